"""The state of one training run, built from its reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from covey.lab.demo import summary
from covey.lab.demo.reports import (
    ROUND,
    FinishedReport,
    JoinedReport,
    KilledReport,
    RecoveredReport,
    Report,
    RoundReport,
    StartedReport,
    WaitingReport,
)


@dataclass(slots=True)
class NodeRow:
    """One node as its latest report describes it; times are seconds a step."""

    state: str = "starting"
    pid: int | None = None
    seat: tuple[int, int] | None = None
    """The latest generation that it was in, and its rank there."""
    batch: int = 0
    loss: float | None = None
    """Mean loss of the node's own batches in its latest round."""
    samples_per_second: float = 0.0
    compute: float = 0.0
    sync: float = 0.0
    history: list[tuple[int, str]] = field(default_factory=lambda: [(0, "starting")])
    """Every state that it was in, and the step at which it began."""

    @property
    def losses(self) -> int:
        """How often the node was lost."""
        return sum(state == "lost" for _, state in self.history)

    def turn(self, state: str, step: int) -> None:
        self.state = state
        self.history.append((step, state))


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The held-out loss after a number of steps, of samples of all nodes, and of seconds of training."""

    step: int
    samples: int
    seconds: float
    """Seconds spent in steps and on new generations; starting, evaluating and reporting do not count."""
    loss: float


@dataclass(slots=True)
class LossSurvived:
    """How a loss was survived."""

    nodes: tuple[int, ...]
    """The lost nodes."""
    reports: dict[int, RecoveredReport]
    """The report of each remaining node."""

    @property
    def first(self) -> RecoveredReport:
        """The report that arrived first."""
        return next(iter(self.reports.values()))

    @property
    def milliseconds(self) -> float:
        """How long the interrupted operation took, on the slowest node."""
        return 1e3 * max(report.seconds for report in self.reports.values())

    @property
    def phases(self) -> dict[str, float]:
        """The timeline of the node that noticed the loss first: its phases end latest after the first sign."""
        return max((report.phases for report in self.reports.values()), key=lambda phases: phases.get("redo", 0.0))


@dataclass(frozen=True, slots=True)
class Return:
    """How a node came back."""

    node: int
    rank: int
    step: int
    donors: tuple[int, ...]
    bytes: int
    seconds: float

    @property
    def gift(self) -> str:
        """The state that it received, in words."""
        donors = f"{len(self.donors)} node{'s' if len(self.donors) > 1 else ''}"
        return f"{self.bytes / 1e6:.1f} MB of state from {donors} in {1e3 * self.seconds:.0f} ms"


@dataclass(slots=True)
class Progress:
    """A training run of `size` nodes and `steps` steps; `record` updates it."""

    size: int
    steps: int
    rows: list[NodeRow] = field(init=False)
    curve: list[LossPoint] = field(default_factory=list)
    """One point per round, from the first node that reported it; the first point is from before training."""
    recoveries: dict[tuple[int, tuple[int, ...]], LossSurvived] = field(default_factory=dict)
    """(generation, lost ranks) → how the loss was survived."""
    returns: list[Return] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    """What happened to the members, in sentences."""
    reached: int = 0
    """The latest step that was reported."""
    lane: str = ""
    gradient_bytes: int = 0
    codec: str = ""
    """How gradients are compressed; empty: not at all."""
    sent_bytes: int = 0
    """What all nodes have sent of compressed gradients."""
    plain_bytes: int = 0
    """What they would have sent without compression."""
    writing: str = ""
    _digests: dict[int, str] = field(default_factory=dict)
    _agreed: bool = True

    def __post_init__(self) -> None:
        self.rows = [NodeRow() for _ in range(self.size)]

    def record(self, node: int, report: Report) -> None:
        """Take in one report about one node."""
        row = self.rows[node]
        if isinstance(report, JoinedReport | RecoveredReport | RoundReport):
            self.reached = max(self.reached, report.step)
        match report:
            case StartedReport():
                row.turn("starting", self.reached)
                row.pid, row.loss = report.pid, None
            case WaitingReport():
                row.turn("waiting", self.reached)
            case JoinedReport():
                self._enter(node, report)
            case KilledReport():
                row.turn("killed" if self.is_away(node) else "lost", self.reached)
            case RecoveredReport():
                self._survive(node, report)
            case RoundReport():
                row.loss = report.batch_loss
                self.sent_bytes += report.sent_bytes
                self.plain_bytes += report.plain_bytes
                row.compute, row.sync = report.compute / report.steps, report.sync / report.steps
                row.samples_per_second = row.batch / (row.compute + row.sync)
                if report.steps == ROUND and report.step > self.last.step:
                    seconds = self.last.seconds + report.compute + report.sync
                    samples = self.last.samples + report.samples
                    self.curve.append(LossPoint(report.step, samples, seconds, report.held_out))
            case FinishedReport():
                row.turn("done", self.reached)
                self._digests[node] = report.digest
                self._agreed &= report.identical
                self.writing = self.writing or report.writing
            case _:
                assert_never(report)
        self.story += summary.sentences(self, node, report)

    def _enter(self, node: int, report: JoinedReport) -> None:
        row = self.rows[node]
        if self.is_away(node):
            came = report.donors, report.received_bytes, report.restore_seconds
            self.returns.append(Return(node, report.rank, report.step, *came))
        row.turn("training", report.step)
        row.seat, row.batch = (report.generation, report.rank), report.batch
        self.lane = self.lane or report.lane
        self.gradient_bytes = report.gradient_bytes
        if not self.curve:
            self.curve.append(LossPoint(0, 0, 0.0, report.held_out))

    def _survive(self, node: int, report: RecoveredReport) -> None:
        """Record a remaining node's report of a loss."""
        seats = {(report.generation, rank) for rank in report.lost}
        lost = tuple(other for other, row in enumerate(self.rows) if row.seat in seats)
        recovery = self.recoveries.setdefault((report.generation, report.lost), LossSurvived(lost, {}))
        recovery.reports[node] = report
        for row in (self.rows[other] for other in lost):
            if row.state == "lost":
                row.history[-1] = report.step, "lost"

    @property
    def name(self) -> str:
        """The run in words: "4 nodes"."""
        return f"{self.size} node{'s' if self.size > 1 else ''}"

    @property
    def digest(self) -> str:
        """SHA-256 of the parameters that every node ended with; empty if they differ, or not all have ended."""
        digests = set(self._digests.values())
        return digests.pop() if self._agreed and len(self._digests) == self.size and len(digests) == 1 else ""

    @property
    def losses(self) -> int:
        """How often a node was lost."""
        return sum(row.losses for row in self.rows)

    def is_away(self, node: int) -> bool:
        """Whether a node was lost and is not back yet."""
        return self.rows[node].losses > sum(back.node == node for back in self.returns)

    @property
    def last(self) -> LossPoint:
        """The latest point of the curve; before there is one, a point without a loss."""
        return self.curve[-1] if self.curve else LossPoint(0, 0, 0.0, float("nan"))

    @property
    def samples_per_second(self) -> float:
        """Samples of all nodes per second of training, over the whole run."""
        return self.last.samples / self.last.seconds if self.last.step else 0.0

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Return seconds of compute and of sync in a step, averaged over the nodes that have reported a round."""
        rows = [row for row in self.rows if row.loss is not None and row.state not in ("lost", "killed")]
        count = len(rows) or 1
        return sum(row.compute for row in rows) / count, sum(row.sync for row in rows) / count

    @property
    def saving(self) -> str:
        """What compression has saved, in words; empty without compression."""
        if not self.sent_bytes:
            return ""
        sent, plain = self.sent_bytes / 1e6, self.plain_bytes / 1e6
        return f"{self.codec} sent {sent:,.1f} MB instead of {plain:,.1f} MB, {plain / sent:.1f}x less"

    def at_step(self, step: int) -> LossPoint | None:
        """Return the point after exactly `step` steps, or None if there was no evaluation."""
        return next((point for point in self.curve if point.step == step), None)
