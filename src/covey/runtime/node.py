"""One process in a run: who the others are, a link to each, and which groups there are.

Everything that touches a link happens on the control loop; other threads ask for it by `soon` or wait for a future.
A launcher's ranks open the links themselves: the higher rank of a pair dials. In a cluster they come from the
gathering in which the run was agreed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.runtime import loop as control
from covey.runtime.greet import HungUpError, RefusedError, admit, dial_any
from covey.runtime.lanes import Lanes
from covey.runtime.link import printable
from covey.runtime.vigil import Vigil
from covey.wire import messages

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from covey.base.config import GroupConfig
    from covey.runtime.entrance import Entrance
    from covey.runtime.greet import Gate, Where
    from covey.runtime.lanes import LaneKey
    from covey.runtime.link import Link

logger = logging.getLogger("covey")

HANG_UPS: Final = 5
"""Times in a row that a rank is hung up on before it believes that its key is wrong, and that nobody died."""
HANG_UP_SECONDS: Final = 1.0
"""And for how long: a crowd at the door of rank 0 passes."""
CLOSE_SECONDS: Final = 1.0
"""How long goodbyes may take."""


class Member(Protocol):
    """A group, as its node sees it. Called on the control loop; `peer` is a rank of the run."""

    def heard(self, peer: int, message: messages.Announce | messages.Position | messages.Revoke) -> None: ...

    def peer_gone(self, peer: int, *, left: bool) -> None: ...

    def lane_arrived(self, peer: int, purpose: str) -> None: ...

    def forked(self) -> None: ...

    def close(self) -> None: ...


class Companion(Protocol):
    """Something that ends with the node."""

    async def close(self) -> None: ...


class Peer:
    """What is known of another rank of the run."""

    def __init__(self, rank: int, contact: messages.Contact | None, *, is_dialled: bool) -> None:
        self.rank = rank
        self.contact = contact
        self.is_dialled = is_dialled
        """Whether this end of the pair does the dialling."""
        self.way: Where | None = None
        """The address that was found best, if any was."""
        self.life = b""
        self.host_name = ""
        self.pid = 0
        self.link: Link | None = None
        self.told: Link | None = None
        """The link on which it heard that this rank is ready."""
        self.ready = False
        self.left = False
        self.gone = False
        self.reason = ""
        """Why it was given up, if it was."""
        self.round_trip = -1.0
        self.measured = asyncio.Event()
        """Set unless `way` and `round_trip` are being found out."""
        self.measured.set()

    def introduce(self, card: messages.Card) -> None:
        """Note who it is."""
        self.life, self.host_name, self.pid = card.life, card.host_name, card.pid
        self.contact = card.contact


class Node:
    """This process's place in a run of `size` ranks."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        run: str,
        gate: Gate,
        card: messages.Card,
        config: GroupConfig,
        entrance: Entrance,
        contacts: Mapping[int, messages.Contact],
        denied: frozenset[bytes] = frozenset(),
        companions: Sequence[Companion] = (),
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`contacts` of ranks that are missing come from rank 0's roster. `entrance` and `companions` end with us."""
        self.rank, self.size, self.run, self.config = rank, size, run, config
        self.gate, self.card = gate, card
        self._denied = denied
        self.host = card.contact.host
        self._socket_folder = os.path.dirname(card.contact.socket)
        self._entrance = entrance
        self._companions = (entrance, *companions)
        self._on_close = on_close
        self.peers = {
            peer: Peer(peer, contacts.get(peer), is_dialled=peer < rank) for peer in range(size) if peer != rank
        }
        self._groups: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self.lanes = Lanes(self)
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._vigil: Vigil | None = None
        self.on_silent: Callable[[int], None] | None = None
        """Who ends all links with a rank that is given up, where that is not the node."""
        self._formed: asyncio.Future[None] | None = None
        self._complaint: CoveyError | None = None
        self._refusal = ""
        self.is_closing = False
        entrance.on_lane = self.lanes.claim
        _nodes.add(self)

    # Forming

    def form(self, timeout: float) -> None:
        """Return once every rank is linked with every other and knows it.

        Raises:
            DeadlineError: some did not come in time; says which.
            ConfigError: another rank has other settings.
        """
        future = control.start(self._form(within=timeout))
        try:
            future.result()
        except BaseException:
            future.cancel()
            self.close()
            raise

    async def _form(self, *, within: float) -> None:
        self._formed = asyncio.get_running_loop().create_future()
        self._entrance.on_link = self._greet
        self._entrance.open()
        for peer in self.peers.values():
            if peer.is_dialled and peer.contact is not None:
                self.spawn(self._dial(peer))
        self.spawn(self._tell_who_is_missing())
        try:
            async with asyncio.timeout(within):
                await self._formed
        except TimeoutError:
            missing = ", ".join(map(str, self._missing()))
            strangers = self._entrance.about_strangers()
            raise DeadlineError(
                f"rank {self.rank} of {self.size} waited {within:g} s in {self.run} for rank {missing}. "
                f"Is it running, and with the same job id or MASTER_ADDR and MASTER_PORT?{self._refusal}"
                + (f" Here {strangers}." if strangers else ""),
                late=tuple(self._missing()),
            ) from None

    def _missing(self) -> list[int]:
        return [peer.rank for peer in self.peers.values() if not peer.ready]

    async def _tell_who_is_missing(self) -> None:
        for pause in (5.0, *(30.0,) * 1000):
            await asyncio.sleep(pause)
            if self._formed is None or self._formed.done():
                return
            logger.warning("rank %d of %d waits in %s for rank %s", self.rank, self.size, self.run,
                           ", ".join(map(str, self._missing())))  # fmt: skip

    def _settle(self) -> None:
        """Take the next step of forming that is possible now."""
        if self._formed is None or self._formed.done():
            return
        if self._complaint is not None:
            self._formed.set_exception(self._complaint)
            return
        linked = all(peer.link is not None or peer.ready for peer in self.peers.values())
        if linked:
            self._tell_ready()
        if linked and not self._missing():
            self._formed.set_result(None)
            self.keep_vigil()

    def _tell_ready(self) -> None:
        """Tell those who have not heard it on their link that this rank is connected to everyone."""
        for peer in self.peers.values():
            if peer.link is not None and peer.link is not peer.told:
                peer.told = peer.link
                if self.rank == 0:
                    contacts = [self.card.contact, *(self.peers[rank].contact for rank in range(1, self.size))]
                    roster = messages.Roster(tuple(contact for contact in contacts if contact is not None))
                    self.send(peer.rank, roster)
                self.send(peer.rank, messages.Ready())

    async def _dial(self, peer: Peer) -> None:
        pause, hang_ups, hung_up_at = 0.005, 0, 0.0
        while peer.link is None and not peer.ready and not self.is_closing:
            try:
                link, welcome, _, where = await dial_any(self.ways_to(peer), self.gate, self._hello())
            except HungUpError as error:
                hang_ups += 1
                hung_up_at = hung_up_at or time.monotonic()
                if hang_ups >= HANG_UPS and time.monotonic() - hung_up_at > HANG_UP_SECONDS:
                    self._complain(AuthError(str(error)))
                    return
            except (ConnectError, TimeoutError):
                hang_ups, hung_up_at = 0, 0.0  # not there yet
            except RefusedError as error:
                self._refusal = f" Rank {peer.rank} says: {printable(str(error))}."
                if not error.retry:
                    self._complain(ConfigError(f"rank {peer.rank} refused this rank: {printable(str(error))}"))
                    return
            except CoveyError as error:
                self._complain(error)
                return
            else:
                if problem := self._wrong_peer(peer, welcome):
                    link.abort()
                    self._complain(AuthError(problem))
                    return
                if not isinstance(where, str):
                    peer.way = where
                self._linked(peer, link, welcome.card)
                return
            await asyncio.sleep(pause)
            pause = min(0.1, pause * 1.5)

    def _wrong_peer(self, peer: Peer, welcome: messages.Welcome) -> str:
        """Return why who answered is not the one that was dialled, or not wanted, or nothing."""
        if welcome.rank != peer.rank:  # somebody on the way led us to another
            return f"rank {welcome.rank} answered where rank {peer.rank} was dialled"
        return f"rank {peer.rank} is on a node that is denied here" if welcome.card.id in self._denied else ""

    def _complain(self, error: CoveyError) -> None:
        self._complaint = self._complaint or error
        self._settle()

    def _linked(self, peer: Peer, link: Link, card: messages.Card) -> None:
        peer.introduce(card)
        peer.link = link
        self._entrance.member_ips.add(link.remote_ip)
        link.attach(functools.partial(self._heard_frame, peer), functools.partial(self._lost, peer, link))
        self._settle()

    def _heard_frame(self, peer: Peer, body: bytes) -> None:
        self.noticed(peer.rank)
        self.heard(peer.rank, messages.decode_control(body))

    async def _greet(self, sock: socket.socket, said: bytes) -> None:
        admitted = await admit(sock, self.gate, said, self._judge)
        if admitted is not None:
            link, hello, _ = admitted
            self._linked(self.peers[hello.rank], link, hello.card)

    def _judge(self, hello: messages.Hello, _id: bytes) -> messages.Welcome | messages.Refusal:
        if hello.version != messages.VERSION:
            reason = f"it speaks version {hello.version}, this rank {messages.VERSION}"
            return messages.Refusal(reason, retry=False)
        if hello.card.id in self._denied:
            return messages.Refusal("this node is denied here", retry=False)
        if hello.purpose != "rank":
            return messages.Refusal(f"{self.run} was started by a launcher, which gives out the ranks", retry=False)
        for what, here, there in (
            ("run", self.run, hello.run),
            ("size", self.size, hello.size),
            ("lanes", self.config.lanes, hello.lanes),
        ):
            if here != there:
                reason = f"{what} is {there!r} on rank {hello.rank} and {here!r} on rank {self.rank}"
                self._complain(ConfigError(f"{reason}; start all ranks with the same settings"))
                return messages.Refusal(reason, retry=False)
        peer = self.peers.get(hello.rank)
        if peer is None or peer.is_dialled:
            return messages.Refusal(f"rank {hello.rank} has no business dialling rank {self.rank}", retry=False)
        if peer.link is not None or peer.ready:
            return messages.Refusal(f"rank {hello.rank} is already here (process {peer.pid})", retry=True)
        return messages.Welcome(self.rank, self.card)

    def _hello(self) -> messages.Hello:
        return messages.Hello(
            version=messages.VERSION,
            nonce=secrets.token_bytes(32),
            purpose="rank",
            run=self.run,
            rank=self.rank,
            size=self.size,
            lanes=self.config.lanes,
            card=self.card,
        )

    # Groups

    def register(self, group_id: int, group: Member) -> None:
        """Let `group` hear what is said about it from now on."""
        with self._lock:
            self._groups[group_id] = group

    def groups(self) -> list[Member]:
        """Return the groups that are open."""
        return list(self._groups.values())

    def forget(self, group_id: int, sequence: int) -> None:
        """Close what is left of a group, of which `sequence` was the last operation; refuse new lanes for it."""
        with self._lock:
            self._groups.pop(group_id, None)
        self.lanes.forget(group_id, sequence)

    def lane_arrived(self, key: LaneKey) -> None:
        """Tell the group, if it exists already, that a lane is open."""
        group = self._groups.get(key[0])
        if group is not None:
            group.lane_arrived(key[1], key[2])

    def tell(self, peers: Iterable[int], message: messages.Control) -> None:
        """Send a control message to some ranks of the run. Returns at once; the dead are skipped."""
        control.soon(self._send_each, tuple(peers), message)

    def _send_each(self, peers: tuple[int, ...], message: messages.Control) -> None:
        for peer in peers:
            self.send(peer, message)

    def send(self, peer: int, message: messages.Control) -> None:
        """Send a control message to a rank of the run; nothing happens if it is gone. On the control loop."""
        link = self.peers[peer].link
        if link is not None:
            link.send(messages.encode(message))

    # What arrives on links, on the control loop

    def keep_vigil(self) -> None:
        """Start to watch over ranks on other machines: the run is formed."""
        self._vigil = Vigil(self, self._silent)
        self.spawn(self._vigil.keep())

    def noticed(self, rank: int) -> None:
        """A rank of the run said something."""
        if self._vigil is not None:
            self._vigil.heard(rank)

    def _silent(self, rank: int, reason: str) -> None:
        peer = self.peers[rank]
        logger.warning("rank %d is given up: %s", rank, reason)
        peer.reason = reason
        if self.on_silent is not None:
            self.on_silent(rank)
        elif peer.link is not None:
            peer.link.abort()

    def heard(self, rank: int, message: messages.Control) -> None:
        """Take a message from a rank of the run."""
        peer = self.peers[rank]
        match message:
            case messages.Ready():
                peer.ready = True
                self._settle()
            case messages.Roster(contacts):
                if peer.rank != 0 or len(contacts) != self.size:
                    return
                for other in self.peers.values():
                    if other.contact is None:
                        other.contact = contacts[other.rank]
                        if other.is_dialled:
                            self.spawn(self._dial(other))
            case messages.Goodbye():
                peer.left = True
            case messages.Ping(number):
                self.send(rank, messages.Pong(number, time.time()))
            case messages.Pong(number, _):
                if self._vigil is not None:
                    self._vigil.answered(rank, number)
            case messages.Dial(group, purpose):
                if peer.is_dialled and not self.lanes.dial((group, rank, purpose)):
                    self.send(rank, messages.NoLane(group, purpose, f"rank {self.rank} has closed the group"))
            case messages.Offer():
                self.lanes.offered(rank, message)
            case messages.Expect(lane):
                self.lanes.expected(rank, lane)
            case messages.NoLane(group, purpose, reason):
                self.lanes.refused((group, rank, purpose), reason)
            case messages.Announce() | messages.Position() | messages.Revoke():
                member = self._groups.get(message.group)
                if member is not None:
                    member.heard(rank, message)
                elif isinstance(message, messages.Announce) and self.lanes.ended(message.group, message.sequence):
                    text = f"rank {self.rank} of the run has closed the group"
                    self.send(rank, messages.Revoke(message.group, "PeerLostError", text, ()))

    def _lost(self, peer: Peer, link: Link) -> None:
        if isinstance(link.error, CoveyError):
            logger.warning("rank %d sent nonsense and is cut off: %s", peer.rank, printable(str(link.error)))
        if peer.link is link:
            self.lost(peer.rank)

    def lost(self, rank: int) -> None:
        """The link to a rank of the run has ended."""
        peer = self.peers[rank]
        peer.link = None
        if self.is_closing:
            return
        if not peer.ready:  # it never saw the run formed, so it may come again
            if peer.is_dialled:
                self.spawn(self._dial(peer))
            return
        peer.gone = True
        if self._vigil is not None:
            self._vigil.forget(rank)
        self.lanes.abandon(lambda key: key[1] == rank, ConnectError(f"rank {rank} is gone"))
        for group in list(self._groups.values()):
            group.peer_gone(rank, left=peer.left)

    # Small things

    def ways_to(self, peer: Peer, kind: str = "") -> list[Where]:
        """Return where to dial `peer`, best first: a unix socket on one host, unless the lane is to be TCP."""
        contact = peer.contact
        assert contact is not None
        same_host = contact.host == self.host
        by_socket = kind in ("shm", "unix", "memory") or (not kind and self.gate.credentials is None)
        # In a cluster a path is only taken from others if it lies where all nodes of this user on this host listen.
        is_ours = self.gate.credentials is None or os.path.dirname(contact.socket) == self._socket_folder
        if by_socket and same_host and contact.socket and is_ours:
            return [contact.socket]
        from covey.net.interfaces import to_dial, usable_interfaces  # of no use to ranks that share memory

        ways: list[Where] = [peer.way] if peer.way is not None else []
        own = usable_interfaces(self.config.interfaces)
        return ways + [way for way in to_dial(own, contact.addresses, same_host) if way not in ways]

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine for as long as the node lives. On the control loop only."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a control task of %s failed", self.run, exc_info=error)

    def close(self) -> None:
        """Say goodbye and free everything. Closing twice is fine."""
        if self.is_closing:
            return
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            control.start(self._close()).result(2 * CLOSE_SECONDS)
        self.lanes.close()
        _nodes.discard(self)
        self._on_close()

    async def _close(self) -> None:
        links = [peer.link for peer in self.peers.values() if peer.link is not None]
        for link in links:
            link.send(messages.encode(messages.Goodbye()))
            link.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.lanes.stop_expecting()
        for companion in self._companions:
            await companion.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(link.ended.wait() for link in links))
        for link in links:
            link.abort()

    def forked(self) -> None:
        """This process is a fork of the one that joined: nothing here may be used again."""
        self.is_closing = True
        for group in list(self._groups.values()):
            group.forked()


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for node in list(_nodes):
        node.forked()
    _nodes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
