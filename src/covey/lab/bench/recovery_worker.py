"""One rank of `covey bench recovery`: `python -m covey.lab.bench.recovery_worker`, started once per rank.

It sums arrays of whole numbers until it is ended, and reports for each sum whether it is right to the last bit.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec
import numpy as np

import covey

VALUES_PERIOD = 251
SCALES = 7


class Begins(msgspec.Struct, frozen=True, tag="begins"):
    """A rank is about to begin an operation."""

    generation: int
    size: int
    rank: int
    step: int
    at: float
    """By the monotonic clock, which all processes of one machine share."""


class Returns(msgspec.Struct, frozen=True, tag="returns"):
    """The operation has returned on this rank."""

    generation: int
    step: int
    began: float
    at: float
    contributors: tuple[int, ...]
    is_right: bool


Report = Begins | Returns
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def decode(line: bytes) -> Report:
    """Return the report that a worker printed."""
    return _decoder.decode(line)


def main() -> None:
    """Take part in the run that the environment describes, until a signal ends this process."""
    parser = argparse.ArgumentParser(prog="covey.lab.bench.recovery_worker", description=__doc__)
    parser.add_argument("--elements", type=int, required=True, help="of float32, in every sum")
    pattern = (np.arange(parser.parse_args().elements) % VALUES_PERIOD + 1).astype(np.float32)
    values, expected, state = np.empty_like(pattern), np.empty_like(pattern), {"step": 0}
    for group in covey.generations():
        group.restore(state)
        while not group.change_pending:
            step = state["step"] = state["step"] + 1
            scale = step % SCALES + 1  # a result of the step before would be wrong
            np.multiply(pattern, (group.rank + 1) * scale, out=values)
            began = time.monotonic()
            _tell(Begins(group.generation, group.size, group.rank, step, began))
            group.all_reduce(values)
            returned_at = time.monotonic()
            # Sums of whole numbers below 2**24 are exact in float32: only one result is right.
            np.multiply(pattern, sum(rank + 1 for rank in group.contributors) * scale, out=expected)
            is_right = np.array_equal(values, expected)
            _tell(Returns(group.generation, step, began, returned_at, group.contributors, is_right))


def _tell(report: Report) -> None:
    sys.stdout.buffer.write(_encoder.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
