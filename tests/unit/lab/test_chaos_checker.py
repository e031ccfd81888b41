"""The checker of `covey chaos --check` catches every kind of wrong history, and passes right ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tests.support.in_turn import in_turn

from covey.lab.chaos import operations
from covey.lab.chaos.checker import MAIN, MOST_FINDINGS, Circumstances, check
from covey.lab.chaos.operations import CheckedOperation
from covey.lab.chaos.records import (
    Began,
    Entered,
    Exclusion,
    Left,
    MessageHeard,
    OperationDone,
    OperationRaised,
    ProcessEnded,
    Record,
    Restored,
    Stepped,
    from_lines,
    to_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable

STORY = "s@0"
KINDS = [
    CheckedOperation("all_reduce", 300, "f8", salt=3),
    CheckedOperation("broadcast", 17, "f4", root=1, salt=4),
    CheckedOperation("all_gather", 5, "i4", salt=5),
    CheckedOperation("scan", 40, "i8", salt=6),
    CheckedOperation("reduce", 251, "f8", root=2, salt=7),
    CheckedOperation("all_to_all", 3, "i4", salt=8),
    CheckedOperation("reduce_scatter", 100, "f8", salt=9),
    CheckedOperation("mean", 10, "f8", salt=10),
    CheckedOperation("gather", 10, "f8", root=0, salt=11),
    CheckedOperation("scatter", 10, "i8", root=0, salt=12),
    CheckedOperation("exscan", 10, "f8", salt=13),
    CheckedOperation("objects", salt=14),
    CheckedOperation("barrier"),
]

History = dict[str, list[Record]]


class Forge:
    """Writes the history of a run as right processes would."""

    def __init__(self, *names: str) -> None:
        self.history: History = {name: [Began(name, 100 + i, 0, 0.0)] for i, name in enumerate(names)}
        self.now = 1.0
        self.members: tuple[str, ...] = ()
        self.live: tuple[int, ...] = ()
        self.generation, self.number, self.step = -1, 0, 0

    def found(self, *members: str, story: str = STORY) -> None:
        self.generation += 1
        self.members, self.live, self.number, self.story = members, tuple(range(len(members))), 0, story
        self.now += 1.0
        for rank, name in enumerate(members):
            self.history.setdefault(name, [Began(name, 100, 0, self.now)])
            self.history[name] += [
                Entered(self.generation, rank, len(members), self.now),
                Restored(self.generation, story, self.step, f"state{self.step}", (0,), (), members, self.now),
            ]

    def lose(self, rank: int) -> None:
        self.live = tuple(each for each in self.live if each != rank)

    def do(self, operation: CheckedOperation) -> None:
        self.number += 1
        self.now += 0.1
        size = len(self.members)
        for rank in self.live:
            value = operations.expected(operation, rank, self.live, size) if operations.is_foreseen(operation) else 7
            self.history[self.members[rank]].append(
                OperationDone(
                    self.story,
                    self.generation,
                    MAIN,
                    self.number,
                    operation,
                    rank,
                    size,
                    self.live,
                    tuple(self.members[each] for each in self.live),
                    operations.digest(value),
                    self.now - 0.05,
                    self.now,
                )
            )

    def raise_everywhere(self, operation: CheckedOperation, **changes: Any) -> None:
        self.number += 1
        self.now += 0.1
        for rank in self.live:
            raised = OperationRaised(self.story, self.generation, MAIN, self.number, operation, False, True, self.now)
            self.history[self.members[rank]].append(msgspec.structs.replace(raised, **changes))

    def advance(self) -> None:
        self.step += 1
        for rank in self.live:
            stepped = Stepped(self.story, self.generation, self.step, f"state{self.step}", False, self.now)
            self.history[self.members[rank]].append(stepped)

    def leave(self, *, is_over: bool = False) -> None:
        for rank in self.live:
            name = self.members[rank]
            self.history[name].append(Left(self.story, self.generation, self.number, self.step, is_over, self.now))
            if is_over:
                end = ProcessEnded("over", self.story, self.step, f"state{self.step}", "", self.now)
                self.history[name].append(end)


def right_history() -> History:
    """Two generations of three, a loss, an operation without its root, a newcomer, messages."""
    forge = Forge("a", "b", "c")
    forge.found("a", "b", "c")
    for operation in KINDS:
        forge.do(operation)
        forge.advance()
    forge.history["a"].append(MessageHeard(STORY, 0, "b", "sent", forge.now))
    forge.history["b"].append(MessageHeard(STORY, 0, "a", "right", forge.now))
    forge.lose(1)
    forge.raise_everywhere(CheckedOperation("broadcast", 5, root=1))
    forge.history["a"].append(MessageHeard(STORY, 0, "b", "lost", forge.now))
    forge.do(KINDS[0])
    forge.advance()
    forge.leave()
    forge.found("a", "c", "d")
    forge.do(CheckedOperation("vote", 1))
    forge.do(KINDS[2])
    forge.advance()
    forge.leave(is_over=True)
    return forge.history


def change(history: History, name: str, kind: type, edit: Callable[[Any], Record | None], which: int = 0) -> None:
    """Replace one record of a process, or remove it."""
    indices = [index for index, record in enumerate(history[name]) if isinstance(record, kind)]
    edited = edit(history[name][indices[which]])
    history[name][indices[which] : indices[which] + 1] = [] if edited is None else [edited]


def change_both(history: History, kind: type, edit: Callable[[Any], Record | None], which: int = 0) -> None:
    """Change a record of both processes that are there from the beginning to the end."""
    for name in "ac":
        change(history, name, kind, edit, which)


def add_a_lost_contributor(history: History) -> None:
    change_both(history, OperationDone, replacing(ranks=(0, 1, 2), names=("a", "b", "c")), 13)
    change_both(history, OperationDone, replacing(ranks=(0, 2), names=("a", "c")), 12)


def replacing(**fields: Any) -> Callable[[Any], Record]:
    return lambda record: msgspec.structs.replace(record, **fields)


def test_a_right_history_is_right_and_is_counted() -> None:
    verdict = check(right_history(), Circumstances())
    assert verdict.problems == []
    figures = verdict.figures
    assert (figures["operations"], figures["raised"], figures["processes"], figures["messages"]) == (17, 2, 4, 3)
    assert figures["operations after a loss"] == 1


def test_what_is_written_can_be_read() -> None:
    history = right_history()
    for records in history.values():
        assert from_lines(b"".join(map(to_line, records)).split(b"\n")) == records


@in_turn(operation=KINDS)
def test_results_are_what_the_contributors_put_in(operation: CheckedOperation) -> None:
    """By another way than the checker's: adding up, element by element."""
    size, ranks = 4, (0, 2, 3)
    given = {rank: operations.inputs(operation, rank, size) for rank in range(size)}
    for rank in ranks:
        wanted = operations.expected(operation, rank, ranks, size)
        match operation.kind:
            case "all_reduce":
                assert np.array_equal(wanted, given[0] + given[2] + given[3])
            case "mean":
                assert np.array_equal(wanted, (given[0] + given[2] + given[3]) / 3)
            case "scan":
                assert np.array_equal(wanted, sum(given[other] for other in ranks if other <= rank))
            case "exscan":
                assert np.array_equal(wanted, sum((given[other] for other in ranks if other < rank), 0 * given[0]))
            case "all_gather":
                assert wanted[1] is None
                assert all(np.array_equal(wanted[other], given[other]) for other in ranks)
            case "all_to_all":
                assert wanted[1] is None
                assert all(np.array_equal(wanted[other], given[other][rank]) for other in ranks)
            case "reduce_scatter":
                assert np.array_equal(wanted, np.array_split(given[0] + given[2] + given[3], size)[rank])
            case "broadcast":
                assert np.array_equal(wanted, given[operation.root])
            case "scatter":
                assert np.array_equal(wanted, given[0][rank])
            case "reduce":
                assert np.array_equal(wanted, given[0] + given[2] + given[3] if rank == 2 else given[rank])
            case "gather":
                assert (wanted is None) == (rank != 0)


