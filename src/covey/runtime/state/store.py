"""Key-value stores of a run: connects `proto.replication` with the views of a member, its keeper and its questions."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from covey.base.errors import ClosedError, ConfigError, CoveyError, DeadlineError, PeerLostError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.net.host.machine import waking_clock
from covey.net.host.store_file import SAVE_AFTER, StoredEntries, StoreFile
from covey.proto.replication import KEEPER, Answered, Replica, Voting
from covey.proto.store import STORE_BYTES, fits
from covey.proto.store_copy import RUN_STORE
from covey.runtime import loop as control
from covey.runtime.state.store_driver import StoreDriver, StorePeer
from covey.wire import messages
from covey.wire import store as wire
from covey.wire.versions import FEATURES, KEPT_STORE, QUORUM_STORE, WIDE_STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from covey.base.numbers import Rank
    from covey.runtime.tasks import Tasks

LARGE_TURN: Final = threading.Lock()
"""Held by the thread of this process that asks a question of more than one frame: such questions take turns."""
NOT_WIDE: Final = (
    "{what}: not all members of the run have a release of covey that knows entries that end, values of more than "
    "256 KiB, and reads of several keys or of a prefix; update covey on all machines, and start the run again"
)
logger = logging.getLogger(__name__)
Outcome: TypeAlias = "Future[wire.Done]"


class StoreMember(StorePeer, Protocol):
    """Another member of the run."""

    @property
    def card(self) -> messages.Card: ...

    @property
    def is_excluded(self) -> bool: ...

    @property
    def is_gone(self) -> bool: ...

    def how_it_went(self) -> str: ...


class StorePeers(Protocol):
    """The other processes of the run, by seat."""

    @property
    def seat(self) -> Seat:
        """That of this process."""

    def __getitem__(self, seat: Seat, /) -> StoreMember: ...

    def rank_of(self, seat: Seat) -> Rank: ...


class Stores:
    """This process's copies of the stores of its run, and its questions. On the control loop."""

    def __init__(
        self,
        peers: StorePeers | None = None,
        tasks: Tasks | None = None,
        *,
        survives_losses: bool = False,
        bytes_limit: int = STORE_BYTES,
        features: Callable[[], Collection[str]] = lambda: FEATURES,
        file: StoreFile | None = None,
        least: int = 1,
    ) -> None:
        """Begin without members: questions wait for the first view. Without `peers`, this process is alone.

        Args:
            peers: the other processes of the run.
            tasks: those of the run, which say when it closes.
            survives_losses: whether a view says what follows from a loss.
            bytes_limit: how much each store may hold, the same on all members.
            features: returns what all members of the run know, once it is formed.
            file: where the entries of the run's store are from one run to the next; ConfigError if it is bad.
            least: no view that this process proposes has fewer members.
        """
        self._peers, self._tasks, self._survives_losses, self._features = peers, tasks, survives_losses, features
        self._me = peers.seat if peers is not None else Seat(0)
        self._replica = Replica(self._me, bytes_limit=bytes_limit)
        self._driver = StoreDriver(self._replica, self._find, self._answered)
        self._keeper: StorePeer | None = None
        self._keeper_knows: Collection[str] | None = None
        """The features that the keeper and this process know, once they have been linked."""
        self._view: tuple[int, int, Sequence[Seat], Seat | None] | None = None
        """The last view: its generation, its number, its members and its tie-breaker."""
        self._least = least
        self._outcomes: dict[int, Outcome] = {}
        """By number of a question."""
        self._file = file
        self._saved: tuple[int, int] | None = None
        """The state of the store that the file has, or is about to have: see `Replica.stamp`."""
        self._found: StoredEntries = () if file is None else file.read()
        """StoredEntries of an earlier run, which this process sets first if it orders the changes of the first view."""
        self._setting: set[int] = set()
        """The numbers of the questions that set these, until they are answered: so long the file stays as it is."""
        if file is not None and not fits(self._found, bytes_limit):
            raise ConfigError(
                f"{file.path} has more entries than a store may have (the setting store_bytes is {bytes_limit}); raise "
                "it on all machines, or move the file away"
            )
        self._saves = itertools.count()
        self._save: asyncio.TimerHandle | None = None
        self._saving: asyncio.Task[None] | None = None
        self._ending: Callable[[], CoveyError] | None = None
        """Makes the error of all questions, once this process is in no view of the run any more."""
        if peers is None:
            self._set_found()
            self._replica.configure(0, (self._me,), is_first=True)

    def use_keeper(self, keeper: StorePeer) -> None:
        """Let the keeper of this run order the changes, if it can, and all members know that it does."""
        self._keeper = keeper

    def view(self, generation: int, view: int, seats: Sequence[Seat], tie_breaker: Seat | None = None) -> None:
        """Take the members of a view. The keeper orders the changes, or else the member that is longest in the run."""
        self._view = generation, view, seats, tie_breaker
        if generation == view == 0 and min(seats) == self._me:
            self._set_found()
        self._configure()

    def seal(self) -> None:
        """Note that a view may follow the last one without another word of this process."""
        self._replica.seal()

    def keeper_up(self, features: Collection[str]) -> None:
        """Note a new link with the keeper, and the features that it knows, too."""
        is_first, self._keeper_knows = self._keeper_knows is None, features
        if is_first:
            self._configure()
        self._driver.link_up(KEEPER)

    def _configure(self) -> None:
        """Pass on the last view, once it is known what orders the changes."""
        is_kept = self._keeper is not None and KEPT_STORE in self._features()
        if self._view is None or (is_kept and self._keeper_knows is None):
            return  # a keeper of an earlier release is known by its first link
        generation, view, seats, tie_breaker = self._view
        voting = None
        if tie_breaker is not None and self._keeper is None and self._survives_losses:
            voting = Voting(tie_breaker, self._least) if QUORUM_STORE in self._features() else None
        self._driver.configure(
            (generation << 32) + view,
            tuple(sorted(seats)),
            is_first=generation == view == 0,
            is_kept=is_kept and KEPT_STORE in (self._keeper_knows or ()),
            follows=self._file is not None and min(seats) == self._me,
            voting=voting,
        )
        self._save_soon()

    def ask(self, store_id: int, question: wire.Question | wire.Open, outcome: Outcome) -> None:
        """Ask a question; `outcome` gets the answer."""
        if self._tasks is not None and self._tasks.is_closing and self._ending is None:
            self.close()
        if self._ending is not None:
            _fail(outcome, self._ending())
            return
        if WIDE_STORE not in self._features() and wire.is_wide(question):
            _fail(outcome, ConfigError(NOT_WIDE.format(what=type(question).__name__.lower())))
            return
        self._replica.advance(waking_clock())
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
        """Take a message of another member."""
        if self._peers is None or not self._peers[seat].is_excluded:
            self._driver.heard(seat, posting)
            self._save_soon()

    def keeper_said(self, posting: messages.Posting) -> None:
        """Take a message of the keeper."""
        self._driver.heard(KEEPER, posting)
        self._save_soon()

    def link_up(self, seat: Seat) -> None:
        """Repeat, on the new link with a process, what may be lost with the last one."""
        self._driver.link_up(seat)

    def link_has_room(self, seat: int) -> None:
        """Go on with what waits for room on the link with a member, or with the keeper."""
        self._driver.link_has_room(seat)

    def peer_gone(self, seat: Seat) -> None:
        """Note that a process is gone. In a run that continues after losses, the next view says what follows."""
        self._driver.forget(seat)
        if self._survives_losses:
            return
        self._replica.advance(waking_clock())
        self._replica.drop(seat)
        self._perform()
        self._fail_if_lost()

    def close(self) -> None:
        """Fail all questions, now and later: this process leaves the run."""
        self.end(lambda: ClosedError("the run is closed, and its store with it; join again"))

    def end(self, error: Callable[[], CoveyError]) -> None:
        """Fail all questions, now and later, each with an error of its own."""
        self._ending = self._ending or error
        self._driver.close()
        if self._save is not None:
            self._save.cancel()
        self._fail_all(error)

    # Helpers

    def _fail_all(self, error: Callable[[], CoveyError]) -> None:
        outcomes, self._outcomes = self._outcomes, {}
        for number, outcome in outcomes.items():
            self._replica.withdraw(number)
            _fail(outcome, error())
        self._perform()

    def _find(self, number: int) -> StorePeer | None:
        if number == KEEPER:
            return self._keeper
        return None if self._peers is None else self._peers[Seat(number)]

    def _perform(self) -> None:
        self._driver.perform()
        self._save_soon()

    def _answered(self, effect: Answered) -> None:
        if effect.number in self._setting:
            self._setting.remove(effect.number)
            if isinstance(effect.answer, wire.Refused):
                logger.warning("entries of store_file are left out: %s", effect.answer.reason)
        outcome = self._outcomes.pop(effect.number, None)
        if outcome is None or outcome.done():
            return
        if isinstance(effect.answer, wire.Done):
            outcome.set_result(effect.answer)
        else:
            _fail(outcome, ConfigError(effect.answer.reason))

    # The file

    def _set_found(self) -> None:
        """Set what an earlier run has left, before any other question."""
        found, self._found = self._found, ()
        batch: list[tuple[str, bytes]] = []  # many at once: a process may have only so many questions
        size = 0
        for entry in found:
            if WIDE_STORE not in self._features() and wire.is_wide(wire.Put((entry,))):
                logger.warning("%r of store_file is left out: %s", entry[0], NOT_WIDE.format(what="put"))
                continue
            cost = 4 * len(entry[0]) + len(entry[1]) + 16
            if batch and (len(batch) == wire.KEYS_LIMIT or size + cost > wire.BODY_LIMIT):
                self._setting.add(self._replica.ask(RUN_STORE, wire.Put(tuple(batch))))
                batch, size = [], 0
            batch.append(entry)
            size += cost
        if batch:
            self._setting.add(self._replica.ask(RUN_STORE, wire.Put(tuple(batch))))

    def _save_soon(self) -> None:
        if self._save is None and self._ending is None and self._has_to_save:
            self._save = asyncio.get_running_loop().call_later(SAVE_AFTER, self._begin_to_save)

    @property
    def _has_to_save(self) -> bool:
        if self._file is None or self._setting:
            return False
        return self._replica.stamp(RUN_STORE) not in (None, self._saved)

    def _take_to_save(self) -> tuple[int, StoredEntries]:
        self._saved = self._replica.stamp(RUN_STORE)
        return next(self._saves), tuple(self._replica.lasting(RUN_STORE))

    def _begin_to_save(self) -> None:
        self._saving = asyncio.get_running_loop().create_task(self._save_changes())

    async def _save_changes(self) -> None:
        try:
            if self._file is not None and self._has_to_save:
                await asyncio.to_thread(self._file.write, *self._take_to_save())
        finally:
            self._save = self._saving = None
        self._perform()  # what has changed meanwhile is saved next

    def keep(self) -> None:
        """Write what the file lacks, when this process leaves. On any thread, once nothing is asked any more."""
        if self._file is not None and self._has_to_save:
            self._file.write(*self._take_to_save())

    def _fail_if_lost(self) -> None:
        """Fail all questions if the process that orders changes is gone, and no view will name another."""
        owner = self._replica.owner
        if self._peers is None or owner in (None, self._me, KEEPER) or self._survives_losses:
            return
        assert owner is not None
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
        if _check(question) > wire.BODY_LIMIT:
            if not LARGE_TURN.acquire(timeout=max(0.0, timeout)):
                raise DeadlineError(f"no answer within the timeout of {timeout:g} s: other threads ask for more")
            try:
                return self._ask(question, timeout)
            finally:
                LARGE_TURN.release()
        return self._ask(question, timeout)

    def _ask(self, question: wire.Question | wire.Open, timeout: float) -> wire.Done:
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

    def names(self, timeout: float, prefix: str = "") -> list[str]:
        """Return the keys of all entries that begin so, sorted.

        Those that do not fit into one message are read a part at a time.
        """
        until = time.monotonic() + timeout
        names: list[str] = []
        more = 1
        while more:
            answer = self.ask(wire.Names(names[-1] if names else None, prefix), until - time.monotonic())
            names += [key.decode(errors="replace") for key in answer.values]
            more = answer.number and len(answer.values)
        return names


def describe(question: wire.Question) -> str:
    """Return a question as errors name it: its kind and up to five of its keys."""
    entries = question.entries if isinstance(question, wire.Put) else ()
    keys = tuple(key for key, _ in entries) or getattr(question, "keys", ())
    keys = keys or (getattr(question, "key", getattr(question, "prefix", "")),)
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


def _check(question: wire.Question | wire.Open) -> int:
    """Return the size of a question; raise ConfigError if others would take it for a broken protocol."""
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
    if len(body) > wire.LARGE_BODY_LIMIT:
        raise ConfigError(f"a store takes {wire.LARGE_BODY_LIMIT} bytes at a time, not {len(body)}; use several calls")
    return len(body)
