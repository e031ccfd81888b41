"""Real processes as ranks of a job, started as any launcher or a person would, and nothing left of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import forked, pipes
from tests.support.waiting import DEADLINE, wait_until

from covey.runtime.metrics.flight import NOTE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCE = Path(__file__).parents[2] / "src"
LAUNCHERS = ("COVEY_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")


@dataclass
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        """What it printed last, as JSON."""
        assert self.code == 0, f"exit code {self.code}\n{self.err}"
        return json.loads(self.out.splitlines()[-1])

    @property
    def error(self) -> str:
        """The last line of its traceback, before the note that names a file."""
        assert self.code == 1, f"exit code {self.code}\n{self.out}\n{self.err}"
        return [line for line in self.err.strip().splitlines() if not line.startswith(NOTE)][-1]


@dataclass
class Job:
    """Processes that share a temporary folder of their own, which has a short path."""

    folder: Path
    popen: type[subprocess.Popen[str]] = forked.Popen
    """What starts them; `subprocess.Popen` where a test measures what a new process costs."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, code: str, before: Sequence[str] = (), /, **env: object) -> subprocess.Popen[str]:
        """Start a Python program, perhaps by way of the command `before`; `env` is all it knows of a launcher."""
        script = self.folder / f"job{len(self.processes)}.py"
        script.write_text(code)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
        clean |= {"PYTHONPATH": str(SOURCE), "TMPDIR": str(self.temp), "XDG_RUNTIME_DIR": str(self.temp)}
        clean |= {"COVEY_HOME": str(self.home)}  # the user's own clusters are no business of a test
        process = self.popen(
            [*(before or [sys.executable]), str(script)],
            env=clean | {key: str(value) for key, value in env.items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def ranks(self, code: str, size: int, **env: object) -> list[subprocess.Popen[str]]:
        """Start `size` ranks on this host by hand."""
        return [self.start(code, RANK=rank, WORLD_SIZE=size, **env) for rank in range(size)]

    @property
    def temp(self) -> Path:
        """The temporary folder that the processes see."""
        return self.folder / "t"

    @property
    def home(self) -> Path:
        """The configuration folder of the processes."""
        return self.folder / "home"

    def left_behind(self) -> list[str]:
        """Return what is in the temporary folder, but for the door of this user's host rendezvous."""
        door = Path(f"covey-{os.getuid()}") / "door"
        paths = {path.relative_to(self.temp) for path in self.temp.rglob("*")}
        return sorted(map(str, paths - {door, door.parent}))

    def rendezvous_folder(self, rank: int) -> Path:
        """Wait until `rank` listens in a host rendezvous, and return the folder."""
        found: list[Path] = []

        def listens() -> bool:
            found[:] = self.temp.glob(f"covey-*/*/{rank}.sock")
            return bool(found)

        wait_until(listens)
        return found[0].parent


@contextlib.contextmanager
def new_job(popen: type[subprocess.Popen[str]] = forked.Popen) -> Iterator[Job]:
    """A job whose processes, with all that they started, are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        job = Job(Path(name), popen)
        job.temp.mkdir(mode=0o1777)
        try:
            yield job
        finally:
            for process in job.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                for pipe in (pipes.stdin(process), pipes.stdout(process), pipes.stderr(process)):
                    pipe.close()
                process.wait(DEADLINE)


def finish(process: subprocess.Popen[str], deadline: float = DEADLINE) -> Ended:
    """Wait for the end of a process that wants no more input."""
    # Not communicate(), which passes over what a line that was read before brought with it.
    until, said = time.monotonic() + deadline, dict[str, str]()
    readers = [
        threading.Thread(target=lambda name=name, pipe=pipe: said.update({name: pipe.read()}), daemon=True)
        for name, pipe in (("out", process.stdout), ("err", process.stderr))
    ]
    for reader in readers:
        reader.start()
    with contextlib.suppress(BrokenPipeError):
        pipes.stdin(process).close()
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))
        if reader.is_alive():
            raise subprocess.TimeoutExpired(process.args, deadline, **said)
    return Ended(process.wait(max(0.1, until - time.monotonic())), said["out"], said["err"])


def finish_all(processes: Sequence[subprocess.Popen[str]], deadline: float = DEADLINE) -> list[Ended]:
    return [finish(process, deadline) for process in processes]
