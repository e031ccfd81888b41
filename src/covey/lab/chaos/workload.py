"""One process of a checked run: performs seeded operations in every generation, and records each as it ends.

The settings come as one JSON object in the variable CHAOS_SETTINGS. All ranks of a generation draw the same operations,
because they draw them from the seed, the generation and the step.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

import covey
from covey.lab.chaos import operations, orders
from covey.lab.chaos.operations import CheckedOperation
from covey.lab.chaos.records import (
    Began,
    Entered,
    Exclusion,
    Left,
    MessageHeard,
    Obeyed,
    OperationDone,
    OperationRaised,
    ProcessEnded,
    Restored,
    Stepped,
    to_line,
)
from covey.runtime.group.internals import is_newcomer

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.lab.chaos.records import Record

VARIABLE: Final = "CHAOS_SETTINGS"
COUNTS: Final = (1, 17, 251, 4097, 65537)
STATE_COUNT: Final = 251
MESSAGE_SECONDS: Final = 60.0
STOP_FILE: Final = "stop"
"""A file of this name in the run's folder asks all processes to finish."""


class Settings(msgspec.Struct, frozen=True):
    """The settings of a process."""

    folder: str
    seed: int
    host: int = 0
    pause: float = 0.01
    """Seconds between steps, at most."""
    bulk: int = 1000
    """Extra elements of the state, so that restoring it takes longer."""
    large: float = 0.02
    """The share of steps with an operation of 8 MiB."""


class Workload:
    """This process's part in the run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.name = f"h{settings.host}.{os.getpid()}.{time.time_ns() // 1_000_000 % 1_000_000}"
        path = os.path.join(settings.folder, f"{self.name}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.state: dict[str, Any] = {}
        self.is_over = self._has_stepped = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin with a new state, which no other process has."""
        own = np.random.default_rng(int.from_bytes(os.urandom(8)))
        self.state.clear()
        self.state |= {
            "values": np.zeros(STATE_COUNT),
            "bulk": own.integers(0, 1000, self._settings.bulk).astype(float),
            "step": 0,
            "story": f"{self.name}:{time.monotonic_ns()}",
        }

    def digest(self) -> str:
        return operations.digest([self.state["values"], self.state["bulk"], self.state["step"], self.state["story"]])

    def write(self, record: Record) -> None:
        os.write(self._file, to_line(record))

    def obey_order(self, moment: str, rank: int = -1, *, is_fresh: bool = False) -> None:
        """Obey an order that waits for this moment, if there is one."""
        order = orders.take(self._settings.folder, moment, rank=rank, is_fresh=is_fresh)
        if order is not None:
            at = time.monotonic()
            self.write(Obeyed(moment, order.signal, order.delay, order.seconds, rank, at))
            if order.delay:
                threading.Timer(order.delay, os.kill, (os.getpid(), order.signal)).start()
            else:
                os.kill(os.getpid(), order.signal)

    # From generation to generation

    def run(self) -> None:
        self.write(Began(self.name, os.getpid(), self._settings.host, time.monotonic()))
        self.obey_order("join")
        how = "left"
        for group in covey.generations():
            try:
                self._live_in(group)
            except covey.CoveyError as error:
                if not _is_exclusion(error):
                    raise
                text = str(error)[:300]
                self.write(Exclusion(group.generation, self._has_stepped, text, time.monotonic()))
                continue
            if self.is_over:
                how = "over"
                break
        self.end(how)

    def end(self, how: str, text: str = "") -> None:
        state = self.state
        self.write(ProcessEnded(how, state["story"], state["step"], self.digest(), text, time.monotonic()))

    def _live_in(self, group: covey.Group) -> None:
        generation, self._has_stepped = group.generation, False
        self.write(Entered(generation, group.rank, group.size, time.monotonic()))
        report = self._restore(group)
        if report.first:  # the first generation, or all members were lost: a new series of states begins
            self.state["story"] += f"@{generation}"
        members = tuple(group.all_gather_object(self.name))
        state = self.state
        self.write(
            Restored(
                generation,
                state["story"],
                state["step"],
                self.digest(),
                report.donors,
                report.drifted,
                members,
                time.monotonic(),
            )
        )
        inner = GroupWorkload(self, group, generation, tuple(name or "" for name in members), "main")
        own = random.Random()
        while not self.is_over and not group.change_pending:
            inner.step(random.Random(f"{self._settings.seed} {generation} {state['step']}"))
            time.sleep(own.random() * self._settings.pause)
        at = time.monotonic()
        self.write(Left(state["story"], generation, group.sequence, state["step"], self.is_over, at))
        self.obey_order("change", group.rank)

    def _restore(self, group: covey.Group) -> Any:
        for _ in range(group.size):
            self.obey_order("restore", group.rank, is_fresh=is_newcomer(group))
            try:
                return group.restore(self.state)
            except covey.PeerLostError:  # all ranks that had the state are lost
                self.begin_anew()
        raise RuntimeError(f"{group.size} restores failed, each because a donor was lost")

    def stepped(self, group: covey.Group, result: np.ndarray[Any, Any]) -> None:
        """Change the state by a result that all ranks have."""
        state, self._has_stepped = self.state, True
        state["values"] += result
        state["step"] += 1
        at = time.monotonic()
        pending = group.change_pending
        self.write(Stepped(state["story"], group.generation, state["step"], self.digest(), pending, at))

    def is_asked_to_stop(self) -> bool:
        return os.path.exists(os.path.join(self._settings.folder, STOP_FILE))

    def draws_large(self, chance: random.Random) -> bool:
        return chance.random() < self._settings.large


