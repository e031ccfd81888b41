"""The rounds of a run, by calls and a clock that the test holds."""

from __future__ import annotations

import random

import msgspec
import pytest

from covey.coordinator.records import CheckpointPhase, CheckpointRecord, RunRecord, Sizes, ViewRecord, WorkerState
from covey.coordinator.refusal import Reason, RefusalError
from covey.coordinator.run import RECONNECT_SECONDS, WORKER_SILENCE, Assignment, CoordinatedRun, Registration

THREE = Sizes(3, 3, 0.0)


def life(worker: str, start: int = 0) -> bytes:
    return f"{worker}/{start}".encode().ljust(16)


class Front:
    """A run, and a clock."""

    def __init__(self, sizes: Sizes = THREE) -> None:
        self.sizes, self.now = sizes, 100.0
        self.run = CoordinatedRun(RunRecord("train", sizes), now=self.now)

    def register(self, worker: str, start: int = 0, **other: object) -> None:
        asked = {"identity": f"key of {worker}", "sizes": self.sizes, "address": f"10.0.0.1:{len(worker)}"} | other
        self.run.register(Registration(worker, life=life(worker, start), name="host", **asked), now=self.now)  # type: ignore[arg-type]

    def leave(self, worker: str, start: int = 0) -> None:
        self.run.unregister(worker, f"key of {worker}", life(worker, start), now=self.now)

    def cut(self, worker: str, start: int = 0) -> None:
        self.run.disconnect(worker, life(worker, start), now=self.now)

    def hear(self, worker: str, number: int, members: tuple[int, ...], start: int = 0) -> bool:
        view = ViewRecord(self.run.record.round, 0, number, members)
        return self.run.hear(worker, f"key of {worker}", life(worker, start), view, 7 * number, now=self.now)

    def later(self, seconds: float) -> bool:
        self.now += seconds
        return self.run.tick(self.now)

    def restart(self) -> None:
        """End the coordinator and start it again, from what it has written."""
        written = msgspec.json.encode(self.run.record)
        self.run = CoordinatedRun(msgspec.json.decode(written, type=RunRecord), now=self.now)

    @property
    def ranks(self) -> dict[str, int]:
        workers = self.run.record.workers.values()
        return {worker.id: worker.rank for worker in workers if worker.state is WorkerState.SEATED}


def phase_of(checkpoint: CheckpointRecord) -> CheckpointPhase:
    return checkpoint.phase


def refused(reason: Reason) -> pytest.RaisesExc[RefusalError]:
    return pytest.RaisesExc(RefusalError, check=lambda error: error.reason is reason)


def test_ranks_do_not_depend_on_the_order_of_registration() -> None:
    names = [f"w{number}" for number in range(12)]
    for seed in range(20):
        front = Front(Sizes(12, 12, 0.0))
        for name in random.Random(seed).sample(names, 12):
            assert front.ranks == {}
            front.register(name)
        assert front.ranks == {name: rank for rank, name in enumerate(names)}


def test_a_worker_that_registered_again_has_its_old_rank_and_a_new_one_fills_the_gap() -> None:
    front = Front()
    for name in ("a", "b", "c"):
        front.register(name)
    assert front.ranks == {"a": 0, "b": 1, "c": 2}
    for name in ("c", "b", "a"):
        front.leave(name)
    for name in ("0", "c", "a"):  # 0 is first by name, and takes the rank that b had
        front.register(name, start=1)
    assert front.ranks == {"a": 0, "0": 1, "c": 2}
    assert front.run.record.round == 2


def test_a_round_of_at_least_and_at_most_begins_when_no_more_workers_come() -> None:
    front = Front(Sizes(2, 4, 5.0))
    front.register("a")
    assert front.run.next_deadline(front.now) is None
    front.register("b")
    assert not front.later(4.9)
    front.register("c")  # one more: it waits anew
    assert front.run.next_deadline(front.now) == front.now + 5.0
    assert not front.later(4.9)
    assert front.later(0.2)
    assert front.ranks == {"a": 0, "b": 1, "c": 2}


