"""Measures a run, on every rank of it in the same order: options, then pairs of ranks, then collectives."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError, RemoteProtocolError
from covey.lab.bench.engines import CoveyEngine
from covey.lab.bench.measure import machine_facts
from covey.lab.bench.network.pairs import LinkFigures, checked, measure_pair
from covey.lab.bench.network.terms import NetworkTerms, RankOffer, agree, batches, rounds
from covey.lab.bench.processes import Measured, PrepareOrder
from covey.lab.bench.report import Measurement, Round
from covey.lab.bench.sweep import ROUND_ITERATIONS, Case, CaseGrid, Contender, iterations_for
from covey.lab.bench.worker import prepare
from covey.runtime.group.internals import engine_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from covey.runtime.group.group import Group

CONTENDER: Final = Contender("covey", "covey")
SLOW_SECONDS: Final = 2.0
"""An operation that takes longer than this is measured once."""


@dataclass(frozen=True)
class RankRounds:
    """The rounds of one case as one rank measured them."""

    nanoseconds: tuple[tuple[int, ...], ...]
    """For each round, the time of each iteration."""
    cpu_seconds: tuple[float, ...]
    """For each round, the processor time of this rank."""


def measure_case(group: Group, grid: CaseGrid, case: Case) -> Measurement | None:
    """Measure a case; every rank calls it. Returns the measurement on rank 0, None elsewhere.

    The first operation checks its result. One that takes over SLOW_SECONDS is measured once, whatever `grid` says.
    """
    engine = CoveyEngine(group)
    round_of = prepare(engine, PrepareOrder(case.operation.name, case.elements, case.dtype), None)
    rounds = [round_of(1)]
    slowest = _slowest(group, rounds[0])
    if slowest <= SLOW_SECONDS:
        warm = round_of(iterations_for(slowest, grid.round_seconds / 4))
        iterations = iterations_for(_slowest(group, warm), grid.round_seconds)
        rounds = [round_of(iterations) for _ in range(grid.repetitions)]
    own = RankRounds(tuple(tuple(each.nanoseconds) for each in rounds), tuple(each.cpu_seconds for each in rounds))
    by_rank = group.gather_object(own, type=RankRounds)
    if by_rank is None:
        return None
    return Measurement(case, CONTENDER, as_rounds(by_rank), engine.lanes())


def as_rounds(by_rank: Sequence[RankRounds]) -> tuple[Round, ...]:
    """Return the rounds of all ranks; RemoteProtocolError if a rank sent other rounds than rank 0 has measured."""
    shape = [len(each) for each in by_rank[0].nanoseconds]
    for rank, told in enumerate(by_rank):
        is_equal = [len(each) for each in told.nanoseconds] == shape and len(told.cpu_seconds) == len(shape)
        if not is_equal or not shape or not all(0 < count <= ROUND_ITERATIONS for count in shape):
            raise RemoteProtocolError(f"rank {rank} sent other rounds of a case than rank 0 has measured")
    return tuple(
        Round(tuple(told.nanoseconds[at] for told in by_rank), tuple(told.cpu_seconds[at] for told in by_rank))
        for at in range(len(shape))
    )


def _slowest(group: Group, measured: Measured) -> float:
    """Return what an iteration takes on the slowest rank; equal on all ranks, so that all do as many iterations."""
    return float(group.all_reduce(statistics.median(measured.nanoseconds) / 1e9, "max"))


@dataclass(frozen=True)
class Agreed:
    """All ranks have the same terms."""

    terms: NetworkTerms
    offers: list[RankOffer]


@dataclass(frozen=True)
class PairsDone:
    """So many more pairs have been measured; 0 before the first."""

    pairs: int


@dataclass(frozen=True)
class LinksDone:
    """All pairs have been measured."""

    links: list[LinkFigures]


@dataclass(frozen=True)
class CaseBegun:
    """A case is measured now."""

    case: Case


@dataclass(frozen=True)
class NetworkCaseDone:
    """A case is over. The measurement is there on rank 0 only."""

    case: Case
    measurement: Measurement | None


NetworkEvent = Agreed | PairsDone | LinksDone | CaseBegun | NetworkCaseDone


def measure(group: Group, options: Mapping[str, str], writes: Sequence[str]) -> Generator[NetworkEvent, None, None]:
    """Measure the run of a group, and yield what happens; every rank calls it and takes all events.

    Raises:
        ConfigError: on all ranks, if they were given options that contradict each other.
        PeerLostError: a rank was lost.
    """
    offers = group.all_gather_object(_offer(group, options, writes), type=RankOffer)
    terms = agree_or_close(group, offers)
    yield Agreed(terms, offers)
    yield from _measure_links(group, terms)
    for case in terms.grid.cases(group.size):
        yield CaseBegun(case)
        yield NetworkCaseDone(case, measure_case(group, terms.grid, case))


def agree_or_close(group: Group, offers: Sequence[RankOffer]) -> NetworkTerms:
    """Return what all ranks measure; if the offers contradict each other, close the group and raise ConfigError.

    Every rank raises it, so the group ends in good order, once all ranks have the offers: none is told that another one
    failed.
    """
    try:
        return agree(offers)
    except ConfigError as error:
        refusal = error
    with contextlib.suppress(CoveyError):
        group.barrier()
        group.close()
    raise refusal


def _offer(group: Group, options: Mapping[str, str], writes: Sequence[str]) -> RankOffer:
    engine = engine_of(group)
    host, name = engine.roster.host(engine.rank), engine.roster.host_name(engine.rank)
    return RankOffer(dict(options), host, name, machine_facts(), tuple(writes))


def _measure_links(group: Group, terms: NetworkTerms) -> Iterator[NetworkEvent]:
    found = list[LinkFigures]()
    yield PairsDone(0)
    for pairs in rounds(group.size):
        own = next((pair for pair in pairs if group.rank in pair), None)
        color = None if own is None else own[0]
        with contextlib.ExitStack() as stack:
            there, back = group.split(color), group.split(color)
            for each in (there, back):
                if each is not None:
                    stack.enter_context(each)
            for batch in batches(pairs, terms.hosts):
                if own in batch and there is not None and back is not None:
                    found.append(measure_pair(there, back, terms.pair_seconds))
                group.barrier()
                yield PairsDone(len(batch))
    found.sort(key=lambda link: link.receiver)
    yield LinksDone(checked(group.all_gather_object(found, type=list[LinkFigures])))