FORGERIES: dict[str, tuple[Callable[[History], None], str]] = {
    "a wrong bit": (
        lambda history: change(history, "b", OperationDone, replacing(result="0" * 16), 3),
        "WRONG RESULT on b",
    ),
    "the sum of others than it says": (
        lambda history: change(history, "a", OperationDone, replacing(ranks=(0, 1), names=("a", "b"))),
        "WRONG RESULT on a",
    ),
    "other contributors than on another rank": (
        lambda history: change(history, "c", OperationDone, replacing(names=("a", "c"))),
        "ended differently in the ranks that contributed",
    ),
    "a result without its own part": (
        lambda history: change(history, "c", OperationDone, replacing(names=("a", "b"))),
        "c returned what it did not contribute to",
    ),
    "a gap": (
        lambda history: change(history, "a", OperationDone, lambda _: None, 4),
        "operation 6 of main in generation 0 follows 4",
    ),
    "an operation done twice": (
        lambda history: change(history, "a", OperationDone, replacing(number=4), 4),
        "operation 4 of main in generation 0 follows 4",
    ),
    "a half-done operation": (
        lambda history: change(
            history,
            "a",
            OperationRaised,
            lambda old: OperationDone(
                old.story,
                old.generation,
                old.group,
                old.number,
                old.operation,
                0,
                3,
                (0, 2),
                ("a", "c"),
                "x",
                old.at,
                old.at,
            ),
        ),
        "ended differently in whether it returned",
    ),
    "another call": (
        lambda history: change(history, "b", OperationDone, replacing(operation=KINDS[3])),
        "ended differently in what was called",
    ),
    "another result of the same operation": (
        lambda history: change(history, "a", OperationDone, replacing(result="f" * 16), 14),
        "ended differently in the result",
    ),
    "a contributor that was lost before": (
        add_a_lost_contributor,
        "b contributed to operation 15",
    ),
    "a raise although the root is live": (
        lambda history: change(history, "a", OperationRaised, replacing(is_root_live=True)),
        "PeerLostError, but the root is live",
    ),
    "a raise that changed its arguments": (
        lambda history: change(history, "a", OperationRaised, replacing(is_unchanged=False)),
        "has changed its arguments",
    ),
    "a raise without a root": (
        lambda history: change_both(history, OperationRaised, replacing(operation=KINDS[0])),
        "an operation that has no root",
    ),
    "two rosters": (
        lambda history: change(history, "d", Restored, replacing(members=("a", "c", "e"))),
        "two kinds of members after restore",
    ),
    "another state after restore": (
        lambda history: change(history, "d", Restored, replacing(state="other")),
        "two kinds of state after restore",
    ),
    "a drifted state": (lambda history: change(history, "a", Restored, replacing(drifted=(2,)), 1), "had drifted"),
    "another state after a step": (
        lambda history: change(history, "b", Stepped, replacing(state="other"), 2),
        "state differs after step 3",
    ),
    "another knowledge of a change": (
        lambda history: change(history, "b", Stepped, replacing(is_pending=True), 2),
        "is_pending differs after step 3",
    ),
    "members that part at different operations": (
        lambda history: change(history, "c", Left, replacing(number=99)),
        "after different operations",
    ),
    "a generation that begins before the last one ended": (
        lambda history: change_both(history, Left, replacing(step=5)),
        "left generation 0 at step 5, and generation 1 began at step 14",
    ),
    "a wrong message": (
        lambda history: change(history, "b", MessageHeard, replacing(outcome="WRONG")),
        "a message with a is WRONG",
    ),
    "a message that calls a live process lost": (
        lambda history: history["a"].insert(3, MessageHeard(STORY, 0, "c", "lost", 0.5)),
        "says that c is lost, which works on for 3.0 s",
    ),
    "a failure": (
        lambda history: history["d"].append(ProcessEnded("failed", STORY, 3, "x", "KeyError: 3", 9.0)),
        "d failed: KeyError: 3",
    ),
    "no quorum on one host": (
        lambda history: history["d"].append(ProcessEnded("quorum", STORY, 3, "x", "nobody", 9.0)),
        "without a quorum on one host",
    ),
    "an exclusion for nothing": (
        lambda history: history["b"].append(Exclusion(0, True, "gone", 5.0)),
        "b was excluded from generation 0, and nothing was done to it",
    ),
    "different ends": (
        lambda history: change(history, "a", ProcessEnded, replacing(state="other")),
        "finished with different states",
    ),
}


