"""Programs on asyncio: joining does not block the loop, and a join that is given up leaves no group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.jobs import Job, finish, finish_all, new_job

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        yield made


def test_ranks_join_and_work_together_while_their_loops_go_on(job: Job) -> None:
    code = """
import asyncio, json
import covey

async def main():
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)
    ticking = asyncio.create_task(tick())
    async with await covey.join_async(timeout=20) as group:
        total = await group.all_reduce(10 ** group.rank, async_op=True)
    ticking.cancel()
    print(json.dumps([total, ticks > 3]))

asyncio.run(main())
"""
    assert [ended.report for ended in finish_all(job.ranks(code, 2))] == [[11, True]] * 2
    assert job.left_behind() == []


def test_a_group_that_is_joined_after_the_program_gave_up_is_closed(job: Job) -> None:
    gives_up = """
import asyncio, time
import covey
from covey.runtime.joining import bootstrap

async def main():
    try:
        async with asyncio.timeout(0.3):
            await covey.join_async(timeout=20)
    except TimeoutError:
        print("gave up", flush=True)
    input()  # until the other rank has come
    until = time.monotonic() + 20
    while bootstrap._joined is None and time.monotonic() < until:
        await asyncio.sleep(0.01)
    while bootstrap.joined() is not None and time.monotonic() < until:
        await asyncio.sleep(0.01)
    print(bootstrap._joined is not None and bootstrap.joined() is None)

asyncio.run(main())
"""
    other = "import covey\nwith covey.join(timeout=20) as group:\n    print(group.size)\n"
    first = job.start(gives_up, RANK=0, WORLD_SIZE=2)
    assert first.stdout is not None
    assert first.stdout.readline() == "gave up\n"
    second = job.start(other, RANK=1, WORLD_SIZE=2)
    assert first.stdin is not None
    first.stdin.write("\n")
    first.stdin.flush()
    assert finish(second).out == "2\n"
    assert finish(first).out == "True\n"
