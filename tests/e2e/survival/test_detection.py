"""How soon the others know that a member is gone, and what is no death."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from tests.support.sets import pairs
from tests.support.survivors import (
    DEADLINE,
    Members,
    attempt,
    await_go,
    covey,
    hold_the_interpreter,
    say,
    total,
    values,
)

from covey.runtime import loop as control

VICTIM, OTHERS = 2, (0, 1, 3)


def wait_for_the_victim(on_loss: covey.OnLoss, victim: int) -> Any:
    """Rank 0 waits for a message of the victim, the others in an operation; then all are in that operation."""
    with covey.join(on_loss=on_loss) as group:
        group.barrier()
        say("ready")
        if group.rank == victim:
            await_go()
        received = attempt(lambda: group.recv(src=victim)) if group.rank == 0 else None
        reduced = attempt(lambda: group.all_reduce(values(group.rank, 100_000))[:3].tolist())
        return {
            "received": received,
            "reduced": reduced,
            "live": group.live,
            "contributors": group.contributors,
            "events": [(event.kind, event.phases) for event in group.events()],
        }


WAYS = {"kill": (signal.SIGKILL, True, 0.5), "kill by hand": (signal.SIGKILL, False, 0.5)}
WAYS |= {"stop": (signal.SIGSTOP, True, 1.0)}
"""What is done to a rank, whether it has a keeper, and how soon the others know."""
all_ways = pytest.mark.parametrize(("way", "on_loss"), pairs(list(WAYS), ["raise", "continue"]))


@all_ways
def test_all_know_of_a_killed_or_stopped_rank_long_before_its_silence_tells_them(way: str, on_loss: str) -> None:
    signum, is_kept, _ = WAYS[way]
    patient = {"COVEY_HEARTBEAT": "50", "COVEY_HOST_SILENCE": str(DEADLINE), "COVEY_PROCESS_SILENCE": str(DEADLINE)}
    check_loss(signum, is_kept, float("inf"), on_loss, patient)


@pytest.mark.thorough
@pytest.mark.alone
@all_ways
def test_all_know_of_a_killed_rank_in_half_a_second_and_of_a_stopped_one_in_a_second(way: str, on_loss: str) -> None:
    signum, is_kept, seconds = WAYS[way]
    check_loss(signum, is_kept, seconds, on_loss, {})


def check_loss(signum: int, is_kept: bool, seconds: float, on_loss: str, env: dict[str, str]) -> None:
    with Members(4, wait_for_the_victim, on_loss, VICTIM, is_kept=is_kept, env=env) as ranks:
        ranks.hear("ready")
        at = ranks.signal(VICTIM, signum)
        for rank, report in zip(OTHERS, ranks.results(OTHERS), strict=True):
            received, reduced = report["received"], report["reduced"]
            assert reduced["at"] - at < seconds, (rank, report)
            if rank == 0:
                assert (received["error"], received["rank"]) == ("PeerLostError", VICTIM), received
            if on_loss == "continue":
                assert reduced["error"] is None, (rank, reduced)
                assert report["contributors"] == list(OTHERS)
                assert VICTIM not in report["live"]
                assert reduced["result"] == total(OTHERS, 3).tolist()
            else:
                assert (reduced["error"], reduced["rank"]) == ("PeerLostError", VICTIM), (rank, reduced)
        ranks.await_exit(OTHERS)


def keep_the_others_waiting(on_loss: covey.OnLoss, seconds: int, busy: int) -> Any:
    """One rank is deaf and dumb in the middle of the others' operation."""
    with covey.join(on_loss=on_loss) as group:
        group.barrier()
        say("ready")
        if group.rank == busy and seconds:
            hold_the_interpreter(seconds)
        x = group.all_reduce(values(group.rank, 1000))
        return {
            "right": bool((x == total(group.contributors, 1000)).all()),
            "contributors": group.contributors,
            "lost": [event.kind for event in group.events() if event.kind == "lost"],
        }


HOST_SILENCE = {"COVEY_HEARTBEAT": "0.2", "COVEY_HOST_SILENCE": "1"}
"""After a second without a sign of its host a process is lost."""


def test_an_interpreter_held_longer_than_a_host_may_be_silent_is_no_death_but_a_silent_process_is() -> None:
    """A process alone may be silent for 15 s, unless a setting says otherwise."""
    patient, hasty = {"COVEY_PROCESS_SILENCE": str(DEADLINE)}, {"COVEY_PROCESS_SILENCE": "4"}
    with (
        Members(3, keep_the_others_waiting, "continue", 3, 0, env=HOST_SILENCE | patient) as kept,
        Members(3, keep_the_others_waiting, "continue", 3, 1, is_kept=False, env=HOST_SILENCE | patient) as by_hand,
        Members(2, keep_the_others_waiting, "raise", 3, 1, is_kept=False, env=HOST_SILENCE | patient) as raising,
        Members(3, keep_until_it_stops, 2, is_kept=False, env=HOST_SILENCE | hasty) as stopped,
    ):
        stopped.hear("ready")
        stopped.signal(2, signal.SIGSTOP)
        for job, size in ((kept, 3), (by_hand, 3), (raising, 2)):
            for report in job.results():
                assert report["contributors"] == list(range(size)), report
                assert report["right"]
                assert report["lost"] == []
            job.await_exit()
        for report in stopped.results((0, 1)):
            assert report["contributors"] == [0, 1], report
            assert report["right"]
            assert report["lost"] == ["lost"]
        stopped.signal(2, signal.SIGCONT)
        [report] = stopped.results([2])
        assert report["error"] == "GroupChangedError"
        assert "join the run again" in report["text"]
        stopped.await_exit()


def test_a_rank_that_is_busy_before_its_keeper_knows_it_is_not_lost() -> None:
    with Members(3, keep_the_others_waiting, "continue", 3, 0, env=HOST_SILENCE) as ranks:
        control.soon(time.sleep, 1.5)  # the keeper is in this process
        for report in ranks.results():
            assert report["contributors"] == [0, 1, 2], report
            assert report["right"]
            assert report["lost"] == []
        ranks.await_exit()


def keep_until_it_stops(victim: int) -> Any:
    """The others wait for one that is stopped; when it wakes up they have gone on."""
    with covey.join(on_loss="continue") as group:
        group.barrier()
        say("ready")
        if group.rank == victim:

            def work() -> None:
                while True:
                    group.all_reduce(values(group.rank, 1000))
                    group.recv(src=0)  # which never comes

            return attempt(work)
        x = group.all_reduce(values(group.rank, 1000))
        if victim in group.contributors:
            x = group.all_reduce(values(group.rank, 1000))
        return {
            "right": bool((x == total(group.contributors, 1000)).all()),
            "contributors": group.contributors,
            "lost": [event.kind for event in group.events() if event.kind == "lost"],
        }