@in_turn(forgery=FORGERIES)
def test_a_forged_history_is_caught(forgery: str) -> None:
    forge, finding = FORGERIES[forgery]
    history = right_history()
    forge(history)
    problems = check(history, Circumstances()).problems
    assert any(finding in problem for problem in problems), problems


def test_two_runs_at_the_same_time_are_caught() -> None:
    """Both are right by themselves."""
    one, other = Forge("a", "b", "c"), Forge("d", "e")
    one.found("a", "b", "c")
    other.now = 2.25
    other.found("d", "e", story="t@0")
    for forge in (one, other):
        for _ in range(20):
            forge.do(KINDS[0])
    assert check(one.history, Circumstances()).is_right
    assert check(other.history, Circumstances()).is_right
    problems = check(one.history | other.history, Circumstances(is_one_host=False, is_network_cut=True)).problems
    assert len(problems) == 1
    assert problems[0].startswith("SPLIT BRAIN")


def test_a_run_that_begins_anew_after_all_are_lost_is_right_and_counted() -> None:
    forge = Forge("a", "b")
    forge.found("a", "b")
    forge.do(KINDS[0])
    forge.step = 0
    forge.found("c", "d", story="t@1")
    forge.do(KINDS[0])
    verdict = check(forge.history, Circumstances())
    assert verdict.problems == []
    assert verdict.figures["times begun anew"] == 1


def test_what_was_done_to_a_process_explains_what_became_of_it() -> None:
    history = right_history()
    history["b"].append(Exclusion(0, True, "gone", 5.0))
    assert check(history, Circumstances(touched={"b": frozenset({"stop"})})).is_right
    assert check(history, Circumstances(is_one_host=False, is_network_cut=True)).is_right
    noted = check(history, Circumstances(is_one_host=False))
    assert noted.is_right
    assert "nothing was done to it" in noted.notes[0]
    history["a"].insert(3, MessageHeard(STORY, 0, "c", "lost", 0.5))
    assert check(history, Circumstances(touched={"b": frozenset({"stop"}), "c": frozenset({"cut"})})).is_right


def test_one_mistake_that_shows_everywhere_does_not_flood_the_report() -> None:
    forge = Forge("a", "b")
    forge.found("a", "b")
    for _ in range(100):
        forge.do(KINDS[0])
    for records in forge.history.values():
        for index, record in enumerate(records):
            if isinstance(record, OperationDone):
                records[index] = msgspec.structs.replace(record, result="x")
    assert len(check(forge.history, Circumstances()).problems) == MOST_FINDINGS
