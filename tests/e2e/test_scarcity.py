"""Ranks that have used up all the descriptors they may have: what has begun goes on, the rest says what to do."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from tests.support.jobs import Job, finish, new_job

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = """
import errno, json, os, resource, sys, time
import numpy as np
import covey

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
options = json.loads(os.environ["JOIN"])
group = covey.join(**options)
x, held, said = np.ones(1000), [], {}
group.all_reduce(x)

def fill():
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE

def attempt(name, call):
    try:
        call()
        said[name] = "done"
    except covey.CoveyError as error:
        said[name] = str(error)

def message():
    if group.rank == 0:
        group.send(x, 1, timeout=500)
    else:
        group.recv(0, timeout=500)

def part(timeout):
    with group.split(0) as other:
        other.all_reduce(x, timeout=timeout)

fill()
until = time.monotonic() + 6
while not group.all_reduce(int(time.monotonic() > until)):  # longer than others look for signs of life
    fill()
    time.sleep(0.05)
attempt("message", message)
attempt("part", lambda: part(2))
for each in held:
    os.close(each)
attempt("message again", message)
attempt("part again", lambda: part(500))
said["sum"] = group.all_reduce(group.rank + 1)
group.close()
print(json.dumps(said))
"""
FIRST = """
import json, os, resource
import numpy as np
import covey

# The lowest numbers: what covey closes above the limit does not become free.
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(int(os.environ["LEFT"]))]
group = covey.join(on_loss=os.environ["ON_LOSS"])
if group.rank == int(os.environ["SHORT"]):
    limit = max([2, *held]) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
for each in held:
    os.close(each)
try:
    said = ["done", float(group.all_reduce(np.ones(3))[0])]
except covey.CoveyError as error:
    said = [type(error).__name__, str(error)]
group.close()
print(json.dumps(said))
"""
ALONE = """
import os, resource, sys
from covey import CoveyError, join

held = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, held[-1] + 1))
try:
    join("my-run", size=2, timeout=500)
except CoveyError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        made.home.mkdir(mode=0o700)
        yield made


@pytest.mark.parametrize("where", ["one host", "cluster", "cluster that survives"])
def test_a_group_without_a_descriptor_left_goes_on_and_says_what_to_do(job: Job, where: str) -> None:
    if where == "one host":
        ranks = job.ranks(FULL, 2, JOIN="{}")
    else:
        on_loss = "continue" if "survives" in where else "raise"
        join = f'{{"run": "full", "size": 2, "interfaces": "lo", "lanes": "secure", "on_loss": "{on_loss}"}}'
        secret = secrets.token_hex(32)
        ranks = [job.start(FULL, JOIN=join, COVEY_SECRET=secret, COVEY_RUN_PROGRAM="x") for _ in range(2)]
    for said in (finish(rank).report for rank in ranks):
        assert "ulimit -n" in said["message"]
        assert "ulimit -n" in said["part"]
        assert said["message again"] == said["part again"] == "done"
        assert said["sum"] == 3


@pytest.mark.parametrize(
    ("short", "left", "on_loss"),
    [(1, 0, "raise"), (0, 0, "raise"), (0, 2, "continue"), pytest.param(1, 2, "continue", marks=pytest.mark.thorough)],
)
def test_a_rank_whose_descriptors_are_used_up_before_its_first_operation_says_so_and_the_others_know_why(
    job: Job, short: int, left: int, on_loss: str
) -> None:
    ended = [finish(rank).report for rank in job.ranks(FIRST, 3, SHORT=short, LEFT=left, ON_LOSS=on_loss)]
    kind, text = ended.pop(short)
    assert kind == "ConnectError"
    assert "ulimit -n" in text
    if on_loss == "continue":  # what it had sent before it failed may have been enough: then both others count it
        assert ended in ([["done", 2.0]] * 2, [["done", 3.0]] * 2)
    else:
        for kind, text in ended:  # rank 0 accepts, the others dial
            assert kind == "PeerLostError"
            assert text.startswith(f"rank {short} gave up")
            assert "ulimit -n" in text


def test_a_process_that_can_open_nothing_is_told_so_when_it_joins(job: Job) -> None:
    ended = finish(job.start(ALONE, COVEY_SECRET=secrets.token_hex(32), COVEY_INTERFACES="lo"))
    assert ended.code == 0, ended.err
    assert "Error " in ended.out
    assert "ulimit -n" in ended.out
