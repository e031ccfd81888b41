"""What a program can ask about a group: the plan of a sum and why (`explain`), and its counters (`metrics`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.base.numbers import operation_name
from covey.base.setting_kinds import show_bytes
from covey.compress.codec import Codec
from covey.plan.choose import PLANNED_BYTES, all_reduce_algorithm, rooted_algorithm
from covey.plan.cost import bound
from covey.plan.fit import compared, fit
from covey.runtime.collectives.size_class import SizeClass, size_class
from covey.runtime.group.topology import Topology, topology
from covey.runtime.metrics.samples import communication_share
from covey.runtime.recorder import quantile

if TYPE_CHECKING:
    from covey.base.numbers import Rank
    from covey.plan.fit import Candidate, Fitted
    from covey.runtime.collectives.attempt import Attempt, AttemptPlanner
    from covey.runtime.collectives.roster import GroupRoster
    from covey.runtime.counters import GroupCounters
    from covey.runtime.group.issuer import Compression
    from covey.runtime.group.members import DescribedEngine
    from covey.runtime.recorder import OperationTotals


ITEM_BYTES = 4
"""Bytes of an element, where none is given: most large arrays are float32."""
ASKED = "if algorithm= asks for it"
"""What speaks for a plan that is never chosen."""


@dataclass(frozen=True)
class PlanAlternative:
    """A plan that was not chosen."""

    algorithm: str
    why: str
    """What speaks for it."""
    predicted_seconds: float


@dataclass(frozen=True)
class PlanReport:
    """The plan of sums of some size; see `Group.explain`."""

    nbytes: int
    algorithm: str
    """One that `algorithm=` names, or `halving`, or `levels`: inside hosts and sites first, then between."""
    order: tuple[int, ...]
    """The ranks in the order of the ring."""
    shares: tuple[float, ...]
    """By rank of `order`: which part of the array the rank finishes. Empty if all finish equal parts."""
    groups: tuple[tuple[int, ...], ...]
    """The ranks that combine among themselves first, in `levels`."""
    why: str
    predicted_seconds: float | None
    """None before the links are measured."""
    measured_seconds: float | None
    """What such a sum took until the last rank had finished, when they agreed on it last; None if they have not."""
    bound_seconds: float | None
    """What no plan can beat, with these links; None before they are measured."""
    alternatives: tuple[PlanAlternative, ...]
    """The plans that were not chosen, the best one first."""
    topology: Topology
    """The network that the plan was made for."""
    codec: str = ""
    """What encodes the transfers; empty if they are not encoded."""
    wire_bytes: int = 0
    """The bytes of the array as they travel, if they are encoded."""

    def __str__(self) -> str:
        coded = f" with {self.codec}, {show_bytes(self.wire_bytes)}" if self.codec else ""
        lines = [f"{show_bytes(self.nbytes)}{coded}: {self.algorithm} ({self.why})"]
        if self.algorithm == "ring":
            lines.append(f"  order: {' -> '.join(map(str, self.order))}")
        if self.shares:
            parts = (f"rank {rank} {share:.1%}" for rank, share in zip(self.order, self.shares, strict=True))
            lines.append(f"  finished by: {', '.join(parts)}")
        if self.groups:
            lines.append(f"  first among: {'; '.join(', '.join(map(str, group)) for group in self.groups)}")
        times = (("predicted", self.predicted_seconds), ("measured", self.measured_seconds),
                 ("no plan beats", self.bound_seconds))  # fmt: skip
        said = [f"{what} {_spell(seconds)}" for what, seconds in times if seconds is not None]
        if said:
            lines.append(f"  {', '.join(said)}")
        for other in self.alternatives:
            lines.append(f"  instead of {other.algorithm} ({other.why}): {_spell(other.predicted_seconds)}")
        return "\n".join([*lines, str(self.topology)])


def explain(engine: DescribedEngine, nbytes: int) -> PlanReport:
    """Return the plan of a sum of `nbytes`, as all ranks have it now."""
    attempt = engine.attempt
    is_alone = engine.roster.node is None  # a run of one, or a process that was forked from a member
    plain = all_reduce_algorithm(attempt.size, nbytes, "ring" if is_alone else attempt.lane_family, attempt.sizes)
    planner = None if is_alone else attempt.planner
    is_small = nbytes < PLANNED_BYTES and (planner is None or not planner.fits_medium(nbytes, attempt.sizes))
    if is_alone or is_small or not attempt.fits_plans:
        return _report(engine, attempt, nbytes, plain, None, _why_plain(engine, attempt, nbytes), SizeClass())
    kind = SizeClass() if planner is None else planner.classes.get(size_class(nbytes), SizeClass())
    return _report(engine, attempt, nbytes, plain, planner, kind.choice.why, kind)


def explain_coded(engine: DescribedEngine, nbytes: int, compress: str | Codec) -> PlanReport:
    """Return the plan of a compressed sum of `nbytes` of float32, as all ranks have it now."""
    from covey.compress.parsing import parse
    from covey.runtime.compressed.dense import CodedSums

    codec = parse(compress)
    if not isinstance(codec, Codec):
        raise ConfigError(f"compress={compress!r} has no plan of its own; use a codec with a fixed rate, like 'int8'")
    attempt, sums = engine.attempt, CodedSums(max(1, nbytes // ITEM_BYTES), codec)
    is_alone = engine.roster.node is None
    plain = "direct" if is_alone or attempt.size == 2 or attempt.lane_family == "ring" else "ring"
    if is_alone or sums.nbytes < PLANNED_BYTES or not attempt.fits_plans:
        why = _why_plain(engine, attempt, sums.nbytes)
        report = _report(engine, attempt, sums.nbytes, plain, None, why, SizeClass())
    else:
        planner = attempt.planner
        kind = SizeClass() if planner is None else planner.classes.get(sums.key, SizeClass())
        report = _report(engine, attempt, sums.nbytes, plain, planner, kind.choice.why, kind, has_fit=False)
    return replace(report, nbytes=nbytes, codec=str(codec), wire_bytes=sums.nbytes)


def explain_rooted(engine: DescribedEngine, nbytes: int, operation: str, root: Rank) -> PlanReport:
    """Return the plan of a broadcast or reduce of `nbytes`, as all ranks have it now."""
    attempt = engine.attempt
    planner = None if engine.roster.node is None else attempt.planner
    network = None if planner is None else planner.network
    used = rooted_algorithm(nbytes, attempt.sizes)
    times: dict[str, float] = {}
    if network is not None:
        count = max(1, nbytes // ITEM_BYTES)
        times = dict(compared(operation, network, attempt.slot_of(root), count, ITEM_BYTES, attempt.sizes))
    others = tuple(PlanAlternative(name, ASKED, seconds) for name, seconds in times.items() if name != used)
    why = f"{operation} of {'up to' if used == 'tree' else 'more than'} {show_bytes(attempt.sizes.tree_bytes)}"
    order = tuple(attempt.ranks)
    return PlanReport(
        nbytes, used, order, (), (), why, times.get(used), None, None, others, topology(engine)
    )  # fmt: skip


def _report(
    engine: DescribedEngine,
    attempt: Attempt,
    nbytes: int,
    plain: str,
    planner: AttemptPlanner | None,
    why: str,
    kind: SizeClass,
    *,
    has_fit: bool = True,
) -> PlanReport:
    """`has_fit` False: what the alternatives would take is known only once the ranks have chosen."""
    fitted, network = kind.choice.fitted, None if planner is None else planner.network
    candidates: tuple[Candidate, ...] = kind.candidates
    if network is not None and not candidates and has_fit:
        candidates = fit(network, max(1, nbytes // ITEM_BYTES), ITEM_BYTES, attempt.sizes)
    ranks = attempt.ranks
    order = tuple(ranks[slot] for slot in (fitted.order if fitted is not None else ()) or attempt.slots)
    total = sum(fitted.shares) if fitted is not None else 0
    shares = () if fitted is None or not total else tuple(
        fitted.shares[attempt.slot_of(engine.roster.ranks[rank])] / total for rank in order
    )  # fmt: skip
    used = plain if fitted is None else fitted.algorithm
    others = [
        PlanAlternative(each.fitted.algorithm, each.why, each.fitted.seconds)
        for each in candidates
        if not _is_used(each.fitted, fitted, plain)
    ]
    if network is not None and has_fit:
        named = {used, *(each.algorithm for each in others)}
        times = compared("all_reduce", network, 0, max(1, nbytes // ITEM_BYTES), ITEM_BYTES, attempt.sizes)
        others += [PlanAlternative(name, ASKED, seconds) for name, seconds in times if name not in named]
        others.sort(key=lambda each: each.predicted_seconds)
    groups = () if fitted is None or fitted.algorithm != "levels" else fitted.groups
    return PlanReport(
        nbytes,
        used,
        order,
        shares,
        tuple(tuple(ranks[slot] for slot in group) for group in groups),
        why,
        _known(kind.choice.predicted),
        _known(kind.measured),
        None if network is None else bound(network, nbytes),
        tuple(others),
        topology(engine),
    )


def _is_used(candidate: Fitted, fitted: Fitted | None, plain: str) -> bool:
    if fitted is None:
        return (candidate.algorithm, candidate.order, candidate.shares) == (plain, (), ())
    return candidate._replace(seconds=0.0) == fitted._replace(seconds=0.0)


def _why_plain(engine: DescribedEngine, attempt: Attempt, nbytes: int) -> str:
    if attempt.size < 3:
        return "plain: there are fewer than three ranks"
    if nbytes < PLANNED_BYTES:
        return f"plain: all_reduces below {show_bytes(PLANNED_BYTES)} depend on round trips more than on speed"
    if engine.facts.config.plan == "plain":
        return "plain: plan='plain' asks for it"
    return "plain: all ranks are on one machine"


def _known(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _spell(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True)
class OperationMetrics:
    """What all operations of one kind have done on this rank."""

    calls: int
    failures: int
    seconds: float
    """In all; from the call until it returned or raised."""
    p50: float
    """The seconds within which half of the operations ended, right to within a bucket of durations, which ends at
    most half its begin later. `p90` and `p99` are the same for 90 and 99 of 100."""
    p90: float
    p99: float
    sent_bytes: int
    received_bytes: int


def _operation_metrics(totals: OperationTotals) -> OperationMetrics:
    p50, p90, p99 = (quantile(totals.buckets, share) for share in (0.5, 0.9, 0.99))
    return OperationMetrics(
        calls=totals.calls,
        failures=totals.failures,
        seconds=totals.ns / 1e9,
        p50=p50,
        p90=p90,
        p99=p99,
        sent_bytes=totals.sent,
        received_bytes=totals.received,
    )


@dataclass(frozen=True)
class PeerMetrics:
    """What collectives have moved between this rank and another one, over one kind of lane."""

    rank: int
    lane: str
    sent_bytes: int
    sends: int
    received_bytes: int
    receives: int


@dataclass(frozen=True)
class MessageMetrics:
    """The point-to-point messages of this rank."""

    sent: int
    sent_bytes: int
    received: int
    received_bytes: int


@dataclass(frozen=True)
class GroupMetrics:
    """The counters of a group on this rank, since the group was made."""

    operations: dict[str, OperationMetrics]
    """By name, such as `all_reduce`; those that have run."""
    peers: tuple[PeerMetrics, ...]
    messages: MessageMetrics
    compression: Compression
    communication_share: float
    """The share of the last minute in which an operation ran, from 0 to 1; see docs/guides/metrics.md."""


def group_metrics(counters: GroupCounters, roster: GroupRoster, compression: Compression) -> GroupMetrics:
    """Return the counters of a group. On any thread."""
    messages = counters.messages.counts()
    return GroupMetrics(
        operations={operation_name(each.operation): _operation_metrics(each) for each in counters.recorder.totals()},
        peers=tuple(
            PeerMetrics(roster.rank_of[seat], lane, *traffic)
            for (seat, lane), traffic in sorted(counters.traffic().items())
        ),
        messages=MessageMetrics(messages.sent, messages.sent_bytes, messages.received, messages.received_bytes),
        compression=compression,
        communication_share=communication_share([counters]),
    )