def test_workers_that_come_later_wait_while_the_round_goes_on() -> None:
    """Otherwise there would be two runs of one name."""
    front = Front(Sizes(2, 4, 1.0))
    front.register("a")
    front.register("b")
    assert front.later(1.0)
    front.register("c")
    front.register("d")
    assert not front.later(1000.0)
    assert front.run.waiting == 2
    outlook = front.run.outlook("c", life("c"), now=front.now)
    assert outlook is not None
    assert "a (rank 0) is still in round 1" in outlook.reason
    front.leave("a")
    front.leave("b")
    assert front.ranks == {"c": 0, "d": 1}


@pytest.mark.parametrize(
    ("view", "left", "begins"),
    [
        ((0, 1, 2, 3, 4), "ab", False),  # c, d and e may have agreed to go on
        ((0, 1, 2, 3, 4), "abc", True),
        ((2, 3, 4), "abc", False),  # they have, and two of these three may be at work
        ((2, 3, 4), "abcd", True),
        ((0, 1), "a", True),  # the tie-breaker of two has left
        ((0, 1), "b", False),
        ((0, 1), "bcde", False),
        ((0, 1, 2, 3, 4), "abCD", False),  # C and D crashed, and may have agreed with e to go on without a and b
        ((0, 1, 2, 3, 4), "abcD", True),
        ((0, 1, 2, 3, 4), "ABCDE", True),  # none of them is in the round any more
    ],
)
def test_a_round_is_over_when_those_that_are_not_heard_can_have_no_quorum(
    view: tuple[int, ...], left: str, begins: bool
) -> None:
    """Small letters leave in order; capital ones crash, and are started again."""
    front = Front(Sizes(1, 5, 0.0))
    front.run.record.sizes = front.sizes = Sizes(5, 5, 0.0)
    for name in "abcde":
        front.register(name)
    if view != (0, 1, 2, 3, 4):
        front.hear("abcde"[view[0]], 1, view)
    for name in "abcde":
        front.cut(name)
    for name in left:
        if name.islower():
            front.leave(name)
    front.now += WORKER_SILENCE + 1
    front.sizes = Sizes(1, 5, 0.0)
    for name in {left[0], *filter(str.isupper, left)}:
        front.register(name.lower(), start=1)
    front.later(1.0)
    assert (front.run.record.round == 2) is begins


def test_a_second_process_of_a_worker_waits_until_the_first_is_gone() -> None:
    front = Front()
    for name in ("a", "b", "c"):
        front.register(name)
    with refused(Reason.TAKEN):
        front.register("b", start=1)
    front.cut("b")
    with refused(Reason.TAKEN):  # the first may only have lost its connection
        front.register("b", start=1)
    front.now += RECONNECT_SECONDS + 0.1
    front.register("b", start=1)
    assert front.ranks == {"a": 0, "c": 2}
    with refused(Reason.NOT_FOUND):  # the first process has no say any more
        front.hear("b", 1, (0, 1, 2))
    front.leave("a")
    front.leave("c")
    front.register("a", start=1)
    front.register("c", start=1)
    assert front.ranks == {"a": 0, "b": 1, "c": 2}


def test_a_worker_acts_only_for_itself() -> None:
    front = Front()
    front.register("a")
    with refused(Reason.NOT_YOURS):
        front.register("a", start=1, identity="key of b")
    with refused(Reason.NOT_YOURS):
        front.run.unregister("a", "key of b", life("a"), now=front.now)
    with refused(Reason.NOT_YOURS):
        front.run.hear("a", "key of b", life("a"), None, 0, now=front.now)
    with refused(Reason.NOT_YOURS):
        front.run.end_checkpoint("a", "key of b", life("a"), "train-1")


def test_workers_that_contradict_each_other_are_told_so() -> None:
    front = Front()
    front.register("a")
    with refused(Reason.CONTRADICTION):
        front.register("b", sizes=Sizes(4, 4, 0.0))
    with refused(Reason.CONTRADICTION):
        front.register("b", address="127.0.0.1:1")


