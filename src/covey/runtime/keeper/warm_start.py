"""Starts many ranks of one script quickly: the keeper's side of the template process (`keeper/template.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import sys
from typing import IO, TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.net.host.descriptors import track
from covey.runtime.keeper import template
from covey.runtime.processes import Children

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SETTING: Final = "COVEY_WARM_START"
"""1: always where it is possible; 0: never; not set: with more ranks than cores."""
TEMPLATE_READY_SECONDS: Final = 10.0
"""How long the template may take to import what ranks need from a slow disk."""
FORK_SECONDS: Final = 10.0
ANSWER_LIMIT: Final = 4096
SOURCE_LIMIT: Final = 1 << 20
USES_COVEY: Final = re.compile(rb"^[ \t]*(?:import|from)[ \t][^#\n]*\bcovey\b", re.MULTILINE)
SETS_UP_NUMPY: Final = re.compile(rb"\b(?:OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|BLIS|VECLIB|NPY|NUMPY)_[A-Z]")
"""Variables that numpy and its libraries read when they are loaded: a script that names one may set it."""
OBSERVERS: Final = ("PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE", "PYTHONINSPECT", "COVERAGE_PROCESS_START")
"""Variables that ask for a report on the start of every process."""


class TemplateLostError(Exception):
    """The template process has ended, or does not answer."""


def is_of_use(argv: Sequence[str], size: int, env: Mapping[str, str]) -> bool:
    """Tell whether `size` processes that execute `argv` should be forks of a process that has imported covey.

    Raises:
        ConfigError: COVEY_WARM_START is malformed.
    """
    wanted = SETTINGS["warm_start"].kind.read(SETTING, env[SETTING]) if env.get(SETTING) else None
    if wanted is False or sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    if wanted is None and size <= len(os.sched_getaffinity(0)):
        return False
    is_script = len(argv) > 1 and argv[0] == sys.executable and argv[1].endswith(".py")
    return size > 1 and is_script and not any(env.get(name) for name in OBSERVERS) and _is_fit(argv[1])


def _is_fit(script: str) -> bool:
    """Tell whether a script imports covey, and names no variable that numpy reads."""
    try:
        with open(script, "rb") as file:
            source = file.read(SOURCE_LIMIT)
    except OSError:
        return False
    return USES_COVEY.search(source) is not None and SETS_UP_NUMPY.search(source) is None


class Template:
    """A process that has imported covey, and forks ranks."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the template; `argv` is that of every rank, `env` what the environments of all ranks have in common.

        Raises:
            TemplateLostError: it does not start, or ranks cannot be forks of it.
        """
        self.argv, self.env = tuple(argv), dict(env)
        self._ranks: dict[int, ForkedRank] = {}
        self._children = Children()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        track(self._channel)
        heard, said = os.pipe()
        try:
            self._child = self._children.start(
                [argv[0], template.__file__, *argv[1:]],
                env={**env, template.CHANNEL_VARIABLE: str(theirs.fileno())},
                stdout=said,
                stderr=said,
                pass_fds=(theirs.fileno(),),
            )
        except ConfigError as error:
            self._children.close()
            self._channel.close()
            os.close(heard)
            raise TemplateLostError(str(error)) from error
        finally:
            theirs.close()
            os.close(said)
        try:
            self._receive(TEMPLATE_READY_SECONDS)
            if select.select([heard], [], [], 0)[0]:
                raise TemplateLostError("importing covey printed something, which every rank should print")
        except BaseException:
            self.close()
            raise
        finally:
            os.close(heard)

    def fork(self, env: Mapping[str, str], secret: tuple[str, int]) -> ForkedRank:
        """Return a new rank with this environment; `secret` is a variable ("": none) and the descriptor of its value.

        Raises:
            TemplateLostError: the template has ended, and all its ranks with it.
        """
        changed = {name: value for name, value in env.items() if self.env.get(name) != value}
        request = {"variables": changed, "secret": secret[0], "parent": self._child.pid}
        try:
            return self._ask_for_rank(json.dumps(request).encode(), secret[1])
        except TemplateLostError:
            self._child.signal_leader(signal.SIGKILL)  # else a late fork would be a second process of this rank
            raise

    def _ask_for_rank(self, request: bytes, secret_end: int) -> ForkedRank:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            streams: list[IO[bytes]] = [theirs.enter_context(open(os.devnull, "rb"))]
            pipes: list[IO[bytes]] = []
            for read_end, write_end in (os.pipe(), os.pipe()):
                pipes.append(ours.enter_context(open(read_end, "rb")))
                streams.append(theirs.enter_context(open(write_end, "wb")))
            try:
                descriptors = [*(stream.fileno() for stream in streams), secret_end]
                socket.send_fds(self._channel, [request], descriptors)
            except OSError as error:
                raise TemplateLostError(str(error)) from error
            while "forked" not in (answer := self._receive(FORK_SECONDS)):
                if answer["pid"] not in self._ranks:
                    raise TemplateLostError("a rank ended before it began")
                self._ended(answer)
            pid = answer["forked"]
            rank = self._ranks[pid] = ForkedRank(pid, self.hear, stdout=pipes[0], stderr=pipes[1])
            ours.pop_all()
        return rank

    def hear(self, patience: float | None = 0.0) -> None:
        """Note which ranks have ended; wait up to `patience` seconds for the first, without limit if None."""
        try:
            while self._ranks and select.select([self._channel], [], [], patience)[0]:
                self._ended(self._receive(0.0))
                patience = 0.0
        except TemplateLostError:
            for rank in self._ranks.values():  # they die with the template; this makes sure
                with contextlib.suppress(OSError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.returncode = -signal.SIGKILL
            self._ranks.clear()

    def close(self) -> None:
        """End the template, after its ranks have ended. Closing twice is fine."""
        self._channel.close()
        with self._children as children:
            children.await_end(self._child, FORK_SECONDS)

    def _receive(self, patience: float) -> dict[str, int]:
        """Return the next message of the template; the first one, "ready", is returned empty."""
        try:
            if not select.select([self._channel], [], [], patience)[0]:
                raise TemplateLostError(f"no answer in {patience:g} s")
            body = self._channel.recv(ANSWER_LIMIT)
        except (OSError, ValueError) as error:  # closed
            raise TemplateLostError(str(error)) from error
        if not body:
            raise TemplateLostError("it has ended")
        answer: dict[str, int] = {} if body == b"ready" else json.loads(body)
        return answer

    def _ended(self, answer: Mapping[str, int]) -> None:
        if (rank := self._ranks.pop(answer["pid"], None)) is not None:
            rank.returncode = answer["code"]


class ForkedRank:
    """A rank that the template forked, with the part of the `subprocess.Popen` interface that a keeper needs."""

    def __init__(self, pid: int, hear: Callable[[float | None], None], *, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self._hear = pid, hear
        self.stdin: IO[bytes] | None = None
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._hear(0.0)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end, and return the exit code."""
        while self.returncode is None:
            self._hear(None)
        return self.returncode
