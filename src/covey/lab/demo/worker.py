"""One node of the demo: `python -m covey.lab.demo.worker`, started once per rank, and again when it was lost.

The training loop is what a person would write: for each generation restore the state, then draw a batch, compute
gradients, `sync_gradients`, step, until newcomers wait.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import covey
from covey.compress.policy import make_policy
from covey.lab.demo import model
from covey.lab.demo.reports import (
    PROMPT,
    ROUND,
    FinishedReport,
    JoinedReport,
    RecoveredReport,
    RoundReport,
    Told,
    WaitingReport,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.group.group import Group

DEMO_BATCH = 256
HELD_OUT_STRIDE = 2
"""Evaluating every second held-out character is as accurate as all of them, and takes half the time."""
LOST_NODES_SECONDS = 30.0
"""How long nodes that are done wait for nodes that were lost."""
POLL_SECONDS = 0.02
SMALLEST_GRADIENT = 1024
"""Bytes of the smallest gradient that is compressed: the model is small, and its compression is to be seen."""


class Task(NamedTuple):
    """The task of one node."""

    lots: tuple[int, ...]
    """The numbers of the batches that it takes in every step."""
    nodes: int
    """How many nodes must be present at the end."""
    changes: int
    """How many changes of generation must have happened before the end."""
    rounds: int
    seconds: float
    seed: int
    compress: str = ""
    """How gradients are compressed; empty: not at all."""


def main() -> None:
    """Go through the generations of the run that the environment describes, and report on stdout."""
    parser = argparse.ArgumentParser(prog="covey.lab.demo.worker", description=__doc__)
    parser.add_argument("--lots", required=True, help="numbers of the batches to take in every step, as in 0,1")
    parser.add_argument("--nodes", type=int, required=True, help="how many train together")
    parser.add_argument("--changes", type=int, required=True, help="stop only after so many generations")
    parser.add_argument("--rounds", type=int, required=True, help=f"stop after so many rounds of {ROUND} steps")
    parser.add_argument("--seconds", type=float, required=True, help="stop at the first end of a round after this time")
    parser.add_argument("--seed", type=int, required=True, help="where parameters and batches come from")
    parser.add_argument("--compress", default="", help="how gradients are compressed, as in int8")
    asked = parser.parse_args()
    lots = tuple(int(lot) for lot in asked.lots.split(","))
    task = Task(lots, asked.nodes, asked.changes, asked.rounds, asked.seconds, asked.seed, asked.compress)
    train(task, _tell)


def train(task: Task, tell: Callable[[Told], None]) -> None:
    """Train until all rounds are done, or until a node's time is over and lost nodes are back; report progress."""
    node = _Node(task, tell)
    tell(WaitingReport())
    for group in covey.generations():
        node.enter(group)
        while not group.change_pending:
            if node.state["step"] < node.state["steps"]:
                node.step(group)
            elif len(group.contributors) == task.nodes and group.generation >= task.changes:
                node.finish(group)
                return
            else:
                node.wait(group)


