"""The links of this process with others: accepts and dials them, passes on what comes over them, and ends them.

On the control loop. A mesh is of one of two kinds, which differ in how they know whom to link with: a `ClusterMesh`
finds nodes and links with every holder of the cluster's secret; a `LauncherMesh` is given the members of its run. What
a process becomes in a run, a mesh does not know: it reports to a `MeshListener` and a `LinkListener`.

A `MeshListener` (a joiner, a keeper, an agent, a launcher's run) hears which processes there are and what they say; a
`LinkListener` (the run that this process has a seat in) hears what becomes of the links with them.

Visitors are linked processes that take part in no run: commands, keepers and agents. Every holder of the secret, or of
a run's token, may link, with any number of keys. So the links of each key are limited, and those of all together. When
there are too many, the process that has not asked anything for longest is dropped. Keepers that a linked node names on
its card do not count and are not dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from typing import TYPE_CHECKING, Final

from covey.base.errors import CoveyError
from covey.base.text import printable
from covey.runtime.links.acceptor import remote_ip
from covey.runtime.links.handshake import Greeter, admit
from covey.runtime.tasks import Tasks
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.base.config import GroupConfig
    from covey.base.errors import AuthError
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link
    from covey.runtime.metrics.inspection import PacedAnswers
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.relays import Relays
    from covey.runtime.peers.remote_process import RemoteProcess

LINKS_PER_KEY: Final = 4
VISITORS_LIMIT: Final = 64
COMMANDS_LIMIT: Final = 8
"""Commands of the same user that may ask a rank of a launcher at a time."""
SEND_REST_SECONDS: Final = 1.0
"""How long links may take to send what they hold when the mesh closes."""


def is_guest(purpose: str, own: str) -> bool:
    """Tell whether a node with this purpose takes part in nothing that a node with the purpose `own` does.

    Agents are linked with each other, and visitors with agents.
    """
    if purpose == "agent":
        return own not in ("agent", "visitor")
    return purpose == "keeper" or (purpose == "visitor" and own != "visitor")


class Visitors:
    """The visitors of one node, ordered by their last question.

    A visitor is an object for each of its links, because an answer goes over the link on which the question came: a
    process that dials a node while that dials it has two here, until one link ends. It chooses between them.
    """

    def __init__(self, is_needed: Callable[[RemoteProcess], bool], limit: int) -> None:
        """`is_needed` tells whether a node is a keeper that a linked node names; up to `limit` others may stay."""
        self._is_needed, self._limit = is_needed, limit
        self._nodes: dict[RemoteProcess, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[RemoteProcess]:
        return iter(tuple(self._nodes))

    def add(self, remote: RemoteProcess) -> list[RemoteProcess]:
        """Add a node; return the nodes that have to be dropped for it."""
        self._nodes[remote] = None
        of_key = [each for each in self._nodes if _key(each) == _key(remote)]
        leaving = of_key[: max(0, len(of_key) - LINKS_PER_KEY)]
        counted = [each for each in self._nodes if each not in leaving and not self._is_needed(each)]
        return leaving + counted[: max(0, len(counted) - self._limit)]

    def asked(self, remote: RemoteProcess) -> None:
        """Note that a node asked something just now."""
        if remote in self._nodes:
            del self._nodes[remote]
            self._nodes[remote] = None

    def discard(self, remote: RemoteProcess) -> None:
        self._nodes.pop(remote, None)


def _key(remote: RemoteProcess) -> bytes:
    """Return the key of a node; commands that hold a token have none, and each counts by itself."""
    return remote.card.id or remote.card.life


class MeshListener:
    """Receives what happens in a mesh. Every method does nothing by default."""

    def linked(self, remote: RemoteProcess) -> None:
        """Called after the first link with a process that takes part in something, and after the next first one."""

    def recall(self, card: messages.Card) -> RemoteProcess | None:
        """Return the process that a card is of, if the owner has known it since an earlier link."""
        return None

    def lost(self, remote: RemoteProcess) -> None:
        """Called after the last link with such a process has ended."""

    def keeper_linked(self, remote: RemoteProcess) -> None:
        """Called after a link with a keeper: a node that reports on its processes and takes part in no run."""

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        """Called for a message that the mesh does not handle itself."""

    def asked_for_checkpoint(
        self, request: messages.RequestCheckpoint, send: Callable[[messages.CheckpointProgress], None]
    ) -> None:
        """Called when a command asks for a checkpoint, or how one is; `send` takes the answer."""
        send(messages.CheckpointProgress(request.id, "refused", "this process is in no run"))

    def expelled(self, remote: RemoteProcess, reason: str) -> None:
        """Called after the links with a node were closed because it may no longer be in the cluster."""

    def identity_refused(self, error: AuthError) -> None:
        """Called when this node cannot be in the cluster, because another process uses its identity."""

    def access_lost(self, error: AuthError) -> None:
        """Called when this node may not be in the cluster any more, or is not approved yet."""

    def refused(self, name: str, reason: str) -> bool:
        """Called when a node is refused for the first time, or for another reason; return whether it was noted."""
        return False

    def describe(self) -> messages.Tell | None:
        """Return how this node sees its run; None if it is in none."""
        return None


class LinkListener:
    """Receives what becomes of links, and says which may rest. Every method does nothing by default."""

    def arrived(self, remote: RemoteProcess) -> None:
        """Called for every message of a process, before the message is handled."""

    def link_changed(self, remote: RemoteProcess) -> None:
        """Called when another link with a process is in use, or a better way to it was found."""

    def link_replaced(self, remote: RemoteProcess) -> None:
        """Called when another link is used instead of one that its owner gave up: messages on that may be lost."""

    def link_rests(self, remote: RemoteProcess) -> None:
        """Called when the link with a process begins to rest."""

    def link_woke(self, remote: RemoteProcess) -> None:
        """Called when a link that rested was replaced by another; nothing is lost."""

    def link_has_room(self, remote: RemoteProcess) -> None:
        """Called when the link in use with a process, which was full, has room again."""

    def may_rest(self, remote: RemoteProcess) -> bool:
        """Tell whether the link with a process may rest."""
        return False

    def wants_awake(self, remote: RemoteProcess) -> bool:
        """Tell whether the link with a process is to be woken if it rests."""
        return False

    def may_change_link(self, remote: RemoteProcess) -> bool:
        """Tell whether the link in use may be changed now: messages on the old one may be overtaken."""
        return True


class LinkMesh:
    """Links of this process. A subclass says whom it dials, whom it accepts, and which of several links is used."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: GroupConfig,
        listener: MeshListener,
        links: LinkListener,
        *,
        visitors: int = VISITORS_LIMIT,
    ) -> None:
        """Take over what the endpoint accepts; it must not be open yet. `links` hears what becomes of links.

        Up to so many `visitors` stay linked.
        """
        self.endpoint, self.config = endpoint, config
        self.card, self.audit = endpoint.card, endpoint.audit
        self.listener, self.link_listener = listener, links
        self._tasks = Tasks("the mesh")
        self.spawn = self._tasks.spawn
        self.visitors = Visitors(self.is_named_keeper, visitors)
        """Processes that take part in nothing: commands, and keepers."""
        self._answers: PacedAnswers | None = None
        endpoint.acceptor.give_links(self._accept)

    # What a subclass says

    @property
    def relays(self) -> Relays | None:
        """The relays through which processes are reached that cannot be dialled, if there are any."""
        raise NotImplementedError

    @property
    def all_linked(self) -> tuple[RemoteProcess, ...]:
        """Every process that this one is linked with."""
        raise NotImplementedError

    def hello(self) -> messages.Hello:
        """Return what this process says first on a link that it dials."""
        raise NotImplementedError

    def judge(
        self, hello: messages.Hello, _id: bytes, *, source: str, is_local: bool
    ) -> messages.Welcome | messages.Refusal:
        """Return the answer to a process that dialled from address `source`, or by a socket of this host."""
        raise NotImplementedError

    def incompatible(self, hello: messages.Hello, reason: str, *, source: str) -> None:
        """Note that a process was refused because it speaks no version that this one speaks."""
        raise NotImplementedError

    def came(self, link: Link, hello: messages.Hello) -> None:
        """Take a link that another process has dialled and `judge` has welcomed."""
        raise NotImplementedError

    def note_heard(self, remote: RemoteProcess, link: Link, message: messages.Control) -> None:
        """Note that a message has arrived on a link."""
        raise NotImplementedError

    def heard(self, remote: RemoteProcess, link: Link, message: messages.Control) -> None:
        """Take a message that is no question of a command or a keeper."""
        raise NotImplementedError

    def cut_off(self, remote: RemoteProcess, link: Link, reason: str) -> None:
        """Note that this process has ended a link, because of what the other end sent."""
        raise NotImplementedError

    def ended(self, remote: RemoteProcess, link: Link) -> None:
        """Forget a link that has ended."""
        raise NotImplementedError

    def may_dial(self, peer: RemoteProcess) -> bool:
        """Tell whether this process is to dial a member without a link."""
        raise NotImplementedError

    def is_linked(self, peer: RemoteProcess) -> bool:
        """Tell whether there is a link with the node of a member."""
        raise NotImplementedError

    async def redial(self, peer: RemoteProcess, is_wanted: Callable[[], bool]) -> None:
        """Dial a process by all its addresses, with growing pauses, while `is_wanted()`."""
        raise NotImplementedError

    def part(self, remote: RemoteProcess) -> None:
        """End the links with a process at once."""
        raise NotImplementedError

    def is_named_keeper(self, remote: RemoteProcess) -> bool:
        """Tell whether a process is the keeper of this one, or of a linked one."""
        return False

    def own_keeper(self) -> RemoteProcess | None:
        """Return the keeper of this process, if it is a node that is linked."""
        return None

    # Links

    @property
    def is_closing(self) -> bool:
        """Whether this process closes its links, or has closed them."""
        return self._tasks.is_closing

    async def _accept(self, sock: socket.socket, said: bytes) -> None:
        """Take a connection that has passed the door."""
        source, is_local = remote_ip(sock), sock.family == socket.AF_UNIX
        greeter = Greeter(
            self.card,
            functools.partial(self.judge, source=source, is_local=is_local),
            functools.partial(self.audit.refused_key, source),
            functools.partial(self.incompatible, source=source),
        )
        admitted = await admit(sock, self.endpoint.credentials, said, greeter)
        if admitted is not None:
            link, hello, _ = admitted
            self.came(link, hello)

    def attach(self, remote: RemoteProcess, link: Link) -> None:
        """Take from now on what comes over a link with a process."""
        link.attach(
            functools.partial(self._received, remote, link),
            functools.partial(self._ended, remote, link),
            functools.partial(self._has_room, remote, link),
        )

    def _received(self, remote: RemoteProcess, link: Link, body: bytes) -> None:
        message = messages.decode_control(body)
        self.link_listener.arrived(remote)
        self.note_heard(remote, link, message)
        match message:
            case messages.Inspect() if remote in self.visitors:
                self.visitors.asked(remote)
                self._inspected(remote, message)
            case messages.RequestCheckpoint():
                self.visitors.asked(remote)
                self.listener.asked_for_checkpoint(message, remote.send)
            case _:
                self.heard(remote, link, message)

    def _inspected(self, remote: RemoteProcess, question: messages.Inspect) -> None:
        from covey.runtime.metrics.inspection import PacedAnswers, answer_keeper  # most processes are not asked

        if self.is_named_keeper(remote):
            answer_keeper(question, remote.send)
        else:
            self._answers = self._answers or PacedAnswers()
            self._answers.answer(question, remote.card.id, remote.send, self.own_keeper())

    def _has_room(self, remote: RemoteProcess, link: Link) -> None:
        if link is remote.link:
            self.link_listener.link_has_room(remote)

    def _ended(self, remote: RemoteProcess, link: Link) -> None:
        if link in remote.links:
            if isinstance(link.error, CoveyError):
                self.cut_off(remote, link, printable(str(link.error)))
            self.ended(remote, link)

    async def close(self) -> None:
        """Stop listening, and close every link. Closing twice is fine."""
        if self.is_closing:
            return
        self._tasks.is_closing = True
        await self._tasks.close()
        await self.endpoint.acceptor.close()
        linked = [link for remote in self.all_linked for link in remote.links]
        links = [link for link in linked if link.is_open or link.is_resting]  # the others, the run has closed
        for link in links:
            link.close()
        if links:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEND_REST_SECONDS):
                    await asyncio.gather(*(link.ended.wait() for link in links))
        for link in links:
            link.abort()

    # Relays

    def ways(self, token: bytes) -> list[Where]:
        """Return the ways through relays to the process that has a token."""
        return [] if self.relays is None else self.relays.ways(token)

    def round_trip(self, way: Where) -> float | None:
        """Return the round trip of a way through a relay, if it is known."""
        return None if self.relays is None else self.relays.round_trip(way)
