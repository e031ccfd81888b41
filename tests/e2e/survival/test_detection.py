"""How soon the others know that a member is gone, and what is no death."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from tests.e2e.survival.jobs import Members, attempt, await_go, covey, hold_the_interpreter, np, say, total, values

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def wait_in_every_way(on_loss: str, victim: int) -> Any:
    """Every rank but the victim waits for it in another way; then all do the same."""
    with covey.join(on_loss=on_loss, timeout=60) as group:
        group.barrier()
        idle = group.split(0)
        say("ready")
        if group.rank == victim:
            await_go()
        if group.rank == 0:
            first = attempt(lambda: group.recv(src=victim))
        else:
            first = attempt(lambda: group.all_reduce(values(group.rank, 100_000)).tolist()[:3])
        then = attempt(lambda: idle.all_reduce(values(group.rank, 3)).tolist())
        return {"first": first, "then": then, "live": group.live}


@pytest.mark.parametrize(("signum", "seconds"), [(signal.SIGKILL, 0.5), (signal.SIGSTOP, 1.0)], ids=["kill", "stop"])
@pytest.mark.parametrize("on_loss", ["raise", "continue"])
def test_all_know_of_a_killed_rank_in_half_a_second_and_of_a_stopped_one_in_a_second(
    on_loss: str, signum: int, seconds: float
) -> None:
    victim, others = 2, (0, 1, 3)
    with Members(4, wait_in_every_way, on_loss, victim) as ranks:
        ranks.hear("ready")
        at = ranks.signal(victim, signum)
        for rank, report in zip(others, ranks.results(others), strict=True):
            first, then = report["first"], report["then"]
            assert first["at"] - at < seconds, (rank, report)
            assert then["at"] - at < seconds + 0.2, (rank, report)
            assert report["live"] == list(others)
            if on_loss == "raise":
                assert (first["error"], first["rank"]) == ("PeerLostError", victim), (rank, first)
                assert (then["error"], then["rank"]) == ("PeerLostError", victim), (rank, then)
            elif rank == 0:
                assert (first["error"], first["rank"]) == ("PeerLostError", victim), (rank, first)
            else:
                # Rank 0 never came to this one: it waited for a message. It was nobody's loss, so the others wait.
                assert then["error"] is None
        ranks.await_exit(others)