class GroupWorkload:
    """Performs operations in one group, and records them."""

    def __init__(
        self, workload: Workload, group: covey.Group, generation: int, members: tuple[str, ...], path: str
    ) -> None:
        self._workload, self._group, self._members, self._path = workload, group, members, path
        self._generation = generation
        self._messages = 0

    def step(self, chance: random.Random) -> None:
        """Perform a few operations, the same on all ranks, then one that changes the state."""
        group, workload = self._group, self._workload
        for _ in range(3):
            kind = chance.choice(_MENU)
            workload.obey_order(kind, group.rank)
            if kind == "split":
                self._split(chance)
            elif kind == "async":
                self._in_flight([self._draw("all_reduce", chance) for _ in range(5)])
            elif kind == "messages":
                self._pass_on(chance.choice(COUNTS))
            else:
                self.perform(self._draw(kind, chance))
        if workload.draws_large(chance):
            workload.obey_order("large", group.rank)
            self.perform(
                CheckedOperation("all_reduce", 1 << 20, "f8", salt=chance.randrange(operations.OPERATIONS_PERIOD))
            )
        vote = np.array([float(workload.is_asked_to_stop())])
        self._call(CheckedOperation("vote", 1), lambda: group.all_reduce(vote, op="max"))
        result = self.perform(
            CheckedOperation("all_reduce", STATE_COUNT, salt=chance.randrange(operations.OPERATIONS_PERIOD))
        )
        workload.is_over = bool(vote[0])
        workload.stepped(group, result)

    def _draw(self, kind: str, chance: random.Random) -> CheckedOperation:
        size = self._group.size
        count = min(chance.choice(COUNTS), 5000 if kind in ("all_to_all", "all_gather") else COUNTS[-1])
        root = chance.randrange(size) if kind in operations.ROOTED_OPERATIONS else -1
        dtype = "f8" if kind == "mean" else chance.choice(operations.dtypes_for(size))
        if kind == "mean" and size > operations.MOST_RANKS_OF_SHORT:
            kind = "all_reduce"
        return CheckedOperation(kind, count, dtype, root, chance.randrange(operations.OPERATIONS_PERIOD))

    def perform(self, operation: CheckedOperation) -> Any:
        """Perform an operation and return its result."""
        group = self._group
        value = operations.inputs(operation, group.rank, group.size)
        call = _CALLS[operation.kind]
        return self._call(operation, lambda: call(group, value, operation.root), value)

    def _call(self, operation: CheckedOperation, call: Callable[[], Any], value: Any = None) -> Any:
        group, workload, began = self._group, self._workload, time.monotonic()
        before = operations.digest(value)
        try:
            result = call()
        except covey.PeerLostError:
            is_live, is_unchanged = operation.root in group.live, operations.digest(value) == before
            number, at = group.sequence, time.monotonic()
            story = workload.state["story"]
            workload.write(
                OperationRaised(story, self._generation, self._path, number, operation, is_live, is_unchanged, at)
            )
            return None
        self._note(operation, group.sequence, group.contributors, result, began)
        return result

    def _note(
        self, operation: CheckedOperation, number: int, ranks: tuple[int, ...], result: Any, began: float
    ) -> None:
        group = self._group
        names = operations.names_of(ranks, self._members)
        story, came = self._workload.state["story"], operations.digest(result)
        self._workload.write(
            OperationDone(
                story,
                self._generation,
                self._path,
                number,
                operation,
                group.rank,
                group.size,
                ranks,
                names,
                came,
                began,
                time.monotonic(),
            )
        )

    def _in_flight(self, wanted: list[CheckedOperation]) -> None:
        """Start many operations at once, and wait for them in another order."""
        group, began = self._group, time.monotonic()
        first = group.sequence + 1
        works = []
        for operation in wanted:
            values = operations.inputs(operation, group.rank, group.size)
            works.append((operation, values, group.all_reduce(values, async_op=True)))
        failure: covey.CoveyError | None = None
        for _, _, work in reversed(works):
            try:
                work.wait()
            except covey.CoveyError as error:
                failure = error if failure is None or _is_exclusion(error) else failure
        for number, (operation, values, work) in enumerate(works, first):
            if work.exception() is None:
                self._note(operation, number, work.contributors, values, began)
        if failure is not None:
            raise failure

    def _split(self, chance: random.Random) -> None:
        """Split the group, and perform operations in the parts."""
        group, colors, began = self._group, chance.randint(1, 3), time.monotonic()
        counts = [chance.choice(COUNTS) for _ in range(2)]
        part = group.split(group.rank % colors)
        assert part is not None
        self._note(CheckedOperation("split", colors), group.sequence, group.contributors, None, began)
        chosen = [rank for rank in group.contributors if rank % colors == group.rank % colors]
        path = f"{self._path}/{group.sequence}.{group.rank % colors}"
        inner = GroupWorkload(self._workload, part, self._generation, operations.names_of(chosen, self._members), path)
        with part:
            for count in counts:
                inner.perform(
                    CheckedOperation("all_reduce", count, "f8", salt=chance.randrange(operations.OPERATIONS_PERIOD))
                )

    def _pass_on(self, count: int) -> None:
        """Send to the next contributor of the last operation, and receive from the one before."""
        group, ring = self._group, list(self._group.contributors)
        if len(ring) < 2:
            return
        index = ring.index(group.rank)
        to, source = ring[(index + 1) % len(ring)], ring[index - 1]
        self._messages += 1
        operation = CheckedOperation("message", count, "f8", salt=self._messages % operations.OPERATIONS_PERIOD)
        ours, theirs = (operations.contribution(operation, rank) for rank in (group.rank, source))
        works: list[tuple[int, Any]] = []
        for peer, post in ((to, self._send), (source, self._receive)):
            try:
                works.append((peer, post(peer, ours)))
            except covey.PeerLostError as error:
                self._heard(peer, "lost" if error.rank == peer else f"blamed on rank {error.rank}")
        for peer, work in works:
            try:
                got = work.wait(MESSAGE_SECONDS)
            except covey.PeerLostError as error:
                self._heard(peer, "lost" if error.rank == peer else f"blamed on rank {error.rank}")
            except covey.DeadlineError as error:
                self._heard(peer, f"late: {error}")
            else:
                is_right = got is None or np.array_equal(got, theirs)
                self._heard(peer, "sent" if got is None else "right" if is_right else "WRONG")

    def _send(self, to: int, values: Any) -> Any:
        return self._group.send(values, to, tag=self._messages, timeout=MESSAGE_SECONDS, async_op=True)

    def _receive(self, source: int, _: Any) -> Any:
        return self._group.recv(source, tag=self._messages, timeout=MESSAGE_SECONDS, async_op=True)

    def _heard(self, peer: int, outcome: str) -> None:
        story, at = self._workload.state["story"], time.monotonic()
        self._workload.write(MessageHeard(story, self._generation, self._members[peer], outcome, at))


