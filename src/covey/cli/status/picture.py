"""Combines what nodes report about themselves and each other into one picture of the cluster. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from covey.base.errors import DeadlineError
from covey.net.keys.identity import short_id
from covey.wire.messages import Tell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from covey.base.errors import CoveyError
    from covey.runtime.events import Event
    from covey.wire.messages import Answer, Card, PeerReport, Wait


@dataclass(frozen=True)
class Way:
    """How a node reaches another."""

    id: str
    rank: int | None
    lane: str
    """The kind of lane; empty while there is none."""
    local: str
    remote: str
    interface: str
    round_trip: float | None
    """Seconds."""
    relay: str = ""
    """The address of the relay that the link goes through; empty if it goes through none."""


@dataclass(frozen=True)
class PicturedNode:
    """One node of a run."""

    id: str
    name: str
    short_id: str
    rank: int | None
    host: str
    pid: int
    address: str
    """The best of its addresses."""
    interface: str
    version: str
    state: str
    """`joining` or `running`; `silent` if other nodes know it and it did not answer; `refused` if it waits for a run
    and its settings differ from those of the other nodes."""
    since: float | None
    """Seconds in this state."""
    clock_offset: float | None
    """Seconds that its clock is ahead of this machine's."""
    is_leader: bool
    is_tie_breaker: bool
    peers: tuple[Way, ...]


@dataclass(frozen=True)
class Run:
    """A run, and its nodes by rank."""

    name: str
    state: str
    since: float
    nodes: tuple[PicturedNode, ...]
    waits: tuple[str, ...] = ()
    """What its nodes wait for, and the problems that they report."""
    events: tuple[Event, ...] = ()
    """The last events of the run, as one of its nodes knows them."""
    protocol: str = ""
    """The version of the protocol that its members speak; empty if none of them said so."""


@dataclass(frozen=True)
class AgentSeen:
    """A machine on which `covey up` runs."""

    id: str
    name: str
    host: str
    address: str
    """The best of its addresses."""
    version: str


