"""HostRegistry: it lists the living nodes of one user on one host, and no others."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.net.discovery.host_registry import NODES_LIMIT, YOUNG_SOCKET_SECONDS, HostRegistry, RegisteredNode
from covey.net.discovery.host_rendezvous import rendezvous_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

TAG = "00112233aabbccdd"
ANNOUNCE = """
import os, sys
from covey.net.discovery.host_registry import HostRegistry
registry = HostRegistry(sys.argv[1])
registry.announce(int(sys.argv[2]), f"/tmp/{sys.argv[2]}.sock")
"""
SAY = "print(os.getpid(), flush=True); sys.stdin.read()"
FORK = """
reader, writer = os.pipe()
if not os.fork():
    os.write(writer, b"!")
    sys.stdin.read()
    os._exit(0)
os.read(reader, 1)
"""


pytestmark = pytest.mark.usefixtures("runtime")


@contextlib.contextmanager
def registry(port: int = 0, tag: str = TAG) -> Iterator[HostRegistry]:
    host_registry = HostRegistry(tag)
    try:
        if port:
            host_registry.announce(port, f"/tmp/{port}.sock")
        yield host_registry
    finally:
        host_registry.close()


@contextlib.contextmanager
def process(port: int, code: str = "") -> Iterator[subprocess.Popen[str]]:
    """A node in a process of its own, announced when this returns."""
    command = [sys.executable, "-c", f"{ANNOUNCE}{code}{SAY}", TAG, str(port)]
    node = forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None
        assert node.stdout.readline().strip() == str(node.pid)
        yield node
    finally:
        node.kill()
        node.communicate(timeout=DEADLINE)


def ports(host_registry: HostRegistry) -> list[int]:
    return sorted(other.port for other in host_registry.others())


def test_each_sees_the_others_but_not_itself() -> None:
    with registry(1) as one, registry(2) as two, registry() as watcher:
        assert (ports(one), ports(two), ports(watcher)) == ([2], [1], [1, 2])
        assert one.others() == [RegisteredNode(2, "/tmp/2.sock", os.getpid())]


def test_clusters_do_not_see_each_other() -> None:
    with registry(1, "aaaa"), registry(2, "bbbb") as other:
        assert ports(other) == []


def test_another_process_is_seen_for_as_long_as_it_lives() -> None:
    with registry(7) as here:
        with process(8) as there:
            assert here.others() == [RegisteredNode(8, "/tmp/8.sock", there.pid)]
        assert here.others() == []
        assert len(list(rendezvous_folder(f"nodes-{TAG}").iterdir())) == 1  # what it left was removed


def test_a_forked_child_does_not_keep_its_dead_parent_announced() -> None:
    with registry() as here, process(8, FORK) as parent:
        assert ports(here) == [8]
        parent.kill()  # the child reads on from the same pipe
        assert parent.wait(DEADLINE) != 0
        assert ports(here) == []
        assert parent.stdin is not None
        parent.stdin.close()  # lets the child go
        parent.stdin = None


def test_the_last_announcement_counts_and_closing_withdraws_it() -> None:
    with registry() as watcher, registry(1) as moving:
        moving.announce(2, "/tmp/elsewhere.sock")
        assert watcher.others() == [RegisteredNode(2, "/tmp/elsewhere.sock", os.getpid())]
        moving.close()
        assert watcher.others() == []
        moving.close()
    assert not rendezvous_folder(f"nodes-{TAG}").exists()


def test_files_are_private() -> None:
    with registry(1):
        folder = rendezvous_folder(f"nodes-{TAG}")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (path,) = folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_open_to_others_is_refused() -> None:
    folder = rendezvous_folder(f"nodes-{TAG}")
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        HostRegistry(TAG)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff" * 100,
        b"[1]",
        b'{"port": "1", "socket": "/s", "pid": 1}',
        b'{"port": 0, "socket": "/s", "pid": 1}',
        b'{"port": 1, "socket": "/s", "pid": -1}',
        b'{"port": 1, "socket": "' + b"s" * 5000 + b'", "pid": 1}',
    ],
)
def test_a_damaged_file_is_passed_over(text: bytes) -> None:
    with registry(1) as one, registry(2), registry(3) as three:
        assert three._own is not None
        three._own.write_bytes(text)
        assert ports(one) == [2]


def test_what_is_no_file_of_a_node_is_passed_over() -> None:
    with registry(1) as one, registry(2) as two:
        folder = rendezvous_folder(f"nodes-{TAG}")
        (folder / "a folder").mkdir()
        (folder / "link.node").symlink_to("/etc/passwd")
        os.mkfifo(folder / "pipe.node", 0o600)
        (folder / "left.node").write_text(json.dumps({"port": 9, "socket": "", "pid": 1}))
        assert (ports(one), ports(two)) == ([2], [1])
        assert not (folder / "left.node").exists()
        (folder / "a folder").rmdir()
        (folder / "link.node").unlink()


def test_nodes_of_another_host_that_share_the_folder_are_passed_over() -> None:
    """As containers and network namespaces do: the port is not reachable there, and a path may be another's."""
    with registry(1) as one, registry(2) as two:
        assert two._own is not None
        elsewhere = two._own.with_name(f"{'0' * 16}-{two._own.name.partition('-')[2]}")
        two._own.rename(elsewhere)
        two._own = elsewhere
        assert ports(one) == []
        assert elsewhere.exists()


