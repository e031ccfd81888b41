"""A network that exists only in virtual time: cores without I/O meet on it, and it treats them badly on purpose.

A `World` has one clock and one seeded source of chance, so a run is a function of its seed. Nodes that can reach each
other are given links, with some delay; each end learns in its own time that a link is up or gone. A message travels on
the link it was sent on, in order, unless it is lost: by chance, in a cut direction, or with its link. `reorder` and
`duplicate` make it worse than any link would be. A node may crash, be stopped for a while, be slow, and have a clock
that is wrong.
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
    """What a world can run: a state machine that is told of links, messages and time."""

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool: ...
    def link_down(self, peer_id: bytes, now: float) -> None: ...
    def received(self, peer_id: bytes, message: Any, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def next_deadline(self) -> float: ...
    def outgoing(self) -> list[tuple[bytes, Any]]: ...


class Node:
    """One life of one node in a world."""

    def __init__(self, id: bytes, life: bytes, core: Core) -> None:
        self.id, self.life, self.core = id, life, core
        self.links: dict[bytes, Link] = {}
        """The links this node believes to be up, by peer."""
        self.alarm_at = math.inf
        self.lag = 0.0
        """How late it may notice anything."""
        self.clock_rate, self.clock_ahead = 1.0, 0.0
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
        """While it is stopped: what it will notice when it goes on."""

    def clock(self, now: float) -> float:
        """Return what its clock shows."""
        return now * self.clock_rate + self.clock_ahead


class Link:
    """A connection between two lives; it is up for each end from when that end is told until it is told otherwise."""

    def __init__(self, one: Node, other: Node) -> None:
        self.ends = (one, other)
        self.is_broken = False
        self.carries = True
        """Messages that are sent may arrive."""
        self.last_arrival = {(id, is_streamed): 0.0 for id in (one.id, other.id) for is_streamed in (False, True)}


class World:
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

        `delay` is the longest a message, or the news of a broken link, takes; `notice` how long a silent loss goes
        unnoticed, at most. `loss`, `duplicate` and `reorder` are probabilities for each message. With `describe`, the
        `story` tells who said what when.
        """
        self.now = 0.0
        self.random = random.Random(seed)
        self.nodes: dict[bytes, Node] = {}
        self.story: list[str] = []
        self.delay, self.loss, self.duplicate, self.reorder, self.notice = delay, loss, duplicate, reorder, notice
        self.streamed: set[type] = set()
        """Messages that have a stream of their own: they are only lost with their link, in order among themselves."""
        self.stream_delay = delay
        self._describe = describe
        self._names: dict[bytes, str] = {}
        self._cuts: set[tuple[bytes, bytes]] = set()
        """Directions in which nothing arrives."""
        self._links: dict[tuple[bytes, bytes], Link] = {}
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    # What happens to nodes.

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` at a time to come."""
        heapq.heappush(self._due, (when, next(self._order), action, args))

    def start(
        self, name: str, id: bytes, life: bytes, core: Core, *, clock_rate: float = 1.0, clock_ahead: float = 0.0
    ) -> Node:
        """Let a node begin, or begin again after a crash: it will be given links with all it can reach."""
        if id in self.nodes:
            raise ValueError(f"{name} is alive")
        self._names[id] = name
        node = self.nodes[id] = Node(id, life, core)
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
            link = self._links[pair] = Link(one, other)
            self._up(one, other, link)
            self._up(other, one, link)

    def settle(self, id: bytes) -> None:
        """Let what a core was told by somebody else than the world take effect."""
        if (node := self.nodes.get(id)) is not None:
            self._settle(node)

    def crash(self, id: bytes, *, silently: bool = False) -> None:
        """End a node's life. Others see its links close; `silently` (the power is cut) they only miss it."""
        node = self.nodes.pop(id, None)
        if node is None:
            return
        self.tell(f"{self._names[id]} crashes{' silently' if silently else ''}")
        for peer in sorted(self.nodes):
            if (link := self._links.pop(_pair(id, peer), None)) is not None:
                self._break(link, self.notice if silently else self.delay)

    def stop(self, id: bytes) -> None:
        """Let a node do nothing until it is resumed. Its links stay up; what reaches it waits."""
        node = self.nodes.get(id)
        if node is not None and node.backlog is None:
            self.tell(f"{self._names[id]} is stopped")
            node.backlog = []

    def resume(self, id: bytes) -> None:
        """Let a stopped node go on where it was: it notices at once all that it missed."""
        node = self.nodes.get(id)
        if node is not None and node.backlog is not None:
            self.tell(f"{self._names[id]} goes on")
            backlog, node.backlog = node.backlog, None
            for action, args in backlog:
                action(*args)

    def slow(self, id: bytes, lag: float) -> None:
        """Let a node notice messages and time up to `lag` late from now on."""
        if (node := self.nodes.get(id)) is not None:
            self.tell(f"{self._names[id]} is {f'up to {lag:.2f} s late' if lag else 'quick again'}")
            node.lag = lag

    def flap(self, one: bytes, other: bytes) -> None:
        """Break the link between two nodes; another will take its place."""
        if (link := self._links.pop(_pair(one, other), None)) is not None:
            self.tell(f"the link {self._names[one]}-{self._names[other]} breaks")
            self._break(link, self.delay)
            self._dial_soon(one, other)

    def cut(self, source: bytes, target: bytes) -> None:
        """Let nothing arrive from `source` at `target`: their link goes down when the silence is noticed."""
        self._cuts.add((source, target))
        if (link := self._links.pop(_pair(source, target), None)) is not None:
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
        for pair in sorted({_pair(*cut) for cut in cuts}):
            self._dial_soon(*pair)

    # The clock.

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until a moment, or until `is_over`, which is asked after every event; return whether it was."""
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, action, args = heapq.heappop(due)
            action(*args)
            if is_over():
                return True
        self.now = until
        return False

    def tell(self, line: str) -> None:
        """Add to the story, if it is told."""
        if self._describe is not None:
            self.story.append(f"{self.now:8.3f}  {line}")

    def _settle(self, node: Node) -> None:
        """Send what a core has to say after a step, and set its alarm."""
        for peer_id, message in node.core.outgoing():
            if (link := node.links.get(peer_id)) is not None:
                self._send(node, peer_id, link, message)
        deadline = node.core.next_deadline()
        if deadline < node.alarm_at:
            node.alarm_at = deadline
            at = max((deadline - node.clock_ahead) / node.clock_rate, self.now)
            self.at(at + (node.lag and node.lag * self.random.random()), self._ring, node, deadline)

    def _ring(self, node: Node, alarm_at: float) -> None:
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

    def _send(self, source: Node, target: bytes, link: Link, message: Any) -> None:
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

    def _deliver(self, source: bytes, target: bytes, link: Link, message: Any) -> None:
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
        pair = _pair(one, other)
        if not self.nodes.keys() >= {one, other} or pair in self._links or self._cuts & {pair, pair[::-1]}:
            return
        ends = self.nodes[one], self.nodes[other]
        if any(there.id in here.links for here, there in (ends, ends[::-1])):
            self._dial_soon(one, other)  # an end has not noticed yet that its last link is gone
            return
        link = self._links[pair] = Link(*ends)
        for here, there in (ends, ends[::-1]):
            self.at(self.now + self.delay * self.random.random(), self._up, here, there, link)

    def _up(self, here: Node, there: Node, link: Link) -> None:
        if self.nodes.get(here.id) is not here or link.is_broken:
            return
        if here.backlog is not None:
            here.backlog.append((self._up, (here, there, link)))
            return
        if here.core.link_up(there.id, there.life, here.clock(self.now)):
            here.links[there.id] = link
        self._settle(here)

    def _break(self, link: Link, delay: float, *, still_carries: bool = False) -> None:
        link.is_broken, link.carries = True, still_carries
        one, other = link.ends
        for here, there in ((one, other), (other, one)):
            self.at(self.now + delay * self.random.random(), self._down, here, there, link)

    def _down(self, here: Node, there: Node, link: Link) -> None:
        if self.nodes.get(here.id) is here and here.links.get(there.id) is link:
            if here.backlog is not None:
                here.backlog.append((self._down, (here, there, link)))
                return
            del here.links[there.id]
            here.core.link_down(there.id, here.clock(self.now))
            self._settle(here)


def _pair(one: bytes, other: bytes) -> tuple[bytes, bytes]:
    return (one, other) if one < other else (other, one)
