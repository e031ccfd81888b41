"""Host rendezvous: one socket a rank, taken over from the dead, closed to other users."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import forked, pipes
from tests.support.waiting import DEADLINE

from covey.base.errors import AuthError, ConfigError, ConnectError
from covey.net.discovery.host_rendezvous import (
    HostRendezvous,
    check_folder,
    check_peer,
    host_token,
    local_address_towards,
    rendezvous_folder,
    socket_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "src"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


pytestmark = pytest.mark.usefixtures("runtime")


@contextlib.contextmanager
def seat(folder: Path, rank: int, token: bytes | None = None) -> Iterator[HostRendezvous]:
    rendezvous = HostRendezvous(folder, rank, token)
    try:
        yield rendezvous
    finally:
        rendezvous.leave()


@contextlib.contextmanager
def other_process(code: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Python that runs `code` and says a line when it is ready."""
    process = forked.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


SIT = """
import sys
from pathlib import Path
from covey.net.discovery.host_rendezvous import HostRendezvous
rendezvous = HostRendezvous(Path(sys.argv[1]), int(sys.argv[2]))
print(rendezvous.token.hex(), flush=True)
sys.stdin.read()
"""
FORK = """
import os, signal
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.write(writer, b"!")
    signal.alarm(500)
    signal.pause()
os.read(reader, 1)
print(child, flush=True)
"""