def test_no_more_than_a_bounded_number_of_files_is_read() -> None:
    with registry() as one:
        folder = rendezvous_folder(f"nodes-{TAG}")
        for i in range(NODES_LIMIT + 10):
            (folder / f"{i}.node").touch()
        assert one.others() == []
        assert len(list(folder.iterdir())) == 10
        assert one.others() == []
        assert list(folder.iterdir()) == []


def test_an_announcement_is_never_lost_to_processes_that_clean_up() -> None:
    """Others look at every moment between making, locking and naming a file, and the last to leave takes the folder."""
    done = threading.Event()
    trouble: list[BaseException] = []

    def look() -> None:
        try:
            while not done.is_set():
                with registry() as watcher:
                    watcher.others()
        except BaseException as error:  # told below
            trouble.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for port in range(1, 200):
            with registry(port) as one, registry() as other:
                assert ports(other) == [port]
                assert ports(one) == []
    finally:
        done.set()
        for thread in threads:
            thread.join(DEADLINE)
    assert trouble == []


LISTEN = """
import sys
from covey.net.discovery.host_registry import HostRegistry
registry = HostRegistry(sys.argv[1])
listener, path = registry.listen(8)
print(path, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(tag: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A node of another process that listens and has not announced itself."""
    words = [sys.executable, "-c", LISTEN, tag]
    process = forked.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - YOUNG_SOCKET_SECONDS - 5,) * 2)


def test_the_socket_of_a_killed_node_goes_with_the_next_one_and_that_of_a_living_one_stays() -> None:
    with listening(TAG) as (_, living), listening(TAG) as (process, dead):
        process.kill()
        process.wait(DEADLINE)
        with registry():
            assert dead.exists(), "it is seconds old"
        make_old(dead)
        make_old(living)
        with registry():
            assert not dead.exists()
            assert living.exists()


def test_what_killed_nodes_of_other_clusters_left_goes_too() -> None:
    """No process may ever look into the folder of that cluster again."""
    other = "ffeeddccbbaa9988"
    with listening(other) as (process, socket):
        node = forked.Popen([sys.executable, "-c", ANNOUNCE + SAY, other, "47777"],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert node.stdout is not None
        node.stdout.readline()
        with registry():
            assert len(list(socket.parent.iterdir())) == 2
        for each in (node, process):
            each.kill()
            each.wait(DEADLINE)
        node.communicate(timeout=DEADLINE)
    make_old(socket)
    with registry():
        assert not socket.parent.exists()


def test_sockets_and_notes_of_another_host_that_shares_the_folder_stay() -> None:
    with registry() as own:
        folder = own._folder
        foreign = [folder / "szzz000000", folder / "another user's own"]
        for path in foreign:
            path.touch()
            make_old(path)
        with registry():
            assert all(path.exists() for path in foreign)
        for path in foreign:
            path.unlink()


def test_looking_is_cheap_and_works_after_the_folder_is_gone() -> None:
    with registry() as one:
        rendezvous_folder(f"nodes-{TAG}").rmdir()
        assert one.others() == []
        one.announce(5, "")
        with registry() as other:
            assert ports(other) == [5]
