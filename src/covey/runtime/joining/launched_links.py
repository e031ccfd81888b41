"""The links with the members of a launcher's run, and how it forms: its members are given, so there is no vote on them.

The run is formed once every rank has said that it is linked with every other. On the control loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.base.numbers import Seat
from covey.base.pace import Growing
from covey.base.text import printable
from covey.runtime.backoff import Backoff
from covey.runtime.joining.node import NodeParts
from covey.runtime.joining.run_links import RunLinks
from covey.runtime.joining.situation import FIRST_REMINDER_SECONDS, REMINDER_SECONDS
from covey.runtime.links.address_race import keep_dialling
from covey.runtime.links.handshake import NO_ANSWER, HungUpError, RefusedError
from covey.runtime.peers.launcher_mesh import LauncherMesh
from covey.runtime.peers.mesh import MeshListener
from covey.runtime.peers.remote_process import PeerEvent
from covey.wire import messages
from covey.wire.versions import OURS, common

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.base.config import GroupConfig
    from covey.runtime.environment import LaunchedRank
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.peer_table import Inbox, PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire.membership import Record
    from covey.wire.versions import Agreement

logger = logging.getLogger("covey")

HANG_UPS: Final = 5
"""Times in a row that the other end hangs up before a rank concludes that its own key is wrong: an end that dies also
hangs up, but once."""
HANG_UP_SECONDS: Final = 1.0
"""And for how long: while all ranks dial rank 0 at once, it hangs up on some."""
DIAL_PAUSES: Final = Growing(0.005, 0.1, 1.5)
"""Between dials of a rank at the start of the run."""


class LaunchedLinks(RunLinks, MeshListener):
    """Connects one run with the mesh that links its given members."""

    can_rest = False

    def __init__(self, launched: LaunchedRank) -> None:
        self._keeper_path = launched.keeper

    def serve(self, mesh: LauncherMesh, node: NodeParts) -> None:
        """Hand the links of a run to its parts from now on. On any thread."""
        self.mesh = mesh
        self.serve_parts(
            node.peers,
            node.views,
            node.inbox,
            tasks=node.tasks,
            stores=node.stores,
            checkpoints=node.checkpoints,
        )
        self.assembly = Assembly(mesh, node.peers)
        self.assembly.take_from(node.inbox)
        mesh.seat(node.peers, self, self, self)

    async def form(self, *, within: float) -> None:
        """Return once every rank is linked with every other and knows it; raises what `Assembly.form` raises."""
        self._meet_keeper()
        self.views.begin(await self.assembly.form(within=within))
        await self.views.await_keeper()

    def enter(self, founded: messages.Founded, record: Record | None = None) -> None:
        """Take this process's seat in a generation of a run in progress, with the links that its members have."""
        for peer in self.peers.values():
            peer.note(PeerEvent.READY)
        self._meet_keeper()
        self.views.enter(founded, record)
        for seat, peer in self.peers.items():
            if peer.link is None:
                self.link_ended(peer)
            self.deliver_early(seat, peer)

    def _meet_keeper(self) -> None:
        if self._keeper_path:
            credentials = self.mesh.endpoint.credentials
            self.views.meet_keeper(self._keeper_path, credentials, checkpoints=self.checkpoints, stores=self.stores)

    # What the mesh reports

    def linked(self, remote: RemoteProcess) -> None:
        if remote.seat < 0:
            self.views.newcomers.add(remote)
            return
        if remote.is_ready:
            self.views.relinked(remote)
        self.assembly.settle()

    def lost(self, remote: RemoteProcess) -> None:
        if remote.seat < 0:
            self.views.newcomers.remove(remote)
        else:
            self.views.losses.link_ended(remote.seat)

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        self.hear(remote, message)

    def asked_for_checkpoint(
        self, request: messages.RequestCheckpoint, send: Callable[[messages.CheckpointProgress], None]
    ) -> None:
        self.checkpoints.asked(request, send)

    # What the mesh asks: `GivenRun`

    def speaks(self) -> Agreement | None:
        return None if self.views.generation is None else self.views.speaks

    def cannot_form(self, error: CoveyError) -> None:
        self.assembly.complain(error)

    # What the run asks for: `MemberLinks`

    def link_ended(self, peer: RemoteProcess) -> None:
        if not peer.is_ready:
            self.assembly.dial(peer)
        elif self.views.generation is not None:
            super().link_ended(peer)

    def find(self, card: messages.Card) -> RemoteProcess | None:
        """Return None: the newcomers of the run are all that could have a seat."""
        return None

    def founded(self, founded: messages.Founded) -> None:
        """Do nothing: processes without a seat are told by the generation."""

    def run_ended(self, lineage: bytes, *, is_finished: bool) -> None:
        """Do nothing: the keeper knows."""


