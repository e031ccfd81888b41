"""A member that sends arbitrary messages to members that keep the protocol, in a world with a virtual clock.

`python -m covey.lab.hostile --seeds 1000` performs such plays. The messages of the hostile member are well-formed:
changed copies of real messages, repetitions of old ones, messages of other views, generations and lineages. Each play
is a function of its seed. Invariants:

1. A core raises nothing but RemoteProtocolError, and that only for messages of the hostile member: its link is closed.
2. The memory of a core is bounded, whatever the number of messages.
3. The honest members install one sequence of views. A member is believed when it announces a decided view, and its vote
   counts; so this is held for a hostile member that lies about everything else (`KEEPS_ITS_VOTES`).
4. When the hostile member is cut off, the others are in one view, or have learned that they are in none, within a
   bounded time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import itertools
import math
import random
import sys
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covey.base.errors import CoveyError, RemoteProtocolError
from covey.lab import lineages
from covey.lab.fuzz.mutations import Mutator
from covey.lab.fuzz.values import Maker, variants
from covey.lab.invariants import BrokenError
from covey.lab.world import SimulatedWorld
from covey.proto.ballot import first_record
from covey.proto.changes import Excluded, Freeze, Installed, QuorumLost, SendToNode
from covey.proto.membership import Membership
from covey.wire import membership as wire
from covey.wire.formation import Formation
from covey.wire.membership import Accept, Accepted, Decided, MemberKey, Promise, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.lab.world import Core, SimulatedLink
    from covey.wire.membership import View

HOSTILE_PATIENCE: Final = 20.0
HOSTILE_RELINK: Final = 0.5
HOSTILE_SECONDS: Final = 6.0
"""Less than half of patience, so that no member gives up only because its view was late."""
HONEST_TOGETHER_WITHIN: Final = 1.5 * HOSTILE_PATIENCE
"""Virtual seconds from when the hostile member is cut off until the others are in one view, or know better."""
MOST_LIES: Final = 300
"""Lies in one quarrel, after which the hostile member is cut off."""
MOST_LIES_OF_ONE: Final = 1500
"""Lies of one process of a hostile node, which then keeps the protocol."""
MOST_PARTS: Final = 3000
"""Parts of all that a core keeps: numbers, texts, entries of dicts."""
_REMEMBERED: Final = 100
_LIKE: Final = 20
_VOTES: Final = (Promise, Accept, Accepted, Decided)


class Mode(enum.Enum):
    """What the hostile member lies about."""

    KEEPS_ITS_VOTES = "keeps its votes"
    """Everything but what it promised, accepted, proposed and knows to be decided."""
    ANYTHING = "anything"


class HostileWorld(SimulatedWorld):
    """A world in which a message that breaks the protocol closes its link."""

    refused: Callable[[bytes, bytes, Any, RemoteProtocolError], None]

    def _deliver(self, source: bytes, target: bytes, link: SimulatedLink, message: Any) -> None:
        try:
            super()._deliver(source, target, link, message)
        except BrokenError:
            raise
        except RemoteProtocolError as error:
            self.refused(source, target, message, error)
            self.flap(source, target)
            self.settle(target)
        except Exception as error:
            raise BrokenError(f"{type(error).__name__}: {error}, because of {message}") from error


class Liar:
    """A node with a correct core that sends other messages as well."""

    def __init__(self, core: Core, chance: random.Random, mode: Mode, said: Any, enclosed: Any = None) -> None:
        """`said` is the type of what can be said, `enclosed` that of what can be said inside another message."""
        self.core, self._chance, self._mode = core, chance, mode
        self._every, self._drops = chance.choice([0.05, 0.1, 0.3]), chance.choice([0.0, 0.0, 0.2])
        self._twists = chance.choice([0.1, 0.5])
        self._kinds, self._enclosed = variants(said), variants(enclosed)
        self._maker = Maker(chance, at_bounds=0.01)
        self._mutator = Mutator(chance)
        self._known: dict[Any, deque[Any]] = {}
        """The last messages of each kind, of all members."""
        self._said: deque[Any] = deque(maxlen=_REMEMBERED)
        self._peers: set[bytes] = set()
        self._lie_at = 0.0
        self.lies: Counter[str] = Counter()

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        self._peers.add(peer_id)
        return self.core.link_up(peer_id, peer_life, now)

    def link_down(self, peer_id: bytes, now: float) -> None:
        self._peers.discard(peer_id)
        self.core.link_down(peer_id, now)

    def received(self, peer_id: bytes, message: Any, now: float) -> None:
        self._learn(message)
        with contextlib.suppress(CoveyError):  # it has talked itself into a corner
            self.core.received(peer_id, message, now)

    def tick(self, now: float) -> None:
        if now >= self.core.next_deadline():
            self.core.tick(now)
        if now >= self._lie_at:
            self._lie_at = now + self._every * self._chance.random()

    def next_deadline(self) -> float:
        return min(self.core.next_deadline(), self._lie_at)

    def outgoing(self) -> list[tuple[bytes, Any]]:
        out: list[tuple[bytes, Any]] = []
        for peer, message in self.core.outgoing():
            self._learn(message)
            self._said.append(message)
            draw = self._chance.random()
            if draw < self._twists:  # as what it should say at this moment, but not quite
                self._add(out, peer, self._checked(alter(message, self._mutator, self._chance)))
            if draw >= self._drops:
                out.append((peer, message))
        peers = sorted(self._peers)
        for _ in range(self._chance.choice([0, 1, 1, 3])):
            if peers and self.lies.total() < MOST_LIES_OF_ONE:
                self._add(out, self._chance.choice(peers), self._lie())
        return out

    def _add(self, out: list[tuple[bytes, Any]], peer: bytes, lie: Any) -> None:
        if lie is not None and self.lies.total() < MOST_LIES_OF_ONE:
            self.lies[type(lie).__name__] += 1
            out.append((peer, lie))

    def _checked(self, lie: Any) -> Any:
        """Return a lie that this member allows itself, or None."""
        is_vote = any(isinstance(part, _VOTES) for part in (lie, getattr(lie, "message", None)))
        return None if is_vote and self._mode is Mode.KEEPS_ITS_VOTES else lie

    def _learn(self, message: Any) -> None:
        kind = type(message), type(getattr(message, "message", None))
        self._known.setdefault(kind, deque(maxlen=_LIKE)).append(message)
        for part in _structs_in(message):
            self._mutator.learn(_plain(part))

    def _lie(self) -> Any:
        chance = self._chance
        if self._said and chance.random() < 0.2:
            return chance.choice(self._said)  # late, or to another one than it was for
        if not self._known:
            return None
        lie = chance.choice(chance.choice(list(self._known.values())))
        draw = chance.random()
        if draw < 0.25:
            lie = self._invent(lie)
        elif draw < 0.85:
            lie = alter(lie, self._mutator, chance)
        return self._checked(lie)

    def _invent(self, like: Any) -> Any:
        """Make a message of any kind, with ids and numbers of others; in the same envelope as one that was said."""
        inner = getattr(like, "message", None)
        kind = self._chance.choice(self._kinds if inner is None else self._enclosed)
        plain = self._mutator.disguised(self._maker.plain(kind))
        with contextlib.suppress(msgspec.MsgspecError, ValueError, TypeError, OverflowError):
            made = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=kind.cls)  # type: ignore[attr-defined]
            return made if inner is None else dataclasses.replace(like, message=made)
        return None


def alter(value: Any, mutator: Mutator, chance: random.Random) -> Any:
    """Return a well-formed message like this one; None if chance made none."""
    if isinstance(value, msgspec.Struct):
        for _ in range(8):
            try:
                changed = mutator.plain(_plain(value), keeps_types=chance.random() < 0.8)
                return msgspec.msgpack.decode(msgspec.msgpack.encode(changed), type=type(value))
            except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, UnicodeError, RecursionError):
                continue
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        field = chance.choice(dataclasses.fields(value)).name
        part = alter(getattr(value, field), mutator, chance)
        if type(part) is not type(getattr(value, field)) or (isinstance(part, bytes) and len(part) != 16):
            return None
        return dataclasses.replace(value, **{field: part})
    return mutator.alike(value)


def _plain(value: msgspec.Struct) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def _structs_in(message: Any) -> list[msgspec.Struct]:
    if isinstance(message, msgspec.Struct):
        return [message]
    parts = [getattr(message, field.name) for field in dataclasses.fields(message)]
    return [part for part in parts if isinstance(part, msgspec.Struct)]


def count_parts(core: object) -> int:
    """Return the number of parts in the memory of a core: numbers, texts, entries of dicts."""
    count, seen = 0, set()
    open_parts: list[Any] = [core]
    while open_parts:
        part = open_parts.pop()
        count += 1
        if isinstance(part, str | bytes | int | float | None | random.Random | enum.Enum) or callable(part):
            continue
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            open_parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset | deque):
            open_parts += part
        elif isinstance(part, msgspec.Struct):
            open_parts += [getattr(part, field) for field in part.__struct_fields__]
        elif hasattr(part, "__dict__"):
            open_parts += vars(part).values()
    return count


class HonestMember:
    """A correct member: it freezes when it is asked to, and reports its state."""

    def __init__(self, name: str, core: Membership, play: Quarrel, *, is_honest: bool) -> None:
        self.name, self.core, self._play, self.is_honest = name, core, play, is_honest
        self.end: Excluded | QuorumLost | None = None
        self.views: list[View] = [core.view]
        self._returned = 0
        self._disturb_at = math.inf
        self._out: list[tuple[bytes, Any]] = []

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        is_up = self.core.link_up(peer_id, peer_life, now)
        self._perform(now)
        return is_up

    def link_down(self, peer_id: bytes, now: float) -> None:
        self.core.link_down(peer_id, now)
        self._perform(now)

    def received(self, peer_id: bytes, message: Any, now: float) -> None:
        try:
            self.core.received(peer_id, message, now)
        finally:
            self._perform(now)

    def disturb(self, now: float) -> None:
        """Let an operation be late."""
        if self.end is None:
            self.core.disturbed(self.core.view.number, now)
            self._perform(now)

    def tick(self, now: float) -> None:
        self.core.tick(now)
        self._perform(now)

    def next_deadline(self) -> float:
        return self.core.next_deadline()

    def outgoing(self) -> list[tuple[bytes, Any]]:
        out, self._out = self._out, []
        if self.is_honest:
            self._play.proposed.update(message.view for _, message in out if isinstance(message, Accept))
        try:
            return [(peer, wire.decode_membership(wire.encode_membership(message))) for peer, message in out]
        except RemoteProtocolError as error:
            raise BrokenError(f"{self.name} says what cannot be said: {error}, {out}") from error

    def _perform(self, now: float) -> None:
        while effects := self.core.effects():
            for effect in effects:
                match effect:
                    case SendToNode(peer, message):
                        self._out.append((peer, message))
                    case Freeze(number):
                        self._returned += 1
                        ranks = tuple(range(len(self.core.ids)))
                        self.core.frozen(number, (State(0, ranks, self._returned),), now)
                    case Installed(view, _):
                        self._play.installed(self, view)
                        self.views.append(view)
                    case Excluded() | QuorumLost():
                        self.end = self.end or effect
                        if isinstance(effect, Excluded):
                            self.views.append(effect.view)


class Quarrel:
    """The views of one generation, with one hostile member."""

    delays = (0.002, 0.05, 0.2)
    losses = (0.0, 0.1, 0.3)
    disturbances = (1, 6)
    """How often operations of honest members are late while the hostile one talks."""
    lies, seconds = MOST_LIES, HOSTILE_SECONDS

    def __init__(self, seed: int, mode: Mode) -> None:
        """Plan everything from the seed."""
        self.seed, self.mode = seed, mode
        self.chance = chance = random.Random(f"{seed} {mode.value}")
        self.world = HostileWorld(seed, delay=chance.choice(self.delays), notice=0.3)
        self.world.loss = chance.choice(self.losses)
        self.world.refused = self._refused
        size = chance.randint(4, 6)
        self.ids = [chance.randbytes(32) for _ in range(size)]
        self.lives = [chance.randbytes(16) for _ in range(size)]
        self.hostile = chance.randrange(size)
        seats = [MemberKey(id, life) for id, life in zip(self.ids, self.lives, strict=True)]
        self.first = first_record(seats, chance.randbytes(16), anchor=chance.randrange(size))
        self.members: dict[bytes, HonestMember] = {}
        """The honest ones, by id."""
        self.refusals = 0
        self.most_parts = 0
        self._last_word_at = 1.0
        self.proposed: set[View] = set()
        """Views that honest members have proposed."""
        self._decided: dict[tuple[bytes, int], View] = {}
        for rank, id in enumerate(self.ids):
            core = Membership(
                self.first,
                id,
                self.lives[rank],
                random.Random(chance.random()),
                0.0,
                patience=HOSTILE_PATIENCE,
                relink=HOSTILE_RELINK,
            )
            member = HonestMember("abcdefgh"[rank], core, self, is_honest=rank != self.hostile)
            if rank == self.hostile:
                self.liar = Liar(member, random.Random(chance.random()), mode, wire.Membership)
                self.world.start(member.name, id, self.lives[rank], self.liar)
            else:
                self.members[id] = member
                self.world.start(member.name, id, self.lives[rank], member)
        self.world.introduce()
        for _ in range(chance.randint(*self.disturbances)):
            self.world.at(chance.uniform(0.2, self.seconds), self._disturb, chance.choice(sorted(self.members)))

    def _disturb(self, id: bytes) -> None:
        self.members[id].disturb(self.world.now)
        self.world.settle(id)

    def _refused(self, source: bytes, target: bytes, message: Any, error: RemoteProtocolError) -> None:
        self.refusals += 1
        if source not in self.members or target not in self.members:
            return
        if self.mode is Mode.KEEPS_ITS_VOTES or not (self._is_deceived(source) or self._is_deceived(target)):
            raise BrokenError(f"{self.members[target].name} refuses {self.members[source].name}: {error}, {message}")

    def _is_deceived(self, id: bytes) -> bool:
        """Tell whether a member believes in a view that no honest member proposed: others cannot follow it there."""
        return any(view not in self.proposed for view in self.members[id].views[1:])

    def installed(self, member: HonestMember, view: View) -> None:
        """Check that a new view of a member has some members of the last one, whatever was sent."""
        if not member.is_honest:
            return
        last = member.views[-1]
        is_sound = list(view.ranks) == sorted(set(view.ranks) & set(last.ranks)) and view.tie_breaker in view.ranks
        if not is_sound or (view.lineage, view.number) != (last.lineage, last.number + 1):
            raise BrokenError(f"{member.name} goes from {last} to {view}")
        if self.mode is Mode.ANYTHING:
            return
        if self._decided.setdefault((view.lineage, view.number), view) != view:
            raise BrokenError(f"view {view.number} has two values: {view} for {member.name}")

    def perform(self) -> None:
        """Run to the end; BrokenError as soon as something does not hold."""
        world = self.world
        for number in itertools.count(1):
            at = number * 0.25
            world.run(at)
            self._weigh()
            is_in = any(self.hostile in member.core.view.ranks for member in self.members.values())
            if at >= self.seconds or self.liar.lies.total() > self.lies or (at > self._last_word_at and not is_in):
                break
        world.crash(self.ids[self.hostile])
        world.loss = 0.0
        cut_at = world.now
        while problem := self._problem():
            if world.now > cut_at + HONEST_TOGETHER_WITHIN:
                raise BrokenError(f"{HONEST_TOGETHER_WITHIN:g} s after the hostile member was cut off: {problem}")
            for id in sorted(self.members):
                self._disturb_if_stuck(id)
            world.run(world.now + 0.5)
            self._weigh()

    def _disturb_if_stuck(self, id: bytes) -> None:
        """Ask for a view now and then: operations among members of different views do not end."""
        if self.mode is Mode.ANYTHING and self.chance.random() < 0.2:
            self._disturb(id)

    def _weigh(self) -> None:
        for member in self.members.values():
            self.most_parts = max(self.most_parts, size := count_parts(member.core))
            if size > MOST_PARTS:
                raise BrokenError(f"{member.name} keeps {size} things")

    def _problem(self) -> str:
        """Return what is not as it should be, once the hostile member is gone."""
        inside = [member for member in self.members.values() if member.end is None]
        if self.mode is Mode.KEEPS_ITS_VOTES and len(inside) < len(self.members):
            outside = [member.name for member in self.members.values() if member.end is not None]
            raise BrokenError(f"{outside} lost their seats: {[member.end for member in self.members.values()]}")
        hostile = self.hostile
        for member in inside:
            view, by_rank = member.core.view, {rank: self.members.get(id) for rank, id in enumerate(self.ids)}
            if view.successor is not None or not view.ranks:
                continue
            others = [other for rank in view.ranks if (other := by_rank[rank]) is not None]
            if hostile in view.ranks or any(other.core.view != view or other.end for other in others):
                return f"{member.name} is in {view.number} with {view.ranks}"
        return ""


class HostileStory(lineages.Story):
    """Whole runs of one name, from the first meeting on, with one hostile node."""

    worlds = HostileWorld

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world.refused = self._refused  # type: ignore[attr-defined]
        self.hostile = self.chance.choice(self.ids)
        self.refusals = self.most_parts = 0
        self.liars: list[Liar] = []

    def begin(self, index: int, *, is_returning: bool = False) -> None:
        if self.ids[index] != self.hostile:
            super().begin(index, is_returning=is_returning)
        elif self.hostile not in self.world.nodes:
            self.lives[index] += 1
            life = self.lives[index].to_bytes(8, "big") + self.chance.randbytes(8)
            process = self.processes[self.hostile] = lineages.SimulatedProcess(
                self, index, life, is_returning=is_returning
            )
            chance = random.Random(self.chance.random())
            self.liars.append(Liar(process, chance, Mode.ANYTHING, Formation, wire.Membership))
            self.world.start(self.name(index), self.hostile, life, self.liars[-1])

    def _refused(self, source: bytes, target: bytes, message: Any, error: RemoteProtocolError) -> None:
        self.refusals += 1

    # What members believe of a liar is not held here.

    def began(self, process: lineages.SimulatedProcess, bound: Any) -> None:
        pass

    def installed(self, process: lineages.SimulatedProcess, generation: int, view: View) -> None:
        pass

    def perform(self) -> None:
        """Run for as long as faults are planned; BrokenError if a core raises, or keeps too much."""
        while self.world.now < self.faults_end_at:
            self.world.run(self.world.now + 0.5)
            for id, process in self.processes.items():
                if id != self.hostile:
                    parts = [process.joining, *process.cores.values()]
                    self.most_parts = max(self.most_parts, size := sum(map(count_parts, parts)))
                    if size > MOST_PARTS:
                        raise BrokenError(f"{process.name} keeps {size} things")


def perform(seed: int) -> Counter[str]:
    """Perform the play of a seed, and count what happened; BrokenError tells what does not hold."""
    if seed % 3 == 2:
        story = HostileStory(seed)
        story.perform()
        lies = sum((liar.lies for liar in story.liars), Counter[str]())
        return Counter({"stories": 1, "lies": lies.total(), "links closed": story.refusals})
    play = Quarrel(seed, Mode.ANYTHING if seed % 3 else Mode.KEEPS_ITS_VOTES)
    play.perform()
    views = sum(len(member.views) - 1 for member in play.members.values())
    return Counter({"quarrels": 1, "lies": play.liar.lies.total(), "links closed": play.refusals, "views": views})


def main() -> int:
    """Perform plays with one hostile member, and count what happened."""
    parser = argparse.ArgumentParser(prog="python -m covey.lab.hostile", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many plays (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed (default: %(default)s)")
    asked = parser.parse_args()
    end_at, totals, broken = time.monotonic() + asked.seconds, Counter[str](), 0
    for seed in range(asked.first, asked.first + asked.seeds):
        try:
            totals += perform(seed)
        except BrokenError as error:
            broken += 1
            print(f"seed {seed}: {str(error)[:2000]}", flush=True)
        if time.monotonic() > end_at:
            break
    print(", ".join(f"{count} {what}" for what, count in totals.items()), f"{broken} broken", sep=", ")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
