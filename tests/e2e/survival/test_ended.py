"""What operations raise in a group that has ended: one class of error, whichever they are and however issued."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from tests.support.survivors import DEADLINE, Members, attempt, covey, np, say, stop, threading, values

VICTIM = 1


def be_evicted(victim: int) -> Any:
    """Every rank has operations queued all the time; the victim is stopped until the others go on without it."""
    with covey.join(on_loss="continue") as group:
        part = group.split(0)
        peer, rounds = (group.rank + 1) % group.size, 0
        errors: list[Any] = []
        waiting = part.recv(src=peer, tag=99, async_op=True)
        group.barrier()
        while not errors and (group.rank == victim or victim in group.contributors or rounds < 3):
            issued = [attempt(lambda: group.all_reduce(values(group.rank, 1000), async_op=True)) for _ in range(5)]
            issued += [attempt(lambda: part.all_reduce(values(group.rank, 10), async_op=True)) for _ in range(3)]
            # Where the victim is stopped between two of them, it finds the group ended when it issues the next.
            reports = [each if each["error"] else attempt(each["result"].wait) for each in issued]
            errors += [report["error"] for report in reports if report["error"]]
            rounds = 0 if victim in group.contributors else rounds + 1
            say("round")
        if group.rank != victim:
            return errors
        calls = [
            lambda: group.all_reduce(values(0, 3)),
            lambda: group.all_reduce(values(0, 3), async_op=True).wait(),
            lambda: group.broadcast_object(1),
            lambda: group.send(values(0, 3), dst=peer),
            lambda: group.send(values(0, 300_000), dst=peer, async_op=True).wait(),
            lambda: group.recv(src=peer),
            lambda: group.recv(),
            lambda: group.recv_object(src=peer, async_op=True).wait(),
            lambda: group.split(0),
            lambda: group.restore({"x": np.zeros(3)}),
            lambda: group.agree(True),
            waiting.wait,
            lambda: part.barrier(),
            lambda: part.send(values(0, 3), dst=peer),
            lambda: part.recv(),
        ]
        told = [attempt(call)["error"] for call in calls]
        part.close()
        return errors, [*told, attempt(part.barrier)["error"], attempt(part.recv)["error"]]


def test_an_evicted_process_gets_group_changed_error_from_every_operation() -> None:
    with Members(3, be_evicted, VICTIM) as ranks:
        for rank in range(3):
            ranks.await_said(rank, "round", 2)
        stop(ranks.pid(VICTIM))
        assert ranks.results((0, 2)) == [[], []]
        ranks.signal(VICTIM, signal.SIGCONT)
        [(errors, told)] = ranks.results([VICTIM])
        assert set(errors) == {"GroupChangedError"}  # it may be stopped in the last one of a round
        assert told == ["GroupChangedError"] * len(told)


def lose_a_rank(victim: int) -> Any:
    """Under `raise`, with operations queued: a rank is killed."""
    with covey.join() as group:
        part = group.split(0)
        group.barrier()
        works = [group.all_reduce(values(group.rank, 1000), async_op=True) for _ in range(3)]
        works += [part.recv(src=victim, async_op=True), part.recv(async_op=True)]
        if group.rank == victim:
            works[2].wait()
            say("ready")
            threading.Event().wait()
        for work in works[:3]:
            work.wait()
        works += [group.barrier(async_op=True) for _ in range(4)]
        say("ready")
        return [
            (report["error"], report.get("rank"))
            for report in [attempt(work.wait) for work in works[3:]]
            + [attempt(group.barrier), attempt(lambda: group.send(values(0, 3), dst=victim)), attempt(part.barrier)]
        ]


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "by hand"])
def test_after_a_loss_every_operation_raises_peer_lost_error(is_kept: bool) -> None:
    with Members(3, lose_a_rank, VICTIM, is_kept=is_kept) as ranks:
        ranks.hear("ready")
        ranks.kill(VICTIM)
        for told in ranks.results((0, 2)):
            assert told == [["PeerLostError", VICTIM]] * len(told)


def be_late_and_go_on() -> Any:
    """A deadline ends the group; a loop that receives with short timeouts must notice, and not try for ever."""
    with covey.join() as group:
        part = group.split(0)
        group.barrier()
        if group.rank == 0:
            first = attempt(lambda: part.barrier(timeout=0.3))
            group.barrier()
            return first["error"], attempt(part.barrier)["error"], attempt(part.recv)["error"]
        group.barrier()
        said = []
        for _ in range(5):
            said.append(attempt(lambda: part.recv(timeout=DEADLINE)))
        return [each["error"] for each in said], said[1]["cause"]


def test_a_deadline_is_told_once_and_then_the_group_is_closed() -> None:
    with Members(2, be_late_and_go_on) as ranks:
        caller, other = ranks.results()
        assert caller == ["DeadlineError", "ClosedError", "ClosedError"]
        assert other == [["DeadlineError"] + 4 * ["ClosedError"], "DeadlineError"]


def close_it(on_loss: covey.OnLoss) -> Any:
    with covey.join(on_loss=on_loss) as group:
        part = group.split(0)
        waiting = part.recv(async_op=True) if group.rank == 0 else None
        group.barrier()
        if group.rank == 1:
            group.barrier()  # rank 0 closes first
        part.close()
        calls: list[Any] = [part.barrier, part.recv, lambda: part.barrier(async_op=True).wait()]
        told = [attempt(call)["error"] for call in ([waiting.wait] if waiting is not None else []) + calls]
        if group.rank == 0:
            group.barrier()
        group.barrier()
        return told


@pytest.mark.parametrize("on_loss", ["raise", "continue"])
def test_a_group_that_its_owner_closed_raises_closed_error(on_loss: str) -> None:
    with Members(2, close_it, on_loss) as ranks:
        assert ranks.results() == [["ClosedError"] * 4, ["ClosedError"] * 3]
