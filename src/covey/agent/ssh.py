"""Starts a run on several machines with `ssh`, where no agent runs.

Nothing but the interpreter is on a command line. What to start, and the cluster's secret, go through the standard input
of ssh to `covey.agent.remote`, which also gets signals there, and ends the program when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import threading
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from covey.agent.shares import Printed, ShareEnded
from covey.base.errors import ConfigError
from covey.runtime import processes
from covey.runtime.processes import Children

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.agent.shares import Report

SSH_FAILED: Final = 255
"""The exit code of ssh itself."""
NOT_FOUND: Final = 127
SSH_OPTIONS: Final = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),  # a machine that vanishes ends the connection
)


class SshHost(NamedTuple):
    """A machine for ssh, and how many processes it gets."""

    name: str
    processes: int


def parse_hosts(text: str, processes: int = 1) -> list[SshHost]:
    """Return the machines of `north,south:2`; without a number, a machine gets `processes`.

    Raises:
        ConfigError: a name or number cannot be used, or a machine is named twice.
    """
    hosts = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, colon, number = word.rpartition(":")
        if not colon:
            name, number = word, str(processes)
        if not (number.isascii() and number.isdigit() and 0 < int(number) <= 1024):
            raise ConfigError(f"--hosts {word}: write HOST or HOST:PROCESSES, with a number from 1 to 1024")
        if not name or name.startswith("-") or not name.isprintable() or " " in name:
            raise ConfigError(f"--hosts {word}: {name!r} is no name of a host")
        hosts.append(SshHost(name, int(number)))
    if not hosts:
        raise ConfigError("--hosts names no host; write north,south:2")
    if len({host.name for host in hosts}) < len(hosts):
        raise ConfigError(f"--hosts {text}: a host is named twice; write its number of processes after a colon")
    return hosts


def ssh_command(env: Mapping[str, str]) -> list[str]:
    """Return the program that connects, with its options: COVEY_SSH, or ssh.

    Raises:
        ConfigError: the value cannot be split into words.
    """
    try:
        return shlex.split(env.get("COVEY_SSH", "")) or ["ssh"]
    except ValueError as error:
        raise ConfigError(f"COVEY_SSH={env['COVEY_SSH']!r}: {error}") from None


def connecting(host: SshHost, ssh: Sequence[str], python: str) -> list[str]:
    """Return the command that starts `covey.agent.remote` on another machine."""
    return [*ssh, *SSH_OPTIONS, host.name, f"{shlex.quote(python)} -m covey.agent.remote"]


def explain_exit(host: SshHost, python: str, code: int) -> str:
    """Return what an exit code of ssh means, if it is not that of the program."""
    if code == SSH_FAILED:
        return f"ssh could not connect (exit code {code}); `ssh {host.name}` must work without a password"
    if code == NOT_FOUND:
        return f"there is no {python}; name an interpreter that has covey on that machine with --python"
    return ""


class SshShare:
    """The program of a run on one machine, started with ssh."""

    def __init__(
        self, host: SshHost, ssh: Sequence[str], python: str, words: Sequence[str], secret: bytes, copy_of: str = ""
    ) -> None:
        """`words` follow `covey` on that machine; `secret` is the cluster's.

        The program is in the folder of the same path as here; or where the files of the run `copy_of` were sent.
        """
        self.name, self._host = host.name, host
        self._argv = connecting(host, ssh, python)
        where = {"run": copy_of} if copy_of else {"folder": os.getcwd()}
        request = json.dumps({**where, "words": list(words), "secret": secret.hex()})
        self._python = python
        self._lock = threading.Lock()
        self._input: IO[bytes] | None = None
        """Standard input of ssh, while it runs."""
        self._unsaid = [request]
        """Lines for the other machine, until ssh has been started: Ctrl-C may come first."""

    def run(self, report: Callable[[Report], None]) -> None:
        """Start ssh, and report what it prints until it ends."""
        with Children() as children:
            try:
                # In its own session, so that Ctrl-C goes through its input, and the program can end in order.
                pipe = subprocess.PIPE
                child = children.start(self._argv, env=os.environ, is_bound=False, stdin=pipe, stdout=pipe, stderr=pipe)
            except ConfigError as error:
                report(ShareEnded(1, f"{error}; install ssh, or set COVEY_SSH"))
                return
            with self._lock:
                self._input = child.process.stdin
            self._say()

            def relay(printed: list[processes.ChildOutput]) -> None:
                for each in printed:
                    if each.data:
                        report(Printed(each.target, each.data))

            while not children.ended():
                relay(children.outputs(None))
            relay(children.rest_of(child))
            with self._lock:
                self._input = None
            code = processes.exit_status(child.code or 0)
        report(ShareEnded(code, explain_exit(self._host, self._python, code)))

    def send_signal(self, signum: int) -> None:
        """Pass a signal on, through the input of ssh."""
        self._say(str(int(signum)))

    def _say(self, *lines: str) -> None:
        with self._lock:
            self._unsaid += lines
            if self._input is None:
                return
            with contextlib.suppress(OSError):  # ssh has ended, and `run` reports it
                self._input.write("".join(f"{line}\n" for line in self._unsaid).encode())
                self._input.flush()
            self._unsaid.clear()