def test_the_folders_above_and_of_a_job_are_closed_to_others(runtime: Path) -> None:
    folder = rendezvous_folder("job")
    with seat(folder, 0) as rendezvous:
        assert folder.parent.parent == runtime
        for path in (folder, folder.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        for name in ("0.lock", "token"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert rendezvous.path == socket_path(folder, 0)


def test_ranks_share_one_secret_token_and_jobs_do_not() -> None:
    with (
        seat(rendezvous_folder("a"), 0) as one,
        seat(rendezvous_folder("a"), 1) as two,
        seat(rendezvous_folder("b"), 0) as other,
    ):
        assert one.token == two.token != other.token
        assert len(one.token) == 32


def test_many_ranks_that_come_at_once_agree_on_the_token() -> None:
    folder, tokens, barrier = rendezvous_folder("rush"), {}, threading.Barrier(16)

    def come(rank: int) -> None:
        barrier.wait(DEADLINE)
        with seat(folder, rank) as rendezvous:
            tokens[rank] = rendezvous.token
            barrier.wait(DEADLINE)

    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(tokens) == 16
    assert len(set(tokens.values())) == 1
    assert not folder.exists()


def test_a_name_of_any_kind_becomes_a_short_plain_folder() -> None:
    names = ["../../etc", "a/b", "x" * 500, "", "j\u00f6b \u2603", ".", "..", "a b", "a-b"]
    folders = [rendezvous_folder(name) for name in names]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert folder.parent == folders[0].parent
        assert len(folder.name) <= 33
        assert folder.name.isascii()
        assert not folder.name.startswith(".")


def test_a_rank_that_lives_keeps_its_seat_and_is_named_to_the_second_one() -> None:
    folder = rendezvous_folder("twice")
    with other_process(SIT, folder, 3) as first:
        token = bytes.fromhex(pipes.stdout(first).readline())
        with pytest.raises(ConfigError, match=f"rank 3 of this job is already running as process {first.pid}"):
            HostRendezvous(folder, 3)
        with seat(folder, 2) as other:
            assert other.token == token
        assert socket_path(folder, 3).exists(), "the refused one and the other left the first's socket alone"


def test_what_a_killed_rank_left_is_taken_over() -> None:
    folder = rendezvous_folder("killed")
    with other_process(SIT, folder, 1) as first:
        pipes.stdout(first).readline()
        first.send_signal(signal.SIGKILL)
        first.wait(DEADLINE)
        assert {path.name for path in folder.iterdir()} == {"1.sock", "1.lock", "token"}
        with seat(folder, 1) as second, socket.socket(socket.AF_UNIX) as client:
            client.settimeout(DEADLINE)
            client.connect(os.fspath(second.path))
    assert not folder.exists()


def test_a_forked_child_does_not_keep_the_seat_of_its_dead_parent() -> None:
    folder = rendezvous_folder("forked")
    with other_process(SIT.replace("print(rendezvous.token.hex(), flush=True)", FORK), folder, 0) as first:
        child = int(pipes.stdout(first).readline())
        try:
            first.kill()
            first.wait(DEADLINE)
            with seat(folder, 0):
                os.kill(child, 0)  # it lives, and holds nothing
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_last_one_to_leave_removes_the_folder_and_leaving_twice_is_fine() -> None:
    folder = rendezvous_folder("leave")
    one, two = HostRendezvous(folder, 0), HostRendezvous(folder, 1)
    one.leave()
    assert {path.name for path in folder.iterdir()} == {"1.sock", "1.lock", "token"}
    one.leave()
    two.leave()
    two.leave()
    assert not folder.exists()
    assert [path.name for path in folder.parent.iterdir()] == ["door"]


def test_a_run_that_brings_its_token_leaves_its_folder_to_the_process_that_made_it() -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        with seat(Path(name), 0, b"t" * 32) as rendezvous:
            assert rendezvous.token == b"t" * 32
            assert {path.name for path in Path(name).iterdir()} == {"0.sock", "0.lock"}
        assert list(Path(name).iterdir()) == []


def test_a_damaged_token_is_named_and_the_seat_is_free_again() -> None:
    folder = rendezvous_folder("damaged")
    folder.mkdir(mode=0o700)
    (folder / "token").write_bytes(b"half")
    for _ in range(2):
        with pytest.raises(ConfigError, match="token is damaged"):
            HostRendezvous(folder, 0)


# Folders that are not safely ours


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_folder_that_others_may_enter_is_refused(mode: int) -> None:
    folder = rendezvous_folder("open")
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"):
        HostRendezvous(folder, 0)
    folder.parent.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"):
        rendezvous_folder("open")


def test_a_link_to_a_folder_is_refused(tmp_path: Path, runtime: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (runtime / f"covey-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="must be a folder of yours"):
        rendezvous_folder("linked")
    assert list(elsewhere.iterdir()) == []


def test_a_file_in_place_of_the_folder_is_refused(runtime: Path) -> None:
    (runtime / f"covey-{os.getuid()}").touch(mode=0o700)
    with pytest.raises(ConfigError, match="must be a folder of yours"):
        rendezvous_folder("file")


@needs_root
def test_a_folder_of_another_user_is_refused(runtime: Path) -> None:
    folder = runtime / f"covey-{os.getuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="must be a folder of yours"):
        rendezvous_folder("theirs")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not there"):
        check_folder(tmp_path / "missing")


def test_a_path_too_long_for_a_socket_is_refused_before_anyone_waits(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 25)
    folder.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="too long for a unix socket; set XDG_RUNTIME_DIR"):
        check_folder(folder)


# Which process is at the other end


def test_a_process_of_this_user_may_connect() -> None:
    one, other = socket.socketpair()
    with one, other:
        check_peer(one)


@needs_root
def test_a_connection_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(name, 0o755)
        path = os.path.join(name, "open.sock")
        listener.settimeout(DEADLINE)
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.listen()
        # Not a Python of ours: another user need not be able to read where it is installed.
        code = f"python3 -c \"import socket; s = socket.socket(socket.AF_UNIX); s.connect('{path}'); s.recv(1)\""
        process = forked.Popen(["/bin/sh", "-c", code], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
        try:
            accepted, _ = listener.accept()
            with accepted, pytest.raises(AuthError, match=f"user {NOBODY} tried to join a run of user {os.getuid()}"):
                check_peer(accepted)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
            process.wait(DEADLINE)


# Facts about this host


def test_the_host_token_is_the_same_in_another_process_and_says_nothing() -> None:
    code = (
        "from covey.net.discovery.host_rendezvous import host_token; from pathlib import Path\n"
        "print(host_token(Path('/')), flush=True)"
    )
    with other_process(code) as process:
        assert pipes.stdout(process).readline().strip() == host_token(Path("/"))
    assert socket.gethostname() not in host_token(Path("/"))


def test_processes_that_see_other_files_are_on_other_hosts(tmp_path: Path) -> None:
    assert host_token(tmp_path) != host_token(Path("/"))


def test_the_way_to_loopback_is_loopback() -> None:
    assert local_address_towards("127.0.0.1") == "127.0.0.1"


def test_no_way_to_a_host_is_a_connect_error_that_names_it() -> None:
    with pytest.raises(ConnectError, match=r"no route to nowhere\.invalid"):
        local_address_towards("nowhere.invalid")
