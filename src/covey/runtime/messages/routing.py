"""The messages of one group: who sends and receives them, and the sockets that carry them."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import ClosedError, ConnectError, DeadlineError
from covey.runtime import loop as control

if TYPE_CHECKING:
    import asyncio
    import socket

    from covey.base.config import GroupConfig
    from covey.base.errors import CoveyError
    from covey.runtime.bell import Bell
    from covey.runtime.members.node import Node
    from covey.runtime.messages.messenger import Messenger
    from covey.runtime.work import Work

ASK_SECONDS: Final = 1.0
"""How often a lane that does not come is asked for again."""


class MessageOwner(Protocol):
    """What the messages of a group need of the group."""

    id: int
    name: str
    rank: int
    size: int
    config: GroupConfig
    node: Node | None
    members: tuple[int, ...]
    ranks_by_member: dict[int, int]
    may_spin: bool

    @property
    def is_freed(self) -> bool: ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def has_failed(self) -> bool: ...

    def require_open(self) -> None: ...

    def fault_error(self) -> CoveyError | None: ...

    def lost_error(self, peer: int) -> CoveyError: ...

    def told(self, error: BaseException) -> None: ...

    def name_ranks(self, ranks: tuple[int, ...]) -> str: ...


class MessageRouting:
    """The messenger of a group on this rank, which is there once it is needed."""

    def __init__(self, owner: MessageOwner, bell: Bell) -> None:
        self._owner, self._bell = weakref.ref(owner), bell  # groups that are dropped go at once
        self._messenger: Messenger | None = None
        self.lock = threading.Lock()

    @property
    def _engine(self) -> MessageOwner:
        engine = self._owner()
        assert engine is not None
        return engine

    def messenger(self) -> Messenger:
        """Return what sends and receives this group's messages, opened on first use."""
        from covey.runtime.messages.messenger import Messenger

        engine = self._engine
        with self.lock:
            if self._messenger is None:
                if engine.is_closed:
                    engine.require_open()
                self._bell.open()
                self._messenger = Messenger(
                    engine.rank,
                    engine.size,
                    open_lane=self._socket,
                    renew_lane=self._renew,
                    give_up=self._give_up,
                    wake_fd=self._bell.fd,
                    fault=engine.fault_error,
                    lost=engine.lost_error,
                    told=engine.told,
                    name=engine.name,
                    may_spin=engine.may_spin,
                )
                if engine.node is not None:
                    for member, sock in engine.node.lanes.arrived(engine.id, "messages").items():
                        if member in engine.ranks_by_member:  # others have no business here
                            self._messenger.adopt(engine.ranks_by_member[member], sock)
            return self._messenger

    def _socket(self, rank: int, deadline: float | None = None) -> socket.socket:
        """Return the socket that carries messages to and from `rank`; the same one every time."""
        engine = self._engine
        assert engine.node is not None
        deadline = time.monotonic() + engine.config.timeout if deadline is None else deadline
        while (left := deadline - time.monotonic()) > 0:
            try:
                sock = engine.node.lanes.open(engine.id, engine.members[rank], "messages", min(1.0, left))
                return sock  # type: ignore[no-any-return]
            except DeadlineError:
                if (fault := engine.fault_error()) is not None:
                    engine.told(fault)
                    raise fault from None
            except (ConnectError, ClosedError) as error:
                if engine.is_closed:
                    engine.require_open()
                lost = engine.lost_error(rank)
                engine.told(lost)
                raise lost from error
        raise DeadlineError(
            f"no lane for messages to {engine.name_ranks((rank,))} opened before the timeout ended", late=(rank,)
        )

    def _renew(self, rank: int, ended: Any, pause: float) -> None:
        """Ask for another socket in place of one that ended, after a pause."""
        control.soon(self._wait_and_ask, rank, ended, pause)

    def _wait_and_ask(self, rank: int, ended: Any, pause: float) -> None:
        control.control_loop().call_later(pause, self._ask_again, rank, ended)

    def _ask_again(self, rank: int, ended: Any) -> None:
        """Ask for another socket, again and again until there is one or the rank is lost. On the control loop."""
        engine, messenger = self._owner(), self._messenger
        if engine is None or engine.node is None or messenger is None or engine.has_failed or engine.is_freed:
            return
        future = engine.node.lanes.renew(engine.id, engine.members[rank], ended)
        if not future.done():
            # Asking may be in vain, if many lanes are being opened. Refusals may come on a thread that holds locks.
            timer = control.control_loop().call_later(ASK_SECONDS, self._ask_again, rank, ended)
            future.add_done_callback(lambda _: control.soon(self._answered, rank, ended, timer))
        elif future.exception() is not None:
            messenger.unreachable(rank)

    def _answered(self, rank: int, ended: Any, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled() and timer.when() > control.control_loop().time():
            timer.cancel()
            self._ask_again(rank, ended)

    def _give_up(self, rank: int) -> None:
        """Want no more sockets to or from a rank."""
        engine = self._owner()
        if engine is not None and engine.node is not None:
            engine.node.lanes.give_up(engine.id, engine.members[rank])

    def lane_arrived(self, rank: int, sock: socket.socket) -> bool:
        """There is a socket for messages, the first one or another; return whether it is used. On the control loop."""
        messenger = self._current()
        if messenger is not None:
            messenger.adopt(rank, sock)
        return messenger is not None

    def peer_lost(self, rank: int) -> None:
        """A rank is lost, and the group goes on. On the control loop."""
        messenger = self._current()
        if messenger is not None:
            messenger.peer_lost(rank)

    def _current(self) -> Messenger | None:
        with self.lock:
            return self._messenger

    @property
    def is_driven_here(self) -> bool:
        """Whether this thread moves the messages: it is in a callback of one of them."""
        return self._messenger is not None and self._messenger.is_driven_here

    def forked(self) -> list[Work[Any]]:
        """Forget what belongs to the parent; return what will never end here."""
        self.lock = threading.Lock()
        messenger, self._messenger = self._messenger, None
        return [] if messenger is None else messenger.pending()

    def close(self, deadline: float) -> None:
        """Hand over what was sent already, until then."""
        if self._messenger is not None:
            self._messenger.close(deadline)
