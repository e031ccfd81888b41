"""The supervisor of child processes, with real ones: what is heard of them, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE, wait_until

from covey.base.errors import ConfigError
from covey.runtime.processes import Child, Children

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


@pytest.fixture(params=["pidfds", "polling"])
def children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    if request.param == "polling":
        monkeypatch.delattr(os, "pidfd_open")
    with Children() as children:
        yield children


def start(children: Children, script: str, name: object = None) -> Child:
    pipe = subprocess.PIPE
    return children.start(["sh", "-c", script], env=os.environ, name=name, stdin=pipe, stdout=pipe, stderr=pipe)


def hear(children: Children, child: Child, text: bytes) -> bytes:
    """Listen until a child has printed `text`; return all that it has printed."""
    heard = b""
    while text not in heard:
        assert child.process.poll() is None, f"{heard!r} is all that came"
        heard += b"".join(each.data for each in children.outputs(DEADLINE) if each.child is child)
    return heard


def await_ended(children: Children) -> tuple[list[Child], list[tuple[object, int, bytes]]]:
    """Return the next children that end, and what was printed until then."""
    heard: list[tuple[object, int, bytes]] = []
    while not (ended := children.ended()):
        heard += [(each.child.name, each.target, each.data) for each in children.outputs(DEADLINE)]
    return ended, heard


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_children_print_and_how_they_end_is_told_by_name_and_stream(children: Children) -> None:
    names = {number: start(children, f"echo {number}; echo {-number} >&2; exit {number}", number) for number in (3, 5)}
    said: dict[tuple[object, int], bytes] = {}
    codes: dict[object, int | None] = {}
    while len(codes) < 2:
        ended, heard = await_ended(children)
        codes |= {child.name: child.code for child in ended}
        heard += [(each.child.name, each.target, each.data) for child in ended for each in children.rest_of(child)]
        for name, target, data in heard:
            said[name, target] = said.get((name, target), b"") + data
    assert codes == {3: 3, 5: 5}
    assert said == {(3, 1): b"3\n", (3, 2): b"-3\n", (5, 1): b"5\n", (5, 2): b"-5\n"}
    assert children.ended() == [], "an end is told once"
    assert not any(child.pipes for child in names.values())


def test_a_child_that_prints_nothing_is_heard_to_end(children: Children) -> None:
    child = start(children, "exec >&- 2>&-; read line; kill -KILL $$")
    while child.pipes:
        children.outputs(DEADLINE)
    assert child.process.stdin is not None
    child.process.stdin.close()
    ended, _ = await_ended(children)
    assert [each.code for each in ended] == [-signal.SIGKILL]
    assert children.await_end(child, DEADLINE) == -signal.SIGKILL


def test_of_several_that_have_ended_a_killed_one_comes_first(children: Children) -> None:
    failed, killed = start(children, "exit 7", "failed"), start(children, "kill -KILL $$", "killed")
    wait_until(lambda: not failed.is_left() and not killed.is_left())
    assert [child.name for child in children.ended()] == ["killed", "failed"]


def test_what_an_ended_child_has_left_is_read_and_its_descendants_end_when_it_is_forgotten(children: Children) -> None:
    child = start(children, "sleep 600 & echo $!; echo rest; exit 4")
    while not children.ended():
        pass
    left = b"".join(each.data for each in children.rest_of(child))
    descendant = int(left.split()[0])
    assert left.endswith(b"rest\n")
    assert child.pipes, "the descendant holds them open"
    assert is_alive(descendant)
    children.forget(child)
    wait_until(lambda: not is_alive(descendant))
    assert list(children) == []


def test_children_are_asked_to_end_before_they_are_killed(children: Children) -> None:
    saving = start(children, "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done")
    stubborn = start(children, "trap '' TERM; echo ready; while :; do sleep 0.01; done")
    ready: set[Child] = set()
    while ready != {saving, stubborn}:
        ready |= {each.child for each in children.outputs(DEADLINE) if each.data == b"ready\n"}
    children.stop(0.5)
    codes = {child: child.code for child in children.ended()}
    assert codes == {saving: 0, stubborn: -signal.SIGKILL}
    assert b"".join(each.data for each in children.rest_of(saving) if each.target == 1) == b"saved\n"
    assert children.await_ends(DEADLINE)


def test_a_signal_goes_to_the_group_or_to_its_leader_alone(children: Children) -> None:
    child = start(children, "trap 'echo heard' USR1; sleep 600 & echo $!; while :; do wait; done")
    descendant = int(hear(children, child, b"\n"))
    child.signal_leader(signal.SIGUSR1)
    hear(children, child, b"heard")
    assert is_alive(descendant)
    assert child.signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(descendant) and not child.is_left())
    assert not child.signal(signal.SIGKILL)


def test_leaving_kills_what_is_left_and_frees_every_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Children() as children:
        pids = [start(children, "exec sleep 600").pid for _ in range(3)]
        assert len(os.listdir("/proc/self/fd")) > before
    assert not any(map(is_alive, pids))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_watched_descriptor_ends_a_wait() -> None:
    reading, writing = os.pipe()
    try:
        with Children() as children:
            start(children, "exec sleep 600")
            children.watch(reading)
            os.write(writing, b"x")
            assert children.outputs(DEADLINE) == []
            children.unwatch(reading)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_program_that_cannot_be_executed_is_an_error_with_its_name() -> None:
    with Children() as children, pytest.raises(ConfigError, match="cannot start /nowhere/program: No such file"):
        children.start(["/nowhere/program"], env=os.environ)


def test_a_stopped_child_hears_that_it_is_asked_to_end(children: Children) -> None:
    child = start(children, "trap 'echo asked; exit 3' TERM; echo ready; kill -STOP $$; while :; do sleep 0.01; done")
    hear(children, child, b"ready")
    wait_until(lambda: state_of(child.pid) == "T")
    child.signal(signal.SIGTERM)
    ended, heard = await_ended(children)
    assert [each.code for each in ended] == [3]
    assert b"asked" in b"".join(data for _, _, data in heard) + b"".join(each.data for each in children.rest_of(child))


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
