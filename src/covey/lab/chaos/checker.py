"""Checks the records of all processes of a run against what covey promises. Pure: records in, findings out.

These must hold, also for processes that were lost later:

- the result of every operation is exactly that of its contributors, and the process itself is one of them;
- an operation has the same outcome on all processes that finished it, with the same contributors;
- operations of a group have numbers without gaps, and their contributors only become fewer;
- an operation raises PeerLostError only if its root is lost, and leaves its arguments unchanged;
- a generation has one roster, one state after restore, one state after every step, and one end;
- generations follow each other in time: two of them never do work at the same time;
- a message has the right content, or reports as lost a process that does nothing any more;
- on one host, no untouched process is excluded, and no process is without a quorum;
- all processes that finish have the same state.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from covey.lab.chaos import operations
from covey.lab.chaos.records import (
    Entered,
    Exclusion,
    Left,
    MessageHeard,
    OperationDone,
    OperationRaised,
    ProcessEnded,
    Restored,
    Stepped,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from covey.lab.chaos.operations import CheckedOperation
    from covey.lab.chaos.records import Record

MAIN: Final = "main"
MOST_FINDINGS: Final = 40
"""How many findings are kept: one mistake may show in thousands of operations."""
LOST_SECONDS: Final = 1.0
"""How long a process that a message reports as lost may still work: the view without it may not have arrived."""

R = TypeVar("R")
Outcome: TypeAlias = OperationDone | OperationRaised
Key: TypeAlias = tuple[str, int, str, int]
"""Story, generation, group and number of an operation."""


@dataclass(frozen=True)
class Circumstances:
    """What was done to the processes of a run."""

    is_one_host: bool = True
    touched: dict[str, frozenset[str]] = field(default_factory=dict)
    """Name of a process → the faults that may exclude it."""
    is_network_cut: bool = False
    """Whether packets were lost between hosts."""

    def may_be_excluded(self, name: str) -> bool:
        return self.is_network_cut or bool(self.touched.get(name))


@dataclass
class Findings:
    """The result of checking a run."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Observations that are not problems."""
    figures: Counter[str] = field(default_factory=Counter)

    @property
    def is_right(self) -> bool:
        return not self.problems


def check(processes: Mapping[str, Sequence[Record]], circumstances: Circumstances) -> Findings:
    """Return what is wrong with a run whose processes, by name, wrote these records."""
    checker = _Checker(processes, circumstances)
    for rule in (
        checker.exact_results,
        checker.same_ends,
        checker.numbers_without_gaps,
        checker.shrinking_contributors,
        checker.raises_for_want_of_a_root,
        checker.one_roster_and_state,
        checker.same_steps,
        checker.same_transitions,
        checker.one_generation_at_a_time,
        checker.messages,
        checker.exclusions,
        checker.endings,
    ):
        for problem in rule():
            if len(checker.verdict.problems) < MOST_FINDINGS:
                checker.verdict.problems.append(problem)
    checker.count()
    return checker.verdict


