"""Copies of key-value stores on several members, which survive the loss of all but one of them.

The first member of a *configuration* (the members of a view, in order) is its *owner*. It orders all changes, sends
each to the other members, and answers the process that asked once all members have it. Changes include questions that
only read: so an answer tells that the owner was not replaced before.

Invariants:

1. The order of changes is one sequence, and the log of every copy is a prefix of it. Only an owner appends, on links
   that keep the order; a new owner first takes the longest log of all members (`Recover`, `Last`), and then brings all
   others up to it, before it appends anything.
2. A change that was answered is in the log of every member of the configuration in which it was answered, so also in
   that of every later owner.
3. A member takes changes of its own configuration only. An owner that was excluded by a view gets no acknowledgements
   from the members of that view, and so answers nothing.
4. A change is applied once: copies keep the answers that their askers may not have received, and askers say which they
   have.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from covey.proto.store_copy import RUN_STORE, LogEntry, StoreCopy
from covey.wire import store as wire

NO_COPY: Final = -1
"""The index of a member that has no copy; an empty one has the index 0."""
WAITING_LIMIT: Final = 1 << 16
"""Questions that wait until the owner has recovered."""
EARLY_LIMIT: Final = 4096
"""Messages of a configuration that this member does not know yet."""


class Send(NamedTuple):
    """Send a message to a member; `store` and `number` are the ones of a question, or 0."""

    peer: int
    store: int
    number: int
    body: wire.Replication | wire.Answer


class Answered(NamedTuple):
    """A question of this process is answered."""

    number: int
    answer: wire.Answer


class _Question(NamedTuple):
    """A question of this process that has no answer yet."""

    store: int
    change: wire.Change


class Replica:
    """One member's part: its copy, and the questions of its process. Calls in, `effects()` out."""

    def __init__(self, me: int) -> None:
        """Begin without a configuration: questions wait for the first one."""
        self._me = me
        self._config, self._members = -1, ()  # type: tuple[int, tuple[int, ...]]
        self._copy: StoreCopy | None = None
        """None until this member was given one."""
        self._loading: StoreCopy | None = None
        """A copy of which parts are missing."""
        self._index = NO_COPY
        """The last change that the copy has."""
        self._log: deque[tuple[int, LogEntry]] = deque()
        """The changes that may be missing in other copies, with their indexes."""
        self._stable = -1
        self._acked: dict[int, int] = {}
        """Of the owner, by other member: the last change that its copy has."""
        self._recovering: set[int] = set()
        """Of the owner: the members that have not said yet how far their copies are."""
        self._unanswered: deque[tuple[int, int, int, int, wire.Answer]] = deque()
        """Of the owner: answers, with the index that all copies must have before they are given."""
        self._ordered: dict[tuple[int, int], int] = {}
        """Of the owner, by asker and number: the index of a change that is not stable yet; in the order of indexes."""
        self._waiting: deque[tuple[int, int, int, wire.Submit]] = deque()
        """Of the owner: questions that came before it was ready."""
        self._early: list[tuple[int, int, int, wire.Replication]] = []
        self._questions: dict[int, _Question] = {}
        """Of this process, by number."""
        self._effects: list[Send | Answered] = []

    def effects(self) -> list[Send | Answered]:
        """Return what to do, in order, and clear it."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def owner(self) -> int | None:
        """The member that orders changes; None before the first configuration."""
        return self._members[0] if self._members else None

    @property
    def has_copy(self) -> bool:
        """Whether this member could order the changes if all others were lost."""
        return self._copy is not None

    # Inputs

    def configure(self, config: int, members: tuple[int, ...], *, is_first: bool = False) -> None:
        """Take the members of a view, in order; `is_first` if no member can have a copy from before."""
        if config <= self._config:
            return
        self._config, self._members = config, members
        self._acked, self._recovering = {}, set()
        self._loading = None
        self._unanswered.clear()
        self._ordered.clear()
        self._waiting.clear()
        if is_first and self._me in members and self._copy is None:
            self._copy, self._index = StoreCopy(), 0
        if self.owner == self._me:
            self._recovering = set(members) - {self._me}
            for peer in self._recovering:
                self._send(peer, wire.Recover(config, self._index))
            self._recovered()
        for number in list(self._questions):
            self._put(number)
        early, self._early = self._early, []
        for message in early:
            self.heard(*message)

    def ask(self, store: int, number: int, change: wire.Question | wire.Open) -> None:
        """Ask a question of this process; numbers ascend."""
        self._questions[number] = _Question(store, change)
        self._put(number)

    def withdraw(self, number: int) -> None:
        """Cancel a question: its caller does not wait any more."""
        question = self._questions.pop(number, None)
        if question is not None and self.owner is not None:
            self._put_change(question.store, number, wire.Withdraw())

    def drop(self, peer: int) -> None:
        """Go on without a member, although no view says so: for runs that end with their first loss."""
        if peer not in self._members or peer == self.owner:
            return
        self._members = tuple(member for member in self._members if member != peer)
        if self.owner == self._me:
            self._acked.pop(peer, None)
            if peer in self._recovering:
                self._recovering.discard(peer)
                self._recovered()
            else:
                self._settle()

    def repeat(self, peer: int) -> None:
        """Repeat what may be lost with the last link to a member."""
        if peer == self.owner:
            for number in list(self._questions):
                self._put(number)
        if self.owner == self._me and peer in self._members:
            if peer in self._recovering:
                self._send(peer, wire.Recover(self._config, self._index))
            elif self._is_ready:
                self._bring_up(peer)

    def heard(self, peer: int, store: int, number: int, body: wire.Replication | wire.Answer) -> None:
        """Take a message of another process."""
        if isinstance(body, wire.Done | wire.Refused):
            if peer == self.owner and self._questions.pop(number, None) is not None:
                self._effects.append(Answered(number, body))
            return
        if body.config > self._config:
            if len(self._early) < EARLY_LIMIT:
                self._early.append((peer, store, number, body))
            return
        if body.config < self._config:
            return
        match body:
            case wire.Submit():
                self._asked(peer, store, number, body)
            case wire.Entry() if peer == self.owner or self._is_recovering(peer):
                self._received(peer, store, number, body)
            case wire.Ack(_, index) if self.owner == self._me and peer in self._acked:
                self._acknowledged(peer, index)
            case wire.Recover(_, index) if peer == self.owner:
                if index == NO_COPY and self._copy is not None:
                    self._send_copy(peer)
                self._send_log(peer, index)
                self._send(peer, wire.Last(self._config, self._index))
            case wire.Last(_, index) if self._is_recovering(peer):
                self._recovering.discard(peer)
                self._acked[peer] = index
                self._recovered()
            case wire.Load() | wire.LoadAnswer() | wire.Loaded() if peer == self.owner or self._is_recovering(peer):
                self._load(store, number, body)
            case _:
                pass  # of a member that is not what it was, or never was

    # Questions

    def _put(self, number: int) -> None:
        question = self._questions[number]
        self._put_change(question.store, number, question.change)

    def _put_change(self, store: int, number: int, change: wire.Change) -> None:
        owner = self.owner
        if owner is None:
            return
        ask = wire.Submit(self._config, min(self._questions, default=number + 1), change)
        if owner == self._me:
            self._asked(self._me, store, number, ask)
        else:
            self._effects.append(Send(owner, store, number, ask))

    def _asked(self, asker: int, store: int, number: int, ask: wire.Submit) -> None:
        if self.owner != self._me:
            return  # the asker repeats it when it knows the owner
        if not self._is_ready:
            if len(self._waiting) < WAITING_LIMIT:
                self._waiting.append((asker, store, number, ask))
            else:
                self._answer(asker, store, number, wire.Refused("the store recovers from a loss; ask again later"))
            return
        assert self._copy is not None
        if isinstance(ask.change, wire.Withdraw):
            self._append(LogEntry(store, asker, number, ask.settled, ask.change))
            return
        if (asker, number) in self._ordered or self._copy.is_settled(asker, number):
            return
        known = self._copy.answer_to(asker, number)
        if known is not None:  # but perhaps not all copies have the change
            self._unanswered.append((self._index, store, asker, number, known))
            self._settle()
        elif not any(store_.is_waiting(asker, number) for store_ in self._copy.stores.values()):
            self._append(LogEntry(store, asker, number, ask.settled, ask.change))

    def _answer(self, asker: int, store: int, number: int, answer: wire.Answer) -> None:
        if asker != self._me:
            self._effects.append(Send(asker, store, number, answer))
        elif self._questions.pop(number, None) is not None:
            self._effects.append(Answered(number, answer))

    # The owner

    @property
    def _is_ready(self) -> bool:
        return not self._recovering and self._copy is not None and len(self._acked) == len(self._members) - 1

    def _is_recovering(self, peer: int) -> bool:
        return self.owner == self._me and peer in self._recovering

    def _append(self, entry: LogEntry) -> None:
        index = self._index + 1
        self._ordered[entry.asker, entry.number] = index
        self._log.append((index, entry))
        self._apply(index, entry)
        for peer in self._members[1:]:
            self._send_entry(peer, index, entry)
        self._settle()

    def _apply(self, index: int, entry: LogEntry) -> None:
        assert self._copy is not None
        self._index = index
        for store, asker, number, answer in self._copy.apply(entry):
            if self.owner == self._me:
                self._unanswered.append((index, store, asker, number, answer))

    def _acknowledged(self, peer: int, index: int) -> None:
        self._acked[peer] = max(self._acked[peer], min(index, self._index))
        self._settle()

    def _settle(self) -> None:
        """Answer what all copies have, and forget the part of the log that none of them lacks."""
        if not self._is_ready:
            return
        self._trim(min(self._acked.values(), default=self._index))
        while self._ordered and self._ordered[key := next(iter(self._ordered))] <= self._stable:
            del self._ordered[key]
        while self._unanswered and self._unanswered[0][0] <= self._stable:
            _, store, asker, number, answer = self._unanswered.popleft()
            self._answer(asker, store, number, answer)

    def _trim(self, stable: int) -> None:
        self._stable = max(self._stable, stable)
        while self._log and self._log[0][0] <= self._stable:
            self._log.popleft()

    def _recovered(self) -> None:
        """Once all members have said how far they are: bring them all to the longest log, and begin to order."""
        if self._recovering or self.owner != self._me:
            return
        if self._copy is None:  # no member has one: all that had one are gone
            self._copy, self._index = StoreCopy(), 0
        for peer in self._acked:
            self._bring_up(peer)
        self._append(LogEntry(RUN_STORE, self._me, 0, 0, wire.Forget()))
        waiting, self._waiting = self._waiting, deque()
        for message in waiting:
            self._asked(*message)

    def _bring_up(self, peer: int) -> None:
        """Send a member what its copy lacks."""
        if self._acked[peer] == NO_COPY:
            self._send_copy(peer)
        self._send_log(peer, self._acked[peer])

    def _send_copy(self, peer: int) -> None:
        assert self._copy is not None
        for store, part, number in self._copy.parts():
            if isinstance(part, wire.Load):
                body: wire.Replication = wire.Load(self._config, part.change, part.asker, part.versions)
                self._effects.append(Send(peer, store, number, body))
            else:
                body = wire.LoadAnswer(self._config, part.asker, part.answer)
                self._effects.append(Send(peer, store, number, body))
        self._send(peer, wire.Loaded(self._config, self._index))

    def _send_log(self, peer: int, index: int) -> None:
        for at, entry in self._log:
            if at > index:
                self._send_entry(peer, at, entry)

    def _send_entry(self, peer: int, index: int, entry: LogEntry) -> None:
        body = wire.Entry(self._config, index, self._stable, entry.asker, entry.settled, entry.change)
        self._effects.append(Send(peer, entry.store, entry.number, body))

    def _send(self, peer: int, body: wire.Replication) -> None:
        self._effects.append(Send(peer, 0, 0, body))

    # The other members

    def _received(self, peer: int, store: int, number: int, body: wire.Entry) -> None:
        if self._copy is None:
            return
        if body.index == self._index + 1:
            entry = LogEntry(store, body.asker, number, body.settled, body.change)
            self._log.append((body.index, entry))
            self._apply(body.index, entry)
        if peer == self.owner:
            self._trim(min(body.stable, self._index))
            self._send(peer, wire.Ack(self._config, self._index))

    def _load(self, store: int, number: int, body: wire.Load | wire.LoadAnswer | wire.Loaded) -> None:
        if self._copy is not None:
            return
        loading = self._loading = self._loading or StoreCopy()
        match body:
            case wire.Load(_, wire.Open(), _, versions):
                loading.open(store)
                loading.stores[store].restore_changes(versions[0] if versions else 0)
            case wire.Load(_, wire.Put(entries), _, versions) if store in loading.stores:
                for (key, value), version in zip(entries, versions, strict=False):
                    loading.stores[store].restore_entry(key, value, version)
            case wire.Load(_, change, asker) if store in loading.stores and not isinstance(change, wire.Open):
                loading.stores[store].ask(asker, number, change)
            case wire.LoadAnswer(_, asker, answer):
                loading.answers.setdefault(asker, {})[number] = answer
            case wire.Loaded(_, index):
                self._copy, self._loading = loading, None
                self._index = self._stable = index
                self._log.clear()
                if self.owner is not None and self.owner != self._me:
                    self._send(self.owner, wire.Ack(self._config, index))
            case _:
                pass
