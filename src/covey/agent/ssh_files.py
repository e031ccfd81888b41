"""Sends a folder to a machine by `ssh`, where no agent runs: both ends of one connection, before the program starts.

The files go into the folder of the run by the rules of an agent (`delivery`): only those that differ are sent, and
nothing outside of that folder is written. The other end (`take_files`) is started by `covey.agent.remote`.

Each message is its length in four bytes, and msgpack. First the sender tells the list, then the other end tells which
files it wants, then the sender sends their content, and the other end says that all is there. So neither end writes
while the other one does, except for a problem, which ends the connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import threading
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import msgspec

from covey.agent.delivery import Delivery, run_folder, work_folder
from covey.agent.requests import OUTPUT_CHUNK_BYTES, PAGE_ENTRIES, Chunk, Number, Page, check_run_name
from covey.agent.ssh import connecting, explain_exit
from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.net.host.folders import home, private_folder
from covey.net.host.locks import LockHolder
from covey.runtime.processes import Children, OutputTail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from covey.agent.snapshot import Snapshot
    from covey.agent.ssh import SshHost
    from covey.runtime.progress_bar import ProgressBar

GREETING: Final = b"\ncovey takes files 1\n"
"""What the other end writes first. Before it comes what the shell there prints, if it prints anything."""
NOISE_LIMIT: Final = 64 << 10
SSH_FRAME_LIMIT: Final = 1 << 20
_FRAME_LENGTH: Final = struct.Struct(">I")


class _Files(msgspec.Struct, frozen=True, array_like=True, tag="files"):
    """A page of the list; the last one is empty."""

    page: Page


class _Content(msgspec.Struct, frozen=True, array_like=True, tag="content"):
    """A chunk of a file that is wanted; the last message has index -1."""

    index: Annotated[int, msgspec.Meta(ge=-1)]
    offset: Number = 0
    data: Chunk = b""


class _Wanted(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """Indexes of files that differ there."""

    indexes: tuple[Number, ...]
    is_last: bool = False


class _Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """All files are there."""


class _Problem(msgspec.Struct, frozen=True, array_like=True, tag="problem"):
    text: Annotated[str, msgspec.Meta(max_length=8000)]


_Message = _Files | _Content | _Wanted | _Done | _Problem
_decoder: Final[msgspec.msgpack.Decoder[_Message]] = msgspec.msgpack.Decoder(_Message)


def _packed(message: _Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _FRAME_LENGTH.pack(len(body)) + body


class MessageReader:
    """Makes messages of the bytes that come through ssh."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._is_greeted = False

    def take(self, data: bytes) -> Iterator[_Message]:
        """Yield the messages that are complete; ConfigError if the other end is not covey's."""
        self._held += data
        if not self._is_greeted:
            _, greeting, rest = self._held.partition(GREETING)
            if not greeting:
                if len(self._held) > NOISE_LIMIT:
                    raise ConfigError("its shell prints without end before it starts covey")
                return
            self._held, self._is_greeted = rest, True
        while len(self._held) >= _FRAME_LENGTH.size:
            (length,) = _FRAME_LENGTH.unpack_from(self._held)
            if length > SSH_FRAME_LIMIT:
                raise ConfigError("what it answers is no answer of covey")
            end = _FRAME_LENGTH.size + length
            if len(self._held) < end:
                return
            body = bytes(self._held[_FRAME_LENGTH.size : end])
            del self._held[:end]
            yield _decoded(body)


def _decoded(body: bytes) -> _Message:
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError:
        raise ConfigError("what it answers is no answer of covey") from None


# Here


def deliver_by_ssh(
    host: SshHost, ssh: Sequence[str], python: str, run: str, snapshot: Snapshot, bar: ProgressBar
) -> tuple[int, int]:
    """Bring the files of a run on a machine to those of a snapshot; return how many were sent, and their bytes.

    Raises:
        ConfigError: the machine cannot be reached, or refuses; the text says why.
    """
    reader, wanted, tail = MessageReader(), _WantedFiles(len(snapshot.entries)), OutputTail()
    problem, is_done = "", False
    pipe = subprocess.PIPE
    with Children() as children:
        try:
            child = children.start(connecting(host, ssh, python), env=os.environ, stdin=pipe, stdout=pipe, stderr=pipe)
        except ConfigError as error:
            raise ConfigError(f"{host.name}: {error}; install ssh, or set COVEY_SSH") from None
        assert child.process.stdin is not None
        sender = threading.Thread(
            target=_send, args=(child.process.stdin, run, snapshot, wanted, bar), name="covey-send", daemon=True
        )
        sender.start()

        def take(target: int, data: bytes) -> None:
            nonlocal problem, is_done
            if target == 2:
                tail.add(data)
                return
            for message in reader.take(data):
                match message:
                    case _Wanted():
                        wanted.add(message)
                    case _Done():
                        is_done = True
                    case _Problem(text):
                        problem = printable(text, 2000)

        try:
            while not children.ended():
                for printed in children.outputs(None):
                    take(printed.target, printed.data)
            for printed in children.rest_of(child):
                take(printed.target, printed.data)
        except ConfigError as error:
            problem = str(error)
            child.signal(9)
        finally:
            wanted.give_up()
            sender.join()
        code = child.process.wait()
    if problem or code or not is_done:
        why = problem or explain_exit(host, python, code) or f"the connection ended early (exit code {code})"
        raise ConfigError(f"{host.name}: {why}" + ("" if problem else tail.quote()))
    return len(wanted.indexes), wanted.sent


