"""Moves the lanes with a peer to another path, while operations go on. On the control loop.

Lanes for messages are replaced at once, which loses nothing. A lane for collectives is replaced at an operation's
boundary: the end that dials opens its replacement over the new path, and then both ends agree on the operation from
which they use it (`collectives.attempt_lanes`). Until then the old lane is used as before, so nothing is lost if the
replacement does not open, or if the two do not agree.

The old lane stays open until both ends have switched: one of them may be an operation behind, and what was sent to it
is still on the way. Each end shuts its direction down when it has switched, and closes when it sees the other end's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from typing import TYPE_CHECKING, Any, Final

from covey.base.lane_kinds import LANE_KINDS
from covey.base.pace import Growing
from covey.net.lanes.stream import is_striped
from covey.runtime import loop as control
from covey.runtime.lanes.dialler import LaneShape
from covey.runtime.lanes.resumption import spell_connection
from covey.runtime.lanes.table import REPLACEMENT, LaneKey
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from covey.base.numbers import Seat
    from covey.runtime.lanes.dialler import LaneDialler
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.lanes.table import LaneTable
    from covey.runtime.links.handshake import Where
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks

logger = logging.getLogger("covey")

MOVE_TRIES: Final = 20
"""Proposals for one lane. The other end may be ahead, by more operations each time."""
PROPOSAL_PAUSES: Final = Growing(0.1, 1.0)
"""Before a proposal that was refused is made again."""
RETIRE_CHECK_EVERY: Final = 0.5
"""How often an end that has switched looks whether the other end has, too."""


class LaneMoves:
    """The lanes of one process that are being moved."""

    def __init__(
        self,
        peers: PeerTable,
        tasks: Tasks,
        groups: GroupRegistry,
        table: LaneTable,
        dialler: LaneDialler,
        *,
        is_resuming: Callable[[Any], bool],
        reason: Callable[[Seat], str],
        tell: Callable[[str, RemoteProcess, str], None],
    ) -> None:
        """`is_resuming` tells whether a lane finds another path by itself.

        `reason` returns why the lanes with a peer have so many streams, and `tell` adds an event about a peer.
        """
        self._peers, self._tasks, self._groups, self._table, self._dialler = peers, tasks, groups, table, dialler
        self._is_resuming, self._reason, self._tell = is_resuming, reason, tell
        self._proposed: dict[LaneKey, tuple[int, int]] = {}
        """By replacement: the operation that this end has proposed and that is not answered, and how often it tried."""
        self._answered: dict[LaneKey, tuple[int, messages.MoveLane | None]] = {}
        """By replacement: the operation that was proposed to this end last, and the answer."""
        self._again: set[LaneKey] = set()
        """Replacements that were being opened, over another path, when their lanes should move: these move later."""

    def stripe(self, peer: Seat, ways: list[Where]) -> None:
        """Replace the sealed lanes for collectives with a peer by lanes over all these addresses."""
        for key, future in self._table.of_peer(peer):
            replacement = key._replace(purpose=REPLACEMENT)
            is_open = key.purpose == "collectives" and future.done() and future.exception() is None
            if not is_open or not LANE_KINDS[future.result().kind].can_spread or is_striped(future.result()):
                continue
            if self._table.get(replacement) is None:
                self._want(replacement)
                self._dialler.open_as(replacement, LaneShape(ways=ways))

    def reopen(self, key: LaneKey, streams: int) -> None:
        """Replace a sealed lane for collectives by one with so many streams."""
        if not self.is_replacing(key):
            replacement = key._replace(purpose=REPLACEMENT)
            self._want(replacement)
            self._dialler.open_as(replacement, LaneShape(streams=streams))

    def is_replacing(self, key: LaneKey) -> bool:
        """Tell whether another lane is about to take the place of this one."""
        return self._table.get(key._replace(purpose=REPLACEMENT)) is not None

    def replace_messages(self, peer: Seat) -> None:
        """Open the lanes for messages with a peer anew, which loses nothing."""
        for key, future in self._table.of_peer(peer):
            if key.purpose == "messages" and future.done() and future.exception() is None:
                self.replace(key)

    def replace(self, key: LaneKey) -> None:
        """Open a lane for messages anew."""
        self._dialler.replace(key)

    def _want(self, replacement: LaneKey) -> None:
        wanted = self._table.want(replacement)
        wanted.add_done_callback(functools.partial(control.soon, self._opened, replacement))

    def move(self, peer: Seat) -> None:
        """Open all lanes with a peer anew, over its best address. This end must be the one that dials."""
        self._proposed = {key: each for key, each in self._proposed.items() if not self._table.is_over(key)}
        self._again = {key for key in self._again if not self._table.is_over(key)}
        for key, future in self._table.of_peer(peer):
            if not future.done() or future.exception() is not None:
                continue
            replacement = key._replace(purpose=REPLACEMENT)
            if key.purpose == "messages":
                self._dialler.replace(key)
            elif self._is_resuming(future.result()):
                continue  # its streams find another path by themselves
            elif key.purpose == "collectives" and LANE_KINDS[future.result().kind].is_of_network:
                if self._table.get(replacement) is not None:
                    self._again.add(replacement)
                else:
                    self._want(replacement)
                    self._dialler.open(replacement)

    def _opened(self, key: LaneKey, done: Future[Any]) -> None:
        """Propose to use a replacement lane that this end has opened."""
        if done.exception() is not None:
            logger.info("no other lane to %s: %s", self._peers.name_of(key.peer), done.exception())
            self._drop(key)
        else:
            self._propose(key, done.result(), 0, 1)

    def _propose(self, key: LaneKey, lane: Any, least: int, tries: int) -> None:
        group = self._groups.get(key.group)
        sequence = None if group is None else group.propose_switch(key.peer, key.attempt, lane, least)
        if sequence is None:
            self._proposed.pop(key, None)
            self._drop(key)
            return
        self._proposed[key] = sequence, tries
        self._peers.send(key.peer, messages.MoveLane(key.group, key.attempt, "propose", sequence))

    def _drop(self, key: LaneKey) -> None:
        """Give a replacement up."""
        self._table.drop_replacement(key)
        self._move_again(key)

    def _move_again(self, replacement: LaneKey) -> None:
        """Move a lane whose replacement, which is used or dropped now, did not go over the path that it should."""
        if replacement in self._again:
            self._again.discard(replacement)
            if self._peers[replacement.peer].is_dialled and not self._table.is_over(replacement):
                self._want(replacement)
                self._dialler.open(replacement)

    def link_up(self, peer: Seat) -> None:
        """Repeat the proposals to a peer that has another link: they, or their answers, may be lost."""
        for key, (sequence, _) in self._proposed.items():
            if key.peer == peer:
                self._peers.send(peer, messages.MoveLane(key.group, key.attempt, "propose", sequence))

    def heard(self, seat: Seat, message: messages.MoveLane) -> None:
        """Take a step from a peer. One that fits nothing here is ignored: the attempt may be over."""
        key = LaneKey(message.group, seat, REPLACEMENT, message.attempt)
        if message.step == "propose":
            self._answer(key, message.sequence)
            return
        sequence, tries = self._proposed.get(key, (0, 0))
        group, future = self._groups.get(key.group), self._table.get(key)
        if message.sequence != sequence or not tries:
            return  # the answer to an earlier proposal, which came on another link
        del self._proposed[key]
        if message.step == "accept":
            if group is not None:
                group.settle_switch(seat, key.attempt, sequence)
            return
        if group is not None:
            group.settle_switch(seat, key.attempt, None)
        if tries >= MOVE_TRIES or future is None or not future.done() or future.exception() is not None:
            self._drop(key)
            return
        least = max(sequence + 1, message.begun + 2**tries)
        asyncio.get_running_loop().call_later(
            PROPOSAL_PAUSES.after(tries), self._propose_again, key, future, least, tries + 1
        )

    def _propose_again(self, key: LaneKey, future: Future[Any], least: int, tries: int) -> None:
        if self._table.get(key) is future and not self._tasks.is_closing:
            self._propose(key, future.result(), least, tries)

    def _answer(self, key: LaneKey, sequence: int) -> None:
        """Accept or refuse what a peer proposes; if it repeats itself, answer as before."""
        last, answer = self._answered.get(key, (0, None))
        if sequence > last:
            answer = self._judge(key, sequence)
            self._answered = {each: said for each, said in self._answered.items() if not self._table.is_over(each)}
            self._answered[key] = sequence, answer
        if sequence >= last and answer is not None:
            self._peers.send(key.peer, answer)

    def _judge(self, key: LaneKey, sequence: int) -> messages.MoveLane:
        group, future = self._groups.get(key.group), self._table.get(key)
        begun = None
        if group is not None and future is not None and future.done() and future.exception() is None:
            begun = group.accept_switch(key.peer, key.attempt, future.result(), sequence)
        if begun == 0:
            return messages.MoveLane(key.group, key.attempt, "accept", sequence)
        return messages.MoveLane(key.group, key.attempt, "refuse", sequence, begun or 0)

    # After the switch

    def switched(self, key: LaneKey) -> None:
        """Note that this end uses the replacement from now on. On the thread of the operation."""
        both = self._table.switch(key)
        if both is not None:
            control.soon(self._retire, key, *both)

    def _retire(self, key: LaneKey, old: Any, new: Any) -> None:
        peer = self._peers[key.peer]
        streams, before = len(new.sockets()), len(old.sockets())
        if is_striped(new):
            text = f"{new.kind} lane spread over {_addresses(new)}"
        elif streams != before and not is_striped(old) and _addresses(old) == _addresses(new):
            reason = self._reason(key.peer)
            text = f"{new.kind} lane has {streams} streams instead of {before}" + (f": {reason}" if reason else "")
        else:
            text = f"{new.kind} lane moved from {_addresses(old)} to {_addresses(new)}"
        self._tell("striped" if is_striped(new) else "moved", peer, text)
        self._tasks.spawn(self._close_when_ended(old))
        self._move_again(key._replace(purpose=REPLACEMENT))

    async def _close_when_ended(self, old: Any) -> None:
        """Close a lane once the other end does not use it any more; its group closes it, if it ends before that.

        One over several networks sends again what one of them has lost, before it ends its direction.
        """
        while is_striped(old) and not old.is_settled and old.sockets()[0].fileno() >= 0:
            old.tend()
            await asyncio.sleep(RETIRE_CHECK_EVERY)
        with contextlib.suppress(OSError):  # it has ended already
            old.shutdown(socket.SHUT_WR)
        while not all(_has_ended(sock) for sock in old.sockets()):  # noqa: ASYNC110  (a reader would need its owner)
            await asyncio.sleep(RETIRE_CHECK_EVERY)
        self._table.close_retired(old)


def _has_ended(sock: socket.socket) -> bool:
    """Tell whether the other end has ended a connection on which it has nothing more to send."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # the end, or what no end may send after its switch
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _addresses(lane: Any) -> str:
    """Return the addresses of both ends of a lane, for events."""
    socks = lane.sockets() if is_striped(lane) else lane.sockets()[:1]
    told = [text for sock in socks if (text := spell_connection(sock))]
    return " and ".join(told) or "a path that is gone"
