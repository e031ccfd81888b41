"""Key-value stores of a run, of which all members hold copies: connects `proto.replication` with links and views."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from covey.base.errors import ClosedError, ConfigError, CoveyError, DeadlineError, PeerLostError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.proto.replication import Answered, Replica, SendToReplica
from covey.runtime import loop as control
from covey.wire import messages
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.numbers import Rank
    from covey.runtime.links.link import Link
    from covey.runtime.tasks import Tasks

UNSENT_LIMIT: Final = 1 << 16
"""Messages that wait for room on one link, besides the parts of copies: of these there may be more."""
WAITING_COPIES_LIMIT: Final = 4
"""Copies that wait for room on one link; a member that has a new link gets one or two."""
Outcome: TypeAlias = "Future[wire.Done]"


class StorePeer(Protocol):
    """Another process that has copies."""

    @property
    def card(self) -> messages.Card: ...

    @property
    def link(self) -> Link | None: ...

    @property
    def is_excluded(self) -> bool: ...

    @property
    def is_gone(self) -> bool: ...

    def how_it_went(self) -> str: ...

    def send(self, message: messages.Control) -> None: ...


class StorePeers(Protocol):
    """The other processes of the run, by seat."""

    @property
    def seat(self) -> Seat:
        """That of this process."""

    def __getitem__(self, seat: Seat, /) -> StorePeer: ...

    def rank_of(self, seat: Seat) -> Rank: ...


class _Unsent:
    """What waits for room on the link with one process, in order. It is encoded when it is sent: copies are large."""

    def __init__(self) -> None:
        self._messages: deque[SendToReplica] = deque()
        self._copies = self._parts = 0
        """How many copies end among them, and how many of them are parts of copies."""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_too_long(self) -> bool:
        """Whether more waits than a process that reads leaves waiting."""
        return len(self._messages) - self._parts > UNSENT_LIMIT or self._copies > WAITING_COPIES_LIMIT

    def add(self, message: SendToReplica) -> None:
        self._messages.append(message)
        self._count(message, 1)

    def take(self) -> SendToReplica:
        """Remove and return the first message."""
        message = self._messages.popleft()
        self._count(message, -1)
        return message

    def _count(self, message: SendToReplica, number: int) -> None:
        if isinstance(message.body, wire.Load | wire.LoadAnswer):
            self._parts += number
        elif isinstance(message.body, wire.Loaded):
            self._copies += number


class Stores:
    """This process's copies of the stores of its run, and its questions. On the control loop."""

    def __init__(
        self, peers: StorePeers | None = None, tasks: Tasks | None = None, *, survives_losses: bool = False
    ) -> None:
        """Begin without members: questions wait for the first view. Without `peers`, this process is alone.

        `tasks` are those of the run, and say when it closes. In a run that survives losses, a view says what follows
        from one.
        """
        self._peers, self._tasks, self._survives_losses = peers, tasks, survives_losses
        self._me = peers.seat if peers is not None else Seat(0)
        self._replica = Replica(self._me)
        self._outcomes: dict[int, Outcome] = {}
        """By number of a question."""
        self._unsent: dict[Seat, _Unsent] = {}
        """By seat: what its link has no room for yet."""
        self._ending: Callable[[], CoveyError] | None = None
        """Makes the error of all questions, once this process is in no view of the run any more."""
        if peers is None:
            self._replica.configure(0, (self._me,), is_first=True)

    def view(self, generation: int, view: int, seats: Sequence[Seat]) -> None:
        """Take the members of a view. The one that is longest in the run orders the changes."""
        is_first = generation == view == 0
        self._unsent.clear()  # of an earlier view: all that matters is said again
        self._replica.configure((generation << 32) + view, tuple(sorted(seats)), is_first=is_first)
        self._perform()

    def ask(self, store_id: int, question: wire.Question | wire.Open, outcome: Outcome) -> None:
        """Ask a question; `outcome` gets the answer."""
        if self._tasks is not None and self._tasks.is_closing and self._ending is None:
            self.close()
        if self._ending is not None:
            _fail(outcome, self._ending())
            return
        self._outcomes[self._replica.ask(store_id, question)] = outcome
        self._perform()
        self._fail_if_lost()

    def withdraw(self, outcome: Outcome) -> None:
        """Cancel the question with this outcome: its caller does not wait any more."""
        for number in [number for number, each in self._outcomes.items() if each is outcome]:
            del self._outcomes[number]
            self._replica.withdraw(number)
            self._perform()

    def heard(self, seat: Seat, posting: messages.Posting) -> None:
        """Take a message of another process."""
        body = wire.decode_body(posting.body)
        if self._peers is None or not self._peers[seat].is_excluded:
            self._replica.heard(seat, posting.store, posting.number, body)
            self._perform()

    def link_up(self, seat: Seat) -> None:
        """Repeat, on the new link with a process, what may be lost with the last one."""
        self._unsent.pop(seat, None)
        self._replica.repeat(seat)
        self._perform()

    def link_has_room(self, seat: Seat) -> None:
        """Go on with what waits for room on the link with a process."""
        self._send_more(seat)

    def peer_gone(self, seat: Seat) -> None:
        """Note that a process is gone. In a run that continues after losses, the next view says what follows."""
        self._unsent.pop(seat, None)
        if self._survives_losses:
            return
        self._replica.drop(seat)
        self._perform()
        self._fail_if_lost()

    def close(self) -> None:
        """Fail all questions, now and later: this process leaves the run."""
        self.end(lambda: ClosedError("the run is closed, and its store with it; join again"))

    def end(self, error: Callable[[], CoveyError]) -> None:
        """Fail all questions, now and later, each with an error of its own."""
        self._ending = self._ending or error
        self._unsent.clear()
        self._fail_all(error)

    # Helpers

    def _fail_all(self, error: Callable[[], CoveyError]) -> None:
        outcomes, self._outcomes = self._outcomes, {}
        for number, outcome in outcomes.items():
            self._replica.withdraw(number)
            _fail(outcome, error())
        self._perform()

    def _perform(self) -> None:
        for effect in self._replica.effects():
            if not isinstance(effect, Answered):
                if self._peers is not None and self._ending is None:
                    self._unsent.setdefault(Seat(effect.peer), _Unsent()).add(effect)
                continue
            outcome = self._outcomes.pop(effect.number, None)
            if outcome is None or outcome.done():
                continue
            if isinstance(effect.answer, wire.Done):
                outcome.set_result(effect.answer)
            else:
                _fail(outcome, ConfigError(effect.answer.reason))
        for seat in list(self._unsent):
            self._send_more(seat)

    def _send_more(self, seat: Seat) -> None:
        """Give the link with a process what it has room for: a link drops what it cannot hold.

        Without a link nothing is kept: what matters is said again on the next one.
        """
        unsent = self._unsent.get(seat)
        if self._peers is None or unsent is None:
            return
        peer = self._peers[seat]
        link = peer.link
        while unsent and link is not None and link.has_room:
            _, store, number, body = unsent.take()
            peer.send(messages.Posting(store, number, wire.encode_body(body)))
        if link is not None and unsent.is_too_long:
            link.abort()  # the process reads nothing; what it lacks is said again on another link
        if link is None or not unsent or unsent.is_too_long:
            self._unsent.pop(seat, None)

    def _fail_if_lost(self) -> None:
        """Fail all questions if the process that orders changes is gone, and no view will name another."""
        owner = self._replica.owner
        if self._peers is None or owner is None or owner == self._me or self._survives_losses:
            return
        peer = self._peers[Seat(owner)]
        if not peer.is_gone:
            return
        rank = self._peers.rank_of(Seat(owner))
        name = f"rank {rank} ({peer.card.name or 'unnamed'}, on {peer.card.host_name or 'this host'})"
        text = f"{name}, which orders the changes to the store, {peer.how_it_went()}"
        host = peer.card.host_name
        self._fail_all(lambda: PeerLostError(text, rank=rank, host=host, operation="store"))


