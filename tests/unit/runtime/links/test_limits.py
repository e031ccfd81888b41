"""Connections at the door are counted by source, and those that prove the key are not."""

from __future__ import annotations

import asyncio

import pytest

from covey.base.pace import PACED_KEYS_LIMIT
from covey.runtime.links.limits import (
    DIALS_BURST,
    DIALS_RATE,
    MEMBER_BURST,
    MEMBER_RATE,
    SOCKETS,
    SOURCE_CONNECTIONS_BURST,
    SOURCE_CONNECTIONS_RATE,
    UNPROVEN_BURST,
    DialLimits,
    SourceLimits,
    source_of,
)


def come(arrivals: SourceLimits, ip: str, times: float, now: float = 0.0, *, is_member: bool = False) -> int:
    """Return how many of so many connections may come."""
    return sum(arrivals.come(ip, now, is_member=is_member) is not None for _ in range(int(times)))


def test_a_source_has_a_burst_and_a_rate_and_another_source_has_its_own() -> None:
    arrivals = SourceLimits()
    assert come(arrivals, "10.0.0.1", 2 * SOURCE_CONNECTIONS_BURST) == SOURCE_CONNECTIONS_BURST
    assert arrivals.refused == SOURCE_CONNECTIONS_BURST
    assert come(arrivals, "10.0.0.2", 5) == 5
    assert come(arrivals, "10.0.0.1", 1000, now=1.0) == SOURCE_CONNECTIONS_RATE


def test_an_ipv6_source_is_its_network_of_64_bits() -> None:
    arrivals = SourceLimits()
    came = sum(come(arrivals, f"2001:db8:0:1::{number:x}", 1) for number in range(1, 2 * int(SOURCE_CONNECTIONS_BURST)))
    assert came == SOURCE_CONNECTIONS_BURST
    assert come(arrivals, "2001:db8:0:2::1", 1) == 1
    assert source_of("fe80::1%eth0") == source_of("fe80::2") == "fe80::"
    assert source_of("no address: at all") == "no address: at all"


def test_a_dialler_that_proves_the_key_is_not_counted() -> None:
    arrivals = SourceLimits()
    for _ in range(10 * int(UNPROVEN_BURST)):
        arrival = arrivals.come("10.0.0.1", 0.0, is_member=False)
        assert arrival is not None
        arrival.proved_key()
        arrival.proved_key()
    assert come(arrivals, "10.0.0.1", 2 * SOURCE_CONNECTIONS_BURST) == SOURCE_CONNECTIONS_BURST


def test_many_sources_share_a_total_and_members_are_not_in_it() -> None:
    arrivals = SourceLimits()
    came = sum(come(arrivals, f"2001:db8:0:{number:x}::1", 1) for number in range(3 * int(UNPROVEN_BURST)))
    assert came == UNPROVEN_BURST
    assert come(arrivals, "10.0.0.9", 1) == 0
    assert come(arrivals, "10.0.0.9", 2 * MEMBER_BURST, is_member=True) == MEMBER_BURST
    assert come(arrivals, "10.0.0.9", 10_000, now=1.0, is_member=True) == MEMBER_RATE


def test_a_members_address_is_a_source_of_its_own_on_a_network_where_all_begin_alike() -> None:
    arrivals = SourceLimits()
    assert come(arrivals, "2001:db8:0:1::bad", 1000) == SOURCE_CONNECTIONS_BURST
    assert come(arrivals, "2001:db8:0:1::5", 1, is_member=True) == 1


@pytest.mark.parametrize("ip", ["10.0.0.1", "2001:db8::1"])
def test_only_so_many_sources_are_remembered(ip: str) -> None:
    arrivals = SourceLimits()
    for number in range(2 * PACED_KEYS_LIMIT):
        arrivals.come(f"10.1.{number // 256}.{number % 256}", 0.0, is_member=number % 2 == 0)
    assert len(arrivals._strangers._buckets) + len(arrivals._members._buckets) <= 2 * PACED_KEYS_LIMIT
    assert come(arrivals, ip, 1) == 1


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
