"""Measures a run, on every rank of it in the same order: options, then pairs of ranks, then collectives."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError, CoveyError
from covey.lab.bench.machine import machine_facts
from covey.lab.bench.network.links import LinkFigures, checked
from covey.lab.bench.network.pairs import measure_pair
from covey.lab.bench.network.rank_rounds import measure_case
from covey.lab.bench.network.schedule import batches, rounds
from covey.lab.bench.network.terms import NetworkTerms, RankOffer, agree
from covey.runtime.group.internals import engine_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from covey.lab.bench.report import Measurement
    from covey.lab.bench.sweep import Case
    from covey.runtime.group.group import Group


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
