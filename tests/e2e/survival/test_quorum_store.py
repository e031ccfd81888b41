"""Where members vote on views, one that is stopped holds up no read of the others, and no write that it may lack."""

from __future__ import annotations

import json
import os
import secrets
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.jobs import Job, new_job
from tests.support.survivors import stop
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

PROGRAM = """
import json, os, sys, threading
import covey
from covey.runtime.joining.node import node_of

join = json.loads(os.environ.pop("TEST_JOIN"))
with covey.join(on_loss="continue", **join) as group:
    store, replica, deadline = group.node.store, node_of(group).stores._replica, float(os.environ["TEST_DEADLINE"])
    group.barrier()
    print(json.dumps([group.rank, replica._me == replica.owner]), flush=True)
    waiting = {}
    for line in sys.stdin:
        what, *words = json.loads(line)
        if what == "set":
            said = store.set(*words, timeout=deadline)
        elif what == "begin":
            waiting[words[0]] = thread = threading.Thread(target=store.set, args=words, kwargs={"timeout": deadline})
            thread.start()
            said = None
        elif what == "has ended":
            said = not waiting[words[0]].is_alive()
        elif what == "finish":
            said = waiting[words[0]].join(deadline)
        elif what == "count":
            said = store.add("count", timeout=deadline)
        elif what == "get":
            said = (store.get(words[0], b"", timeout=deadline)).decode()
        else:
            said = [event.kind for event in group.events() if event.kind == "lost"]
        print(json.dumps(said), flush=True)
"""
PATIENT = {"COVEY_HOST_SILENCE": "1000", "COVEY_PROCESS_SILENCE": "1000"}
"""So long nothing happens to a silent member: as in the seconds before it is excluded."""


class Member:
    """A process of the run, which does what it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.rank, self.is_owner = -1, False

    def begin(self, *words: str) -> None:
        """Tell it to do something."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(json.dumps(words) + "\n")
        stdin.flush()

    def result(self) -> Any:
        """Return what it says next."""
        line = pipes.stdout(self.process).readline()
        assert line, pipes.stderr(self.process).read()
        return json.loads(line)

    def does(self, *words: str) -> Any:
        self.begin(*words)
        return self.result()


class Members:
    """The members of runs on loopback, as they come."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def join(self, count: int, **limits: int) -> tuple[Member, list[Member]]:
        """Let some processes join a run of their own; return the one that orders the changes, and the others."""
        settings = {
            "COVEY_SECRET": secrets.token_hex(32), "COVEY_INTERFACES": "lo", "COVEY_RUN_PROGRAM": "train.py",
            "TEST_JOIN": json.dumps({"run": "run-a", "timeout": DEADLINE} | limits), "TEST_DEADLINE": str(DEADLINE),
        }  # fmt: skip
        members = [Member(self._job.start(PROGRAM, **settings, **PATIENT)) for _ in range(count)]
        for member in members:
            member.rank, member.is_owner = member.result()
        [owner] = [member for member in members if member.is_owner]
        return owner, sorted((each for each in members if each is not owner), key=lambda each: each.rank)


@pytest.fixture
def members() -> Iterator[Members]:
    with new_job() as job:
        yield Members(job)


def test_reads_and_writes_go_on_while_a_member_is_stopped_that_every_view_would_have(members: Members) -> None:
    """No view has fewer than three members, so a change need not be on any two."""
    owner, (asking, stopped) = members.join(3, min_size=3, max_size=3)
    stop(stopped.process.pid)
    for number in range(10):
        for member in (owner, asking):
            other = asking if member is owner else owner
            assert member.does("set", f"key {number}", f"{number} of {member.rank}") is None
            assert other.does("get", f"key {number}") == f"{number} of {member.rank}"
            assert member.does("count") == 2 * number + (1 if member is owner else 2)
    assert owner.does("lost") == asking.does("lost") == []
    os.kill(stopped.process.pid, signal.SIGCONT)
    assert stopped.does("get", "key 9") == f"9 of {asking.rank}"
    assert stopped.does("count") == 21


def test_reads_go_on_while_a_member_is_stopped_that_may_be_left_alone_and_writes_wait_for_it(members: Members) -> None:
    owner, (asking, stopped) = members.join(3, size=3)
    assert asking.does("set", "key", "before") is None
    stop(stopped.process.pid)
    assert asking.does("begin", "key", "after") is None
    for _ in range(10):
        assert owner.does("get", "key") == asking.does("get", "key") == "before"
    assert asking.does("has ended", "key") is False
    os.kill(stopped.process.pid, signal.SIGCONT)
    assert asking.does("finish", "key") is None
    assert stopped.does("get", "key") == "after"
    owner.process.kill()  # the next one has all that was answered
    assert asking.does("get", "key") == stopped.does("get", "key") == "after"
    assert [asking.does("count"), stopped.does("count")] == [1, 2]
