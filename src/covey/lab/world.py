"""A simulated, unreliable network in virtual time, on which cores without I/O run.

A `SimulatedWorld` has one clock and one seeded source of randomness, so a run is a function of its seed. Nodes that can
reach each other get links, with some delay; each end learns separately that a link is up or down. A message travels on
the link it was sent on, in order, unless it is lost: at random, in a cut direction, or with its link. `reorder` and
`duplicate` add faults that no real link has. A node may crash, be stopped for a while, be slow, and have a wrong clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Core(Protocol):
    """What a world can run: a state machine with links, messages and time as input."""

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool: ...
    def link_down(self, peer_id: bytes, now: float) -> None: ...
    def received(self, peer_id: bytes, message: Any, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def next_deadline(self) -> float: ...
    def outgoing(self) -> list[tuple[bytes, Any]]: ...


class SimulatedNode:
    """One incarnation of a node in a world."""

    def __init__(self, id: bytes, life: bytes, core: Core) -> None:
        self.id, self.life, self.core = id, life, core
        self.links: dict[bytes, SimulatedLink] = {}
        """The links this node believes to be up, by peer."""
        self.alarm_at = math.inf
        self.lag = 0.0
        """How late it may notice anything."""
        self.clock_rate, self.clock_ahead = 1.0, 0.0
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
        """While it is stopped: the events that it handles when it continues."""

    def clock(self, now: float) -> float:
        """Return the time on its clock."""
        return now * self.clock_rate + self.clock_ahead


class SimulatedLink:
    """A connection between two incarnations. Each end has its own view of whether the link is up."""

    def __init__(self, one: SimulatedNode, other: SimulatedNode) -> None:
        self.ends = (one, other)
        self.is_broken = False
        self.carries = True
        """Whether messages that are sent may arrive."""
        self.last_arrival = {(id, is_streamed): 0.0 for id in (one.id, other.id) for is_streamed in (False, True)}


class SimulatedWorld:
    """Nodes, the links between them, and the clock."""

    def __init__(
        self,
        seed: int,
        *,
        delay: float = 0.05,
        loss: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        notice: float = 1.0,
        describe: Callable[[Any], str] | None = None,
    ) -> None:
        """Make an empty world.

        `delay` is the longest time that a message, or the news of a broken link, takes; `notice` is the longest time
        that a silent loss goes unnoticed. `loss`, `duplicate` and `reorder` are probabilities for each message. With
        `describe`, `story` records every message with its time.
        """
        self.now = 0.0
        self.random = random.Random(seed)
        self.nodes: dict[bytes, SimulatedNode] = {}
        self.story: list[str] = []
        self.delay, self.loss, self.duplicate, self.reorder, self.notice = delay, loss, duplicate, reorder, notice
        self.streamed: set[type] = set()
        """Messages with a stream of their own: they are lost only with their link, and stay in order."""
        self.stream_delay = delay
        self._describe = describe
        self._names: dict[bytes, str] = {}
        self._cuts: set[tuple[bytes, bytes]] = set()
        """Directions in which nothing arrives."""
        self._links: dict[tuple[bytes, bytes], SimulatedLink] = {}
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    # Events of nodes.

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` at the time `when`."""
        heapq.heappush(self._due, (when, next(self._order), action, args))

    def start(
        self, name: str, id: bytes, life: bytes, core: Core, *, clock_rate: float = 1.0, clock_ahead: float = 0.0
    ) -> SimulatedNode:
        """Start a node, or restart it after a crash; it gets links with all nodes that it can reach."""
        if id in self.nodes:
            raise ValueError(f"{name} is alive")
        self._names[id] = name
        node = self.nodes[id] = SimulatedNode(id, life, core)
        node.clock_rate, node.clock_ahead = clock_rate, clock_ahead
        self.tell(f"{name} starts as life {life.hex()[:4]}")
        for peer in sorted(self.nodes.keys() - {id}):
            self._dial_soon(id, peer)
        self._settle(node)
        return node

    def introduce(self) -> None:
        """Give all nodes links with each other at once."""
        for pair in itertools.combinations(sorted(self.nodes), 2):
            one, other = (self.nodes[id] for id in pair)
            link = self._connect(one, other)
            self._up(one, other, link)
            self._up(other, one, link)

    def settle(self, id: bytes) -> None:
        """Perform the effects of a core that was called directly, not by the world."""
        if (node := self.nodes.get(id)) is not None:
            self._settle(node)

    def crash(self, id: bytes, *, silently: bool = False) -> None:
        """Crash a node. Other nodes see its links close; with `silently` (a power cut) they only hear nothing."""
        node = self.nodes.pop(id, None)
        if node is None:
            return
        self.tell(f"{self._names[id]} crashes{' silently' if silently else ''}")
        for peer in sorted(self.nodes):
            if (link := self._links.pop(pair_of(id, peer), None)) is not None:
                self._break(link, self.notice if silently else self.delay)

    def stop(self, id: bytes) -> None:
        """Stop a node until it is resumed. Its links stay up; messages for it wait."""
        node = self.nodes.get(id)
        if node is not None and node.backlog is None:
            self.tell(f"{self._names[id]} is stopped")
            node.backlog = []

    def resume(self, id: bytes) -> None:
        """Continue a stopped node: it handles at once all events that it missed."""
        node = self.nodes.get(id)
        if node is not None and node.backlog is not None:
            self.tell(f"{self._names[id]} goes on")
            backlog, node.backlog = node.backlog, None
            for action, args in backlog:
                action(*args)

    def slow(self, id: bytes, lag: float) -> None:
        """Make a node handle messages and time up to `lag` seconds late from now on."""
        if (node := self.nodes.get(id)) is not None:
            self.tell(f"{self._names[id]} is {f'up to {lag:.2f} s late' if lag else 'quick again'}")
            node.lag = lag

    def flap(self, one: bytes, other: bytes) -> None:
        """Break the link between two nodes; another one replaces it."""
        if (link := self._links.pop(pair_of(one, other), None)) is not None:
            self.tell(f"the link {self._names[one]}-{self._names[other]} breaks")
            self._break(link, self.delay)
            self._dial_soon(one, other)

    def cut(self, source: bytes, target: bytes) -> None:
        """Drop everything from `source` to `target`: their link goes down when the silence is noticed."""
        self._cuts.add((source, target))
        if (link := self._links.pop(pair_of(source, target), None)) is not None:
            self._break(link, self.notice, still_carries=True)

    def partition(self, *groups: Iterable[bytes]) -> None:
        """Cut all directions between nodes of different groups."""
        sides = [sorted(group) for group in groups]
        self.tell("cut: " + " | ".join(",".join(self._names.get(id, "?") for id in side) for side in sides))
        for one, other in itertools.permutations(sides, 2):
            for pair in itertools.product(one, other):
                self.cut(*pair)

    def heal(self) -> None:
        """Undo all cuts."""
        self.tell("the network heals")
        cuts, self._cuts = self._cuts, set()
        for pair in sorted({pair_of(*cut) for cut in cuts}):
            self._dial_soon(*pair)

    # The clock.

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Run until the time `until`, or until `is_over()` after an event; return whether it was over."""
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, action, args = heapq.heappop(due)
            action(*args)
            if is_over():
                return True
        self.now = until
        return False

    def tell(self, line: str) -> None:
        """Add a line to the story, if it is recorded."""
        if self._describe is not None:
            self.story.append(f"{self.now:8.3f}  {line}")

    def _settle(self, node: SimulatedNode) -> None:
        """Send the messages of a core after a step, and set its alarm."""
        for peer_id, message in node.core.outgoing():
            if (link := node.links.get(peer_id)) is not None:
                self._send(node, peer_id, link, message)
        deadline = node.core.next_deadline()
        if deadline < node.alarm_at:
            node.alarm_at = deadline
            at = max((deadline - node.clock_ahead) / node.clock_rate, self.now)
            self.at(at + (node.lag and node.lag * self.random.random()), self._ring, node, deadline)

    def _ring(self, node: SimulatedNode, alarm_at: float) -> None:
        if self.nodes.get(node.id) is not node or node.alarm_at != alarm_at:
            return
        if node.backlog is not None:
            node.backlog.append((self._ring, (node, alarm_at)))
            return
        node.alarm_at = math.inf
        # A clock that is multiplied may show a little less than the deadline it was set for.
        if node.core.next_deadline() <= node.clock(self.now) + 1e-9:
            node.core.tick(max(node.clock(self.now), alarm_at))
        self._settle(node)

    # The network.

    def _send(self, source: SimulatedNode, target: bytes, link: SimulatedLink, message: Any) -> None:
        chance = self.random.random
        is_streamed = type(message) in self.streamed
        if self._describe is not None:
            self.tell(f"{self._names[source.id]} > {self._names[target]}  {self._describe(message)}")
        for _ in range(2 if self.duplicate and chance() < self.duplicate else 1):
            if not link.carries or (source.id, target) in self._cuts:
                continue
            if chance() < self.loss and not is_streamed:
                continue
            arrival = self.now + (self.stream_delay if is_streamed else self.delay) * chance()
            if (node := self.nodes.get(target)) is not None and node.lag:
                arrival += node.lag * chance()
            if not self.reorder or chance() >= self.reorder:
                key = (target, is_streamed)
                arrival = link.last_arrival[key] = max(arrival, link.last_arrival[key])
            self.at(arrival, self._deliver, source.id, target, link, message)

    def _deliver(self, source: bytes, target: bytes, link: SimulatedLink, message: Any) -> None:
        node = self.nodes.get(target)
        if node is not None and node.links.get(source) is link:
            if node.backlog is not None:
                node.backlog.append((self._deliver, (source, target, link, message)))
                return
            node.core.received(source, message, node.clock(self.now))
            self._settle(node)

    def _dial_soon(self, one: bytes, other: bytes) -> None:
        self.at(self.now + self.delay * (0.2 + self.random.random()), self._dial, one, other)

    def _dial(self, one: bytes, other: bytes) -> None:
        pair = pair_of(one, other)
        if not self.nodes.keys() >= {one, other} or pair in self._links or self._cuts & {pair, pair[::-1]}:
            return
        ends = self.nodes[one], self.nodes[other]
        if any(there.id in here.links for here, there in (ends, ends[::-1])):
            self._dial_soon(one, other)  # an end has not noticed yet that its last link is gone
            return
        link = self._connect(*ends)
        for here, there in (ends, ends[::-1]):
            self.at(self.now + self.delay * self.random.random(), self._up, here, there, link)

    def _connect(self, one: SimulatedNode, other: SimulatedNode) -> SimulatedLink:
        link = self._links[pair_of(one.id, other.id)] = SimulatedLink(one, other)
        return link

    def _up(self, here: SimulatedNode, there: SimulatedNode, link: SimulatedLink) -> None:
        if self.nodes.get(here.id) is not here or link.is_broken:
            return
        if here.backlog is not None:
            here.backlog.append((self._up, (here, there, link)))
            return
        if here.core.link_up(there.id, there.life, here.clock(self.now)):
            here.links[there.id] = link
        self._settle(here)

    def _break(self, link: SimulatedLink, delay: float, *, still_carries: bool = False) -> None:
        link.is_broken, link.carries = True, still_carries
        one, other = link.ends
        for here, there in ((one, other), (other, one)):
            self.at(self.now + delay * self.random.random(), self._down, here, there, link)

    def _down(self, here: SimulatedNode, there: SimulatedNode, link: SimulatedLink) -> None:
        if self.nodes.get(here.id) is here and here.links.get(there.id) is link:
            if here.backlog is not None:
                here.backlog.append((self._down, (here, there, link)))
                return
            del here.links[there.id]
            here.core.link_down(there.id, here.clock(self.now))
            self._settle(here)


def pair_of(one: bytes, other: bytes) -> tuple[bytes, bytes]:
    """Return the key of the link between two nodes."""
    return (one, other) if one < other else (other, one)