class _WantedFiles:
    """Which files the other end wants; the sender waits until it has said so."""

    def __init__(self, count: int) -> None:
        self.indexes: list[int] = []
        self.sent = 0
        """Bytes."""
        self._count = count
        self._is_known = threading.Event()
        self._has_ended = False

    def add(self, message: _Wanted) -> None:
        """Note indexes; ConfigError if one was not offered."""
        if any(index >= self._count for index in message.indexes) or self._is_known.is_set():
            raise ConfigError("it asked for a file that was not offered")
        self.indexes += message.indexes
        if message.is_last:
            self._is_known.set()

    def give_up(self) -> None:
        """Let the sender end: the connection has ended."""
        self._has_ended = True
        self._is_known.set()

    def wait(self) -> list[int]:
        """Return the indexes once all are known."""
        self._is_known.wait()
        return [] if self._has_ended else self.indexes


def _send(target: IO[bytes], run: str, snapshot: Snapshot, wanted: _WantedFiles, bar: ProgressBar) -> None:
    entries = snapshot.entries
    with contextlib.suppress(OSError, ValueError):  # ssh has ended, or its input was closed: its exit code tells why
        target.write(json.dumps({"receive": run}).encode() + b"\n")
        for start in range(0, len(entries), PAGE_ENTRIES):
            target.write(_packed(_Files(entries[start : start + PAGE_ENTRIES])))
        target.write(_packed(_Files(())))
        target.flush()
        indexes = wanted.wait()
        bar.expect(sum(entries[index].size for index in indexes))
        for index in indexes:
            size = entries[index].size
            for offset in range(0, max(1, size), OUTPUT_CHUNK_BYTES):
                data = snapshot.read(index, offset, min(OUTPUT_CHUNK_BYTES, size - offset))
                target.write(_packed(_Content(index, offset, data)))
                wanted.sent += len(data)
                bar.show(len(data))
        target.write(_packed(_Content(-1)))
        target.flush()


# There


def runs_folder() -> Path:
    """Return the folder on this machine for runs that ssh starts."""
    return private_folder(private_folder(home() / "ssh") / "runs")


def claim(run: str) -> tuple[LockHolder, Path]:
    """Return the folder of a run, locked: no other files go there, and no other program starts there.

    Raises:
        ConfigError: it is in use, or cannot be used.
    """
    folder = private_folder(run_folder(runs_folder(), check_run_name(run)))
    return LockHolder.take(folder / "lock", f"run {run!r} runs here already; end it, or choose another name"), folder


def claimed_work_folder(run: str) -> tuple[LockHolder, Path]:
    """Return the working folder of a run, and what keeps it for one program."""
    lock, folder = claim(run)
    return lock, work_folder(folder)


def take_files(run: str, source: IO[bytes], target: IO[bytes]) -> int:
    """Take the files of a run from the input; return the exit code of this process."""
    target.write(GREETING)
    target.flush()
    try:
        lock, folder = claim(run)
        try:
            _take(Delivery(folder), source, target)
        finally:
            lock.let_go()
    except ConfigError as error:
        target.write(_packed(_Problem(str(error)[:8000])))
        target.flush()
        return 1
    target.write(_packed(_Done()))
    target.flush()
    return 0


def _take(files: Delivery, source: IO[bytes], target: IO[bytes]) -> None:
    while (listed := _read(source, _Files)).page:
        files.offer(listed.page)
    pages: Iterable[list[int]] = files.missing()
    for page in pages:
        target.write(_packed(_Wanted(tuple(page))))
    target.write(_packed(_Wanted((), is_last=True)))
    target.flush()
    while (content := _read(source, _Content)).index >= 0:
        files.put(content.index, content.offset, content.data)
    files.finish()


def _read(source: IO[bytes], kind: Callable[..., Any]) -> Any:
    """Return the next message of the input, of a kind."""
    head = source.read(_FRAME_LENGTH.size)
    length = _FRAME_LENGTH.unpack(head)[0] if len(head) == _FRAME_LENGTH.size else 0
    body = source.read(length) if length <= SSH_FRAME_LIMIT else b""
    if not length or len(body) < length:
        raise ConfigError("the connection ended before all files had come; start again")
    message = _decoded(body)
    if type(message) is not kind:
        raise ConfigError("the other machine has another release of covey; update one of them")
    return message
