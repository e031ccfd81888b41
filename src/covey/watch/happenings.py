"""What happened to a run, in words: each event once, although several ranks tell it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from covey.base.text import listed_briefly, listed_ranks, printable
from covey.runtime.events import VIEWS
from covey.watch.overview import Happening

if TYPE_CHECKING:
    from covey.watch.overview import Level
    from covey.wire.reports import PastEvent

HAPPENINGS_LIMIT: Final = 200
HAPPENING_LIMIT: Final = 300
UNINTERESTING: Final = ("lane", "leader", "generation")
"""Events that say nothing to a person who watches: every run has them all the time."""
HEARSAY: Final = "other members have given it up"
"""What a rank says of a loss that it has not noticed itself."""
EVENT_LEVELS: Final[dict[str, Level]] = {"lost": "warning", "refused": "warning", "suspected": "warning"}
HAPPENING_RANKS: Final = 64


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run."""

    at: float
    """By the clock of the machine that watches."""
    kind: str
    generation: int
    ranks: tuple[int, ...] = ()
    who: str = ""
    """`rank 3 (attic)`, `ranks 1 and 3`, or the name of a node that has no rank."""
    why: str = ""
    recovered: float | None = None
    """Milliseconds after which the run continued."""

    def shown(self) -> Happening:
        """Return what views show."""
        level = EVENT_LEVELS.get(self.kind, "note")
        if self.kind == "report" and "finite again" not in self.why:
            level = "warning"
        return Happening(self.at, self.kind, self.text, self.ranks[:HAPPENING_RANKS], level)

    @property
    def text(self) -> str:
        """What happened, as a sentence without a period."""
        return printable(self._text(), HAPPENING_LIMIT)

    def _text(self) -> str:
        who, why = self.who or "a rank", self.why
        because = f": {why}" if why else ""
        were = "were" if len(self.ranks) > 1 else "was"
        if self.kind == "lost":
            return f"{who} {were} lost{because}{self.recovery}"
        if self.kind == "left":
            return f"{who} left{because}{self.recovery}"
        if self.kind == "view":
            return f"the members agreed to continue together{because}{self.recovery}"
        if self.kind in _DONE:
            return f"{who} {_DONE[self.kind].format(were=were, are='are' if were == 'were' else 'is')}{because}"
        parts = [self.who, why]
        return ": ".join(filter(None, parts)) or self.kind

    @property
    def recovery(self) -> str:
        """How long the run stood still, to be appended; empty if that is not known."""
        return "" if self.recovered is None else f"; the run continued after {spell_ms(self.recovered)}"


_DONE: Final = {
    "joined": "joined the run",
    "restored": "got the state of the run",
    "suspected": "{are} not heard",
    "recovered": "{are} heard again",
    "discovered": "waits to join",
    "refused": "{were} refused",
    "moved": "is reached over another path",
    "striped": "is reached over several networks at once",
    "mtu": "gets shorter packets",
}
"""What follows the name."""


class TimeLine:
    """What happened to one run, bounded."""

    def __init__(self) -> None:
        self._events: dict[tuple[object, ...], RunEvent] = {}
        """By what tells events apart."""

    def take(self, told: PastEvent, *, ahead: float, has_machines: bool) -> None:
        """Take an event that a rank tells whose clock is so many seconds ahead.

        With `has_machines`, the run is on several machines, and ranks are named with theirs.
        """
        if told.kind in UNINTERESTING:
            return
        is_view = told.kind in VIEWS
        key = (told.kind, told.generation, told.view, told.ranks, told.names, "" if is_view else told.text)
        known = self._events.get(key)
        why = ", ".join(dict.fromkeys(each for each in told.text.split(", ") if each != HEARSAY))
        event = RunEvent(
            told.time - ahead if known is None else known.at,
            told.kind,
            told.generation,
            told.ranks,
            _who(told, has_machines=has_machines),
            why if known is None or not known.why else known.why,
            told.phases.get("redo", None if known is None else known.recovered),
        )
        self._events[key] = event
        if len(self._events) > HAPPENINGS_LIMIT:
            del self._events[next(iter(self._events))]

    def explain(self, generation: int, rank: int, why: str) -> None:
        """Note why a rank was lost, which its peers may know that did not tell of the loss."""
        for key, event in self._events.items():
            is_meant = event.kind == "lost" and event.generation == generation and event.ranks == (rank,)
            if is_meant and not event.why and why != HEARSAY:
                self._events[key] = replace(event, why=why)

    def last(self, *kinds: str) -> RunEvent | None:
        """Return the last event of these kinds."""
        found = [event for event in self._events.values() if event.kind in kinds]
        return max(found, key=lambda event: event.at, default=None)

    def shown(self) -> tuple[Happening, ...]:
        """Return what happened, the oldest first."""
        return tuple(event.shown() for event in sorted(self._events.values(), key=lambda event: event.at))


def _who(told: PastEvent, *, has_machines: bool) -> str:
    """Return whom an event is about: by rank, and by machine if the run is on several."""
    named = list(dict.fromkeys(told.names))
    if named and all(name.startswith("rank ") for name in named):  # with its machine already
        return listed_briefly(named)
    machines = list(dict.fromkeys(name.rpartition("-")[0] or name for name in named))
    if not told.ranks:
        return listed_briefly(machines)
    ranks = f"rank{'s' * (len(told.ranks) > 1)} {listed_ranks(sorted(told.ranks))}"
    return f"{ranks} ({listed_briefly(machines)})" if machines and has_machines else ranks


def spell_ms(milliseconds: float) -> str:
    """Return a duration in words."""
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
