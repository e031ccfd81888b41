"""Carries calls over the links of a mesh, between a terminal and agents: neither of them is in a run, so there are no
lanes.

A session is one link with one node, from the first call to the end of the link; nothing is sent again. Its messages are
numbered: a link drops what a peer does not read in time, and a gap ends the link. The callers start anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import AuthError, ConnectError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.runtime import loop as control
from covey.runtime.calls.transport import BackgroundTransport
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.errors import CoveyError
    from covey.runtime.calls.transport import CallListener, PartsTaker
    from covey.runtime.links.link import Link
    from covey.runtime.peers.remote_process import RemoteProcess

SESSIONS_LIMIT: Final = 256
SESSIONS_PER_LINK: Final = 4


class _Session:
    """Calls with one node over one link."""

    def __init__(self, seat: Seat, number: int, remote: RemoteProcess, link: Link) -> None:
        self.seat, self.number, self.remote, self.link = seat, number, remote, link
        self.sent = self.received = 0
        """Messages, which are numbered from 1."""


class LinkTransport(BackgroundTransport):
    """The transport of a service of calls. Its own methods run on the control loop, those of a transport anywhere."""

    seat = Seat(0)
    """This node; each session is a seat of its own, and none is used again."""

    def __init__(
        self,
        listener: CallListener,
        objection: Callable[[messages.Card], str],
        lost: Callable[[Seat], None] = lambda _seat: None,
        *,
        is_data: bool = False,
    ) -> None:
        """`objection` returns why a node may not call this one, or ""; `lost` is called when a session has ended.

        `is_data` says that the sessions are about data sets: these are calls of a service of their own.
        """
        self._listener, self._objection, self._lost, self._is_data = listener, objection, lost, is_data
        self._sessions: dict[Seat, _Session] = {}
        self._last = 0
        self._outbox: deque[tuple[Seat, bytes]] = deque()
        self._refusals: dict[Seat, str] = {}
        """Sessions that the other node refused, and why."""
        self._watching: set[asyncio.Task[None]] = set()

    # What the owner of the mesh calls, on the control loop

    def connect(self, remote: RemoteProcess) -> Seat:
        """Return the seat of a node for calls over the link that is in use now; ConnectError if there is none."""
        if remote.link is None or not remote.link.is_open:
            raise ConnectError(f"{remote.card.name} is not linked")
        return self._begin(secrets.randbits(52), remote, remote.link).seat

    def card_of(self, seat: Seat) -> messages.Card:
        """Return the card of a caller; ConnectError if its link has ended. On any thread."""
        return self.remote_of(seat).card

    def remote_of(self, seat: Seat) -> RemoteProcess:
        """Return the node that calls; ConnectError if its link has ended. On any thread."""
        session = self._sessions.get(seat)
        if session is None:
            raise ConnectError("the caller has gone")
        return session.remote

    def heard(self, remote: RemoteProcess, message: messages.AgentCall | messages.AgentRefusal) -> None:
        """Take a message about calls; RemoteProtocolError, which ends the link, if one before it is missing.

        A message of a session of the other kind, about data sets or not, is left to the other transport.
        """
        if isinstance(message, messages.AgentCall) and message.is_data != self._is_data:
            return
        session = self._find(remote, message.session)
        if isinstance(message, messages.AgentRefusal):
            if session is not None:
                self._refusals[session.seat] = message.reason
                self._end(session)
            return
        if session is None and message.serial == 1:
            if reason := self._objection(remote.card) or self._too_many(remote):
                remote.send(messages.AgentRefusal(message.session, reason))
                return
            if remote.link is not None:
                session = self._begin(message.session, remote, remote.link)
        if session is None:
            return  # it has ended here, and the other side will notice
        if message.serial != session.received + 1:
            raise RemoteProtocolError(f"message {message.serial} about calls after message {session.received}")
        session.received += 1
        self._listener.heard([(session.seat, message.body)])

    # What the calls need (`runtime.calls.transport.CallTransport`)

    def send(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Send messages, on the control loop."""
        self._outbox.extend(messages)
        control.soon(self._send_all)

    def send_parts(self, peer: Seat, tag: int, parts: Sequence[Any], priority: int, share: float = 1.0) -> None:
        """Do nothing: calls here are too small to have parts (`requests.CALL_BYTES`)."""

    def fetch_parts(self, peer: Seat, tag: int, sizes: Sequence[int], then: PartsTaker) -> None:
        """Report that there are none."""
        then(None)

    def refuse_parts(self, peer: Seat, tag: int, count: int) -> None:
        """Do nothing."""

    def lost_error(self, peer: Seat, rank: int, operation: str) -> CoveyError:
        """Return why calls with a node ended."""
        if reason := self._refusals.get(peer):
            return AuthError(reason)
        return ConnectError(f"{operation}: the connection was lost")

    def cut_off(self, peer: Seat, error: CoveyError) -> None:
        """End the link with a node that broke the protocol."""
        if (session := self._sessions.get(peer)) is not None:
            control.soon(session.link.abort)

    def shut(self) -> None:
        """Do nothing: the links belong to the mesh, and what was sent is on its way."""

    def _send_all(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                seat, body = self._outbox.popleft()
                if (session := self._sessions.get(seat)) is not None:
                    session.sent += 1
                    session.link.send(
                        messages.encode(messages.AgentCall(session.number, session.sent, body, self._is_data))
                    )

    def _find(self, remote: RemoteProcess, number: int) -> _Session | None:
        found = (each for each in self._sessions.values() if each.remote is remote and each.number == number)
        return next(found, None)

    def _too_many(self, remote: RemoteProcess) -> str:
        of_link = sum(each.remote is remote for each in self._sessions.values())
        is_full = of_link >= SESSIONS_PER_LINK or len(self._sessions) >= SESSIONS_LIMIT
        return "too many terminals are connected; try again later" if is_full else ""

    def _begin(self, number: int, remote: RemoteProcess, link: Link) -> _Session:
        self._last += 1
        session = self._sessions[Seat(self._last)] = _Session(Seat(self._last), number, remote, link)

        async def await_end() -> None:
            await link.ended.wait()
            self._end(session)

        task = asyncio.get_running_loop().create_task(await_end())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return session

    def _end(self, session: _Session) -> None:
        if self._sessions.pop(session.seat, None) is not None:
            self._listener.lost(session.seat)
            self._lost(session.seat)
