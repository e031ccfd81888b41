"""The stores of a run on one host, whose changes its keeper orders. On the control loop of the keeper's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.base.errors import RemoteProtocolError
from covey.proto.replication import KEEPER, Answered, Replica
from covey.runtime.state.store_driver import StoreDriver
from covey.wire import messages
from covey.wire.versions import KEPT_STORE

if TYPE_CHECKING:
    from collections.abc import Collection

    from covey.base.numbers import Seat
    from covey.runtime.links.link import Link


class KeeperStores:
    """The copy of a keeper, and its links with the members that ask. It outlives every member."""

    def __init__(self) -> None:
        """Begin without a copy: the first generation says how large it may become."""
        self._driver: StoreDriver | None = None
        self._generation = -1
        self._seats: tuple[Seat, ...] = ()
        """Seats of the last generation, by rank."""
        self._seat_of: dict[bytes, Seat] = {}
        """By life, of the last generation."""
        self._with_files: frozenset[Seat] = frozenset()
        """Seats of the members of the last generation that have files for the store."""
        self._askers: dict[int, _Asker] = {}
        """The members with links, by seat."""

    def founded(self, founded: messages.Founded, links: dict[bytes, Link]) -> None:
        """Take the members of a new generation, if all of them know that the keeper orders the changes.

        `links` are those of the keeper with processes, by life.
        """
        speaks = founded.versions
        if not founded.is_kept or speaks is None or KEPT_STORE not in speaks.features:
            return
        if self._driver is not None and not founded.generation:
            self._driver.close()  # the processes have left the run, and formed it anew: its stores are empty
            self._driver = None
        if self._driver is None:
            replica = Replica(KEEPER, bytes_limit=founded.store_bytes)
            self._driver = StoreDriver(replica, self._askers.get, _no_answer)
        self._generation = founded.generation
        self._seats = tuple(member.seat for member in founded.members)
        self._seat_of = {member.card.life: member.seat for member in founded.members}
        self._with_files = frozenset(member.seat for member in founded.members if member.card.keeps_store)
        self._askers.clear()
        self._askers.update((seat, _Asker(links[life])) for life, seat in self._seat_of.items() if life in links)
        self.view(founded.generation, 0, range(len(self._seats)))

    def view(self, generation: int, number: int, ranks: Collection[int]) -> None:
        """Take the ranks of a view that was decided."""
        if self._driver is not None and generation == self._generation:
            members = tuple(sorted(self._seats[rank] for rank in ranks))
            self._driver.configure(
                (generation << 32) + number,
                members,
                is_first=generation == number == 0,
                is_kept=True,
                follower=members[0] if members and members[0] in self._with_files else None,
            )

    def heard(self, life: bytes, posting: messages.Posting) -> None:
        """Take a message of a process; RemoteProtocolError if it breaks the protocol."""
        seat = self._seat_of.get(life)
        if self._driver is None:
            raise RemoteProtocolError("a process asked a keeper that has no store of its run")
        if seat is not None:  # else it repeats the message in its next generation
            self._driver.heard(seat, posting)

    def link_up(self, life: bytes, link: Link) -> None:
        """Note a new link with a process."""
        if self._driver is not None and (seat := self._seat_of.get(life)) is not None:
            self._askers[seat] = _Asker(link)
            self._driver.link_up(seat)

    def link_down(self, life: bytes) -> None:
        """Note that the link with a process ended."""
        if self._driver is not None and (seat := self._seat_of.get(life)) is not None:
            self._askers.pop(seat, None)
            self._driver.forget(seat)

    def link_has_room(self, life: bytes) -> None:
        """Go on with what waits for room on the link with a process."""
        if self._driver is not None and (seat := self._seat_of.get(life)) is not None:
            self._driver.link_has_room(seat)

    def close(self) -> None:
        """Answer nothing more."""
        if self._driver is not None:
            self._driver.close()


class _Asker:
    """A member with a link."""

    def __init__(self, link: Link) -> None:
        self.link: Link | None = link

    def send(self, message: messages.Control) -> None:
        if self.link is not None:
            self.link.send(messages.encode(message))


def _no_answer(_effect: Answered) -> None:
    raise AssertionError("a keeper asks nothing")
