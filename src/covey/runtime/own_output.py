"""Keeps what a program prints that was started by plain `python`, if COVEY_KEEP_OUTPUT=1 asks for it.

Under `covey run` the keeper does that. Here a small process of its own takes the program's place at standard output and
standard error, passes on what comes and keeps it: so the last words of a program that is killed are kept, too. The
program then writes to pipes, which Python flushes by the line if there was a terminal before.

    python -m covey.runtime.own_output    (started by `OwnOutput`, which tells it all by its pipes)
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from typing import Final

from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.base.text import printable
from covey.net.host.run_notes import KEPT_FOLDER

OUTPUT_READY_SECONDS: Final = 20.0
"""How long the process may take to begin."""
PASS_ON_SECONDS: Final = 2.0
"""How long it may take to pass on the rest when the program ends; a child of the program may hold its pipes open."""
OUTPUT_READ_BYTES: Final = 64 << 10
_kept: OwnOutput | None = None


class OwnOutput:
    """The output of this process, on its way through the one that keeps it."""

    def __init__(self, name: str, cluster: str) -> None:
        """Begin.

        Raises:
            ConfigError: the process cannot be started, or has no folder.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        was_terminal = {target: os.isatty(target) for target in (1, 2)}
        self._saved = {target: os.dup(target) for target in (1, 2)}
        pipes = {target: os.pipe() for target in (1, 2)}
        ours, theirs = socket.socketpair()
        about = {"name": name, "cluster": cluster, "pid": os.getpid(), "words": sys.argv[:8]}
        reads = [pipes[1][0], pipes[2][0], theirs.fileno()]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "covey.runtime.own_output", *map(str, reads)],
                stdin=subprocess.DEVNULL,
                pass_fds=reads,
                start_new_session=True,  # Ctrl-C is for the program
            )
        self._control = ours
        try:
            ours.settimeout(OUTPUT_READY_SECONDS)
            ours.sendall(json.dumps(about).encode() + b"\n")
            answer = json.loads(ours.makefile("rb").readline() or b"{}")
        except (OSError, ValueError) as error:
            answer = {"why": str(error)}
        for target, (read, write) in pipes.items():
            os.close(read)
            if "folder" in answer:
                os.dup2(write, target)
            os.close(write)
        if "folder" not in answer:
            self._process.kill()
            raise ConfigError(f"COVEY_KEEP_OUTPUT: what this program prints cannot be kept: {answer.get('why', '')}")
        os.environ[KEPT_FOLDER] = answer["folder"]
        for target, stream in ((1, sys.stdout), (2, sys.stderr)):
            if was_terminal[target] and hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)
        atexit.register(self.end)

    def told_rank(self, rank: int) -> None:
        """Note the rank of this process in its run."""
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps({"rank": rank}).encode() + b"\n")

    def end(self) -> None:
        """Write to where this process wrote at first, and wait until the rest of its output has arrived there."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        with contextlib.suppress(OSError):
            self._control.sendall(b'{"end": true}\n')  # before the pipes end
        for target, saved in self._saved.items():
            os.dup2(saved, target)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PASS_ON_SECONDS)
        self._control.close()


def keep_own_output(name: str, cluster: str) -> OwnOutput | None:
    """Keep what this process prints from now on, if its user asks for it and no keeper does it; return how."""
    global _kept
    asked, row = os.environ.get("COVEY_KEEP_OUTPUT"), SETTINGS["keep_output"]
    is_kept = _kept is not None or KEPT_FOLDER in os.environ
    if not is_kept and asked is not None and row.kind.read(row.variable, asked):
        _kept = OwnOutput(name, cluster)
    return _kept


def main(reads: list[int], control: socket.socket) -> None:
    """Pass on and keep what the program prints, until it closes its ends."""
    from covey.net.host.machine import short_host_name
    from covey.net.host.saved_runs import KEPT_COMMAND_LIMIT, OutputTerms, RunSummary, SavedRun
    from covey.net.host.settings_files import effective_environment

    orders = control.makefile("rb")
    about = json.loads(orders.readline())
    machine = short_host_name()
    record = RunSummary(
        name=about["name"], cluster=about["cluster"], machine=machine, machines=(machine,), processes=1,
        program=printable(" ".join(about["words"]), KEPT_COMMAND_LIMIT), pid=about["pid"], began=time.time(),
    )  # fmt: skip
    try:
        terms = OutputTerms.read(effective_environment())
        kept = SavedRun(record, output_bytes=terms.output_bytes, total_bytes=terms.total_bytes)
    except ConfigError as error:
        control.sendall(json.dumps({"why": str(error)}).encode() + b"\n")
        return
    control.sendall(json.dumps({"folder": str(kept.folder)}).encode() + b"\n")
    control.setblocking(False)
    rank, has_ended, held = None, False, b""
    with selectors.DefaultSelector() as waiting:
        for target, read in zip((1, 2), reads, strict=True):
            waiting.register(read, selectors.EVENT_READ, target)
        waiting.register(control, selectors.EVENT_READ, 0)
        while len(waiting.get_map()) > (control in waiting.get_map()):
            for key, _ in sorted(
                waiting.select(), key=lambda event: event[0].data
            ):  # the rank was told before the rest
                data = os.read(key.fd, OUTPUT_READ_BYTES)
                if not data:
                    waiting.unregister(key.fileobj)
                elif key.data:
                    _pass_on(key.data, data)
                    kept.append(0, rank, key.data, data)
                else:
                    *lines, held = (held + data).split(b"\n")
                    for order in map(json.loads, lines):
                        rank, has_ended = order.get("rank", rank), has_ended or "end" in order
    if has_ended:
        kept.end(None, "")
    else:  # it was killed
        kept.close()


def _pass_on(target: int, data: bytes) -> None:
    rest = memoryview(data)
    with contextlib.suppress(
        OSError
    ):  # its reader is gone; the program is not told, and the output is kept all the same
        while rest:
            rest = rest[os.write(target, rest) :]


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:3]], socket.socket(fileno=int(sys.argv[3])))