_CALLS: Final[dict[str, Callable[[covey.Group, Any, int], Any]]] = {
    "all_reduce": lambda group, value, _root: group.all_reduce(value),
    "mean": lambda group, value, _root: group.all_reduce(value, op="mean"),
    "reduce": lambda group, value, root: group.reduce(value, root=root),
    "broadcast": lambda group, value, root: group.broadcast(value, root=root),
    "all_gather": lambda group, value, _root: group.all_gather(value),
    "gather": lambda group, value, root: group.gather(value, root=root),
    "scatter": lambda group, value, root: group.scatter(value, root=root),
    "reduce_scatter": lambda group, value, _root: group.reduce_scatter(value),
    "all_to_all": lambda group, value, _root: group.all_to_all(value),
    "scan": lambda group, value, _root: group.scan(value),
    "exscan": lambda group, value, _root: group.exscan(value),
    "barrier": lambda group, _value, _root: group.barrier(),
    "objects": lambda group, value, _root: group.all_gather_object(value),
}
_MENU: Final = (*_CALLS, "all_reduce", "all_reduce", "async", "async", "split", "messages", "messages")


def _is_exclusion(error: BaseException) -> bool:
    return isinstance(error, covey.GroupChangedError) or isinstance(error.__cause__, covey.GroupChangedError)


def main() -> int:
    """Run until the work is over; return the exit code."""
    settings = msgspec.json.decode(os.environ[VARIABLE], type=Settings)
    trace = os.open(
        os.path.join(settings.folder, f"stack-{os.getpid()}"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
    workload = Workload(settings)
    try:
        workload.run()
    except SystemExit:
        workload.end("left")
        raise
    except BaseException as error:
        is_quorum = isinstance(error, covey.QuorumLostError) or isinstance(error.__cause__, covey.QuorumLostError)
        text = str(error)[:500] if is_quorum else traceback.format_exc()[-2000:]
        workload.end("quorum" if is_quorum else "failed", text)
        return 3 if is_quorum else 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
