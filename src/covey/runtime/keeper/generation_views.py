"""A generation whose views the keeper of a run on one host decides. On the control loop of the keeper's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.proto.ballot import first_record
from covey.proto.health import ProcessState
from covey.proto.keeper import lost_ranks
from covey.runtime.views.view_driver import ViewDriver, member_keys
from covey.wire import messages
from covey.wire.formation import ID_BYTES, LIFE_BYTES
from covey.wire.formation import LINEAGE_BYTES as PROPOSAL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from covey.base.errors import CoveyError
    from covey.proto.changes import QuorumAwaited, QuorumLost
    from covey.runtime.links.link import Link
    from covey.runtime.views.process_table import ProcessTable
    from covey.wire.membership import View

FOUNDING_SECONDS: Final = 3.0
"""How long living members of a new generation may take to link; after that, views are decided without waiting."""


class GenerationViews:
    """A generation whose views the keeper decides; it has a view driver once its members are linked."""

    def __init__(
        self, founded: messages.Founded, now: float, on_view: Callable[[int, int, Collection[int]], None]
    ) -> None:
        """Check the members; RemoteProtocolError if their cards are malformed.

        `on_view` is called with the generation, the number and the ranks of every view that is decided, before a
        member can say anything in it.
        """
        self._on_view = on_view
        cards = [member.card for member in founded.members]
        self.number, self.lineage, self.is_kept = founded.generation, founded.lineage, founded.is_kept
        self.lives = [card.life for card in cards]
        self.keys = member_keys(founded)
        self.rank_of = {card.life: rank for rank, card in enumerate(cards)}
        are_whole = all(len(key.id) == ID_BYTES and len(key.life) == LIFE_BYTES for key in self.keys)
        if not are_whole or len(self.rank_of) < len(cards) or len(founded.lineage) != PROPOSAL_BYTES:
            raise RemoteProtocolError(
                f"generation {founded.generation}, as a process announced it, has malformed members"
            )
        self.told_by: set[bytes] = set()
        """The lives that announced it, and so understand messages about it."""
        self.patience = founded.patience
        self.open_by = now + FOUNDING_SECONDS
        self.view_driver: ViewDriver | None = None
        self._given_up: set[int] = set()
        """The ranks that the view driver was told are lost."""

    def agrees_with(self, other: GenerationViews) -> bool:
        """Tell whether two members announced the same generation."""
        return (self.lineage, self.is_kept, self.keys) == (other.lineage, other.is_kept, other.keys)

    def judge(
        self, processes: ProcessTable, links: dict[bytes, Link], left: Collection[bytes], keeper: bytes, now: float
    ) -> None:
        """Open the view driver once all living members are linked; tell it which members are lost, and which back.

        Args:
            processes: the processes that the keeper sees, by life.
            links: those of the keeper with processes, by life.
            left: the lives that said goodbye.
            keeper: the life of the keeper.
            now: the time.
        """
        if not self.is_kept:
            return
        lost = self._lost(processes, left, now)
        if self.view_driver is None:
            here = {self.rank_of[life] for life in self.told_by if life in links}
            if len(lost | here) < len(self.lives) and now < self.open_by:
                return
            self.view_driver = self._open_view_driver(links, keeper)
        for rank, life in enumerate(self.lives):
            process = processes.get(life)
            if process is not None and process.state is ProcessState.BUSY:
                self.view_driver.vouched(rank)
        for rank in sorted(lost ^ self._given_up):
            self.view_driver.judged(rank, is_dead=rank in lost)
        self._given_up = lost

    def _lost(self, processes: ProcessTable, left: Collection[bytes], now: float) -> set[int]:
        """Return the ranks without which the others continue."""
        by_rank = [processes.get(life) for life in self.lives]
        exited = [
            rank for rank, process in enumerate(by_rank) if process is None or process.state is ProcessState.EXITED
        ]
        stopped = [rank for rank, process in enumerate(by_rank) if process is not None and process.is_lost(now)]
        if self.view_driver is None:
            stays = [rank for rank, life in enumerate(self.lives) if life not in left]
        else:
            view_driver = self.view_driver
            stays = [rank for rank in view_driver.view.ranks if not view_driver.is_leaving(rank)]
        return lost_ranks(exited, stopped, stays)

    def _open_view_driver(self, links: dict[bytes, Link], keeper: bytes) -> ViewDriver:
        view_driver = ViewDriver(
            self.number,
            first_record(self.keys, self.lineage, has_keeper=True),
            len(self.keys),
            keeper,
            _ViewHost(links, self.lives),
            has_keeper=True,
            patience=self.patience,
            store=lambda record: self._on_view(self.number, record.view.number, record.view.ranks),
        )
        for rank, life in enumerate(self.lives):
            if life in links:
                view_driver.link_up(rank, life)
        return view_driver


class _ViewHost:
    """The host of a keeper's view driver: it sends messages; a keeper has no operations to freeze."""

    def __init__(self, links: dict[bytes, Link], lives: list[bytes]) -> None:
        """`lives` are those of the members, by rank."""
        self._links, self._lives = links, lives

    def send(self, rank: int, message: messages.Control, *, wakes: bool) -> None:
        if (link := self._links.get(self._lives[rank])) is not None:
            link.send(messages.encode(message))

    def freeze(self, number: int) -> None:
        """Do nothing: a keeper runs no operations."""

    def accepted(self) -> None:
        """Do nothing: the keeper decides alone, and installs the view at once."""

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        """Do nothing: the view driver tells the members."""

    def excluded(self, view: View) -> None:
        """Do nothing: a keeper is in no view."""

    def waiting(self, effect: QuorumAwaited) -> None:
        """Do nothing: a keeper needs no quorum."""

    def quorum_lost(self, effect: QuorumLost) -> None:
        """Do nothing: all members were silent for too long; if one comes back, the next loss starts a new ballot."""

    def failed(self, error: CoveyError) -> None:
        """Do nothing: a keeper writes no promises to disk."""
