"""Short runs of the real cores without chance, told as transcripts that people can read: `tests/sim/scripts/*.txt`.

One line is one message at the time when it arrives: `time  sender -> receiver  message  | state of the receiver`. The
state is told when it has changed. What nodes decide by themselves, because time has passed, has a line of its own. Left
out: pulses of the leader, announcements that repeat the last one, and messages that never arrive.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from covey.lab import lineages
from covey.lab.lineages import Disk, EndedNotice, FoundedNotice, SimulatedProcess, Story, ViewNotice
from covey.lab.world import SimulatedWorld
from covey.wire.formation import Answer, Here, Outcome, Phase, Propose, Standing, Terms
from covey.wire.membership import Accept, Accepted, Decided, Prepare, Promise, Pulse, Refuse, Seated, Trouble, View

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.lab.world import SimulatedLink, SimulatedNode

NAMES = "abc"
WIDTH = 72
"""Where the state of the receiver begins."""
WAITS = {
    "nodes": "more nodes",
    "links": "links between all nodes",
    "agreement": "agreement on a view",
    "run": "a seat in the run",
    "earlier-run": "an earlier run",
}
SIZED, OPEN = (
    Terms("a run", "train.py", 3, 2, None, "1", "auto"),
    Terms("a run", "train.py", None, 2, None, "1", "auto"),
)


class RecordingWorld(SimulatedWorld):
    """A world that records what arrives, and how nodes change."""

    def __init__(self, script: Script) -> None:
        super().__init__(1, delay=0.01, notice=0.3)
        self._script = script
        self._states: dict[bytes, str] = {}
        self._heard: dict[tuple[bytes, bytes], str] = {}
        self._delivering = ""

    def tell(self, line: str) -> None:
        self.story.append(f"{self.now:7.3f}  {line.partition(' as life ')[0]}")

    def _deliver(self, source: bytes, target: bytes, link: SimulatedLink, message: Any) -> None:
        text = self._script.describe(message)
        is_repeated = isinstance(message, Here) and self._heard.get((source, target)) == text
        self._heard[source, target] = text
        if text and not is_repeated:
            self._delivering = f"{self._names[source]} -> {self._names[target]}  {text}"
        super()._deliver(source, target, link, message)
        if self._delivering:
            self.tell(self._delivering)
        self._delivering = ""

    def _settle(self, node: SimulatedNode) -> None:
        super()._settle(node)
        state, name = self._script.state(node.core), self._names[node.id]
        if state == self._states.get(node.id):
            return
        self._states[node.id] = state
        if self._delivering:
            self.tell(f"{self._delivering:{WIDTH}}| {name}: {state}")
            self._delivering = ""
        else:
            self.tell(f"{name}: {state}")


class Script(Story):
    """One run whose machines do as they are told."""

    def __init__(self, terms: Terms = SIZED) -> None:
        self.chance = random.Random(1)
        self.terms, self.ids = terms, [name.encode() * 32 for name in NAMES]
        self.disks, self.lives = [Disk() for _ in self.ids], [0] * len(self.ids)
        self.processes: dict[bytes, SimulatedProcess] = {}
        self.left_early: set[bytes] = set()
        self.words, self.is_good = 0, True
        self._agreed: set[tuple[bytes, bytes]] = set()
        self.world = RecordingWorld(self)

    # What the processes of a story report; these runs are checked by reading.

    def remember(self, process: SimulatedProcess, remembered: Any) -> None:
        process.disk.remembered = remembered

    def informed(self, process: SimulatedProcess, here: Here) -> None: ...
    def accepted(self, process: SimulatedProcess, bound: Any) -> None: ...
    def began(self, process: SimulatedProcess, bound: Any) -> None: ...
    def installed(self, process: SimulatedProcess, generation: int, view: View) -> None: ...

    def gone(self, process: SimulatedProcess) -> None:
        if self._is_current(process):
            self.world.crash(process.id)
            self.world.story[-1] = self.world.story[-1].replace("crashes", "ends its process")

    # What the script says.

    def at(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.world.at(seconds, action, *args)

    def start(self, name: str) -> None:
        self.begin(NAMES.index(name))

    def crash(self, name: str) -> None:
        self.world.crash(self.ids[NAMES.index(name)])

    def leave(self, name: str) -> None:
        self.world.tell(f"the program of {name} ends")
        self.processes[self.ids[NAMES.index(name)]].finish(self.world.now, is_finished=True)

    def cut(self, one: str, other: str) -> None:
        self.world.partition(*({self.ids[NAMES.index(name)] for name in side} for side in (one, other)))

    def take_in(self) -> None:
        self.world.tell("the members agree to take in the nodes that wait")
        members = [process for process in self.processes.values() if process.is_member]
        self._take_in(members)

    # For people.

    def state(self, process: Any) -> str:
        core = process.core
        if core is None:
            return f"waits for {WAITS[process.joining.formation.waits_for()]}"
        view = f"generation {process.generation}, {self._view(core.view)}"
        if not core.is_member:
            return f"not a member; {view}"
        if core._round.states is not None:
            return f"{view}, frozen"
        return f"{view}, needs a view" if core._need.is_there else view

    def describe(self, message: Any) -> str:
        match message:
            case Here():
                phase = {Phase.JOINING: "joining", Phase.LOCKED: "accepted a view", Phase.FORMED: "in the run"}
                hears = " ".join(sorted(self._name_of_life(life) for life in message.hears))
                waits = ", waits for the run" if message.lineage and message.phase is Phase.JOINING else ""
                return f"here: {phase[message.phase]}{waits}, hears {hears or 'no node'}"
            case Propose():
                return f"propose {' '.join(member.name for member in message.members)}"
            case Standing():
                said = {Answer.NONE: "?", Answer.ACCEPTED: "yes", Answer.REFUSED: "no"}
                rows = ", ".join(
                    f"{NAMES[rank]} {said[row.answer]}{' and votes' * (row.voted >= 0)}"
                    for rank, row in enumerate(message.rows)
                )
                outcome = "" if message.outcome is Outcome.OPEN else f"; outcome {message.outcome.name.lower()}"
                return f"standing: {rows}{outcome}"
            case FoundedNotice(_, successor):
                names = " ".join(self._name_of_life(seat.life) for seat in successor.members)
                return f"founded: generation {successor.generation} of {names}"
            case EndedNotice(ending):
                return f"ended: the run is {'finished' if ending.is_finished else 'over'}"
            case ViewNotice(_, body):
                return self._describe_vote(body)
        raise AssertionError(message)

    def _describe_vote(self, message: Any) -> str:
        match message:
            case Pulse():
                return ""
            case Prepare():
                return f"prepare view {message.number}, ballot {message.ballot}"
            case Promise():
                only_votes = ", only votes" * (message.states is None)
                goes_on = "" if message.successor is None else f", goes on in generation {message.successor.generation}"
                return f"promise ballot {message.ballot}: hears {self._ranks(message.hears)}{only_votes}{goes_on}"
            case Accept():
                return f"accept in ballot {message.ballot}: {self._view(message.view)}"
            case Accepted():
                return f"accepted ballot {message.ballot}"
            case Refuse():
                return f"refuse: promised ballot {message.promised}"
            case Decided():
                return f"decided: {self._view(message.view)}"
            case Trouble():
                what = "leaves" if message.leaves else "needs another view"
                return f"trouble in view {message.number}: {what}{', its program has ended' * message.is_finished}"
            case Seated():
                return f"seated: you have a seat in generation {message.generation.generation}"
        raise AssertionError(message)

    def _view(self, view: View) -> str:
        if not view.ranks:
            return f"view {view.number}: the run is {'finished' if view.is_finished else 'over'}"
        follows = "" if view.successor is None else f", then generation {view.successor.generation}"
        return f"view {view.number}: {self._ranks(view.ranks)}{follows}"

    def _ranks(self, ranks: tuple[int, ...]) -> str:
        return " ".join(NAMES[rank] for rank in ranks) or "no rank"

    def _name_of_life(self, life: bytes) -> str:
        return next(process.name for process in self.processes.values() if process.life == life)


def formation() -> Script:
    """Three nodes find each other one by one, and agree on the first view."""
    script = Script()
    for at, name in ((0.0, "a"), (0.1, "b"), (0.3, "c")):
        script.at(at, script.start, name)
    script.world.run(2.0)
    return script


def _formed(terms: Terms = SIZED, names: str = NAMES) -> Script:
    script = Script(terms)
    for name in names:
        script.start(name)
    script.world.run(5.0)
    script.world.story.clear()
    return script


def lost_member() -> Script:
    """A member of three crashes: the other two decide the next view."""
    script = _formed()
    script.at(5.0, script.crash, "c")
    script.world.run(8.0)
    return script


def cut_network() -> Script:
    """The network splits: the side with the quorum continues, the other one gives up after its patience."""
    script = _formed()
    script.at(5.0, script.cut, "ab", "c")
    script.world.run(5.0 + 2 * lineages.STORY_PATIENCE)
    return script


def leaving_member() -> Script:
    """The program of one member ends before the others: they continue without it."""
    script = _formed()
    script.at(5.0, script.leave, "b")
    script.world.run(8.0)
    return script


def newcomer() -> Script:
    """A node joins a run of two: the members decide a view that ends their generation and names the next."""
    script = _formed(OPEN, "ab")
    script.at(5.0, script.start, "c")
    script.at(6.0, script.take_in)
    script.world.run(8.0)
    return script


SCRIPTS: dict[str, Callable[[], Script]] = {
    made.__name__: made for made in (formation, lost_member, cut_network, leaving_member, newcomer)
}


def text_of(made: Callable[[], Script]) -> str:
    """Return a whole transcript."""
    return "\n".join([f"# {made.__doc__}", "", *(line.rstrip() for line in made().world.story), ""])