class Assembly:
    """How the given members of a run come together: each links with all, says so, and waits until all have said so."""

    def __init__(self, mesh: LauncherMesh, peers: PeerTable) -> None:
        self._mesh, self._peers, self._size = mesh, peers, 1 + len(peers)
        self._tells_roster = peers.seat == 0 and any(peer.contact is None for peer in peers.values())
        """Ranks of one host know each other's sockets from the start."""
        self._formed: asyncio.Future[Agreement] | None = None
        self._complaint: CoveyError | None = None
        self._refusal = ""
        self._reasons: dict[Seat, str] = {}
        """By rank: why it could not be dialled the last time."""
        self._hang_ups: dict[Seat, tuple[int, float]] = {}
        """By rank: how often in a row it hung up, and since when."""

    def take_from(self, inbox: Inbox) -> None:
        """Take the messages with which ranks come together."""
        inbox.give(messages.Ready, lambda seat, _: self._ready(seat))
        inbox.give(messages.Roster, lambda seat, roster: self._told_roster(seat, roster.contacts))
        inbox.give(messages.Failing, lambda seat, failing: self._heard_failure(seat, failing.reason))

    @property
    def has_begun(self) -> bool:
        """Whether this rank listens, and dials others."""
        return self._formed is not None

    async def form(self, *, within: float) -> Agreement:
        """Return what all ranks speak, once every rank is linked with every other and knows it.

        Raises:
            DeadlineError: some ranks were not linked in time; says which.
            ConfigError: another rank has different settings.
        """
        self._formed = asyncio.get_running_loop().create_future()
        self._mesh.open()
        for peer in self._peers.values():
            if peer.contact is not None:
                self.dial(peer)
        self._mesh.spawn(self._log_missing())
        try:
            async with asyncio.timeout(within):
                return await self._formed
        except TimeoutError:
            missing = ", ".join(map(str, self._missing()))
            strangers = self._mesh.endpoint.acceptor.about_strangers()
            raise DeadlineError(
                f"rank {self._peers.seat} of {self._size} waited in {self._mesh.run} for rank {missing} until the "
                f"timeout of {within:g} s ended. "
                f"Is it running, and with the same job id, address, or MASTER_ADDR and MASTER_PORT?{self._refusal}"
                + self._last_reason()
                + (f" Here {strangers}." if strangers else "")
                + self._rendezvous_clause(),
                late=tuple(self._missing()),
            ) from None

    def _missing(self) -> list[Seat]:
        return [peer.seat for peer in self._peers.values() if not peer.is_ready]

    async def _log_missing(self) -> None:
        for pause in (FIRST_REMINDER_SECONDS, *(REMINDER_SECONDS,) * 1000):
            await asyncio.sleep(pause)
            if self._is_formed:
                return
            logger.warning("rank %d of %d waits for rank %s of %s.%s", self._peers.seat, self._size,
                           ", ".join(map(str, self._missing())), self._mesh.run,
                           self._last_reason() + self._rendezvous_clause())  # fmt: skip

    def _last_reason(self) -> str:
        """Return a clause about the last dial of a missing rank; empty if this rank dials none of them."""
        for seat in self._missing():
            if reason := self._reasons.get(seat, ""):
                return f" The last dial of rank {seat} failed: {reason}."
        return ""

    def _rendezvous_clause(self) -> str:
        """Return a sentence about the folder in which the ranks meet, if they do that in a folder."""
        endpoint = self._mesh.endpoint
        if endpoint.credentials.tls is not None or any(peer.contact is None for peer in self._peers.values()):
            return ""
        from covey.net.discovery.host_rendezvous import about_rendezvous  # only needed when ranks do not meet

        return f" {about_rendezvous(endpoint.card.contact.socket)}".rstrip()

    # Ranks that are linked

    def _ready(self, seat: Seat) -> None:
        """Take from a rank that it is linked with every rank."""
        self._peers[seat].note(PeerEvent.READY)
        self.settle()

    def settle(self) -> None:
        """Take the next possible step towards the formed run."""
        if self._formed is None or self._formed.done():
            return
        if self._complaint is not None:
            self._formed.set_exception(self._complaint)
            return
        linked = all(peer.link is not None or peer.is_ready for peer in self._peers.values())
        if linked:
            self._tell_ready()
        if linked and not self._missing():
            try:
                speaks = common((OURS, *(peer.versions for peer in self._peers.values())))
            except ValueError as error:
                self.complain(ConfigError(str(error)))
                return
            self._formed.set_result(speaks)

    def _tell_ready(self) -> None:
        """Tell every peer, once on each link, that this rank is linked with every rank."""
        for peer in self._peers.values():
            if peer.link is not None and peer.link is not peer.told:
                peer.told = peer.link
                if self._tells_roster:
                    self._peers.send(peer.seat, self._roster())
                self._peers.send(peer.seat, messages.Ready())

    def _roster(self) -> messages.Roster:
        contacts = [self._mesh.card.contact, *(self._peers[Seat(rank)].contact for rank in range(1, self._size))]
        return messages.Roster(tuple(contact for contact in contacts if contact is not None))

    def _told_roster(self, seat: Seat, contacts: tuple[messages.Contact, ...]) -> None:
        """Take from rank 0 where the other ranks listen, and dial those that this rank has to dial."""
        if seat != 0 or len(contacts) != self._size:
            return
        for peer in self._peers.values():
            if peer.contact is None:
                peer.listens_at(contacts[peer.seat])
                self.dial(peer)

    # Ranks that are dialled

    def dial(self, peer: RemoteProcess) -> None:
        """Dial a rank until it is linked or `form` has ended, if this rank is to dial it."""
        if self._mesh.may_dial(peer):
            self._mesh.spawn(self._keep_dialling(peer))

    async def _keep_dialling(self, peer: RemoteProcess) -> None:
        def is_wanted() -> bool:
            return peer.link is None and not peer.is_ready and self._complaint is None

        tries = Backoff(f"rank {peer.seat}", DIAL_PAUSES, level=logging.DEBUG)  # `_log_missing` tells
        await keep_dialling(functools.partial(self._attempt, peer), is_wanted, tries)

    async def _attempt(self, peer: RemoteProcess) -> str:
        """Dial a rank once; an error that no retry can mend makes `form` raise."""
        try:
            await self._mesh.dial(peer)
            return ""
        except HungUpError as error:
            reason = str(error)
            if self._hung_up(peer.seat):
                self.complain(AuthError(reason))
        except (ConnectError, TimeoutError) as error:
            reason = str(error) or NO_ANSWER
            self._hang_ups.pop(peer.seat, None)  # not there yet
        except RefusedError as error:
            reason = printable(str(error))
            self._refusal = f" Rank {peer.seat} says: {reason}."
            if not error.retry:
                self.complain(ConfigError(f"rank {peer.seat} refused this rank: {reason}"))
        except CoveyError as error:
            reason = str(error)
            self.complain(error)
        self._reasons[peer.seat] = printable(reason)
        return reason

    def _hung_up(self, seat: Seat) -> bool:
        """Note that a rank hung up; tell whether it has for so long that this rank's key must be wrong."""
        now = time.monotonic()
        times, since = self._hang_ups.get(seat, (0, now))
        self._hang_ups[seat] = times + 1, since
        return times + 1 >= HANG_UPS and now - since > HANG_UP_SECONDS

    # What makes it impossible

    def complain(self, error: CoveyError) -> None:
        """Make `form` raise, here and on the ranks that are linked: the run cannot form with what is wrong."""
        if self._complaint is None and isinstance(error, ConfigError) and not self._is_formed:
            for peer in self._peers.values():
                if peer.link is not None:
                    self._peers.send(peer.seat, messages.Failing(str(error)))
        self._complaint = self._complaint or error
        self.settle()

    def _heard_failure(self, seat: Seat, reason: str) -> None:
        """Take from a rank that the run cannot form."""
        if not self._is_formed:
            self.complain(ConfigError(f"rank {seat} gave up: {printable(reason)}"))

    @property
    def _is_formed(self) -> bool:
        return self._formed is not None and self._formed.done()


def launched_links(
    launched: LaunchedRank,
    config: GroupConfig,
    mesh: LauncherMesh,
    peers: Mapping[Seat, RemoteProcess],
    *,
    seat: Seat,
) -> tuple[NodeParts, LaunchedLinks]:
    """Return the node of a rank of a launcher beside its peers, and the links that connect it with its mesh."""
    links, endpoint = LaunchedLinks(launched), mesh.endpoint
    node = NodeParts(
        seat=seat,
        size=1 + len(peers),
        run=launched.name,
        endpoint=endpoint,
        card=endpoint.card,
        config=config,
        peers=peers,
        links=links,
        closes=(mesh,),
    )
    links.serve(mesh, node)
    return node, links


def launched_node(
    launched: LaunchedRank, config: GroupConfig, endpoint: Endpoint, peers: Mapping[Seat, RemoteProcess]
) -> tuple[NodeParts, LaunchedLinks]:
    """Return the node of a rank whose run begins, and its links, which form the run."""
    mesh = LauncherMesh(launched, config, endpoint)
    return launched_links(launched, config, mesh, peers, seat=Seat(launched.rank))
