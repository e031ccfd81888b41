"""What ssh starts on another machine for `covey run --hosts`: reads what to do from its input, and does it.

The first line is JSON. It has the name of a run whose files follow (`ssh_files`), or a program to start. Then every
further line is the number of a signal for the program. At the end of the input, which comes when the connection breaks,
the program is told to end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Final

from covey.agent.jobs import ALLOWED_SIGNALS, environment
from covey.agent.ssh_files import claimed_work_folder, take_files
from covey.base.errors import ConfigError
from covey.net.host.locks import LockHolder
from covey.runtime.processes import Child, Children, exit_status

FIRST_LINE_LIMIT: Final = 1 << 20
CLUSTER_SECRET_BYTES: Final = 32
USAGE_CODE: Final = 2


def main() -> int:
    """Start the program that the first line of the input describes; return its exit code."""
    try:
        request = json.loads(_first_line())
        if "receive" in request:
            with open(0, "rb", closefd=False) as source, open(1, "wb", closefd=False) as target:
                return take_files(str(request["receive"]), source, target)
        folder, words, secret = (
            str(request.get("folder", "")),
            [str(word) for word in request["words"]],
            bytes.fromhex(request["secret"]),
        )
        if len(secret) != CLUSTER_SECRET_BYTES:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        print("error: covey.agent.remote is started by `covey run --hosts`", file=sys.stderr)
        return USAGE_CODE
    lock = LockHolder()
    if copied := str(request.get("run", "")):
        try:
            lock, work = claimed_work_folder(copied)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE_CODE
        folder = str(work)
    try:
        return _run(folder, words, secret)
    finally:
        lock.let_go()


def _run(folder: str, words: list[str], secret: bytes) -> int:
    """Start a program; return its exit code."""
    if not os.path.isdir(folder):
        print(
            f"error: there is no folder {folder} on this machine; add --copy, which sends it, or make it, with the "
            "program in it",
            file=sys.stderr,
        )
        return USAGE_CODE
    with Children() as children:
        reading, writing = os.pipe()
        try:
            os.write(writing, secret)
            env = {**environment(), "COVEY_SECRET_FD": str(reading)}
            argv = [sys.executable, "-m", "covey", *words]
            child = children.start(argv, env=env, cwd=folder, pass_fds=(reading,))
        finally:
            os.close(reading)
            os.close(writing)
        threading.Thread(target=_pass_signals_on, args=(child,), daemon=True).start()
        while not children.ended():
            children.outputs(None)
        return exit_status(child.code or 0)


def _first_line() -> bytes:
    """Read the first line of the input, and nothing after it."""
    line = bytearray()
    while len(line) < FIRST_LINE_LIMIT and not line.endswith(b"\n") and (letter := os.read(0, 1)):
        line += letter
    return bytes(line)


def _pass_signals_on(child: Child) -> None:
    held = b""
    while data := os.read(0, 64):  # not by a file object, whose lock this thread would hold when the process ends
        *lines, held = (held + data)[-256:].split(b"\n")
        for line in lines:
            if line.isdigit() and int(line) in ALLOWED_SIGNALS:
                child.signal_leader(int(line))
    child.signal_leader(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
