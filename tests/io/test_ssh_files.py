"""Files that go to a machine by ssh: what its shell prints, what it refuses, and a connection that ends early."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.in_turn import in_turn
from tests.support.jobs import SOURCE
from tests.support.seeds import examples

from covey.agent import ssh_files
from covey.agent.requests import FileEntry
from covey.agent.snapshot import Snapshot, with_files
from covey.agent.ssh import SshHost
from covey.agent.ssh_files import GREETING, NOISE_LIMIT, MessageReader, claim, deliver_by_ssh, take_files
from covey.base.errors import ConfigError
from covey.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("home")

FILES = {"a.py": b"a", "deep/er/b.bin": bytes(range(256)) * 500, "empty": b""}
NORTH = SshHost("north", 1)


def answer(run: str, *sent: ssh_files._Message) -> tuple[int, list[ssh_files._Message]]:
    """Return the exit code and the messages of a machine that was sent these."""
    source, target = io.BytesIO(b"".join(map(ssh_files._packed, sent))), io.BytesIO()
    code = take_files(run, source, target)
    return code, list(MessageReader().take(target.getvalue()))


def deliver(ssh: Path, run: str, snapshot: Snapshot) -> tuple[int, int]:
    return deliver_by_ssh(NORTH, [str(ssh)], sys.executable, run, snapshot, ProgressBar("", 0, wanted=False))


def stands_for_ssh(folder: Path, script: str) -> Path:
    """Return a program that is called as ssh is; `$*` is the command for the other machine."""
    ssh = folder / "ssh"
    skip = 'while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done; shift\n'
    ssh.write_text(f"#!/bin/sh\n{skip}export PYTHONPATH={SOURCE}\n{script}\n")
    ssh.chmod(0o755)
    return ssh


@settings(max_examples=examples(200))
@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=40))
def test_messages_are_read_in_whatever_pieces_they_come_and_behind_whatever_a_shell_prints(
    noise: bytes, sizes: list[int]
) -> None:
    messages: list[ssh_files._Message] = [
        ssh_files._Wanted((1, 2)),
        ssh_files._Wanted((), is_last=True),
        ssh_files._Done(),
    ]
    stream = noise.replace(GREETING, b"") + GREETING + b"".join(map(ssh_files._packed, messages))
    reader = MessageReader()
    found: list[ssh_files._Message] = []
    for size in sizes:
        piece, stream = stream[:size], stream[size:]
        found += reader.take(piece)
    assert [*found, *reader.take(stream)] == messages


def test_a_machine_that_is_not_coveys_is_refused_in_bounded_memory() -> None:
    with pytest.raises(ConfigError, match="prints without end"):
        list(MessageReader().take(b"x" * (NOISE_LIMIT + 1)))
    for stream in (b"\xff\xff\xff\xff", b"\0\0\0\2\xc1\xc1"):
        with pytest.raises(ConfigError, match="no answer of covey"):
            list(MessageReader().take(GREETING + stream))


def test_only_what_differs_is_sent_and_a_shell_may_print(tmp_path: Path) -> None:
    ssh = stands_for_ssh(tmp_path, 'echo "Welcome to north"; exec sh -c "$*"')
    with with_files(FILES) as snapshot:
        assert deliver(ssh, "train", snapshot) == (3, 128001)
        assert deliver(ssh, "train", snapshot) == (0, 0)
    lock, folder = claim("train")
    with with_files(FILES) as snapshot, pytest.raises(ConfigError, match="north: run 'train' runs here already"):
        deliver(ssh, "train", snapshot)
    lock.let_go()
    work = folder / "work"
    assert {str(path.relative_to(work)): path.read_bytes() for path in work.rglob("*") if path.is_file()} == FILES


ENDS = [
    ("exit 255", "could not connect"),
    ("exit 127", "there is no"),
    ("exit 0", "ended early"),
    ("head -c 100 > /dev/null; echo no disk >&2; exit 3", "no disk"),
]


@in_turn(end=ENDS)
def test_a_connection_that_ends_early_is_an_error_that_says_why(tmp_path: Path, end: tuple[str, str]) -> None:
    script, why = end
    with with_files(FILES) as snapshot, pytest.raises(ConfigError) as raised:
        deliver(stands_for_ssh(tmp_path, script), "train", snapshot)
    assert str(raised.value).startswith("north: ")
    assert why in str(raised.value)


def test_paths_that_lead_out_and_files_that_were_not_announced_are_refused() -> None:
    for path in ("../out", "/etc/passwd", "a/../../b"):
        code, told = answer("train", ssh_files._Files((FileEntry(path, 1, bytes(32)),)))
        assert code == 1
        assert isinstance(told[-1], ssh_files._Problem)
        assert "cannot be sent" in told[-1].text
    listed = (ssh_files._Files((FileEntry("a", 1, bytes(32)),)), ssh_files._Files(()))
    code, told = answer("train", *listed, ssh_files._Content(0, 0, b"x"))
    assert code == 1
    assert told[0] == ssh_files._Wanted((0,))
    assert isinstance(told[-1], ssh_files._Problem), "its content is not what was announced"
    assert "has changed while it was sent" in told[-1].text
    for rest in ((), (ssh_files._Content(-1),), (ssh_files._Done(),)):
        code, told = answer("train", *listed, *rest)
        assert (code, type(told[-1])) == (1, ssh_files._Problem), rest


def test_a_program_that_is_to_run_where_nothing_was_sent_says_what_to_do(tmp_path: Path) -> None:
    request = {"folder": str(tmp_path / "nowhere"), "words": ["run"], "secret": bytes(32).hex()}
    ended = subprocess.run(
        [sys.executable, "-m", "covey.agent.remote"],
        input=json.dumps(request) + "\n",
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "add --copy, which sends it" in ended.stderr
