"""Answers to `messages.Inspect`: the metrics, operations, events and progress of this process, the links it measured.

A rank is asked by its keeper, and by nodes that have proved the secret of its cluster. An answer may take milliseconds
to encode, on the control loop, so a process answers such nodes a few times a second. Its checks and stacks are told to
its keeper only.

`covey run` keeps the output of its processes, and names its folder to them; each of them can tell other machines of
all. A node that asks has proved the secret of the cluster, and no more: so nothing is told unless COVEY_SHARE_OUTPUT
says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.base.pace import Bucket, Buckets
from covey.base.settings import SETTINGS
from covey.net.discovery.interfaces import all_interfaces
from covey.net.host.machine import short_host_name
from covey.net.host.run_notes import KEPT_FOLDER
from covey.net.host.saved_output import log_end, logs_in, read_log, tail_of
from covey.net.host.settings_files import effective_environment
from covey.runtime import loop as control
from covey.runtime.checks import are_ready
from covey.runtime.counters import process
from covey.runtime.metrics.flight import flight
from covey.runtime.metrics.samples import samples
from covey.runtime.tracebacks import stacks
from covey.wire import messages
from covey.wire import reports as wire
from covey.wire.progress import encode
from covey.wire.reports import encode_network

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from covey.net.host.readings import MachineReader
    from covey.wire.reports import MeasuredNetwork

INSPECTIONS_RATE, INSPECTIONS_BURST = 10.0, 64.0
"""Answers a second to one key, and at once: `covey trace` asks once for each group."""
INSPECTIONS_TOTAL_RATE, INSPECTIONS_TOTAL_BURST = 20.0, 128.0
"""The same for all keys together: a holder of the secret can make any number of keys."""
METRICS: Final = "metrics"
OPERATIONS_PAGE: Final = "operations"
EVENTS: Final = "events"
NETWORK: Final = "network"
PROGRESS: Final = "progress"
REPORTS: Final = "reports"
READINGS: Final = "readings"
OUTPUT: Final = "output"
CHECKS: Final = "checks"
STACKS: Final = "stacks"
KEEPER_ANSWER_SECONDS: Final = 0.5
"""How long the keeper may take to say how the machine is used; views wait for longer."""
STACKS_LIMIT_BYTES: Final = 200_000
"""Most bytes of the stacks of one process: they fit into a frame."""
SHARED_TAIL_BYTES: Final = 256 << 10
"""What an asker gets of the output before its first question, of all logs together; at least a sixteenth from each."""


def answer_keeper(question: messages.Inspect, send: Callable[[messages.Inspected], None]) -> None:
    """Send the answer to the keeper of this process, which may also ask for its checks and stacks."""

    def run_checks() -> None:  # functions of the program, which may take a while
        results = wire.CheckResults(tuple(are_ready()[: wire.TOLD_CHECKS_LIMIT]))
        control.soon(send, messages.Inspected(CHECKS, 0, 1, wire.encode(results)))

    if question.what == CHECKS:
        threading.Thread(target=run_checks, name="covey-check", daemon=True).start()
    elif question.what == STACKS:
        body = stacks().encode(errors="replace")[:STACKS_LIMIT_BYTES]
        send(messages.Inspected(STACKS, 0, 1, body))
    else:
        send(answer(question))


class AsksKeeper(Protocol):
    """The keeper of this process."""

    async def ask(self, question: messages.Question, within: float) -> messages.Answer:
        """Send a question and return the answer; TimeoutError if there is none in time."""


class PacedAnswers:
    """Answers nodes of the cluster, within limits. On the control loop."""

    def __init__(self) -> None:
        self._by_key = Buckets(INSPECTIONS_RATE, INSPECTIONS_BURST)
        self._total = Bucket(INSPECTIONS_TOTAL_RATE, INSPECTIONS_TOTAL_BURST)
        self._reader: MachineReader | None = None
        self._waiting: list[Callable[[messages.Inspected], object]] = []
        """What takes the answer of the keeper."""
        self._asking: asyncio.Future[None] | None = None
        self._reads_output = False
        """Whether a thread reads output now."""

    def answer(
        self,
        question: messages.Inspect,
        key: bytes,
        send: Callable[[messages.Inspected], object],
        keeper: AsksKeeper | None = None,
    ) -> None:
        """Send the answer to the node with this key; it has no pages if the node, or all together, ask too often.

        How the machine is used, the keeper reads, if this process has one: a driver must not hold a rank up.
        """
        now = time.monotonic()
        if not (self._by_key.take(key, now) and self._total.take(now)):
            send(messages.Inspected(question.what, question.page, 0, b""))
        elif question.what == READINGS and keeper is not None:
            self._waiting.append(send)
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._ask(keeper))
        elif question.what == READINGS:
            self._read_machine(send)
        elif question.what == OUTPUT:
            self._read_output(question, send)
        else:
            send(answer(question))

    async def _ask(self, keeper: AsksKeeper) -> None:
        """Send what the keeper answers to all that wait for it; without an answer, read the machine here."""
        answer: messages.Answer | None = None
        with contextlib.suppress(TimeoutError):
            answer = await keeper.ask(messages.Inspect(READINGS), KEEPER_ANSWER_SECONDS)
        waiting, self._waiting, self._asking = self._waiting, [], None
        for send in waiting:
            if isinstance(answer, messages.Inspected) and answer.what == READINGS:
                send(answer)
            else:
                self._read_machine(send)

    def _read_machine(self, send: Callable[[messages.Inspected], object]) -> None:
        """Send how this machine is used: at once if that was read within the last second, else after a reading."""
        from covey.net.host.readings import MachineReader  # few commands ask

        reader = self._reader = self._reader or MachineReader()

        def read() -> None:
            control.soon(send, messages.Inspected(READINGS, 0, 1, encode(reader.read())))

        if (last := reader.last()) is not None:
            send(messages.Inspected(READINGS, 0, 1, encode(last)))
        elif reader.is_reading:
            send(messages.Inspected(READINGS, 0, 0, b""))
        else:  # a driver may take a while
            threading.Thread(target=read, name="covey-readings", daemon=True).start()

    def _read_output(self, question: messages.Inspect, send: Callable[[messages.Inspected], object]) -> None:
        """Send what processes of the run print on this machine, if its user shares it; it is on disk."""
        from covey.runtime.metrics.inspection import encode_shared, shared_folder  # few runs share it

        folder = shared_folder()
        if folder is None or self._reads_output:
            send(messages.Inspected(OUTPUT, 0, 0, b""))
            return
        self._reads_output = True

        def read() -> None:
            body = b""
            try:
                body = encode_shared(folder, question.about)
            finally:
                control.soon(tell, body)

        def tell(body: bytes) -> None:
            self._reads_output = False
            send(messages.Inspected(OUTPUT, 0, int(bool(body)), body))

        threading.Thread(target=read, name="covey-output", daemon=True).start()


def answer(question: messages.Inspect) -> messages.Inspected:
    """Return the answer; it has no pages if the question is not known."""
    if question.what == METRICS:
        return messages.Inspected(METRICS, 0, 1, wire.encode(wire.Samples(tuple(samples()))))
    if question.what == OPERATIONS_PAGE:
        groups = process.groups()[-wire.REPORTED_GROUPS_LIMIT :]  # one group a page, which fits into a frame
        page = groups[question.page : question.page + 1]
        return messages.Inspected(OPERATIONS_PAGE, question.page, max(1, len(groups)), wire.encode(flight(page)))
    if question.what == PROGRESS:
        from covey.runtime.metrics.progress import encode_own  # few commands ask

        return messages.Inspected(PROGRESS, question.page, 1, encode_own(question.page))
    node: Any = next(iter(list(process.nodes)), None)
    if question.what == REPORTS and node is not None:
        from covey.wire.progress import encode_reports  # few commands ask

        return messages.Inspected(REPORTS, 0, 1, encode_reports(node.reports.rows()))
    if question.what == EVENTS and node is not None:
        from covey.runtime.events import encode_last  # few commands ask

        return messages.Inspected(EVENTS, 0, 1, encode_last(node.events))
    if question.what == NETWORK and node is not None and node.measured is not None:
        from covey.runtime.metrics.inspection import encode_measured  # few commands ask

        measured_at, network = node.measured
        own = {peer.link.local_ip for peer in list(node.peers.values()) if peer.link is not None}
        return messages.Inspected(NETWORK, 0, 1, encode_measured(measured_at, network, own))
    return messages.Inspected(question.what, question.page, 0, b"")


def encode_measured(measured_at: float, network: MeasuredNetwork, addresses: Collection[str]) -> bytes:
    """Return a network that was measured at a time since 1970; `addresses` are those of this end of links."""
    return encode_network(network, max(0.0, time.time() - measured_at), medium_of(addresses))


def medium_of(addresses: Collection[str]) -> str:
    """Return the kind of the interfaces with these addresses: the slowest kind, if there are several."""
    kinds = {each.kind for each in all_interfaces() if set(addresses) & set(each.addresses)}
    return next((kind for kind in ("wireless", "wired", "virtual") if kind in kinds), "unknown")


def shared_folder() -> Path | None:
    """Return where the output of this run is kept; None if it is not, or if this machine keeps it to itself."""
    folder = os.environ.get(KEPT_FOLDER, "")
    env, row = effective_environment(), SETTINGS["share_output"]
    try:
        is_shared = row.variable in env and row.kind.read(row.variable, env[row.variable])
    except ConfigError:
        return None
    return Path(folder) if folder and is_shared else None


def encode_shared(folder: Path, about: bytes) -> bytes:
    """Return what is new of the logs in a folder, for an asker that knows this; empty if its question is none."""
    try:
        asked = wire.decode_known(about) if about else wire.OutputKnown(())
    except RemoteProtocolError:
        return b""
    known, logs, room, has_more = dict(asked.logs), [], wire.LOGS_BYTES, False
    found = logs_in(folder)[: wire.LOGS_LIMIT]
    for at, (name, path) in enumerate(found):
        fair = max(room // (len(found) - at), 1)
        offset = known.get(name)
        if offset is None:
            tail = max(SHARED_TAIL_BYTES // len(found), SHARED_TAIL_BYTES // 16)
            offset = 0 if asked.wants_all else tail_of(path, tail)
        try:
            batch = read_log(path, offset, fair)
        except (ConfigError, OSError):  # no record begins there: what the asker knows is another log
            continue
        records = tuple(
            wire.ToldRecord(each.stream, each.rank, each.at, each.lines_before, each.data) for each in batch.records
        )
        room = max(0, room - sum(len(each.data) for each in records))
        has_more = has_more or (bool(records) and batch.next < log_end(path))
        logs.append(wire.ToldLog(name, batch.next, records))
    machine = short_host_name()
    return wire.encode(wire.ToldOutput(machine, tuple(logs), has_more))
