"""Turns to dial: so many at a time, so many a second."""

from __future__ import annotations

import asyncio

from covey.runtime.links.dial_limits import DIALS_BURST, DIALS_RATE, SOCKETS, DialLimits


def test_so_many_are_opened_at_a_time_and_so_many_a_second() -> None:
    async def dial_all() -> None:
        allowance, clock = DialLimits(), asyncio.get_running_loop().time
        begun: list[float] = []
        open_now = most = 0

        async def dial(number: int) -> None:
            nonlocal open_now, most
            async with allowance.turn(("192.0.2.1", number)):
                begun.append(clock())
                open_now += 1
                most = max(most, open_now)
                await asyncio.sleep(0.001)
                open_now -= 1

        total = int(DIALS_BURST + DIALS_RATE)
        async with asyncio.timeout(30):
            await asyncio.gather(*(dial(number) for number in range(1, total + 1)))
        assert most == SOCKETS
        assert begun[-1] - begun[0] >= 0.9 * DIALS_RATE / DIALS_RATE
        assert begun[int(DIALS_BURST) - 1] - begun[0] < begun[-1] - begun[0]

    asyncio.run(dial_all())


def test_loopback_and_unix_sockets_wait_for_no_rate() -> None:
    async def dial_all() -> None:
        allowance, clock = DialLimits(), asyncio.get_running_loop().time
        began = clock()
        for number in range(20 * int(DIALS_BURST)):
            async with allowance.turn(("127.0.0.1", number) if number % 2 else "/run/node.sock"):
                pass
        assert clock() - began < 10  # at the rate for other machines it takes more than a minute

    asyncio.run(dial_all())


def test_a_turn_that_is_given_up_is_anothers() -> None:
    async def give_up() -> None:
        allowance = DialLimits()

        async def hold() -> None:
            async with allowance.turn("/run/node.sock"):
                await asyncio.Event().wait()

        holding = [asyncio.create_task(hold()) for _ in range(2 * SOCKETS)]
        await asyncio.sleep(0)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        async with asyncio.timeout(10):
            for _ in range(SOCKETS):
                async with allowance.turn("/run/node.sock"):
                    pass

    asyncio.run(give_up())
