"""What the ranks of one training run have reported so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from covey.cli.demo.reports import ROUND, Finished, Joined, Report, Round


@dataclass(slots=True)
class Row:
    """One rank as its latest report describes it; times are seconds a step."""

    state: str = "starting"
    pid: int | None = None
    loss: float | None = None
    """Mean loss of the rank's own batches in its latest round."""
    samples_per_second: float = 0.0
    compute: float = 0.0
    sync: float = 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """The held-out loss after so many steps, samples of all ranks, and seconds of training."""

    step: int
    samples: int
    seconds: float
    """Time in steps alone: starting, judging and reporting are off this clock."""
    loss: float


@dataclass(slots=True)
class Progress:
    """A training run of `size` ranks that is to do `steps` steps; `record` brings it up to date."""

    size: int
    steps: int
    rows: list[Row] = field(init=False)
    curve: list[Point] = field(default_factory=list)
    """One point per round, as rank 0 saw it; the first one is from before training."""
    lane: str = ""
    gradient_bytes: int = 0
    writing: str = ""
    _batch: int = 0
    _digests: dict[int, str] = field(default_factory=dict)
    _agreed: bool = True

    def __post_init__(self) -> None:
        self.rows = [Row() for _ in range(self.size)]

    def record(self, rank: int, report: Report) -> None:
        """Take in one report of one rank."""
        row = self.rows[rank]
        match report:
            case Joined():
                row.state, row.pid = "training", report.pid
                if rank == 0:
                    self.lane, self.gradient_bytes, self._batch = report.lane, report.gradient_bytes, report.batch
                    self.curve.append(Point(0, 0, 0.0, report.held_out))
            case Round():
                row.loss = report.batch_loss
                row.compute, row.sync = report.compute / ROUND, report.sync / ROUND
                row.samples_per_second = self._batch / (row.compute + row.sync)
                if rank == 0:
                    samples = report.step * self._batch * self.size
                    seconds = self.curve[-1].seconds + report.compute + report.sync
                    self.curve.append(Point(report.step, samples, seconds, report.held_out))
            case Finished():
                row.state = "done"
                self._digests[rank] = report.digest
                self._agreed &= report.identical
                self.writing = self.writing or report.writing
            case _:
                assert_never(report)

    @property
    def name(self) -> str:
        """The run in words: "4 ranks"."""
        return f"{self.size} rank{'s' if self.size > 1 else ''}"

    @property
    def identical(self) -> bool:
        """Whether every rank ended with the same parameters: what the ranks say, and what their digests say."""
        return self._agreed and len(self._digests) == self.size and len(set(self._digests.values())) == 1

    @property
    def last(self) -> Point:
        """The latest point of the curve; before there is one, a point without a loss."""
        return self.curve[-1] if self.curve else Point(0, 0, 0.0, float("nan"))

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks per second of training, over the whole run."""
        return self.last.samples / self.last.seconds if self.last.step else 0.0

    @property
    def samples_planned(self) -> int:
        """Samples of all ranks once all steps are done."""
        return self.steps * self._batch * self.size

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Return seconds of compute and of sync in a step, averaged over the ranks that have reported a round."""
        rows = [row for row in self.rows if row.loss is not None]
        count = len(rows) or 1
        return sum(row.compute for row in rows) / count, sum(row.sync for row in rows) / count

    def at_step(self, step: int) -> Point | None:
        """Return the point after exactly `step` steps, or None if the run did not judge itself there."""
        return next((point for point in self.curve if point.step == step), None)
