"""Programs on asyncio: joining does not block the loop, and a join that is given up leaves no group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support import pipes
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
    async def tick():
        for _ in range(5):
            await asyncio.sleep(0.005)
        print("goes on", flush=True)
    ticking = asyncio.create_task(tick())
    async with await covey.join_async(timeout=500) as group:
        total = await group.all_reduce(10 ** group.rank, async_op=True)
    await ticking
    print(json.dumps(total))

asyncio.run(main())
"""
    first = job.start(code, RANK=0, WORLD_SIZE=2)
    assert pipes.stdout(first).readline() == "goes on\n"  # while it waits for the other rank
    second = job.start(code, RANK=1, WORLD_SIZE=2)
    assert [ended.report for ended in finish_all([first, second])] == [11, 11]
    assert job.left_behind() == []


def test_a_group_that_is_joined_after_the_program_gave_up_is_closed(job: Job) -> None:
    gives_up = """
import asyncio
import covey
from covey.runtime.joining import bootstrap

async def main():
    try:
        async with asyncio.timeout(0.3):
            await covey.join_async(timeout=500)
    except TimeoutError:
        print("gave up", flush=True)
    input()  # until the other rank has come
    while bootstrap._joined is None:
        await asyncio.sleep(0.01)
    while bootstrap.joined() is not None:
        await asyncio.sleep(0.01)
    print("joined and closed")

asyncio.run(main())
"""
    other = "import covey\nwith covey.join(timeout=500) as group:\n    print(group.size)\n"
    first = job.start(gives_up, RANK=0, WORLD_SIZE=2)
    assert pipes.stdout(first).readline() == "gave up\n"
    second = job.start(other, RANK=1, WORLD_SIZE=2)
    pipes.stdin(first).write("\n")
    pipes.stdin(first).flush()
    assert finish(second).out == "2\n"
    assert finish(first).out == "joined and closed\n"
