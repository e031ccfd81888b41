"""Copies of key-value stores, which survive every loss that their run survives.

The *owner* orders all changes of a *configuration* (the members of a view, in order), and answers the process that
asked once so many copies have the change that a later owner begins with it. There are three kinds of runs:

- Members vote on views (`Voting`). The first member of the view is the owner, and all others hold copies. A view has at
  least `least` members, and these may be any of the last one: nodes that leave or were started anew vote, too, and are
  in no view. So a change is *committed* once all members but `least` - 1 have it. A question that only reads
  (`wire.only_reads`) is answered from what is committed, once members that can decide the next view have confirmed,
  after it was asked, that they have accepted none.
- The same, but some members do not know the rules of voting, or the run ends with its first loss: a change is committed
  once all copies have it, and questions that only read are ordered like changes.
- The keeper of a run on one host decides all views, and the run ends with it. It is the owner of every configuration
  (`KEEPER`), and its copy is the only one that counts, whichever members are lost or silent. So it commits at once, and
  answers a question that only reads without asking others. A member that writes a file of the store follows: it holds a
  copy that no owner begins with, and changes wait for that one, too. In the first configuration it sets what an earlier
  run has left before the keeper takes a question of another member.

Invariants:

1. The order of changes is one sequence, and the log of every member is a prefix of it. Only an owner appends, and
   members take one after the other; a new owner first takes the longest log of all members of its configuration
   (`Recover`, `Last`), and then brings all others up to it, before it appends anything. So no change is taken back.
2. Of the members that have a copy, at most `least` - 1 lack a committed change: so many may lack it when it is
   committed, views only take members away, and a newcomer has a copy only once it has all that was committed before. A
   later view has at least `least` members. Once newcomers have their copies, one of its members has the change, and so
   does its owner. Under a keeper the owner is always the same.
3. A member takes changes of its own configuration only. A view that follows is accepted by members that can decide it,
   and these have one in common with any others that can. So an owner that others have excluded reads nothing: too few
   confirm it. And it commits nothing that the others lack: too few of them have stayed in its configuration.
4. Answers and reads show only what is committed. The copy of an owner has, of its own configuration, no other changes;
   what it began with is committed before anything is answered (`_is_open`). The other copies have whole logs, as has
   that of a keeper, whose changes cannot get lost.
5. A view that names the next generation is no configuration to answer in (`seal`): newcomers decide what follows, too.
6. A change is applied once: copies keep the answers that their askers may not have received, and askers say which they
   have, one by one: a question that waits for long holds up none that was asked after it.
7. A question is numbered where it is queued, so numbers ascend. In one configuration the owner takes each number once,
   and none whose answer the asker has said to have: a message on a link that was replaced may arrive late.
8. An entry ends by a change like any other (`Expire`), which only an owner orders: no read of its configuration that
   comes later has the entry. The time of an entry is counted anew by each copy from when it got it, so an entry may
   end late after a new owner, but never early.
9. Both ends of a link that is new repeat what may be lost or late with the last one (`repeat`).
10. Changes that a silent member lacks are kept up to a limit, and then a whole copy replaces them; only some of them
   are on their way at a time.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.proto.store import LASTING, STORE_BYTES, Lifetime
from covey.proto.store_copy import RUN_STORE, LogEntry, StoreCopy
from covey.proto.views import is_majority
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Collection

KEEPER: Final = (1 << 62) - 1
"""The number of the keeper of a run on one host, where members have their seats."""
NO_COPY: Final = -1
"""The index of a member that has no copy; an empty one has the index 0."""
UNRECOVERED_LIMIT: Final = 1 << 16
"""Questions that wait until the owner has recovered."""
EARLY_LIMIT: Final = 4096
"""Messages of a configuration that this member does not know yet."""
RANGES_LIMIT: Final = 1 << 14
"""Numbers of one asker that are remembered: many more than it can have questions that wait."""
NO_INDEX: Final = (1 << 62) - 1
"""The index of a `Recover` that asks only how far a member is."""
CHANGES_ASKED: Final = 5
"""How often an owner asks a member for changes that the member claims to have and does not send."""
ON_THEIR_WAY: Final = 256
"""Changes that an owner sends to a member before the member has acknowledged one of them."""
LARGE_CHANGE_BYTES: Final = 1 << 16
"""A change of more bytes is sent once the member has acknowledged all before."""
LOG_LIMIT: Final = 1 << 14
"""Changes that are kept for members that lack them; one that lacks more gets a whole copy."""
LOG_BYTES_LIMIT: Final = 1 << 25
"""Bytes of these changes, besides those that are not committed."""
RECOVERS: Final = "the store recovers from a loss; ask again later"


class SendToReplica(NamedTuple):
    """Send a message to a member; `store` and `number` are the ones of a question, or 0."""

    peer: int
    store: int
    number: int
    body: wire.Replication | wire.Answer


class Answered(NamedTuple):
    """A question of this process is answered."""

    number: int
    answer: wire.Answer


class Voting(NamedTuple):
    """How the members of a run decide its views, if all of them know that their store rests on it."""

    tie_breaker: int
    """Half of the members can decide the next view if this one is among them."""
    least: int
    """This member proposes no view of fewer members."""


class LoggedChange(NamedTuple):
    """A change in the log, with its place in the order, and about how many bytes it has."""

    at: int
    entry: LogEntry
    size: int


class _Question(NamedTuple):
    """A question of this process that has no answer yet."""

    store: int
    change: wire.Asked
    """A Withdraw once its caller does not wait any more; it stays until the owner has confirmed that."""
    received: tuple[int, ...]
    """The answers that it acknowledges, whenever it is sent."""


class Replica:
    """One member's part: its copy, and the questions of its process. Calls in, `effects()` out."""

    def __init__(self, me: int, *, bytes_limit: int = STORE_BYTES) -> None:
        """Begin without a configuration: questions wait for the first one. All members have the same limit."""
        self._me, self._bytes_limit, self._now = me, bytes_limit, 0.0
        self._config, self._members = -1, ()  # type: tuple[int, tuple[int, ...]]
        self._owner: int | None = None
        self._follows = False
        self._has_caught_up = False
        """On a member that follows, whether its copy has all that was answered before this configuration."""
        self._copy: StoreCopy | None = None
        """None until this member was given one."""
        self._loading: StoreCopy | None = None
        """A copy of which parts are missing."""
        self._loading_index, self._loading_from = NO_COPY, NO_COPY
        self._parts = 0
        """How many parts of it have come."""
        self._index = NO_COPY
        """The last change that this member has."""
        self._applied = NO_COPY
        """The last change that its copy has: of an owner, the last one that is committed."""
        self._log: deque[LoggedChange] = deque()
        """The changes that others may lack, without a gap, up to the last one."""
        self._log_bytes = 0
        self._stable = -1
        """All changes up to this one are committed, as far as this member knows."""
        self._voting: Voting | None = None
        self._is_sealed = False
        """Whether this member confirms no read, and as the owner commits nothing, in this configuration."""
        self._acked: dict[int, int] = {}
        """On the owner, by member that holds another copy: the last change that this member has."""
        self._sent: dict[int, int] = {}
        """On the owner, by the same: the last change that was sent to it."""
        self._leasts: dict[int, int] = {}
        """On the owner, by member: the fewest members of a view that it proposes."""
        self._may_lack = 0
        """On the owner, how many members need not have a change that is committed."""
        self._start = 0
        """On the owner, the last of the changes with which it begins this configuration."""
        self._expires_at = NO_COPY
        """On the owner, the last change that ends entries."""
        self._recovering: dict[int, int] = {}
        """On the owner, the members whose logs may have changes that it lacks, with how often it has asked each."""
        self._lasts: dict[int, int] = {}
        """On the owner, by member that it recovers from: the last change of that member's copy, as the member said."""
        self._source: int | None = None
        """On an owner without a copy, the member that sends it one."""
        self._unanswered: deque[tuple[int, int, int, int, wire.Answer]] = deque()
        """On the owner, answers, each with the change that has to be committed before it is given."""
        self._awaited: int | None = None
        """On a keeper that begins, the member that follows, until all that it sets first has come."""
        self._begins = False
        """On the first owner, whether it has not taken a question yet."""
        self._reads: dict[tuple[int, int], tuple[int, wire.Change]] = {}
        """On the owner, by asker and number: store and question of what is read once this round is confirmed."""
        self._later_reads: dict[tuple[int, int], tuple[int, wire.Change]] = {}
        """The same of the next round."""
        self._round = 0
        """Rounds of confirmations are numbered, in all configurations one after the other."""
        self._confirmed: set[int] = set()
        """The members that have confirmed this round."""
        self._taken: dict[int, Numbers] = {}
        """On the owner, by asker: the numbers of the questions that came in this configuration, or whose answers the
        asker has said in it to have."""
        self._waiting: deque[tuple[int, int, int, wire.Submit]] = deque()
        """On the owner, questions that came before it was ready."""
        self._early: list[tuple[int, int, int, wire.Replication]] = []
        self._questions: dict[int, _Question] = {}
        """Questions of this process by number, in ascending order."""
        self._asked_so_far = 0
        self._unsaid: list[int] = []
        """Questions whose answers this process has and has not acknowledged, above the lowest one without an answer."""
        self._effects: list[SendToReplica | Answered] = []

    def effects(self) -> list[SendToReplica | Answered]:
        """Return what to do, in order, and clear it."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def owner(self) -> int | None:
        """The member that orders changes, or `KEEPER`; None before the first configuration."""
        return self._owner

    @property
    def has_copy(self) -> bool:
        """Whether this member could order the changes if all others were lost."""
        return self._copy is not None

    def stamp(self, store: int) -> tuple[int, int] | None:
        """Return two numbers that tell of any change of entries; None unless this member orders or follows them.

        They are None, too, while a copy that follows lacks changes of before.
        """
        if (
            not (self._is_open or (self._follows and self._has_caught_up))
            or self._copy is None
            or store not in self._copy.stores
        ):
            return None
        return self._copy.stores[store].changes, self._copy.stores[store].count

    def lasting(self, store: int) -> list[tuple[str, bytes]]:
        """Return the entries of a store of this copy that do not end by themselves."""
        found = () if self._copy is None else self._copy.stores[store].entries()
        return [(key, value) for key, value, _, lifetime in found if lifetime == LASTING]

    def next_end(self) -> float:
        """Return when to call `advance` at the latest; inf for never."""
        if not self._is_open or self._copy is None or self._expires_at > self._applied:
            return math.inf  # an owner that recovers cannot end them yet, and one that waits for the others has done so
        return min(store.next_end() for store in self._copy.stores.values())

    # Inputs

    def advance(self, now: float) -> None:
        """Note the time before any other input, by a clock that never stops; the owner ends entries that are due."""
        self._now = now
        if self.next_end() <= now:
            assert self._copy is not None
            for number, store in list(self._copy.stores.items()):
                self._expire(number, store.due(now))

    def configure(
        self,
        config: int,
        members: tuple[int, ...],
        *,
        is_first: bool = False,
        is_kept: bool = False,
        follows: bool = False,
        follower: int | None = None,
        voting: Voting | None = None,
    ) -> bool:
        """Take the members of a view, in order; return whether it is a new one.

        Args:
            config: the number of the configuration; one that is not higher than the last is ignored.
            members: the seats of the members that may ask.
            is_first: whether no member can have a copy from before.
            is_kept: whether the keeper is the owner.
            follows: whether this member is to hold a copy although the keeper is the owner.
            follower: on the keeper, the member that is to hold one.
            voting: how the members decide the next view; None if the keeper does, or not all of them say how.
        """
        if config <= self._config:
            return False
        self._config, self._members = config, members
        self._owner = KEEPER if is_kept else members[0] if members else None
        self._has_caught_up = self._has_caught_up and is_kept and follows  # this copy has what was answered since
        self._follows = is_kept and follows
        self._voting, self._is_sealed, self._may_lack = voting, False, 0
        self._acked, self._sent, self._recovering, self._lasts, self._leasts = {}, {}, {}, {}, {}
        self._loading = self._source = None
        self._reads, self._later_reads = {}, {}
        self._apply(self._index)  # no change is taken back, but perhaps it is not committed: so no answers
        self._unanswered.clear()
        self._taken.clear()
        self._waiting.clear()
        self._begins, self._awaited = is_first, follower if is_first else None
        if is_first and self._me in members and self._copy is None:
            self._begin_empty()
        if self.owner == self._me:
            if follower is not None:  # nothing is sent to it before it says how far it is
                self._acked[follower], self._sent[follower] = NO_COPY, NO_INDEX
            others = () if is_kept else (member for member in members if member != self._me)
            self._recovering = dict.fromkeys(others, 0)
            for peer in self._recovering:
                self._recover_from(peer)
            self._catch_up()
        for number in list(self._questions):
            self._put(number)
        if self._follows:
            self._send(KEEPER, self._last())  # after what it sets first
        early, self._early = self._early, []
        for message in early:
            self.heard(*message)
        return True

    def seal(self) -> None:
        """Note that this member has accepted the next view, or that its view names the next generation."""
        self._is_sealed = self._voting is not None

    def ask(self, store: int, change: wire.Question | wire.Open) -> int:
        """Ask a question of this process; return its number, which `Answered` repeats."""
        self._asked_so_far += 1
        number = self._asked_so_far
        received = () if self._is_unordered(change) else self._take_received()
        self._questions[number] = _Question(store, change, received)
        self._put(number)
        return number

    def withdraw(self, number: int) -> None:
        """Cancel a question: its caller does not wait any more."""
        question = self._questions.get(number)
        if question is None or isinstance(question.change, wire.Withdraw):
            return
        if self.owner is None:  # it was never sent
            del self._questions[number]
        else:
            self._questions[number] = question._replace(change=wire.Withdraw())
            self._put(number)

    def drop(self, peer: int) -> None:
        """Go on without a member, although no view says so: for runs that end with their first loss."""
        if peer not in self._members or peer == self.owner:
            return
        self._members = tuple(member for member in self._members if member != peer)
        if self.owner == self._me:
            self._acked.pop(peer, None)
            self._sent.pop(peer, None)
            if self._recovering.pop(peer, None) is not None:
                self._lasts.pop(peer, None)
                self._source = None if self._source == peer else self._source
                self._loading = None if self._loading_from == peer else self._loading
                self._catch_up()
            else:
                self._settle()
                self._end_with_members()

    def repeat(self, peer: int) -> None:
        """Repeat what may be lost with the last link to a member."""
        if peer == self.owner:
            for number in list(self._questions):
                self._put(number)
            has_copy = self._follows if peer == KEEPER else self._me in self._members and peer != self._me
            if has_copy:
                self._send(peer, self._last())  # an Ack or a Last may be lost
        if self.owner == self._me and peer in self._members:
            if peer in self._recovering:
                self._recover_from(peer)
            elif peer in self._acked:
                self._bring_up(peer)
            if self._is_open:
                self._answer_again(peer)
            if self._voting is not None and peer != self._me:
                self._send(peer, wire.Confirm(self._config, self._round, asks_again=True))

    def heard(self, peer: int, store: int, number: int, body: wire.Replication | wire.Answer) -> None:
        """Take a message of another process."""
        if isinstance(body, wire.Done | wire.Refused):
            if peer == self.owner:
                self._conclude(number, body)
            return
        if body.config > self._config:
            if isinstance(body, wire.Entry | wire.Load | wire.LoadAnswer | wire.Loaded):
                return  # large, and sent only to a member that has said in this configuration how far it is
            if len(self._early) < EARLY_LIMIT:
                self._early.append((peer, store, number, body))
            elif isinstance(body, wire.Submit):
                self._effects.append(SendToReplica(peer, store, number, wire.Refused(RECOVERS)))
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
                self._send_after(peer, index)
                self._send(peer, self._last())
            case wire.Last(_, index, least) if self._is_recovering(peer):
                self._lasts[peer], self._leasts[peer] = index, least
                self._catch_up()
            case wire.Last(_, index) if self._is_ready and self._may_hold(peer):
                self._awaited = None if peer == self._awaited else self._awaited
                self._acked[peer] = max(self._acked.get(peer, NO_COPY), min(index, self._index))
                self._bring_up(peer)
                self._settle()  # it may stand for an Ack that was lost
            case wire.Confirm(_, number, asks_again) if peer == self.owner:
                if self._confirms:
                    self._send(peer, wire.Confirmed(self._config, number))
                for each in [each for each in self._questions if asks_again]:
                    if self._is_unordered(self._questions[each].change):
                        self._put(each)
            case wire.Confirmed(_, number) if self._is_ready and peer in self._members and number == self._round:
                self._confirmed.add(peer)
                self._read_confirmed()
            case wire.Load() | wire.LoadAnswer() if peer == self.owner or self._is_recovering(peer):
                self._load(peer, store, number, body)
            case wire.Loaded() if peer == self.owner or self._is_recovering(peer):
                self._loaded(peer, body)
            case _:
                pass  # of a member that is not what it was, or never was

    # Questions

    def _put(self, number: int) -> None:
        """Send a question to the owner, or order it here."""
        owner = self.owner
        if owner is None:
            return
        store, change, received = self._questions[number]
        ask = wire.Submit(self._config, next(iter(self._questions)), change, received, self._confirms)
        if owner == self._me:
            self._asked(self._me, store, number, ask)
        else:
            self._effects.append(SendToReplica(owner, store, number, ask))

    def _take_received(self) -> tuple[int, ...]:
        """Return the acknowledgements that the next question carries."""
        lowest = next(iter(self._questions), self._asked_so_far)  # the others are below `Submit.settled`
        unsaid = [number for number in self._unsaid if number > lowest]
        self._unsaid = unsaid[wire.RECEIVED_LIMIT :]
        return tuple(unsaid[: wire.RECEIVED_LIMIT])

    def _conclude(self, number: int, answer: wire.Answer) -> None:
        question = self._questions.pop(number, None)
        if question is None:
            return
        if not self._is_unordered(question.change):
            self._unsaid.append(number)
        if isinstance(answer, wire.Refused):
            self._unsaid += question.received  # the owner may not have ordered it
        if not isinstance(question.change, wire.Withdraw):
            self._effects.append(Answered(number, answer))

    def _asked(self, asker: int, store: int, number: int, ask: wire.Submit) -> None:
        if self.owner != self._me or asker not in self._members:
            return  # an asker that is a member repeats it when it knows the owner
        if not self._is_open or self._awaited not in (None, asker):
            if len(self._waiting) < UNRECOVERED_LIMIT:
                self._waiting.append((asker, store, number, ask))
            else:
                self._answer(asker, store, number, wire.Refused(RECOVERS))
            return
        assert self._copy is not None
        if self._is_unordered(ask.change):
            self._read(asker, store, number, ask)
            return
        known, taken = self._copy.answer_to(asker, number), self._taken.setdefault(asker, Numbers())
        is_new = number not in taken  # else it waits, or its asker has the answer
        taken.add_below(ask.settled)
        for each in (*ask.received, number):
            taken.add(each)
        if known is not None:
            self._unanswered.append((self._applied, store, asker, number, known))
            self._settle()
        elif is_new or isinstance(ask.change, wire.Withdraw):
            self._append(LogEntry(store, asker, number, ask.settled, ask.change, ask.received))

    def _answer_again(self, asker: int) -> None:
        """Repeat the answers that a member may not have: it may have asked again before the owner had the new link."""
        assert self._copy is not None
        for number, answer in self._copy.answers.get(asker, {}).items():
            self._unanswered.append((self._applied, RUN_STORE, asker, number, answer))
        self._settle()

    def _answer(self, asker: int, store: int, number: int, answer: wire.Answer) -> None:
        if asker != self._me:
            self._effects.append(SendToReplica(asker, store, number, answer))
        else:
            self._conclude(number, answer)

    def _is_unordered(self, change: wire.Change) -> bool:
        """Tell whether the owner answers a question from its copy, and orders and keeps nothing."""
        return (self._owner == KEEPER or self._voting is not None) and wire.only_reads(change)

    # Questions that only read

    @property
    def _confirms(self) -> bool:
        """Whether this member has accepted no view after its configuration."""
        return self._voting is not None and not self._is_sealed

    def _read(self, asker: int, store: int, number: int, ask: wire.Submit) -> None:
        """Answer a question that only reads, once members that can decide the next view have accepted none."""
        if self._voting is None or self._can_read({self._me, asker} if ask.confirms else {self._me}):
            self._look(asker, store, number, ask.change)
        elif len(self._reads) + len(self._later_reads) >= UNRECOVERED_LIMIT:
            self._answer(asker, store, number, wire.Refused(RECOVERS))
        elif (asker, number) not in self._reads:
            self._later_reads[asker, number] = store, ask.change
            if not self._reads:
                self._confirm_next()

    def _look(self, asker: int, store: int, number: int, change: wire.Change) -> None:
        assert self._copy is not None
        self._answer(asker, store, number, self._copy.look(store, change))

    def _can_read(self, confirmed: Collection[int]) -> bool:
        assert self._voting is not None
        return not self._is_sealed and is_majority(self._members, self._voting.tie_breaker, confirmed)

    def _confirm_next(self) -> None:
        """Ask all members once for all questions that have come since the last round began."""
        self._reads, self._later_reads = self._later_reads, {}
        self._round, self._confirmed = self._round + 1, {self._me}
        for peer in self._acked:
            self._send(peer, wire.Confirm(self._config, self._round))

    def _read_confirmed(self) -> None:
        if self._reads and self._can_read(self._confirmed):
            reads, self._reads = self._reads, {}
            for (asker, number), (store, change) in reads.items():
                self._look(asker, store, number, change)
            if self._later_reads:
                self._confirm_next()

    # The owner

    @property
    def _is_ready(self) -> bool:
        return self._owner == self._me and not self._recovering and self._copy is not None

    @property
    def _is_open(self) -> bool:
        """Whether all that this owner began with is committed: only then it takes questions."""
        return self._is_ready and self._applied >= self._start

    def _may_hold(self, peer: int) -> bool:
        """Tell whether a process may hold a copy that this owner brings up."""
        return peer in (self._members if self._owner == KEEPER else self._acked)

    def _is_recovering(self, peer: int) -> bool:
        return self.owner == self._me and peer in self._recovering

    def _append(self, entry: LogEntry) -> None:
        self._log_change(self._index + 1, entry)
        for peer in self._acked:
            self._send_more(peer)
        self._settle()

    def _log_change(self, index: int, entry: LogEntry) -> None:
        change = LoggedChange(index, entry, wire.bytes_of(entry.change))
        self._index = index
        self._log.append(change)
        self._log_bytes += change.size

    def _apply(self, until: int) -> list[tuple[int, int, int, int, wire.Answer]]:
        """Apply the changes of the log up to this one; return the answers: change, store, asker, number, answer."""
        answers = []
        while self._applied < until:
            assert self._copy is not None
            entry = self._log[self._applied - self._index].entry
            self._applied += 1
            answers += [(self._applied, *answer) for answer in self._copy.apply(entry, self._now)]
        return answers

    def _acknowledged(self, peer: int, index: int) -> None:
        self._acked[peer] = max(self._acked[peer], min(index, self._index))
        self._send_more(peer)
        self._settle()

    def _settle(self) -> None:
        """Commit what enough members have; forget what none of them lacks, or too much."""
        if not self._is_ready or self._is_sealed:
            return
        self._stable = max(self._stable, self._held())
        answers = self._apply(self._index if self._owner == KEEPER else self._stable)
        self._unanswered += answers
        while self._unanswered and self._unanswered[0][0] <= self._stable:
            _, store, asker, number, answer = self._unanswered.popleft()
            self._answer(asker, store, number, answer)
        if any(asker not in self._members for _, _, asker, _, _ in answers):
            self._end_with_members()
        self._trim(min(self._acked.values(), default=self._index))
        if len(self._log) > LOG_LIMIT or self._log_bytes > LOG_BYTES_LIMIT:
            self._trim(self._applied)
        if self._is_open and self._waiting and self._awaited is None:
            self._take_waiting()

    def _take_waiting(self) -> None:
        """Take the questions that have waited, in their order; what reads waits for the changes before it.

        The first ones of all set what an earlier run has left: so every question waits for these.
        """
        waiting, self._waiting = self._waiting, deque()
        while waiting and not (self._applied < self._index and self._is_unordered(waiting[0][3].change)):
            self._asked(*waiting.popleft())
        if self._begins or waiting:
            self._begins, self._start = False, self._index
        self._waiting += waiting

    def _held(self) -> int:
        """Return the last change that so many members have that every later view has one of them."""
        if len(self._acked) <= self._may_lack:
            return self._index
        return min(self._index, sorted(self._acked.values())[self._may_lack])

    def _trim(self, index: int) -> None:
        """Forget the changes of the log up to this one, which the copy has."""
        while self._log and self._log[0].at <= min(index, self._applied):
            self._log_bytes -= self._log.popleft().size

    def _recover_from(self, peer: int) -> None:
        """Ask a member how far it is, and for what this owner lacks: for a whole copy only one member at a time."""
        lacks_all = self._copy is None and self._source != peer
        self._send(peer, wire.Recover(self._config, NO_INDEX if lacks_all else self._index))

    def _catch_up(self) -> None:
        """Act on what members have said about their logs: take what this owner lacks, and then begin to order."""
        for peer, index in list(self._lasts.items()):
            if index <= self._index or self._recovering[peer] >= CHANGES_ASKED:
                del self._lasts[peer], self._recovering[peer]
                self._acked[peer] = self._sent[peer] = min(index, self._index)
                self._source = None if self._source == peer else self._source
            elif self._copy is not None or self._source in (None, peer):
                self._source = peer if self._copy is None else None
                self._recovering[peer] += 1
                del self._lasts[peer]
                self._recover_from(peer)
        self._recovered()

    def _recovered(self) -> None:
        """Once this owner lacks nothing: bring all members to the longest log, and begin to order."""
        if self._recovering or self.owner != self._me:
            return
        if self._copy is None:  # no member has one: all that had one are gone
            self._begin_empty()
        self._start = NO_INDEX
        if self._voting is not None:
            self._may_lack = min(self._voting.least, *self._leasts.values(), len(self._members)) - 1
        for peer in self._acked if self._owner != KEEPER else ():
            self._bring_up(peer)
        self._append(LogEntry(RUN_STORE, self._me, 0, 0, wire.Forget(self._members)))
        self._end_with_members()
        self._start = self._index
        self._settle()

    def _begin_empty(self) -> None:
        self._copy, self._index, self._applied = StoreCopy(self._bytes_limit), 0, 0

    def _end_with_members(self) -> None:
        """End the entries of processes that are no members any more."""
        if self._is_ready:
            assert self._copy is not None
            for number, store in list(self._copy.stores.items()):
                self._expire(number, store.without_member(self._members))

    def _expire(self, store: int, ended: list[tuple[str, int]]) -> None:
        for at in range(0, len(ended), wire.KEYS_LIMIT):
            change = wire.Expire(tuple(ended[at : at + wire.KEYS_LIMIT]))
            self._append(LogEntry(store, self._me, 0, 0, change))
            self._expires_at = self._index

    def _bring_up(self, peer: int) -> None:
        """Send a member what it lacks, and again what may be lost on its way."""
        self._sent[peer] = self._acked[peer]
        self._send_more(peer)

    def _send_more(self, peer: int) -> None:
        """Send a member changes that it lacks, as many as may be on their way."""
        acked = self._acked[peer]
        sent = max(self._sent[peer], acked)
        if sent < self._index - len(self._log):
            if sent > acked:
                return  # the log does not reach back any more to what it lacks; it is sent a copy once it is heard
            self._send_copy(peer)
            sent = self._applied
        while sent < self._index and sent - acked < ON_THEIR_WAY:
            change = self._log[sent - self._index]
            if change.size > LARGE_CHANGE_BYTES and sent > acked:
                break
            self._send_entry(peer, change)
            sent += 1
        self._sent[peer] = sent

    def _send_after(self, peer: int, index: int) -> None:
        """Send an owner the changes after `index`: a whole copy, if the log does not reach back so far."""
        if self._copy is None:
            return
        if index < self._index - len(self._log):
            self._send_copy(peer)
        for change in self._log:
            if change.at > index:
                self._send_entry(peer, change)

    def _send_copy(self, peer: int) -> None:
        assert self._copy is not None
        count = 0
        for store, part, number in self._copy.parts():
            body = wire.placed(part, self._config, count, self._applied)
            self._effects.append(SendToReplica(peer, store, number, body))
            count += 1
        self._send(peer, wire.Loaded(self._config, self._applied, count))

    def _send_entry(self, peer: int, change: LoggedChange) -> None:
        index, entry, _ = change
        body = wire.Entry(self._config, index, self._stable, entry.asker, entry.settled, entry.change, entry.received)
        self._effects.append(SendToReplica(peer, entry.store, entry.number, body))

    def _last(self) -> wire.Last:
        """Return how far this member is."""
        return wire.Last(self._config, self._index, 1 if self._voting is None else self._voting.least)

    def _send(self, peer: int, body: wire.Replication) -> None:
        self._effects.append(SendToReplica(peer, 0, 0, body))

    # The other members

    def _received(self, peer: int, store: int, number: int, body: wire.Entry) -> None:
        if self._copy is None:
            return
        if body.index == self._index + 1:
            entry = LogEntry(store, body.asker, number, body.settled, body.change, body.received)
            self._log_change(body.index, entry)
            self._apply(body.index)
        if peer == self.owner:
            self._has_caught_up = self._has_caught_up or self._index >= body.stable
            self._stable = max(self._stable, min(body.stable, self._index))
            self._trim(self._stable)
            self._send(peer, wire.Ack(self._config, self._index))

    def _load(self, peer: int, store: int, number: int, body: wire.Load | wire.LoadAnswer) -> None:
        """Take a part of a copy that is newer than this one. Parts come from one member at a time, each in its turn."""
        if body.index <= self._index or (self._loading is not None and peer != self._loading_from):
            return
        if not body.part:
            self._loading, self._parts = StoreCopy(self._bytes_limit), 0
            self._loading_index, self._loading_from = body.index, peer
        if self._loading is None or (body.index, body.part) != (self._loading_index, self._parts):
            return  # it came late, over a link that was replaced
        self._parts += 1
        loading = self._loading
        match body:
            case wire.Load(_, wire.Open(), _, versions):
                loading.open(store)
                loading.stores[store].restore_changes(versions[0] if versions else 0)
            case wire.Load(_, wire.Put(entries, _, milliseconds), asker, versions) if store in loading.stores:
                lifetime = Lifetime(asker, milliseconds)
                for (key, value), version in zip(entries, versions, strict=False):
                    loading.stores[store].restore_entry(key, value, version, lifetime, self._now)
            case wire.Load(_, change, asker) if store in loading.stores and not isinstance(change, wire.Open):
                loading.stores[store].ask(asker, number, change)
            case wire.LoadAnswer(_, asker, answer):
                loading.answers.setdefault(asker, {})[number] = answer

    def _loaded(self, peer: int, body: wire.Loaded) -> None:
        loading = self._loading
        if loading is not None and peer == self._loading_from:
            self._loading = None
            if (body.index, body.parts) == (self._loading_index, self._parts) and body.index > self._index:
                self._copy = loading
                self._index = self._applied = body.index
                self._log.clear()
                self._log_bytes = 0
        if peer == self.owner:  # which sends the copy again, if this one was not whole
            self._has_caught_up = self._has_caught_up or self._index >= body.index
            is_whole = self._index >= body.index
            self._send(peer, wire.Ack(self._config, self._index) if is_whole else self._last())


class Numbers:
    """A set of numbers, most of which follow each other: as ranges."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, number: int) -> bool:
        at = bisect.bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._firsts)

    def add_below(self, number: int) -> None:
        """Add all numbers from 0 on that are lower than this one."""
        if number <= 0 or (self._firsts and not self._firsts[0] and number <= self._lasts[0] + 1):
            return
        while self._firsts and self._firsts[0] <= number:
            number = max(number, self._lasts[0] + 1)
            del self._firsts[0], self._lasts[0]
        self._firsts.insert(0, 0)
        self._lasts.insert(0, number - 1)

    def add(self, number: int) -> None:
        """Add a number; the lowest range is dropped if there are too many."""
        at = bisect.bisect_right(self._firsts, number)
        if at and number <= self._lasts[at - 1]:
            return
        follows = at > 0 and self._lasts[at - 1] == number - 1
        precedes = at < len(self._firsts) and self._firsts[at] == number + 1
        if follows and precedes:
            self._lasts[at - 1] = self._lasts.pop(at)
            del self._firsts[at]
        elif follows:
            self._lasts[at - 1] = number
        elif precedes:
            self._firsts[at] = number
        else:
            self._firsts.insert(at, number)
            self._lasts.insert(at, number)
        if len(self._firsts) > RANGES_LIMIT:
            del self._firsts[0], self._lasts[0]
