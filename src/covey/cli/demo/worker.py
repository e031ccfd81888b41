"""One rank of the demo: `python -m covey.cli.demo.worker`, started once per rank.

The training loop is what a person would write: draw a batch, compute gradients, `sync_gradients`, step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import covey
from covey.cli.demo import model, text
from covey.cli.demo.reports import PROMPT, ROUND, Finished, Joined, Report, Round, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.group import Group

BATCH = 256
HELD_OUT_STRIDE = 2
"""Judging by every second held-out character is as telling as by all of them, and takes half the time."""


def main() -> None:
    """Join the group that the environment describes, train, and report each round on stdout."""
    parser = argparse.ArgumentParser(prog="covey.cli.demo.worker", description=__doc__)
    parser.add_argument("--rounds", type=int, required=True, help=f"stop after so many rounds of {ROUND} steps")
    parser.add_argument("--seconds", type=float, required=True, help="stop at the first end of a round after this time")
    parser.add_argument("--seed", type=int, required=True, help="where parameters and batches come from")
    arguments = parser.parse_args()
    with covey.join() as group:
        train(group, _tell, rounds=arguments.rounds, seconds=arguments.seconds, seed=arguments.seed)


def train(group: Group, tell: Callable[[Report], None], *, rounds: int, seconds: float, seed: int) -> None:
    """Train until `rounds` are done or some rank's `seconds` are over, and tell about it."""
    stop_at = time.monotonic() + seconds
    book = text.load()
    contexts, targets = text.examples(book.training)
    rng = np.random.default_rng((seed, group.rank))
    parameters = model.initial(len(book.alphabet), seed + group.rank)
    for array in parameters.values():
        group.broadcast(array, root=0)
    optimizer = model.Adam(parameters)
    held_out, _ = _judge(group, book, parameters, over=False)
    gradient_bytes = sum(array.nbytes for array in parameters.values())
    tell(Joined(os.getpid(), _lane(group), BATCH, gradient_bytes, held_out))

    for number in range(1, rounds + 1):
        losses, compute, sync = 0.0, 0.0, 0.0
        for _ in range(ROUND):
            started = time.perf_counter()
            batch = rng.integers(len(targets), size=BATCH)
            loss, gradients = model.loss_and_gradients(parameters, contexts[batch], targets[batch])
            computed = time.perf_counter()
            group.sync_gradients(gradients)
            synced = time.perf_counter()
            optimizer.step(parameters, gradients)
            losses += loss
            sync += synced - computed
            compute += time.perf_counter() - started - (synced - computed)
        held_out, over = _judge(group, book, parameters, over=time.monotonic() >= stop_at)
        tell(Round(number * ROUND, losses / ROUND, held_out, compute, sync))
        if over:
            break

    digest = hashlib.sha256(b"".join(array.tobytes() for array in parameters.values())).hexdigest()
    identical = len(set(group.all_gather_object(digest))) == 1
    writing = model.write(parameters, book.encode(PROMPT), 240, seed) if group.rank == 0 else []
    tell(Finished(digest, identical, book.decode(writing)))


def _judge(group: Group, book: text.Text, parameters: model.Arrays, *, over: bool) -> tuple[float, bool]:
    """Return the held-out loss, to which each rank adds its share, and whether any rank says that time is over."""
    contexts, targets = (part[::HELD_OUT_STRIDE] for part in text.examples(book.held_out))
    mine = slice(group.rank, None, group.size)
    share = model.loss(parameters, contexts[mine], targets[mine]) * len(targets[mine])
    total, votes = group.all_reduce(np.array([share, float(over)]))
    return float(total) / len(targets), votes > 0


def _lane(group: Group) -> str:
    return "+".join(sorted(set(group.lanes().values())))


def _tell(report: Report) -> None:
    sys.stdout.buffer.write(encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