def _fail(outcome: Outcome, error: CoveyError) -> None:
    if not outcome.done():
        outcome.set_exception(error)


class StoreClient:
    """Asks one store. On any thread."""

    def __init__(self, stores: Stores, store_id: int) -> None:
        self._stores = stores
        self.store_id = store_id
        """The number of the store, the same on all ranks and unique to it."""

    def ask(self, question: wire.Question | wire.Open, timeout: float) -> wire.Done:
        """Return the answer.

        Raises:
            DeadlineError: there was no answer within `timeout` seconds.
            PeerLostError: in a run that ends with its first loss, the process that orders the changes is gone.
            ConfigError: the store is full, or the question is malformed.
            ClosedError: this process has left the run.
        """
        _check(question)
        outcome: Outcome = Future()
        try:
            control.soon(self._stores.ask, self.store_id, question, outcome)
            try:
                return control.result_of(outcome, timeout)
            except TimeoutError:
                if outcome.done():  # with a TimeoutError as its outcome
                    raise
                raise DeadlineError(f"no answer within the timeout of {timeout:g} s") from None
        except BaseException:  # Ctrl-C, too
            control.soon(self._stores.withdraw, outcome)
            raise

    def read(self, keys: tuple[str, ...], timeout: float) -> list[bytes]:
        """Wait until all of these entries exist, and return their values, all as they were at one moment.

        Values that do not fit into one message come in several: each tells which of those that came before have changed
        since. Raises as `ask` does.
        """
        until = time.monotonic() + timeout
        values, seen = [b""] * len(keys), [0] * len(keys)
        answer = self.ask(wire.Get(keys), timeout)
        while answer.versions:
            if len(answer.versions) != len(keys):
                raise RemoteProtocolError(f"a store has {len(answer.versions)} versions of {len(keys)} entries")
            changed = [at for at, version in enumerate(answer.versions) if version != seen[at]]
            for at, value in zip(changed, answer.values, strict=False):
                values[at], seen[at] = value, answer.versions[at]
            if len(answer.values) == len(changed):
                return values
            answer = self.ask(wire.Get(keys, tuple(seen)), until - time.monotonic())
        return list(answer.values)

    def names(self, timeout: float) -> list[str]:
        """Return the keys of all entries, sorted. Those that do not fit into one message are read a part at a time."""
        until = time.monotonic() + timeout
        names: list[str] = []
        more = 1
        while more:
            answer = self.ask(wire.Names(names[-1] if names else None), until - time.monotonic())
            names += [key.decode(errors="replace") for key in answer.values]
            more = answer.number and len(answer.values)
        return names