def test_the_state_is_that_of_the_latest_view() -> None:
    front = Front()
    for name in ("a", "b", "c"):
        front.register(name)
    assert front.hear("a", 0, (0, 1, 2))
    assert not front.hear("b", 0, (0, 1, 2))
    assert front.hear("b", 2, (1, 2))
    assert not front.hear("c", 1, (0, 1))  # an older view that was reported late
    states = {worker.id: front.run.state_of(worker, now=front.now) for worker in front.run.record.workers.values()}
    assert states == {"a": "lost", "b": "active", "c": "active"}
    assert front.run.sequence == 14
    with refused(Reason.MALFORMED):
        front.hear("b", 3, (1, 3))


def test_a_restarted_coordinator_goes_on_where_it_was() -> None:
    front = Front()
    for name in ("a", "b", "c"):
        front.register(name)
    front.hear("a", 1, (0, 2))
    front.restart()
    front.register("a")  # the same process registers again
    assert front.ranks == {"a": 0, "b": 1, "c": 2}
    outlook = front.run.outlook("a", life("a"), now=front.now)
    assert outlook is not None
    assert outlook.assignment == Assignment(1, 0, 3, "10.0.0.1:1")
    assert outlook.view == ViewRecord(1, 0, 1, (0, 2))


def test_workers_that_waited_get_their_ranks_after_a_restart() -> None:
    front = Front()
    front.register("a")
    front.register("b")
    front.restart()
    front.register("c")
    assert front.ranks == {}  # a and b are not connected
    front.register("b")
    front.register("a")
    assert front.ranks == {"a": 0, "b": 1, "c": 2}


def test_a_coordinator_that_has_lost_its_state_learns_it_from_the_workers() -> None:
    front = Front()
    front.run.record.round = 0
    front.register("c", assignment=Assignment(4, 2, 3, "10.0.0.1:1"))
    front.register("a", assignment=Assignment(4, 0, 3, "10.0.0.1:1"))
    assert front.run.record.round == 4
    assert front.ranks == {"c": 2, "a": 0}
    with refused(Reason.CONTRADICTION):
        front.register("b", assignment=Assignment(3, 1, 3, "10.0.0.1:1"))
    with refused(Reason.CONTRADICTION):
        front.register("b", assignment=Assignment(4, 2, 3, "10.0.0.1:1"))
    front.register("d")
    assert not front.later(WORKER_SILENCE)


def test_a_checkpoint_is_done_when_all_members_have_ended_it() -> None:
    front = Front()
    with refused(Reason.NOT_NOW):
        front.run.checkpoints.start("one", "1")
    for name in ("a", "b", "c"):
        front.register(name)
    front.hear("a", 0, (0, 1, 2))
    started = front.run.checkpoints.start("one", "1")
    assert front.run.checkpoints.start("one", "2") is started
    with refused(Reason.NOT_NOW):
        front.run.checkpoints.start("two", "2")
    front.run.end_checkpoint("a", "key of a", life("a"), started.id)
    front.run.end_checkpoint("a", "key of a", life("a"), started.id)
    front.run.end_checkpoint("b", "key of b", life("b"), started.id)
    assert phase_of(started) is CheckpointPhase.PENDING
    front.hear("a", 1, (0, 1))  # c is lost, and need not end it
    assert phase_of(started) is CheckpointPhase.DONE
    assert front.run.checkpoints.get("") is started
    failed = front.run.checkpoints.start("elsewhere", "full")
    front.run.end_checkpoint("b", "key of b", life("b"), "full", "the disk is full")
    front.run.end_checkpoint("a", "key of a", life("a"), "full")
    assert (failed.phase, failed.error) == (CheckpointPhase.FAILED, "the disk is full")
    second = front.run.checkpoints.start("two", "2")
    for name in ("a", "b", "c"):
        front.leave(name)
        front.register(name, start=1)
    assert front.ranks == {"a": 0, "b": 1, "c": 2}
    assert phase_of(second) is CheckpointPhase.ABANDONED
    with refused(Reason.NOT_FOUND):
        front.run.checkpoints.get("train-9")