class _Checker:
    def __init__(self, processes: Mapping[str, Sequence[Record]], circumstances: Circumstances) -> None:
        self._processes, self._circumstances = processes, circumstances
        self.verdict = Findings()
        self._outcomes: dict[Key, list[tuple[str, Outcome]]] = defaultdict(list)
        for name in processes:
            for record in self._ends_of(name):
                self._outcomes[_key(record)].append((name, record))

    def _all(self, kind: type[R]) -> Iterator[tuple[str, R]]:
        for name, records in self._processes.items():
            for record in records:
                if isinstance(record, kind):
                    yield name, record

    def _ends_of(self, name: str) -> Iterator[Outcome]:
        return (record for record in self._processes[name] if isinstance(record, OperationDone | OperationRaised))

    # Operations

    def exact_results(self) -> Iterator[str]:
        for name, done in self._all(OperationDone):
            if name not in done.names:
                yield f"{name} returned what it did not contribute to: {_tell(done)}"
            if operations.is_foreseen(done.operation) and done.result != _right(
                done.operation, done.rank, done.ranks, done.size
            ):
                yield f"WRONG RESULT on {name}: {_tell(done)} is not what {_list(done.names)} put in"

    def same_ends(self) -> Iterator[str]:
        for key, ends in self._outcomes.items():
            first_name, first = ends[0]
            for name, other in ends[1:]:
                if (difference := _difference(first, other)) is not None:
                    yield (
                        f"operation {key[3]} of {key[2]} in generation {key[1]} ended differently in {difference}: "
                        f"{first_name} has {_tell(first)}, {name} has {_tell(other)}"
                    )
                    break

    def numbers_without_gaps(self) -> Iterator[str]:
        for name in self._processes:
            last: dict[tuple[str, int, str], int] = {}
            for record in self._ends_of(name):
                group, number = _key(record)[:3], record.number
                if group in last and number != last[group] + 1:
                    yield f"{name}: operation {number} of {group[2]} in generation {group[1]} follows {last[group]}"
                last[group] = number

    def shrinking_contributors(self) -> Iterator[str]:
        before: dict[tuple[str, int, str], frozenset[str]] = {}
        for key in sorted(self._outcomes, key=lambda key: (key[:3], key[3])):
            done = next((record for _, record in self._outcomes[key] if isinstance(record, OperationDone)), None)
            if done is None:
                continue
            names = frozenset(done.names)
            if more := names - before.get(key[:3], names):
                what = f"operation {key[3]} of {key[2]} in generation {key[1]}"
                yield f"{_list(more)} contributed to {what}, and not to the one before"
            before[key[:3]] = names

    def raises_for_want_of_a_root(self) -> Iterator[str]:
        for name, raised in self._all(OperationRaised):
            if raised.operation.kind not in operations.ROOTED_OPERATIONS:
                yield f"{name}: PeerLostError in an operation that has no root: {_tell(raised)}"
            elif raised.is_root_live:
                yield f"{name}: PeerLostError, but the root is live: {_tell(raised)}"
            if not raised.is_unchanged:
                yield f"{name}: an operation that raised has changed its arguments: {_tell(raised)}"

    # Generations

    def one_roster_and_state(self) -> Iterator[str]:
        known: dict[tuple[str, int], tuple[str, Restored]] = {}
        for name, record in self._all(Restored):
            other, first = known.setdefault((record.story, record.generation), (name, record))
            for what in ("members", "step", "state", "donors"):
                if getattr(first, what) != getattr(record, what):
                    yield (
                        f"generation {record.generation} has two kinds of {what} after restore: {other} says "
                        f"{getattr(first, what)}, {name} {getattr(record, what)}"
                    )
            if record.drifted:
                yield f"{name}: the state of rank {_list(record.drifted)} had drifted in generation {record.generation}"

    def same_steps(self) -> Iterator[str]:
        known: dict[tuple[str, int], tuple[str, Stepped]] = {}
        for name, record in self._all(Stepped):
            other, first = known.setdefault((record.story, record.step), (name, record))
            for what in ("generation", "state", "is_pending"):
                if getattr(first, what) != getattr(record, what):
                    yield (
                        f"{what} differs after step {record.step}: {getattr(first, what)} on {other}, "
                        f"{getattr(record, what)} on {name}"
                    )

    def same_transitions(self) -> Iterator[str]:
        """Staying members end a generation after the same operation, and the next generation begins at that step."""
        members: dict[tuple[str, int], tuple[str | None, ...]] = {}
        began: dict[tuple[str, int], int] = {}
        left: dict[tuple[str, int], dict[str, Left]] = defaultdict(dict)
        excluded = {(name, record.generation) for name, record in self._all(Exclusion)}
        for _, restored in self._all(Restored):
            members.setdefault((restored.story, restored.generation), restored.members)
            began.setdefault((restored.story, restored.generation), restored.step)
        for name, record in self._all(Left):
            left[record.story, record.generation][name] = record
        for (story, generation), following in members.items():
            stayed = {
                name: (record.number, record.step)
                for name, record in left.get((story, generation - 1), {}).items()
                if name in following and (name, generation - 1) not in excluded
            }
            if len(set(stayed.values())) > 1:
                yield f"members went from generation {generation - 1} to the next after different operations: {stayed}"
            for name, (_, step) in stayed.items():
                if step != began[story, generation]:
                    yield (
                        f"{name} left generation {generation - 1} at step {step}, and generation {generation} began at "
                        f"step {began[story, generation]}"
                    )
                    break

    def one_generation_at_a_time(self) -> Iterator[str]:
        spans: dict[tuple[str, int], tuple[float, float]] = {}
        for (story, generation, group, _), ends in self._outcomes.items():
            if group == MAIN:  # a group of one that was split off needs no other member
                first = min(record.at for _, record in ends)
                low, high = spans.get((story, generation), (first, first))
                spans[story, generation] = min(low, first), max(high, first)
        order = sorted(spans.items(), key=lambda item: item[1])
        for (one, (_, high)), (other, (low, _)) in itertools.pairwise(order):
            if low < high:
                yield (
                    f"SPLIT BRAIN: generation {one[1]} of {one[0]!r} did something {high - low:.3f} s after generation "
                    f"{other[1]} of {other[0]!r} had begun to work"
                )
            if one[0] == other[0] and other[1] <= one[1]:
                yield f"generation {other[1]} came after generation {one[1]}"
        self.verdict.figures["times begun anew"] = max(0, len({story for story, _ in spans}) - 1)

    # Messages, exclusions, ends

    def messages(self) -> Iterator[str]:
        active: dict[tuple[str, str, int], float] = defaultdict(float)
        for (story, generation, group, _), ends in self._outcomes.items():
            for _, record in ends:
                if group == MAIN and isinstance(record, OperationDone):
                    for name in record.names:
                        active[name, story, generation] = max(active[name, story, generation], record.began)
        for name, heard in self._all(MessageHeard):
            if heard.outcome not in ("sent", "right", "lost"):
                yield f"{name}: a message with {heard.peer} is {heard.outcome}"
            last = active[heard.peer, heard.story, heard.generation]
            is_cut = self._circumstances.is_network_cut or any(
                "cut" in self._circumstances.touched.get(each, ()) for each in (name, heard.peer)
            )
            if heard.outcome == "lost" and last > heard.at + LOST_SECONDS and not is_cut:
                yield f"{name}: a message says that {heard.peer} is lost, which works on for {last - heard.at:.1f} s"

    def exclusions(self) -> Iterator[str]:
        for name, record in self._all(Exclusion):
            self.verdict.figures["excluded"] += 1
            if self._circumstances.may_be_excluded(name):
                continue
            text = f"{name} was excluded from generation {record.generation}, and nothing was done to it: {record.text}"
            if self._circumstances.is_one_host and record.has_stepped:
                yield text
            else:
                self.verdict.notes.append(text)

    def endings(self) -> Iterator[str]:
        finished: dict[tuple[str, int, str], str] = {}
        for name, record in self._all(ProcessEnded):
            if record.how == "failed":
                yield f"{name} failed: {record.text}"
            elif record.how == "quorum":
                self.verdict.figures["without a quorum"] += 1
                if self._circumstances.is_one_host:
                    yield f"{name} is without a quorum on one host: {record.text}"
            elif record.how == "over":
                finished.setdefault((record.story, record.step, record.state), name)
        if len(finished) > 1:
            yield f"processes finished with different states: {finished}"

    def count(self) -> None:
        """Count what was checked."""
        figures = self.verdict.figures
        ends = [record for found in self._outcomes.values() for _, record in found]
        figures["processes"] = len(self._processes)
        figures["operations"] = len(self._outcomes)
        figures["results"] = len(ends)
        figures["raised"] = sum(isinstance(record, OperationRaised) for record in ends)
        figures["messages"] = sum(1 for _ in self._all(MessageHeard))
        figures["generations"] = len({record.generation for _, record in self._all(Entered)})
        figures["steps"] = len({(r.story, r.step) for _, r in self._all(Stepped)})
        sizes = {(r.story, r.generation): len(r.members) for _, r in self._all(Restored)}
        figures["operations after a loss"] = sum(
            isinstance(found[0][1], OperationDone) and key[2] == MAIN and len(found[0][1].names) < sizes.get(key[:2], 0)
            for key, found in self._outcomes.items()
        )


def _key(record: Outcome) -> Key:
    return record.story, record.generation, record.group, record.number


@functools.lru_cache(maxsize=4096)
def _right(operation: CheckedOperation, rank: int, ranks: tuple[int, ...], size: int) -> str:
    return operations.digest(operations.expected(operation, rank, ranks, size))


def _difference(one: Outcome, other: Outcome) -> str | None:
    """Return how two outcomes of the same operation differ; None if they agree."""
    if type(one) is not type(other):
        return "whether it returned"
    if one.operation != other.operation:
        return "what was called"
    if isinstance(one, OperationDone) and isinstance(other, OperationDone):
        if one.names != other.names:
            return "the ranks that contributed"
        if one.operation.kind in operations.ALIKE and one.result != other.result:
            return "the result"
    return None


def _tell(record: Outcome) -> str:
    operation = record.operation
    root = f", root {operation.root}" if operation.root >= 0 else ""
    what = f"{operation.kind}({operation.count} {operation.dtype}{root}), number {record.number} of {record.group}"
    came = f" = {record.result} of {_list(record.names)}" if isinstance(record, OperationDone) else " raised"
    return f"{what} in generation {record.generation}{came}"


def _list(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names))) or "no rank"