class _Node:
    """A copy of the model, with everything needed to train it."""

    def __init__(self, task: Task, tell: Callable[[Told], None]) -> None:
        self._task, self._tell = task, tell
        self._policy = make_policy(task.compress or None, smallest=SMALLEST_GRADIENT)
        self._book = model.load()
        self._contexts, self._targets = model.examples(self._book.training)
        self._parameters = model.initial(len(self._book.alphabet), task.seed + task.lots[0])
        self._optimizer = model.Adam(self._parameters)
        self.state: dict[str, Any] = {
            "step": 0,
            "steps": task.rounds * ROUND,
            **{f"parameter {name}": array for name, array in self._parameters.items()},
            **self._optimizer.state,
        }
        """The state that a newcomer gets."""
        self._stop_at = 0.0
        self._give_up_at = 0.0
        self._left_at = 0.0
        """When the last generation was left."""
        self._feedback = covey.ErrorFeedback()
        self._there: tuple[int, ...] = ()
        """The ranks that remain in this generation."""
        self._begin_round()

    def enter(self, group: Group) -> None:
        """Begin a generation: receive the state from other ranks, or send it."""
        restored = group.restore(self.state)
        self._there = tuple(range(group.size))
        self._stop_at = self._stop_at or time.monotonic() + self._task.seconds
        held_out = self._judge(group)
        lane = "+".join(sorted(set(group.lanes().values())))
        gradient_bytes = sum(array.nbytes for array in self._parameters.values())
        batch = DEMO_BATCH * len(self._task.lots)
        self._tell(
            JoinedReport(
                *(group.generation, group.rank, self.state["step"], lane, batch, gradient_bytes, held_out),
                donors=restored.donors,
                received_bytes=restored.bytes_received,
                restore_seconds=restored.seconds,
            )
        )
        if self._left_at:
            self._sync += time.perf_counter() - self._left_at
            self._left_at = 0.0

    def step(self, group: Group) -> None:
        """Take one step with the others, and report at the end of a round."""
        started = time.perf_counter()
        number = self.state["step"] + 1
        draws = (np.random.default_rng((self._task.seed, lot, number)) for lot in self._task.lots)
        batch = np.concatenate([draw.integers(len(self._targets), size=DEMO_BATCH) for draw in draws])
        loss, gradients = model.loss_and_gradients(self._parameters, self._contexts[batch], self._targets[batch])
        computed = time.perf_counter()
        before = group.compression
        group.sync_gradients(gradients, compress=self._policy, feedback=self._feedback)
        synced = time.perf_counter()
        self._sent += group.compression.sent_bytes - before.sent_bytes
        self._plain += group.compression.plain_bytes - before.plain_bytes
        self._optimizer.step(self._parameters, gradients, number)
        self.state["step"] = number
        self._notice(group, "step", synced - started)
        self._steps += 1
        self._samples += len(batch) * len(group.contributors)
        self._losses += loss
        self._sync += synced - computed
        self._compute += time.perf_counter() - started - (synced - computed)
        group.report(step=number, loss=float(loss), samples=len(batch))
        if number % ROUND == 0:
            held_out = self._judge(group)
            loss = self._losses / self._steps
            seconds = self._compute, self._sync
            self._tell(
                RoundReport(number, self._steps, self._samples, loss, held_out, *seconds, self._sent, self._plain)
            )
            self._begin_round()
        self._left_at = time.perf_counter()

    def wait(self, group: Group) -> None:
        """Wait a moment for nodes that are restarted."""
        if not self._give_up_at:
            self._give_up_at = time.monotonic() + LOST_NODES_SECONDS
            self._tell(WaitingReport())
        time.sleep(POLL_SECONDS)
        began = time.perf_counter()
        if not group.agree(time.monotonic() < self._give_up_at):
            raise TimeoutError(
                f"not all {self._task.nodes} nodes were there within {LOST_NODES_SECONDS:.0f} s of the end"
            )
        self._notice(group, "wait", time.perf_counter() - began)

    def finish(self, group: Group) -> None:
        """Compare parameters with the other ranks, and report a sample of the model's text."""
        digest = hashlib.sha256(b"".join(array.tobytes() for array in self._parameters.values())).hexdigest()
        identical = set(group.all_gather_object(digest, type=str)) == {digest}
        writing = (
            model.write(self._parameters, self._book.encode(PROMPT), 240, self._task.seed) if group.rank == 0 else []
        )
        self._tell(FinishedReport(digest, identical, self._book.decode(writing)))

    def _begin_round(self) -> None:
        self._steps = self._samples = self._sent = self._plain = 0
        self._losses = self._compute = self._sync = 0.0

    def _judge(self, group: Group) -> float:
        """Return the held-out loss, to which each rank adds its share; note if the time of any rank is over."""
        contexts, targets = (part[::HELD_OUT_STRIDE] for part in model.examples(self._book.held_out))
        mine = slice(self._there.index(group.rank), None, len(self._there))
        share = model.loss(self._parameters, contexts[mine], targets[mine]) * len(targets[mine])
        is_end_of_round = self.state["step"] > 0 and self.state["step"] % ROUND == 0
        over = is_end_of_round and time.monotonic() >= self._stop_at
        began = time.perf_counter()
        total, count, votes = group.all_reduce(np.array([share, len(targets[mine]), over]))
        self._notice(group, "evaluation", time.perf_counter() - began)
        if votes:
            self.state["steps"] = self.state["step"]
        return float(total / count)  # without the share of a node that is lost meanwhile

    def _notice(self, group: Group, during: str, seconds: float) -> None:
        """Report a loss that the last operation survived."""
        lost = tuple(rank for rank in self._there if rank not in group.contributors)
        if lost:
            self._there = group.contributors
            phases: dict[str, float] = {}
            for event in group.events():
                if event.generation == group.generation and event.kind == "lost" and set(event.ranks) & set(lost):
                    phases = dict(event.phases)
            left = len(group.contributors)
            self._tell(RecoveredReport(self.state["step"], during, group.generation, lost, left, seconds, phases))


def _tell(report: Told) -> None:
    sys.stdout.buffer.write(encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
