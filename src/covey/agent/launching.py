"""Starts a run on several agents: sends the working folder, makes environments, starts a share on each, follows it.

Environments on machines that have another release get a wheel of the covey that runs here (`OwnWheel`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import logging
import secrets
import signal
import threading
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import covey
from covey.agent.callers import RestartedError
from covey.agent.environments import NEEDS_INDEX
from covey.agent.requests import OUTPUT_CHUNK_BYTES, PAGE_ENTRIES, WHEEL_RUN, Interpreter, StartRequest
from covey.agent.shares import Printed, Said, ShareEnded
from covey.agent.snapshot import with_files
from covey.base.errors import ConfigError, ConnectError, CoveyError
from covey.base.pace import Growing
from covey.base.text import printable
from covey.base.version import __version__
from covey.runtime.backoff import Backoff
from covey.runtime.progress_bar import ProgressBar
from covey.wire import messages
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from covey.agent.callers import AgentCaller
    from covey.agent.shares import Report
    from covey.agent.snapshot import Snapshot
    from covey.runtime.peers.visit import Visit

_MOMENT: Final = (1980, 1, 1, 0, 0, 0)
"""Modification time of every file, so that the same package makes the same wheel."""
T = TypeVar("T")
LEASE_SECONDS: Final = 20.0
"""How long a program goes on after its terminal was lost, unless it was started with --detach."""
AGENT_RETRY_SECONDS: Final = 15.0
"""How long a terminal tries to reach an agent again; shorter than the lease."""
AGENT_PAUSES: Final = Growing(0.1, 1.0)
"""Between two tries."""
PUTS_AT_ONCE: Final = 12
"""Chunks of files on the way: together they are less than what a link holds for a slow peer."""
ASK_JOBS_EVERY: Final = 1.0
INDEX_NAMES_SHOWN: Final = 400
"""Characters of the names of packages that are not there."""


class OwnWheel(NamedTuple):
    """The wheel as a file."""

    name: str
    data: bytes

    @property
    def digest(self) -> str:
        """The SHA-256, by which an environment is known that has it."""
        return hashlib.sha256(self.data).hexdigest()


def make_own_wheel() -> OwnWheel:
    """Make a wheel of the package as it lies here; another Python does not load what was compiled for this one."""
    package = Path(covey.__file__).parent
    files = {
        f"covey/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"covey-{__version__}.dist-info"
    files |= {f"{info}/{name}": text.encode() for name, text in _metadata().items()}
    record = "".join(f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _MOMENT), data, zipfile.ZIP_DEFLATED)
    return OwnWheel(f"covey-{__version__}-py3-none-any.whl", written.getvalue())


def _metadata() -> dict[str, str]:
    """Return the files that tell pip what the package needs; without an installed one, its name alone."""
    told = {"METADATA": f"Metadata-Version: 2.1\nName: covey\nVersion: {__version__}\n"}
    try:
        installed = metadata.distribution("covey")
    except metadata.PackageNotFoundError:  # run from its source folder
        pass
    else:
        for name in ("METADATA", "entry_points.txt"):
            told |= {name: text} if (text := installed.read_text(name)) else {}
    return {**told, "WHEEL": "Wheel-Version: 1.0\nGenerator: covey\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Launch(NamedTuple):
    """What to start on each of several machines."""

    run: str
    processes: int
    """On each machine."""
    options: tuple[str, ...]
    words: tuple[str, ...]
    interpreter: Interpreter
    lease: float
    is_temporary: bool = False
    """Whether its folder is removed when its program is forgotten."""


class AgentShare:
    """The program of a run on the machine of one agent."""

    def __init__(self, agent: AgentCaller, number: int) -> None:
        self.name, self.agent, self.number = agent.name, agent, number

    def run(self, report: Callable[[Report], None]) -> None:
        """Report the output until the program has ended; connect again if the agent is lost for a while."""
        offset, tries = 0, self._tries()
        while True:
            try:
                for batch in self.agent.stream("follow", self.number, offset, True, True):
                    if tries.failures:
                        report(Said("connected again"))
                        tries.worked()
                    if batch.missing:
                        report(Said(f"{batch.missing} bytes of output are missing here: they came too fast"))
                    for stream, data in batch.records:
                        report(Printed(stream, data))
                    offset = batch.next
                    if batch.code is not None:
                        report(ShareEnded(batch.code))
                        return
                raise ConnectError("the output ended early")
            except ConnectError as error:
                if tries.is_over:
                    report(
                        ShareEnded(1, f"the agent was not reached again within {AGENT_RETRY_SECONDS:g} s", is_lost=True)
                    )
                    return
                if not tries.failures:
                    report(Said("the agent is lost; trying to reach it again"))
                tries.failed(error)
                time.sleep(tries.pause)
            except RestartedError as error:
                report(ShareEnded(1, str(error), is_lost=True))
                return
            except CoveyError as error:
                report(ShareEnded(1, str(error)))
                return

    def send_signal(self, signum: int) -> None:
        """Pass a signal on, once, although the answer may be lost: a second SIGINT would kill."""
        tries, token = self._tries(), secrets.randbits(52)
        while not tries.is_over:
            try:
                self.agent.call("send_signal", self.number, int(signum), token)
            except ConnectError as error:
                tries.failed(error)
                time.sleep(tries.pause)
            except CoveyError:  # the program has ended
                return
            else:
                return

    def _tries(self) -> Backoff:
        """Return tries to reach the agent; `run` tells how they end."""
        return Backoff(f"the agent on {self.name}", AGENT_PAUSES, within=AGENT_RETRY_SECONDS, level=logging.DEBUG)


def launch(
    agents: Sequence[AgentCaller], wanted: Launch, snapshot: Snapshot, note: Callable[[str], None]
) -> list[AgentShare]:
    """Start a program on all of the agents, or on none.

    `note` gets lines about what happens, on any thread.

    Raises:
        CoveyError: a machine refused, or could not be reached; the text says which and why.
    """
    said: list[str] = []
    with ProgressBar("files", 0) as bar:

        def send(agent: AgentCaller) -> None:
            deliver(agent, wanted.run, snapshot, said.append, is_temporary=wanted.is_temporary, bar=bar)

        for_all(agents, send)
    for line in said:
        note(line)
    interpreters = _make_environments(agents, wanted.interpreter, note) if wanted.interpreter.requirements else {}
    numbers: dict[bytes, int] = {}

    def start(agent: AgentCaller) -> None:
        interpreter = interpreters.get(agent.card.id, wanted.interpreter)
        request = StartRequest(wanted.run, wanted.processes, wanted.options, wanted.words, interpreter, wanted.lease)
        numbers[agent.card.id] = agent.call("start_program", request)

    try:
        for_all(agents, start)
    except BaseException:
        for agent in agents:
            if agent.card.id in numbers:
                with contextlib.suppress(CoveyError):
                    agent.call("send_signal", numbers[agent.card.id], int(signal.SIGKILL), 0)
        raise
    return [AgentShare(agent, numbers[agent.card.id]) for agent in agents]


def may_start(agent: AgentCaller) -> None:
    """Raise the error of an agent that lets this machine start no programs."""
    for _ in agent.stream("programs"):
        pass


def deliver(
    agent: AgentCaller,
    run: str,
    snapshot: Snapshot,
    note: Callable[[str], None],
    *,
    is_temporary: bool = False,
    bar: ProgressBar | None = None,
) -> int:
    """Bring the files of a run on an agent to those of a snapshot; return how many were sent."""
    bar = bar or ProgressBar("", 0, wanted=False)
    number = agent.call("open_delivery", run, *([True] if is_temporary else []))
    for start in range(0, len(snapshot.entries), PAGE_ENTRIES):
        agent.call("offer_files", number, snapshot.entries[start : start + PAGE_ENTRIES])
    wanted = [index for page in agent.stream("missing_files", number) for index in page]
    if any(not 0 <= index < len(snapshot.entries) for index in wanted):
        raise ConfigError(f"{agent.name}: asked for a file that was not offered")
    bar.expect(sum(snapshot.entries[index].size for index in wanted))
    on_the_way: list[Any] = []
    sent = 0
    for index in wanted:
        entry = snapshot.entries[index]
        for offset in range(0, max(1, entry.size), OUTPUT_CHUNK_BYTES):
            data = snapshot.read(index, offset, min(OUTPUT_CHUNK_BYTES, entry.size - offset))
            while len(on_the_way) >= PUTS_AT_ONCE:
                with agent.errors():
                    on_the_way.pop(0).wait_or_cancel()
            with agent.errors():
                on_the_way.append(agent.begin("put_bytes", number, index, offset, data))
            sent += len(data)
            bar.show(len(data))
    for work in on_the_way:
        with agent.errors():
            work.wait_or_cancel()
    agent.call("finish_delivery", number)
    if wanted:
        note(sent_text(agent.name, len(wanted), len(snapshot.entries), sent))
    return len(wanted)


def sent_text(machine: str, count: int, total: int, size: int) -> str:
    """Return the line about files that were sent to a machine."""
    return f"{machine}: {count} of {total} files sent ({max(1, size >> 10)} KiB)"


def goes_on(visit: Visit, run: str, machines: Container[bytes] | None = None) -> bool:
    """Tell whether a node says that it is in this run: then the run decides what a failure means for the others.

    With `machines`, only nodes of these machines are asked: any member could say so.
    """
    cards = [member.card for member in visit.members()]
    if machines is not None:
        cards = [card for card in cards if machine_of(card) in machines]
    answers = visit.ask_all(cards, messages.Ask(), ASK_JOBS_EVERY)
    return any(isinstance(each, messages.Tell) and each.run == run and each.state == "running" for each in answers)


def for_all(machines: Sequence[T], function: Callable[[T], None]) -> None:
    """Call `function` with all machines at the same time; raise what went wrong, for all of them in one error."""
    errors: list[BaseException] = []

    def work(machine: T) -> None:
        try:
            function(machine)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(machine,), daemon=True) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(errors) == 1 or any(not isinstance(error, CoveyError) for error in errors):
        raise next((error for error in errors if not isinstance(error, CoveyError)), errors[0])
    if errors:
        raise ConfigError("\n".join(sorted(map(str, errors))))


def _make_environments(
    agents: Sequence[AgentCaller], wanted: Interpreter, note: Callable[[str], None]
) -> dict[bytes, Interpreter]:
    """Make the environments of a requirements file; return by agent what to start programs with.

    An agent of another release gets the covey of this process: the program meets the one that it was written with.
    """
    others = {agent.card.id for agent in agents if agent.card.version != __version__}
    wheel = make_own_wheel() if others else None
    made = {}

    def make(agent: AgentCaller) -> None:
        interpreter = wanted
        if wheel is not None and agent.card.id in others:
            interpreter = Interpreter("", wanted.requirements, wheel.digest)
            with with_files({wheel.name: wheel.data}) as sent:
                deliver(agent, WHEEL_RUN, sent, lambda _text: None)
            note(f"{agent.name} has covey {agent.card.version}: the environment gets {__version__} from here")
        _make_environment(agent, interpreter, note)
        made[agent.card.id] = interpreter

    for_all(agents, make)
    return made


def _make_environment(agent: AgentCaller, interpreter: Interpreter, note: Callable[[str], None]) -> None:
    has_said = False
    for piece in agent.stream("make_environment", interpreter):
        if not has_said:
            note(f"{agent.name}: making the environment of the requirements; this takes a while the first time")
            has_said = True
        if piece.startswith(NEEDS_INDEX):
            names = printable(piece.removeprefix(NEEDS_INDEX).decode(errors="replace").strip(), INDEX_NAMES_SHOWN)
            note(f"{agent.name}: pip there needs its index, for {names}")
