"""What a node knows about the lineages of its run, and which of them it may join.

A node that knows of a lineage that may be going on is a newcomer of that lineage. It founds no other run of that name
until it learns that the lineage is over, or until the user gives the lineage up on its machine. Of several lineages it
follows the oldest: a younger one ends when its members link with an older one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.wire.formation import MAX_ENDED, MAX_GIVEN_UP, MAX_NAMES, MAX_OPEN, Ending, KnownLineage, Remembered

if TYPE_CHECKING:
    from collections.abc import Iterable

TOLD: Final = 8
"""Endings of each kind that a node announces to its peers; the latest ones."""


def merge(one: Remembered, other: Remembered) -> Remembered:
    """Return what two processes of one machine know together."""
    together = Lineages(one)
    for ending in other.ended:
        together.end(ending)
    for known in other.open:
        together.learn(known.lineage, known.names, is_ours=known.is_ours)
    together.note_given_up(other.given_up)
    return together.remembered


class Lineages:
    """The lineages of one run, as one node knows them. `is_changed` tells that `remembered` is to be made durable."""

    def __init__(self, remembered: Remembered | None = None, abandoned: Iterable[bytes] = ()) -> None:
        """Begin with what is on disk; the user has given up the `abandoned` lineages."""
        remembered = remembered if remembered is not None else Remembered()
        self._open = {known.lineage: known.names for known in remembered.open}
        self._ours = {known.lineage for known in remembered.open if known.is_ours}
        self._ended = {ending.lineage: ending for ending in remembered.ended}
        self._abandoned = frozenset(abandoned)
        self._given_up = dict.fromkeys((*remembered.given_up, *self._abandoned))
        self._tentative = b""
        self.is_changed = False

    @property
    def current(self) -> bytes:
        """The oldest lineage that may be going on; empty if there is none.

        A founding that this node has accepted counts only when it is committed, or after a crash.
        """
        return min((lineage for lineage in self._open if lineage != self._tentative), default=b"")

    @property
    def remembered(self) -> Remembered:
        """What to write to disk."""
        known = tuple(KnownLineage(lineage, names, lineage in self._ours) for lineage, names in self._open.items())
        return Remembered(known, tuple(self._ended.values()), tuple(self._given_up)[-MAX_GIVEN_UP:])

    def names(self, lineage: bytes) -> tuple[str, ...]:
        """Return the members of an open lineage, as far as they are known."""
        return self._open.get(lineage, ())

    def is_open(self, lineage: bytes) -> bool:
        """Tell whether a lineage is known, and may be going on."""
        return lineage in self._open

    def ending(self, lineage: bytes) -> Ending | None:
        """Return how a lineage ended, if it is known to be over."""
        return self._ended.get(lineage)

    def latest_endings(self) -> tuple[Ending, ...]:
        """Return the endings to announce."""
        kinds = ([ending for ending in self._ended.values() if ending.is_finished is kind] for kind in (True, False))
        return tuple(ending for kind in kinds for ending in kind[-TOLD:])

    def is_abandoned(self, lineage: bytes) -> bool:
        """Tell whether the user gave a lineage up for this process."""
        return lineage in self._abandoned

    def was_given_up(self, lineage: bytes) -> bool:
        """Tell whether a lineage was ever given up on this machine, whose nodes may have been in it."""
        return lineage in self._given_up

    # Inputs

    def give_up(self, lineage: bytes) -> None:
        """Give a lineage up, as the user asks."""
        self._open.pop(lineage, None)
        self.note_given_up((lineage,))

    def note_given_up(self, lineages: Iterable[bytes]) -> None:
        """Note that lineages were given up here; this machine may have learned of them again since."""
        self._given_up |= dict.fromkeys(lineages)

    def learn(self, lineage: bytes, names: Iterable[str], *, is_ours: bool = False) -> None:
        """Note that a lineage may be going on, with these members; `is_ours`: this node is in it, or may be."""
        names = tuple(name[:80] for name in names)[:MAX_NAMES]
        if lineage in self._ended or lineage in self._abandoned:
            return
        if lineage not in self._open and not self._has_room(lineage, is_ours=is_ours):
            return
        if is_ours and lineage not in self._ours:
            self._ours.add(lineage)
            self.is_changed = True
        if self._open.get(lineage) != names and (names or lineage not in self._open):
            self._open[lineage] = names
            self.is_changed = True

    def _has_room(self, lineage: bytes, *, is_ours: bool) -> bool:
        """Make room for another lineage if possible, and return whether there is room. A peer may invent any number.

        The youngest lineage that this node only knows from peers is dropped first: an older one is followed before it.
        """
        if len(self._open) < MAX_OPEN:
            return True
        told_of = self._open.keys() - self._ours
        if not told_of or (max(told_of) < lineage and not is_ours):
            return False
        del self._open[max(told_of)]
        return True

    def accept(self, lineage: bytes, names: Iterable[str]) -> None:
        """Note that this node has accepted the founding of a lineage, which is not decided yet."""
        self._tentative = lineage
        self.learn(lineage, names, is_ours=True)

    def commit(self, lineage: bytes) -> None:
        """Note that the founding of a lineage is decided."""
        if self._tentative == lineage:
            self._tentative = b""

    def end(self, ending: Ending) -> None:
        """Note that a lineage is over."""
        self.commit(ending.lineage)
        known = self._ended.get(ending.lineage)
        if known is None or (ending.is_finished and not known.is_finished):
            self._open.pop(ending.lineage, None)
            self._ours.discard(ending.lineage)
            self._ended[ending.lineage] = ending
            # Foundings that came to nothing may be many; they must not make this node forget runs that were finished.
            alike = [each for each, known in self._ended.items() if known.is_finished is ending.is_finished]
            if len(alike) > MAX_ENDED // 2:
                del self._ended[alike[0]]
            self.is_changed = True
