"""A rank that called something else and was killed: the others get MismatchError, however the two pieces of news race.

The process of the killed rank is gone, and the keeper says so to the control loop; its bytes lie in a lane, where the
thread of the operation finds them. Each test lets the loss be declared at one moment of the operation.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.support.compiled import needs_native
from tests.support.ranks import Ranks, attempt, await_go, np, say

import covey


def hear_of_the_loss_first(moment: str) -> Any:
    """Rank 0 broadcasts and is killed. Rank 1 calls something else, and hears of the loss at a moment of its call."""
    from covey.runtime.group.internals import engine_of, issuer_of

    group = covey.join()
    for _ in range(3):
        group.barrier()  # the third one takes the shortcut
    if group.rank == 0:
        group.broadcast(np.arange(6.0))
        say("called")
        await_go()
        os.kill(os.getpid(), 9)
    engine = engine_of(group)

    def has_heard(then: Any) -> Any:
        def wait_and_go_on(*args: Any, **options: Any) -> Any:
            say("inside")
            while not engine.failure.has_happened:
                pass
            return then(*args, **options)

        return wait_and_go_on

    await_go()  # the bytes of rank 0 are in the lane
    if moment == "between the shortcut and the long way":
        issuer = issuer_of(group)
        issuer.resume = has_heard(issuer.resume)  # type: ignore[method-assign]
    else:
        engine.perform = has_heard(engine.perform)  # type: ignore[method-assign]
    if moment == "as the long way begins":
        return attempt(lambda: group.all_reduce(np.ones(3)))
    return attempt(group.barrier)


@needs_native
@pytest.mark.parametrize(
    "lanes", ["shm", "tcp", *(pytest.param(lanes, marks=pytest.mark.thorough) for lanes in ("unix", "secure"))]
)
@pytest.mark.parametrize(
    "moment", ["between the shortcut and the long way", "as what the shortcut began goes on", "as the long way begins"]
)
def test_a_loss_that_is_declared_in_the_middle_of_a_call_hides_no_mismatch(moment: str, lanes: str) -> None:
    with Ranks(2, hear_of_the_loss_first, moment, lanes=lanes) as ranks:
        ranks.hear("called", [0])
        ranks.go(1)
        ranks.hear("inside", [1])
        ranks.go(0)
        (report,) = ranks.results([1])
    assert report["error"] == "MismatchError", report
    assert "rank 0 called broadcast(float64" in report["text"], report


def read_what_the_plan_does_not_have() -> Any:
    """Rank 0 broadcasts, by way of rank 2 to rank 3, scatters and is killed. Rank 3 calls something else meanwhile."""
    from covey.runtime.group.internals import engine_of

    group = covey.join()
    group.all_to_all(np.zeros((4, 1)))
    if group.rank == 0:
        group.broadcast(np.arange(6.0))
        group.scatter([np.ones(3)] * 4)
        say("called")
    if group.rank != 3:
        await_go()
        os.kill(os.getpid(), 9)
    engine = engine_of(group)
    announce = engine.stalls.announce

    def hear_of_the_loss(*args: Any, **options: Any) -> None:
        engine.stalls.announce = announce  # type: ignore[method-assign]
        say("inside")
        while not (engine.attempt.is_stopped or engine.stalls.is_comparing):
            pass
        announce(*args, **options)

    await_go()
    engine.stalls.announce = hear_of_the_loss  # type: ignore[method-assign]
    return attempt(lambda: group.scatter(None))


@pytest.mark.parametrize(("lanes", "native"), [("shm", "1"), ("unix", "0"), ("tcp", "1"), ("secure", "0")])
def test_bytes_of_a_later_operation_prove_a_mismatch_to_the_only_rank_that_reads_them(lanes: str, native: str) -> None:
    with Ranks(4, read_what_the_plan_does_not_have, lanes=lanes, env={"COVEY_NATIVE": native}) as ranks:
        ranks.hear("called", [0])
        ranks.go(3)
        ranks.hear("inside", [3])
        ranks.go(0)
        (report,) = ranks.results([3])
    assert report["error"] == "MismatchError", report
    # Ranks 1 and 2 tell what they have of the broadcast, before or after rank 3 has given its own reason.
    told = (" bytes of scatter as its operation 3", "called different things as operation 2: rank 0 called broadcast(")
    assert any(words in report["text"] for words in told), report


def witness_between_operations() -> Any:
    """Rank 0 broadcasts, to rank 3 by way of rank 2, and is killed; rank 3 calls something else, the others nothing.

    Rank 3 has no byte of rank 0. Those that have are between two operations and call nothing before they are told.
    """
    from covey.runtime.group.internals import engine_of

    group = covey.join()
    group.all_to_all(np.zeros((4, 1)))
    engine = engine_of(group)
    if group.rank == 0:
        group.broadcast(np.arange(6.0))
        say("called")
        await_go()
        os.kill(os.getpid(), 9)
    if group.rank in (1, 2):
        await_go()
        return attempt(lambda: group.broadcast(np.arange(6.0)))
    announce = engine.stalls.announce

    def hear_of_the_loss(*args: Any, **options: Any) -> None:
        engine.stalls.announce = announce  # type: ignore[method-assign]
        say("inside")
        while not (engine.attempt.is_stopped or engine.stalls.is_comparing):
            pass
        announce(*args, **options)

    await_go()
    engine.stalls.announce = hear_of_the_loss  # type: ignore[method-assign]
    return attempt(lambda: group.all_reduce(np.ones(3)))


@pytest.mark.parametrize(
    ("lanes", "native"),
    [
        ("shm", "1"),
        ("secure", "1"),
        ("unix", "0"),
        *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in [("shm", "0"), ("tcp", "1"), ("secure", "0")]),
    ],
)
def test_ranks_between_operations_tell_what_their_lanes_hold(lanes: str, native: str) -> None:
    with Ranks(4, witness_between_operations, lanes=lanes, env={"COVEY_NATIVE": native}) as ranks:
        ranks.hear("called", [0])
        ranks.go(3)
        ranks.hear("inside", [3])
        ranks.go(0)
        (report,) = ranks.results([3])
        ranks.go(1)
        ranks.go(2)
        others = ranks.results([1, 2])
    for each in (report, *others):
        assert each["error"] == "MismatchError", each
        assert "rank 0 called broadcast(float64, ...)" in each["text"], each
        assert "rank 3 called all_reduce(float64[3]" in each["text"], each
