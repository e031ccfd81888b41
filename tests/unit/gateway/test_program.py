"""What a program of the gateway leaves behind: memory that a message is written to, and the rank of a lost group."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import covey
from covey.gateway.program import CallTurn, RegisteredProgram
from covey.gateway.ranks import Wish
from covey.runtime.work import Work

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


def test_a_receive_whose_message_arrives_while_its_caller_goes_holds_up_only_the_next_receive() -> None:
    given_back = []
    work: Work[Any] = Work("a receive", cancel=lambda _: False, give_back=lambda: given_back.append(True))

    async def receive(turn: CallTurn) -> None:
        async with turn.take() as taken:
            await taken.withdrawable(lambda *, async_op: work)

    async def next_one(turn: CallTurn) -> bool:
        async with turn.take():
            return work.done()

    async def go() -> None:
        turn = CallTurn("Receive")
        call = asyncio.ensure_future(receive(turn))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        following = asyncio.ensure_future(next_one(turn))
        await asyncio.sleep(0)
        assert not following.done()
        work.finish(None)
        assert await following
        assert given_back == [True]

    asyncio.run(go())


class AloneRank:
    """The rank of a run of one process."""

    def __init__(self) -> None:
        self.group: Group = covey.join()
        self.lost: list[Exception] = []

    def join(self) -> Group:
        return self.group

    def interrupt(self) -> None:
        raise AssertionError("the join does not wait")

    def leave(self) -> None:
        raise AssertionError("the group has ended")

    def lose(self, error: Exception) -> None:
        self.lost.append(error)


def test_the_rank_of_a_program_that_leaves_a_group_which_has_ended_is_given_up() -> None:
    async def go() -> None:
        rank = AloneRank()
        program = RegisteredProgram(Wish("p", "", 0, 10.0, ""), "user", rank, 1 << 20)
        (await program.join()).close()
        with pytest.raises(covey.ClosedError):
            await program.leave()
        error = RuntimeError("the registration is over")
        await program.lose(error)
        assert rank.lost == [error]

    asyncio.run(go())