def describe(question: wire.Question) -> str:
    """Return a question as errors name it: its kind and up to five of its keys."""
    entries = question.entries if isinstance(question, wire.Put) else ()
    keys = tuple(key for key, _ in entries) or getattr(question, "keys", ()) or (getattr(question, "key", ""),)
    shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
    return f"{type(question).__name__.lower()}({shown})"


def encoded(value: str | bytes | bytearray | memoryview) -> bytes:
    """Return a value as the store has it: text as UTF-8; ConfigError for what is neither that nor bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise ConfigError(
            f"a store has bytes and text, not {type(value).__name__}; encode the value, with json for instance"
        )
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise _no_text("value", error) from None


def _no_text(what: str, error: UnicodeEncodeError) -> ConfigError:
    shown = ascii(error.object[max(0, error.start - 20) : error.start + 20])
    return ConfigError(
        f"a store has text that UTF-8 can encode, and no {what} with a lone surrogate (character {error.start} of "
        f"{shown}); pass bytes as a value, and another key"
    )


def _check(question: wire.Question | wire.Open) -> None:
    """Raise ConfigError for a question that others would take for a broken protocol, which ends the link."""
    try:
        body = wire.encode_body(wire.Submit(0, 0, question))
        wire.decode_body(body)
    except UnicodeEncodeError as error:
        raise _no_text("key", error) from None
    except (RemoteProtocolError, OverflowError) as error:
        raise ConfigError(
            f"a store has keys of up to {wire.KEY_LIMIT} characters, values of up to {wire.VALUE_LIMIT} bytes and "
            f"numbers of 64 bits: {error.__cause__ or error}"
        ) from None
    if len(body) > wire.BODY_LIMIT:
        raise ConfigError(f"a store takes {wire.BODY_LIMIT} bytes at a time, not {len(body)}; use several calls")
