"""The table of a relay: which connection has registered which token, and which calls wait. Without I/O.

Connections are numbers that the owner of the core chooses. The owner has checked signatures before it reports anything.

Invariants:
- A token of a cluster has at most one registration. A later one replaces it: both proved the cluster's key.
- A connection is one of: a registration, a caller that waits, or neither. Joined connections leave the table.
- A call is answered at most once, and only by the holder of its id, which only the registration's connection was told.
- A call that is not answered within WAITING_CALL_SECONDS is refused. One that says nothing for
  REGISTRATION_SILENCE ends.
- A connection is told about tokens of its own cluster only.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.pace import Bucket
from covey.wire.relay import (
    LISTED_TOKENS_LIMIT,
    CallJoined,
    IncomingCall,
    ListedTokens,
    RelayRefusal,
    StillThere,
    TokenRegistered,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.wire.relay import RelayMessage

WAITING_CALL_SECONDS: Final = 4.0
"""How long a call waits for the other side: less than a handshake may take, so that the caller learns the reason."""
ASK_REGISTERED_EVERY: Final = 15.0
"""How often a registration is asked whether it is still there; routers forget connections that carry nothing."""
REGISTRATION_SILENCE: Final = 45.0
"""A registration that says nothing for so long ends."""
WAITING_CALLS_LIMIT: Final = 128
"""Calls to one token that wait at the same time."""
NEWS_RATE, NEWS_BURST = 4.0, 128.0
"""New tokens of a cluster of which its other nodes are told, per second and at once. Each is told to at most
LISTED_TOKENS_LIMIT nodes, so this bounds the work for a client that registers again and again. A new node hears of the
others anyway, and calls them itself."""
UNKNOWN_TOKEN: Final = "no node with this token is registered here"
BUSY: Final = "too many calls wait for this node"
UNANSWERED: Final = "the node did not answer in time"
OVER: Final = "there is no such call, or it is over"


class SendTo(NamedTuple):
    """Send a message on a connection."""

    connection: int
    message: RelayMessage


class CloseConnection(NamedTuple):
    """Close a connection."""

    connection: int


class JoinConnections(NamedTuple):
    """Copy bytes between two connections from now on."""

    caller: int
    taker: int


RelayEffect = SendTo | CloseConnection | JoinConnections


@dataclass
class _Registered:
    connection: int
    is_listed: bool
    heard_at: float


class RelayTable:
    """Registrations and waiting calls."""

    def __init__(self, new_call: Callable[[], bytes]) -> None:
        """`new_call` returns an id for a call that cannot be guessed."""
        self._new_call = new_call
        self._clusters: dict[bytes, dict[bytes, _Registered]] = {}
        """By cluster and token."""
        self._pace: dict[bytes, Bucket] = {}
        """By cluster: how often its nodes are told of a new token."""
        self._keys: dict[int, tuple[bytes, bytes]] = {}
        """By connection of a registration: its cluster and token."""
        self._asked: dict[int, float] = {}
        """By connection of a registration, in order of time: when it was last asked whether it is there."""
        self._calls: dict[bytes, tuple[int, int, float]] = {}
        """By id, in order of time: the caller, the registration that was told, and until when the call waits."""
        self._waiting: Counter[int] = Counter()
        """By connection of a registration: its calls that wait."""
        self._callers: dict[int, bytes] = {}
        self._effects: list[RelayEffect] = []

    @property
    def registrations(self) -> int:
        """The number of registered tokens."""
        return len(self._keys)

    @property
    def clusters(self) -> int:
        """The number of clusters with a registered token."""
        return len(self._clusters)

    @property
    def waiting(self) -> int:
        """The number of calls that wait."""
        return len(self._calls)

    # Inputs

    def registered(self, connection: int, cluster: bytes, token: bytes, *, is_listed: bool, now: float) -> None:
        """Register a token for a connection, and tell the other nodes of the cluster."""
        tokens = self._clusters.get(cluster, {})
        if (old := tokens.get(token)) is not None:
            self._forget(old.connection)
            self._effects.append(CloseConnection(old.connection))
        tokens = self._clusters.setdefault(cluster, {})
        others = [each for each, known in tokens.items() if known.is_listed]
        self._tell(connection, TokenRegistered())
        if others:
            self._tell(connection, ListedTokens(tuple(others[-LISTED_TOKENS_LIMIT:])))
        if is_listed and old is None and self._pace.setdefault(cluster, Bucket(NEWS_RATE, NEWS_BURST)).take(now):
            for known in itertools.islice(tokens.values(), LISTED_TOKENS_LIMIT):
                self._tell(known.connection, ListedTokens((token,)))
        tokens[token] = _Registered(connection, is_listed, now)
        self._keys[connection] = cluster, token
        self._asked[connection] = now

    def heard(self, connection: int, now: float) -> None:
        """Note that a registration is still there."""
        if (key := self._keys.get(connection)) is not None:
            self._clusters[key[0]][key[1]].heard_at = now

    def called(self, connection: int, cluster: bytes, token: bytes, now: float) -> None:
        """Tell the node of a token that a connection waits for it, or refuse."""
        known = self._clusters.get(cluster, {}).get(token)
        if known is None:
            self._refuse(connection, UNKNOWN_TOKEN)
        elif self._waiting[known.connection] >= WAITING_CALLS_LIMIT:
            self._refuse(connection, BUSY)
        else:
            call = self._new_call()
            self._calls[call] = connection, known.connection, now + WAITING_CALL_SECONDS
            self._callers[connection] = call
            self._waiting[known.connection] += 1
            self._tell(known.connection, IncomingCall(call))

    def taken(self, connection: int, call: bytes) -> None:
        """Join a connection with the caller of a call, or refuse it."""
        if call not in self._calls:
            self._refuse(connection, OVER)
            return
        caller = self._end(call)
        for each in (caller, connection):
            self._tell(each, CallJoined())
        self._effects.append(JoinConnections(caller, connection))

    def closed(self, connection: int) -> None:
        """Forget a connection that has ended."""
        self._forget(connection)
        if (call := self._callers.get(connection)) is not None:
            self._end(call)

    # The shape of a core

    def effects(self) -> list[RelayEffect]:
        """Return the effects to perform, in order, and clear them."""
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        call = next(iter(self._calls.values()), (0, 0, math.inf))[2]
        return min(call, next(iter(self._asked.values()), math.inf) + ASK_REGISTERED_EVERY)

    def tick(self, now: float) -> None:
        """Refuse calls that waited too long; ask registrations whether they are there, and close silent ones."""
        for call in list(self._overdue(now)):
            self._refuse(self._end(call), UNANSWERED)
        while self._asked and now >= next(iter(self._asked.values())) + ASK_REGISTERED_EVERY:
            connection = next(iter(self._asked))
            cluster, token = self._keys[connection]
            if now - self._clusters[cluster][token].heard_at >= REGISTRATION_SILENCE:
                self._forget(connection)
                self._effects.append(CloseConnection(connection))
            else:
                del self._asked[connection]
                self._asked[connection] = now
                self._tell(connection, StillThere())

    def _overdue(self, now: float) -> Iterator[bytes]:
        for call, (_, _, until) in self._calls.items():
            if until > now:
                return
            yield call

    def _end(self, call: bytes) -> int:
        """Forget a call; return its caller."""
        caller, told, _ = self._calls.pop(call)
        del self._callers[caller]
        self._waiting[told] -= 1
        if not self._waiting[told]:
            del self._waiting[told]
        return caller

    def _forget(self, connection: int) -> None:
        """Remove a registration, if the connection has one. Calls that it was told of may still be taken."""
        key = self._keys.pop(connection, None)
        if key is not None:
            cluster, token = key
            del self._asked[connection], self._clusters[cluster][token]
            if not self._clusters[cluster]:
                del self._clusters[cluster]
                self._pace.pop(cluster, None)

    def _tell(self, connection: int, message: RelayMessage) -> None:
        self._effects.append(SendTo(connection, message))

    def _refuse(self, connection: int, reason: str) -> None:
        self._tell(connection, RelayRefusal(reason))
        self._effects.append(CloseConnection(connection))
