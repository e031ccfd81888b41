"""The messages of one group: its messenger, and the sockets that the messenger uses.

Sockets are opened, replaced after they end, and given up on the control loop, through the node's lanes.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import ClosedError, ConnectError, DeadlineError
from covey.base.numbers import Rank
from covey.net.host.descriptors import ScarceError
from covey.runtime import loop as control

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat
    from covey.runtime.bell import Bell
    from covey.runtime.counters import MessageTraffic
    from covey.runtime.lanes.lanes import Lanes
    from covey.runtime.messages.messenger import Messenger
    from covey.runtime.work import Work

LANE_REQUEST_SECONDS: Final = 1.0
"""How often to ask again for a lane that has not been opened."""


class MessageFailure(Protocol):
    """What messages need of the failure of a group (`collectives.failure`)."""

    @property
    def has_happened(self) -> bool: ...

    def require_open(self) -> None: ...

    def message_error(self) -> CoveyError | None: ...

    def lost_error(self, rank: Rank) -> CoveyError: ...

    def note_raised(self, error: BaseException) -> None: ...


class MessageRoster(Protocol):
    """What messages need of the ranks of a group (`collectives.roster`)."""

    rank_of: dict[Seat, Rank]

    def describe(self, ranks: tuple[Rank, ...]) -> str: ...


class MessageOwner(Protocol):
    """What messages need of a group (`collectives.engine`)."""

    id: int
    name: str
    rank: Rank
    size: int
    config: GroupConfig
    members: tuple[Seat, ...]
    may_spin: bool

    @property
    def is_closed(self) -> bool: ...

    @property
    def lanes(self) -> Lanes | None: ...

    @property
    def is_freed(self) -> bool: ...

    @property
    def failure(self) -> MessageFailure: ...

    @property
    def roster(self) -> MessageRoster: ...


class MessageRouting:
    """The messenger of a group on this rank, made on first use, and its sockets."""

    def __init__(self, owner: MessageOwner, bell: Bell, traffic: MessageTraffic | None = None) -> None:
        """`traffic` counts the messages; by default, the messenger counts them for itself."""
        self._owner, self._bell = weakref.ref(owner), bell  # weak: a dropped group is freed at once
        self._messenger: Messenger | None = None
        self._traffic = traffic
        self.lock = threading.Lock()
        self.short: dict[int, Any] = {}
        """By rank: what sends and receives short messages; see `Messenger.short`."""

    @property
    def _group(self) -> MessageOwner:
        group = self._owner()
        assert group is not None
        return group

    def messenger(self) -> Messenger:
        """Return the messenger of this group; make it on first use."""
        from covey.proto.message_link import MessageSizes

        group = self._group
        with self.lock:
            if self._messenger is None:
                if group.is_closed:
                    group.failure.require_open()
                self._bell.open()
                self._messenger = self._kind()(
                    group.rank,
                    group.size,
                    open_lane=self._socket,
                    renew_lane=self._renew,
                    give_up=self._give_up,
                    wake_fd=self._bell.fd,
                    fault=lambda: group.failure.message_error(),  # these keep the group while messages move
                    lost=lambda rank: group.failure.lost_error(Rank(rank)),
                    told=lambda error: group.failure.note_raised(error),
                    name=group.name,
                    sizes=MessageSizes(group.config.eager_bytes, group.config.credit_bytes),
                    may_spin=group.may_spin,
                )
                self.short = self._messenger.short
                if self._traffic is not None:
                    self._messenger.traffic = self._traffic
                if group.lanes is not None:
                    for seat, sock in group.lanes.arrived(group.id, "messages").items():
                        if seat in group.roster.rank_of:  # a seat outside of the group has no messages in it
                            self._messenger.adopt(group.roster.rank_of[seat], sock)
            return self._messenger

    def _kind(self) -> Callable[..., Messenger]:
        from covey.runtime.messages.messenger import Messenger  # most groups need none

        return Messenger

    def _socket(self, rank: int, deadline: float | None = None) -> socket.socket:
        """Return the socket to `rank`, opened on first use."""
        group = self._group
        assert group.lanes is not None
        deadline = time.monotonic() + group.config.timeout if deadline is None else deadline
        while (left := deadline - time.monotonic()) > 0:
            try:
                sock = group.lanes.open(group.id, group.members[rank], "messages", min(1.0, left))
                return sock  # type: ignore[no-any-return]
            except DeadlineError:
                if (fault := group.failure.message_error()) is not None:
                    group.failure.note_raised(fault)
                    raise fault from None
            except ScarceError as error:  # of this process: the other rank is not lost
                raise ConnectError(f"messages cannot be sent or received: {error}") from error
            except (ConnectError, ClosedError) as error:
                if group.is_closed:
                    group.failure.require_open()
                lost = group.failure.lost_error(Rank(rank))
                group.failure.note_raised(lost)
                raise lost from error
        raise DeadlineError(
            f"no lane for messages to {group.roster.describe((Rank(rank),))} opened before the timeout ended",
            late=(rank,),
        )

    def note_urgent(self, rank: int) -> None:
        """Let bulk to a rank's machine leave room for a message."""
        group = self._owner()
        if group is not None and group.lanes is not None and 0 <= rank < group.size:
            group.lanes.limit.note_urgent(group.members[rank])

    def _renew(self, rank: int, ended: Any, pause: float) -> None:
        """Ask for a socket in place of `ended`, after a pause. On any thread."""
        control.soon(self._wait_and_ask, rank, ended, pause)

    def _wait_and_ask(self, rank: int, ended: Any, pause: float) -> None:
        group = self._owner()
        if pause and group is not None and group.lanes is not None:  # lanes carry nothing: their path may be the reason
            group.lanes.paths.stuck(group.members[rank])
        control.control_loop().call_later(pause, self._ask_again, rank, ended)

    def _ask_again(self, rank: int, ended: Any) -> None:
        """Ask for a socket in place of `ended` until there is one or the rank is lost. On the control loop."""
        group, messenger = self._owner(), self._messenger
        if group is None or group.lanes is None or messenger is None or group.failure.has_happened or group.is_freed:
            return
        future = group.lanes.renew(group.id, group.members[rank], ended)
        if not future.done():
            # A request may get lost while many lanes are being opened. Refusals may come on a thread that holds locks.
            timer = control.control_loop().call_later(LANE_REQUEST_SECONDS, self._ask_again, rank, ended)
            future.add_done_callback(lambda _: control.soon(self._answered, rank, ended, timer))
        elif future.exception() is not None:
            messenger.unreachable(rank)

    def _answered(self, rank: int, ended: Any, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled() and timer.when() > control.control_loop().time():
            timer.cancel()
            self._ask_again(rank, ended)

    def _give_up(self, rank: int) -> None:
        """Open and accept no more sockets to a rank."""
        group = self._owner()
        if group is not None and group.lanes is not None:
            group.lanes.give_up(group.id, group.members[rank])

    def lane_arrived(self, rank: Rank, sock: socket.socket) -> bool:
        """Give a new socket to the messenger; return False if there is none yet. On the control loop."""
        messenger = self._current()
        if messenger is not None:
            messenger.adopt(rank, sock)
        return messenger is not None

    def peer_lost(self, rank: Rank) -> None:
        """Tell the messenger that a rank is lost and the group continues. On the control loop."""
        messenger = self._current()
        if messenger is not None:
            messenger.peer_lost(rank)

    def _current(self) -> Messenger | None:
        with self.lock:
            return self._messenger

    @property
    def is_driven_here(self) -> bool:
        """Whether the calling thread moves messages: then it is in a callback of one of them."""
        return self._messenger is not None and self._messenger.is_driven_here

    def interrupt(self) -> None:
        """Let no further message pass without Python: the group has failed. On any thread."""
        if self._messenger is not None:
            self._messenger.stop_short()

    def forked(self) -> list[Work[Any]]:
        """Forget the parent's messenger, in a forked child; return the works that will never end here."""
        self.lock = threading.Lock()
        messenger, self._messenger, self.short = self._messenger, None, {}
        return [] if messenger is None else messenger.pending()

    def close(self, deadline: float) -> None:
        """Deliver the messages that were sent before, until `deadline`."""
        if self._messenger is not None:
            self._messenger.close(deadline)