@dataclass(frozen=True)
class Picture:
    """A cluster, as a visitor saw it."""

    cluster: str
    runs: tuple[Run, ...]
    silent: tuple[str, ...]
    """One sentence for each node that was found and did not answer."""
    refused: Mapping[str, str]
    """Nodes that were refused here, and why."""
    agents: tuple[AgentSeen, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.runs and not self.silent and not self.agents


def picture(
    cluster: str,
    seen: Sequence[PeerReport],
    answers: Sequence[Answer | CoveyError],
    refused: Mapping[str, str],
    agents: Sequence[Card] = (),
) -> Picture:
    """Combine how nodes are `seen` from here with what each of them answered to Ask; add the agents."""
    told: dict[str, list[tuple[PeerReport, Tell]]] = {}
    silent = []
    for state, answer in zip(seen, answers, strict=True):
        if isinstance(answer, Tell):
            told.setdefault(answer.run, []).append((state, answer))
        elif isinstance(answer, DeadlineError):
            silent.append(str(answer))
    runs = tuple(_run(name, told[name]) for name in sorted(told))
    return Picture(cluster, runs, tuple(silent), dict(refused), tuple(map(_agent, agents)))


def _agent(card: Card) -> AgentSeen:
    return AgentSeen(card.id.hex(), card.name, card.host_name, _best_address(card), card.version)


def _best_address(card: Card) -> str:
    best = card.contact.addresses[0] if card.contact.addresses else None
    return _spell(best.ip, best.port) if best is not None else ""


def tellers(seen: Sequence[PeerReport], answers: Sequence[Answer | CoveyError]) -> dict[str, Card]:
    """Return, by run, the card of the member to ask for its events: the one with the lowest rank that answered."""
    members = [
        (answer.rank, state.card, answer.run)
        for state, answer in zip(seen, answers, strict=True)
        if isinstance(answer, Tell) and answer.rank >= 0
    ]
    return {run: card for _, card, run in sorted(members, key=lambda each: -each[0])}


def with_events(drawn: Picture, events: Mapping[str, Sequence[Event]]) -> Picture:
    """Return the picture with the last events of each run, given by its name."""
    runs = (replace(run, events=tuple(events.get(run.name, ()))) for run in drawn.runs)
    return replace(drawn, runs=tuple(runs))


def _run(name: str, told: list[tuple[PeerReport, Tell]]) -> Run:
    ranks = _ranks(told)
    running = [tell for _, tell in told if tell.state == "running"]
    leader, tie_breaker = (running[0].leader, running[0].tie_breaker) if running else (b"", b"")

    def node(
        card: Card, state: str, since: float | None, offset: float | None, peers: Iterable[PeerReport]
    ) -> PicturedNode:
        address = card.contact.addresses[0] if card.contact.addresses else None
        return PicturedNode(
            id=card.id.hex(),
            name=card.name,
            short_id=short_id(card.id),
            rank=ranks.get(card.id),
            host=card.host_name,
            pid=card.pid,
            address=_best_address(card),
            interface=address.interface if address is not None else "",
            version=card.version,
            state=state,
            since=since,
            clock_offset=offset,
            is_leader=card.id == leader,
            is_tie_breaker=card.id == tie_breaker,
            peers=tuple(_way(peer, ranks) for peer in peers if peer.rank >= 0 or state in ("joining", "refused")),
        )

    refused = _refused(told)
    nodes = {
        state.card.id: node(
            state.card,
            "refused" if state.card.name in refused else tell.state,
            tell.since,
            state.clock_offset,
            tell.peers,
        )
        for state, tell in told
    }
    for tell in running:
        for peer in tell.peers:
            if peer.rank >= 0 and peer.card.id not in nodes:
                nodes[peer.card.id] = node(peer.card, "silent", None, None, ())
    in_order = sorted(nodes.values(), key=lambda each: (each.rank is None, each.rank or 0, each.name, each.id))
    longest = max(tell.since for _, tell in told if bool(running) == (tell.state == "running"))
    waits = _waits({state.card.name: tell.wait for state, tell in told if tell.wait is not None})
    spoken = next((str(tell.versions) for tell in running if tell.versions is not None), "")
    state = "running" if running else "joining"
    return Run(name, state, longest, tuple(in_order), waits, protocol=spoken)


def _refused(told: list[tuple[PeerReport, Tell]]) -> set[str]:
    """Return the names of refused nodes that are not in the largest set of nodes that could form the run."""
    waits = [tell.wait for _, tell in told if tell.wait is not None]
    largest = max(sorted(wait.here for wait in waits), key=len, default=())
    return {trouble.where for wait in waits for trouble in wait.refused} - set(largest)


def _waits(by_node: Mapping[str, Wait]) -> tuple[str, ...]:
    """Return what nodes wait for, as lines; with node names, if the nodes report different things."""
    said = {name: tuple(_lines(wait)) for name, wait in by_node.items()}
    if len(set(said.values())) <= 1:
        return next(iter(said.values()), ())
    return tuple(f"{name}: {line}" for name, lines in said.items() for line in lines)


def _lines(wait: Wait) -> Iterator[str]:
    yield wait.text
    for trouble in (*wait.seeds, *wait.refused, *wait.problems):
        yield f"{trouble.where}: {trouble.why}"


def _ranks(told: list[tuple[PeerReport, Tell]]) -> dict[bytes, int]:
    """Return the ranks by node id; what a node reports about itself overrides what its peers report."""
    ranks = {peer.card.id: peer.rank for _, tell in told for peer in tell.peers if peer.rank >= 0}
    return ranks | {state.card.id: tell.rank for state, tell in told if tell.rank >= 0}


def _way(peer: PeerReport, ranks: Mapping[bytes, int]) -> Way:
    round_trip = peer.round_trip if peer.round_trip >= 0 else None
    rank = ranks.get(peer.card.id)
    return Way(peer.card.id.hex(), rank, peer.lane, peer.local, peer.remote, peer.interface, round_trip, peer.relay)


def _spell(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def as_json(drawn: Picture) -> dict[str, Any]:
    """Return the picture as plain values for JSON."""
    return asdict(drawn)
