"""Copies of a store among processes that come and go, each with several threads: no answered change is lost or twice.

A `World` is a function of its seed. Threads ask and stop waiting at any moment; links lose what they carry, or are
replaced while late messages are still on the old one; views exclude members, down to one, and add others; members are
stopped and continue. Entries end with members and at times. At the end one order of all questions must explain all
answers, and all copies must be equal. Under a keeper, which holds the only copy, all members may be lost at once.

Where members vote, any of them that are a quorum accept a view, also some that it excludes, and any that are `least` go
on. Members that a view has excluded do not learn so: they go on to ask, and to order. While a member is stopped, the
others must not wait for it.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.linearizability import Ended, Operation, State, is_linearizable
from tests.support.seeds import batches, seeds

from covey.base.errors import RemoteProtocolError
from covey.proto import replication, store_copy
from covey.proto.replication import KEEPER, NO_COPY, Answered, Numbers, Replica, SendToReplica, Voting
from covey.proto.store import LASTING, Lifetime
from covey.proto.store_copy import RUN_STORE
from covey.proto.views import is_majority
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = ("a", "b")
TTL = 5
"""Seconds of entries that end, on a clock that runs a second with each course of a thread, and late for some."""
THREADS = 3
LIFETIMES = (*5 * ((False, 0),), (True, 0), (False, 1000 * TTL))
"""Of entries that are set: whether they end with their member, and after how many milliseconds."""
LATE_CHANCE = 0.05
"""Of each step, that a message on a link that was replaced may arrive while there is something else to do."""
ANSWERS_LIMIT = 10
"""In these simulations: enough for threads that acknowledge what they get, and too few for others."""
ON_THEIR_WAY, LOG_LIMIT = 3, 8
"""In these simulations: few enough for members that lack more."""


class BrokenError(AssertionError):
    """The store broke a promise."""


class World:
    """Processes 0, 1, 2, ... with a replica each, links, and views that arrive in turn."""

    def __init__(
        self,
        seed: int,
        replica: type[Replica] = Replica,
        *,
        in_two_steps: bool = False,
        is_kept: bool = False,
        is_voted: bool = False,
    ) -> None:
        """`in_two_steps`: a thread takes its number first, and queues its question later. `is_kept`: with a keeper.
        `is_voted`: the members decide the views, and know that the store rests on it."""
        self.seed, self.chance = seed, random.Random(seed)
        self._make, self._in_two_steps, self._is_voted = replica, in_two_steps, is_voted
        self.least = self.chance.choice((1, 2, 2, 3)) if is_voted else 1
        self.tie_breaker = 0
        self.whole: set[int] = set()
        """Processes that have had a copy in a configuration whose owner had recovered."""
        self.keeper = replica(KEEPER) if is_kept else None
        self.has_file = is_kept and self.chance.random() < 0.3
        """Whether the first member follows the keeper, because it writes a file."""
        self.stopped: set[int] = set()
        """Processes that do nothing, although they are in the view."""
        self.now = 0
        self.replicas: dict[int, Replica] = {}
        self.links: dict[tuple[int, int], deque[SendToReplica]] = {}
        self.late: list[tuple[tuple[int, int], SendToReplica]] = []
        """Messages on links that were replaced: they arrive in their order of each link, at any time."""
        self.dead: set[tuple[int, int]] = set()
        """From and to: links that are broken, and whose sender has not noticed it."""
        self.notices: list[tuple[int, int]] = []
        """Process and peer: links that are new, and the process has not noticed it."""
        self.config = 0
        self.members: tuple[int, ...] = ()
        self.views: dict[int, deque[tuple[int, tuple[int, ...], bool, Voting | None, bool]]] = {}
        """By process: the views that were agreed on and that it has not installed yet, and whether each is sealed."""
        self.jobs: list[tuple[int, int, int, wire.Question]] = []
        """Process, thread, number if it is taken early, question: asked by threads, and not at the queue yet."""
        self.open: dict[tuple[int, int], tuple[wire.Question, int, int]] = {}
        """By process and thread: the question that the thread waits for, when it was asked, and its number or 0."""
        self.history: list[Operation] = []
        self.refusals: list[str] = []
        self.values = 0
        self.clock = 0
        self.ending: list[tuple[int, int, str, bytes]] = []
        """Process or -1, time or 0, key and value: entries that may end with the process or after the time."""
        self._next = 0

    def start(self, count: int) -> None:
        for _ in range(count):
            self._add()
        self.agree(tuple(self.replicas), is_first=True)

    def _add(self) -> int:
        process, self._next = self._next, self._next + 1
        self.replicas[process], self.views[process] = self._make(process), deque()
        return process

    # Members

    def agree(self, members: tuple[int, ...], *, is_first: bool = False, is_sealed: bool = False) -> None:
        self.config, self.members = self.config + 1, members
        self.tie_breaker = self.tie_breaker if self.tie_breaker in members else min(members, default=0)
        voting = Voting(self.tie_breaker, self.least) if self._is_voted else None
        if self.keeper is not None:  # it decides the view, so it knows it first
            follower = min(members, default=None) if self.has_file else None
            self.keeper.configure(self.config, members, is_first=is_first, is_kept=True, follower=follower)
            self._perform(KEEPER)
        self._may_end(lambda process, at: process >= 0 and process not in members)
        for process in list(self.replicas):
            if process in members:
                self.views[process].append((self.config, members, is_first, voting, is_sealed))
            elif not self._is_voted or self.chance.random() < 0.5:
                self._remove(process)

    def vote(self, members: tuple[int, ...], *, is_sealed: bool = False) -> None:
        """Some members, which are a quorum, accept the view of `members`, and so it is decided."""
        accepting: list[int] = []
        while not is_majority(self.members, self.tie_breaker, accepting):
            accepting.append(self.chance.choice([each for each in self.members if each not in accepting]))
        for process in {*accepting, *members}:
            while self.views.get(process):  # it is in no view before it has installed the last one
                self.install(process)
            if process in self.replicas and process in accepting:
                self.replicas[process].seal()
        self.agree(members, is_sealed=is_sealed)

    def _may_end(self, is_over: Callable[[int, int], bool]) -> None:
        """Note that from now on the store may remove the entries that have ended."""
        for each in [each for each in self.ending if is_over(*each[:2])]:
            self.ending.remove(each)
            self.now += 1
            self.history.append(Operation(Ended(*each[2:]), self.now))

    def pass_time(self, seconds: int = 1) -> None:
        self.clock += seconds
        self._may_end(lambda process, at: process < 0 and at <= self.clock)

    def look(self, process: int) -> None:
        """A process looks at its clock, and so does the keeper."""
        for each in (process, KEEPER) if self.keeper is not None else (process,):
            self.of(each).advance(self.clock)
            self._perform(each)

    def of(self, number: int) -> Replica:
        """Return the replica of a process, or that of the keeper."""
        return self.keeper if self.keeper is not None and number == KEEPER else self.replicas[number]

    def copies(self) -> list[Replica]:
        """Return the replicas that must have equal copies."""
        if self.keeper is None:
            return list(self.replicas.values())
        return [self.keeper, *([self.replicas[min(self.members)]] if self.has_file else [])]

    def _remove(self, process: int) -> None:
        """The process is excluded: from now on no member hears it."""
        del self.replicas[process], self.views[process]
        for thread in range(THREADS):
            self.give_up(process, thread)
        self.links = {pair: sent for pair, sent in self.links.items() if process not in pair}
        self.late = [each for each in self.late if process not in each[0]]
        self.dead = {pair for pair in self.dead if process not in pair}
        self.notices = [pair for pair in self.notices if process not in pair]
        self.jobs = [job for job in self.jobs if job[0] != process]
        self.stopped.discard(process)

    def _have_copies(self, members: tuple[int, ...]) -> int:
        return len(self.whole.intersection(members))

    def lose(self) -> None:
        if self._is_voted:
            for _ in range(5):
                others = tuple(sorted(self.chance.sample(self.members, self.chance.randint(1, len(self.members)))))
                if others != self.members and min(len(others), self._have_copies(others)) >= self.least:
                    self.vote(others)
                    return
            return
        if self.keeper is not None and self.chance.random() < 0.3:  # all of them, and others begin the run anew
            self.agree(())
            self.agree(tuple(self._add() for _ in range(self.chance.randint(1, 3))))
            return
        process = self.members[0] if self.chance.random() < 0.5 else self.chance.choice(self.members)
        others = tuple(member for member in self.members if member != process)
        if self.keeper is not None or any(self.replicas[other].has_copy for other in others):  # else nothing survives
            self.agree(others)

    def add(self) -> None:
        if self._is_voted:
            self.vote(self.members, is_sealed=True)
        newcomers = [self._add() for _ in range(self.chance.randint(1, 2))]
        self.agree((*self.members, *newcomers))

    # Threads

    def ask(self, process: int, thread: int, question: wire.Question) -> None:
        """A thread asks, if it does not wait: its question is on its way to the queue."""
        if (process, thread) in self.open:
            return
        self.now += 1
        self.open[process, thread] = question, self.now, 0
        if isinstance(question, wire.Put | wire.Swap) and (question.ends_with_member or question.milliseconds):
            pairs = question.entries if isinstance(question, wire.Put) else ((question.key, question.desired),)
            at = self.clock + question.milliseconds // 1000
            self.ending += [(process if question.ends_with_member else -1, at, key, value) for key, value in pairs]
        number = 0
        if self._in_two_steps:
            number = self.replicas[process]._asked_so_far = self.replicas[process]._asked_so_far + 1
        self.jobs.append((process, thread, number, question))

    def queue(self, job: tuple[int, int, int, wire.Question]) -> None:
        self.jobs.remove(job)
        process, thread, number, question = job
        replica = self.replicas[process]
        replica.advance(self.clock)
        if number:
            replica._questions[number] = replication._Question(RUN_STORE, question, replica._take_received())
            replica._put(number)
        else:
            number = replica.ask(RUN_STORE, question)
        asked, at, _ = self.open[process, thread]
        self.open[process, thread] = asked, at, number
        self._perform(process)

    def give_up(self, process: int, thread: int) -> None:
        """A thread does not wait any more; whether its question has an effect is open."""
        if (process, thread) not in self.open:
            return
        question, asked, number = self.open.pop((process, thread))
        self.history.append(Operation(question, asked))
        if process in self.replicas:
            self.jobs = [job for job in self.jobs if job[:2] != (process, thread)]
            self.replicas[process].withdraw(number)
            self._perform(process)

    def _answered(self, process: int, effect: Answered) -> None:
        thread = next(
            (at for at in range(THREADS) if self.open.get((process, at), (0, 0, 0))[2] == effect.number), None
        )
        if thread is None:
            return  # it does not wait any more
        question, asked, _ = self.open.pop((process, thread))
        self.now += 1
        if isinstance(effect.answer, wire.Refused):
            self.refusals.append(effect.answer.reason)
        self.history.append(Operation(question, asked, self.now, effect.answer))

    # Messages

    def _perform(self, process: int) -> None:
        for effect in self.of(process).effects():
            if process == KEEPER and self.has_file and isinstance(effect, SendToReplica):
                self._check_file(effect)
            if isinstance(effect, Answered):
                self._answered(process, effect)
            elif (effect.peer in self.replicas or effect.peer == KEEPER) and (process, effect.peer) not in self.dead:
                body = wire.decode_body(wire.encode_body(effect.body))
                assert body == effect.body
                self.links.setdefault((process, effect.peer), deque()).append(effect)

    def _check_file(self, sent: SendToReplica) -> None:
        """Check that the member with a file has all that the keeper has answered until now, if this is an answer."""
        if not isinstance(sent.body, wire.Done) or self.keeper is None:
            return
        asked = [
            question
            for (process, _), (question, _, number) in self.open.items()
            if (process, number) == (sent.peer, sent.number)
        ]
        if any(not wire.only_reads(question) for question in asked):
            follower = self.replicas[min(self.members)]
            if follower._index < self.keeper._stable:
                raise BrokenError(f"the file has {follower._index} of {self.keeper._stable} answered changes")

    def _hear(self, pair: tuple[int, int], sent: SendToReplica) -> None:
        self.of(pair[1]).advance(self.clock)
        self.of(pair[1]).heard(pair[0], sent.store, sent.number, sent.body)
        self._perform(pair[1])

    def deliver(self, pair: tuple[int, int]) -> None:
        sent = self.links[pair].popleft()
        if not self.links[pair]:
            del self.links[pair]
        self._hear(pair, sent)

    def deliver_late(self, pair: tuple[int, int]) -> None:
        at = next(at for at, each in enumerate(self.late) if each[0] == pair)
        self._hear(*self.late.pop(at))

    def install(self, process: int) -> None:
        config, members, is_first, voting, is_sealed = self.views[process].popleft()
        self.replicas[process].advance(self.clock)
        is_kept, follows = self.keeper is not None, self.has_file and process == min(members)
        self.replicas[process].configure(
            config, members, is_first=is_first, is_kept=is_kept, follows=follows, voting=voting
        )
        if is_sealed:
            self.replicas[process].seal()
        self._perform(process)

    def break_link(self, one: int, other: int, *, are_late: bool) -> None:
        """What is on its way between two processes is late, or lost, and what they send until they notice it, too."""
        for pair in ((one, other), (other, one)):
            sent = self.links.pop(pair, ())
            if are_late:
                self.late += [(pair, each) for each in sent]
            else:
                self.dead.add(pair)
            self.notices.append(pair)

    def notice(self, pair: tuple[int, int]) -> None:
        self.notices.remove(pair)
        self.dead.discard(pair)
        self.of(pair[0]).advance(self.clock)
        self.of(pair[0]).repeat(pair[1])
        self._perform(pair[0])

    def step(self) -> bool:
        """Do one thing that can happen; False if nothing is left to happen by itself."""
        runs = {*self.replicas, KEEPER} - self.stopped
        # A keeper hears nothing over a link that it has not noticed.
        deaf = {pair for pair in self.notices if pair[0] == KEEPER}
        heard = (pair for pair in self.links if pair[1] in runs and pair[::-1] not in deaf)
        choices: list[tuple[Any, Any]] = [(self.deliver, pair) for pair in heard]
        choices += [(self.notice, pair) for pair in self.notices if pair[0] in runs]
        choices += [(self.install, process) for process, views in self.views.items() if views and process in runs]
        choices += [(self.queue, job) for job in self.jobs if job[0] in runs]
        if not choices or self.chance.random() < LATE_CHANCE:
            choices += [(self.deliver_late, pair) for pair in {pair for pair, _ in self.late} if pair[1] in runs]
        if not choices:
            return False
        act, what = self.chance.choice(sorted(choices, key=lambda choice: (choice[0].__name__, str(choice[1]))))
        act(what)
        for process in self.members if self._is_voted else ():
            replica, owner = self.replicas[process], self.replicas.get(self.replicas[process].owner or 0)
            if replica.has_copy and owner is not None and owner._config == replica._config and owner._is_ready:
                self.whole.add(process)
        return True

    def settle(self) -> None:
        for _ in range(200_000):
            if not self.step():
                return
        raise BrokenError("the messages never end")

    # The course of events

    def question(self) -> wire.Question:
        self.values += 1
        if self._is_voted and self.chance.random() < 0.4:
            return wire.Read(KEYS)
        key, value, dice = self.chance.choice(KEYS), b"%d" % self.values, self.chance.random()
        if dice < 0.25:
            return wire.Add("n", 1)
        if dice < 0.4:
            pairs = ((key, value), ("a" if key == "b" else "b", value)) if dice < 0.3 else ((key, value),)
            return wire.Put(pairs, *self.chance.choice(LIFETIMES))
        if dice < 0.55:
            expected = b"%d" % self.chance.randint(1, self.values)
            return wire.Swap(key, expected, value, self.chance.random() < 0.5, *self.chance.choice(LIFETIMES))
        if dice < 0.6:
            return wire.Observe(key, self.chance.choice((-1, -1, 0, 1)))
        if dice < 0.65:
            return wire.Scan("", *self.chance.choice(((-1, 0), (-1, 0), (2, self.values))))
        if dice < 0.7:
            return wire.Delete(key)
        if dice < 0.8:
            return wire.Get(KEYS) if dice < 0.75 else wire.Read(KEYS)
        return wire.Push("q", value) if dice < 0.9 else wire.Pop("q", waits=True)

    def perform(self, steps: int) -> None:
        """Let things happen; then let all that wait go on, and check everything."""
        links, views = self.chance.choice((0.0, 0.05, 0.15)), self.chance.choice((0.0, 0.03, 0.1))
        if self.chance.random() < 0.3:  # one thread of each process waits for something all the time
            for process in self.replicas:
                self.ask(process, 0, wire.Get(("never",)))
        for _ in range(steps):
            process, thread = self.chance.choice(sorted(self.replicas)), self.chance.randrange(THREADS)
            self.pass_time()
            if process in self.stopped:
                continue
            self.look(process)
            self.stop_or_continue(process)
            dice = self.chance.random()
            if dice < 0.4:
                self.ask(process, thread, self.question())
            elif dice < 0.44 and self.open.get((process, thread), (None,))[0] != wire.Get(("never",)):
                self.give_up(process, thread)
            elif dice < 0.44 + links and len(self.replicas) > 1:
                one, other = self.chance.sample(sorted(self.replicas), 2)
                other = other if self.keeper is None else KEEPER
                if (one, other) not in self.notices and (other, one) not in self.notices:
                    self.break_link(one, other, are_late=self.chance.random() < 0.5)
            elif dice < 0.44 + links + views:
                if len(self.members) > 1 and self.chance.random() < 0.5:
                    self.lose()
                elif len(self.members) < (5 if self._is_voted else 4):
                    self.add()
            else:
                for _ in range(self.chance.randint(1, 12)):
                    self.step()
        self.stopped.clear()
        for process in [process for process in self.replicas if process not in self.members]:
            self._remove(process)  # at last
        self.settle()
        self.check()

    def stop_or_continue(self, process: int) -> None:
        """Let what was stopped go on, or stop a process now and then; questions of the others go on without it."""
        dice = self.chance.random()
        if dice < 0.1:
            self.stopped.clear()
        elif dice < 0.13 and len(self.replicas) > 1 and not self.stopped:
            if self._is_voted:
                self.others_go_on_without(process)
                return
            self.stopped.add(process)
            if self.keeper is not None and not (self.has_file and process == min(self.members)):
                self.settle()
                held_up = [
                    each
                    for each, (question, _, _) in self.open.items()
                    if each[0] != process and not isinstance(question, wire.Get | wire.Pop | wire.Observe | wire.Scan)
                ]
                if held_up:
                    raise BrokenError(f"questions wait for a process that is stopped: {held_up}")

    def others_go_on_without(self, process: int) -> None:
        """Stop a member while nothing happens; check that the others wait for it no longer than they have to."""
        if process == min(self.members) or process not in self.members:
            return
        self.settle()
        running = [member for member in self.members if member != process]
        self.stopped.add(process)
        for number in range(8):
            change = wire.Read(("a", "n")) if number % 2 else wire.Add("n", 1)
            self.ask(self.chance.choice(running), self.chance.randrange(THREADS), change)
            self.settle()
        reads = is_majority(self.members, self.tie_breaker, running)
        for (asker, _), (question, _, _) in self.open.items():
            waits = not (isinstance(question, wire.Add) if self.least > 1 else reads and wire.only_reads(question))
            if asker in running and not waits:
                raise BrokenError(f"{question} of {asker} waits for {process}, which is stopped")
        if self.chance.random() < 0.3:  # it continues in a view of the fewest members, which lacks most of the others
            view = (process, *self.chance.sample(running, min(self.least - 1, len(running))))
            if min(len(view), self._have_copies(view)) >= self.least:
                self.stopped.discard(process)
                self.vote(tuple(sorted(view)))

    def _lifetimes_left(self) -> tuple[Lifetime, ...]:
        return LASTING, *(Lifetime(member) for member in self.members)

    def check(self) -> None:
        self.pass_time(10 * TTL)
        for process in list(self.replicas):
            self.look(process)
        self.settle()
        for each_replica in self.copies():
            left = [each for each in dump(each_replica)[0][RUN_STORE][0] if each[3] not in self._lifetimes_left()]
            if left:
                raise BrokenError(f"entries have not ended: {left}")
        asker = min(self.replicas)
        for _ in range(len(self.open)):  # each round serves at least one thread that waits for the queue
            free = next((at for at in range(THREADS) if (asker, at) not in self.open), 0)
            self.give_up(asker, free)
            ends: list[wire.Question] = [wire.Put(((key, b"end"),)) for key in (*KEYS, "never")]
            for question in (*ends, wire.Push("q", b"end")):
                self.ask(asker, free, question)
                self.settle()
        if self.open:
            raise BrokenError(f"questions have no answers: {self.open}")
        if self.refusals:
            raise BrokenError(f"refused: {self.refusals[0]}")
        for replica in self.replicas:  # the last question of each acknowledges what it got before
            self.ask(replica, 0, wire.Add("n", 0))
            self.settle()
        copies = [dump(replica) for replica in self.copies()]
        if any(copy != copies[0] for copy in copies):
            raise BrokenError("the copies are not equal")
        if any(store[3] for store in copies[0][0].values()):
            raise BrokenError("questions wait whose askers do not")
        kept = [at for answers in copies[0][1].values() for at in answers]
        if len(kept) > len(self.replicas) or any(asker not in self.replicas for asker in copies[0][1]):
            raise BrokenError(f"answers are kept that their askers have: {copies[0][1]}")
        if not is_linearizable(self.history):
            raise BrokenError("no order of the questions explains the answers")


def dump(replica: Replica) -> tuple[Any, dict[int, dict[int, Any]]]:
    copy = replica._copy
    assert copy is not None
    stores = {number: (store.entries(), store.changes, sorted(store.queued()), store.waiting())
              for number, store in copy.stores.items()}  # fmt: skip
    return stores, copy.answers


def play(
    seed: int,
    replica: type[Replica] = Replica,
    *,
    steps: int = 80,
    in_two_steps: bool = False,
    is_kept: bool = False,
    is_voted: bool = False,
) -> World:
    world = World(seed, replica, in_two_steps=in_two_steps, is_kept=is_kept, is_voted=is_voted)
    world.start(world.least - 1 + world.chance.randint(1, 3))
    try:
        world.perform(steps)
    except Exception as error:
        error.add_note(f"with seed={seed}")
        raise
    return world


@pytest.fixture(autouse=True)
def _few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_copy, "UNACKNOWLEDGED_LIMIT", ANSWERS_LIMIT)
    monkeypatch.setattr(replication, "ON_THEIR_WAY", ON_THEIR_WAY)
    monkeypatch.setattr(replication, "LOG_LIMIT", LOG_LIMIT)


@pytest.mark.parametrize("batch", batches(10))
def test_one_order_of_all_questions_explains_all_answers_whatever_is_lost(batch: int) -> None:
    histories = [play(seed).history for seed in range(100 * batch, 100 * batch + 100)]
    assert sum(map(len, histories)) > 1000


@pytest.mark.parametrize("batch", batches(10))
def test_the_same_holds_if_a_keeper_has_the_only_copy_and_all_members_may_be_lost_at_once(batch: int) -> None:
    histories = [play(seed, is_kept=True).history for seed in range(100 * batch, 100 * batch + 100)]
    assert sum(map(len, histories)) > 1000


@pytest.mark.parametrize("batch", batches(10))
def test_the_same_holds_if_members_vote_and_those_that_are_excluded_do_not_learn_so(batch: int) -> None:
    histories = [play(seed, is_voted=True).history for seed in range(100 * batch, 100 * batch + 100)]
    assert sum(map(len, histories)) > 1000


# What happens without each rule


class LowestOnly(Replica):
    """Acknowledges only what is below the lowest question without an answer."""

    def _take_received(self) -> tuple[int, ...]:
        return ()


class Forgetful(Replica):
    """Takes a late question that it has ordered, and whose answer was acknowledged, for a new one."""

    def _asked(self, asker: int, store: int, number: int, ask: wire.Submit) -> None:
        self._taken.clear()
        super()._asked(asker, store, number, ask)


class Silent(Replica):
    """An owner that repeats no answers on a new link."""

    def _answer_again(self, asker: int) -> None:
        pass


class Hasty(Replica):
    """Answers before others have the change."""

    def _held(self) -> int:
        return self._index


class Mixing(Replica):
    """Puts parts of different copies together."""

    def _load(self, peer: int, store: int, number: int, body: wire.Load | wire.LoadAnswer) -> None:
        self._loading_index, self._parts = body.index, body.part
        super()._load(peer, store, number, body)


class Deaf(Replica):
    """Begins to order without the changes that only others have."""

    def _catch_up(self) -> None:
        self._recovering = dict.fromkeys(self._recovering, replication.CHANGES_ASKED)
        super()._catch_up()


class Lasting(Replica):
    """Leaves the entries of members that are gone."""

    def _end_with_members(self) -> None:
        pass


class Eager(Replica):
    """Ends entries before their time."""

    def _apply(self, until: int) -> Any:
        self._now -= TTL - 1
        answers = super()._apply(until)
        self._now += TTL - 1
        return answers


class Alone(Replica):
    """An owner that removes what has ended from its own copy only."""

    def _expire(self, store: int, ended: list[tuple[str, int]]) -> None:
        assert self._copy is not None
        self._copy.stores[store].expire(tuple(ended))


class Keeping(Replica):
    """Keeps the answers for members that are gone."""

    def _append(self, entry: store_copy.LogEntry) -> None:
        change = wire.Forget() if isinstance(entry.change, wire.Forget) else entry.change
        super()._append(entry._replace(change=change))


RARE: dict[type[Replica], int] = {Mixing: 750}
"""From which seed on courses of events are tried for a mutant that few of them catch."""


@pytest.mark.parametrize(
    "mutant",
    [LowestOnly, Forgetful, Silent, Hasty, Mixing, Deaf, Lasting, Eager, Alone, Keeping],
    ids=lambda kind: kind.__name__,
)
def test_a_replica_without_one_of_the_rules_is_caught(mutant: type[Replica]) -> None:
    assert caught(lambda seed: play(seed, mutant), since=RARE.get(mutant, 0))


class Few(Replica):
    """Answers once all but one of those have a change that must have it."""

    def _held(self) -> int:
        self._may_lack += 1
        held = super()._held()
        self._may_lack -= 1
        return held


class Confident(Replica):
    """An owner that reads without asking whether it still is the owner."""

    def _can_read(self, confirmed: Any) -> bool:
        return True


class Unsealed(Replica):
    """Confirms reads, and commits, also after it has accepted the next view."""

    def seal(self) -> None:
        pass


class Impatient(Replica):
    """An owner that begins with the log of the first member that it hears."""

    def _catch_up(self) -> None:
        if self._lasts and all(index <= self._index for index in self._lasts.values()):
            self._lasts = {**dict.fromkeys(self._recovering, replication.NO_COPY), **self._lasts}
            self._leasts = {**dict.fromkeys(self._recovering, 1000), **self._leasts}
        super()._catch_up()


class Revealing(Replica):
    """Reads what is not committed yet."""

    def _look(self, asker: int, store: int, number: int, change: wire.Change) -> None:
        committed, self._copy = self._copy, copy.deepcopy(self._copy)
        assert self._copy is not None
        for logged in self._log:
            if logged.at > self._applied:
                self._copy.apply(logged.entry, self._now)
        super()._look(asker, store, number, change)
        self._copy = committed


class Waiting(Replica):
    """Waits for all members, as where not all of them know the rules of voting."""

    def _held(self) -> int:
        self._may_lack = 0
        return super()._held()


RARELY_VOTED: dict[type[Replica], int] = {Impatient: 110, Deaf: 100, Silent: 290}
"""The same where members vote."""


@pytest.mark.parametrize(
    "mutant",
    [Hasty, Few, Confident, Unsealed, Impatient, Revealing, Waiting, Deaf, Silent, Forgetful],
    ids=lambda kind: kind.__name__,
)
def test_a_replica_whose_members_vote_is_caught_without_one_of_the_rules(mutant: type[Replica]) -> None:
    assert caught(lambda seed: play(seed, mutant, is_voted=True), since=RARELY_VOTED.get(mutant, 0))


class SecondOwner(Replica):
    """Orders its own changes although the keeper does."""

    def configure(self, config: int, members: tuple[int, ...], **options: Any) -> bool:
        return super().configure(config, members, **(options | {"is_kept": self._me == KEEPER}))


class Fresh(Replica):
    """A keeper that begins each view with an empty copy."""

    def configure(self, config: int, members: tuple[int, ...], **options: Any) -> bool:
        self._copy, self._index, self._applied = None, replication.NO_COPY, replication.NO_COPY
        self._log.clear()
        return super().configure(config, members, **options)


class Repeating(Replica):
    """A keeper that performs a question again when it is repeated after a view."""

    def _asked(self, asker: int, store: int, number: int, ask: wire.Submit) -> None:
        if self._copy is not None:
            self._copy.answers.clear()
        super()._asked(asker, store, number, ask)


class Cautious(Replica):
    """A keeper that answers only once every member has a copy of the change."""

    def configure(self, config: int, members: tuple[int, ...], **options: Any) -> bool:
        return super().configure(config, members, **(options | {"follows": self._me != KEEPER}))


class Unaware(Replica):
    """A keeper that learns of the member with a file when that one says how far it is."""

    def configure(self, config: int, members: tuple[int, ...], **options: Any) -> bool:
        return super().configure(config, members, **(options | {"follower": None}))


@pytest.mark.parametrize("mutant", [SecondOwner, Fresh, Repeating, Cautious, Unaware], ids=lambda kind: kind.__name__)
def test_a_keeper_without_one_of_the_rules_is_caught(mutant: type[Replica]) -> None:
    assert caught(lambda seed: play(seed, mutant, is_kept=True))


def test_a_number_that_is_taken_before_its_question_is_queued_is_caught() -> None:
    assert caught(lambda seed: play(seed, in_two_steps=True))


def caught(perform: Any, since: int = 0) -> bool:
    """Tell whether one of many courses of events breaks a promise."""
    for seed in seeds(500):
        try:
            perform(since + seed)
        except BrokenError:
            return True
    return False


# Single courses of events


def question_of(world: World, process: int, question: wire.Question, thread: int = 0) -> wire.Answer | None:
    """Return the answer to a question once nothing more happens; None if there is none."""
    world.ask(process, thread, question)
    world.settle()
    return None if (process, thread) in world.open else world.history[-1].answer


def test_an_owner_that_was_excluded_answers_nothing() -> None:
    world = World(1)
    world.start(3)
    world.settle()
    for process in (1, 2):  # the owner does not hear of the view
        world.replicas[process].configure(world.config + 1, (1, 2))
        world._perform(process)
    assert question_of(world, 0, wire.Add("a", 1)) is None
    assert question_of(world, 2, wire.Add("a", 1)) == wire.Done(number=1)


def test_an_owner_reads_nothing_before_what_it_began_with_is_committed() -> None:
    """The others may lack it, and the next view may be without this owner."""
    owner, voting, read = Replica(0), Voting(0, 1), wire.Read(("a",))
    owner.configure(0, (0, 1), is_first=True, voting=voting)
    owner.heard(1, 0, 0, wire.Last(0, replication.NO_COPY))
    number = owner.ask(RUN_STORE, read)
    owner.heard(1, RUN_STORE, 1, wire.Submit(0, 1, read, confirms=True))
    assert not any(isinstance(effect, Answered) or is_answer(effect) for effect in owner.effects())
    owner.heard(1, 0, 0, wire.Ack(0, 1))
    answer = wire.Done((), 0, (0,))
    assert owner.effects() == [Answered(number, answer), SendToReplica(1, RUN_STORE, 1, answer)]


def test_a_keeper_takes_no_question_before_its_follower_has_set_what_an_earlier_run_has_left() -> None:
    keeper, follower, read = Replica(KEEPER), Replica(0), wire.Names()
    keeper.configure(0, (0, 1), is_first=True, is_kept=True, follower=0)
    keeper.heard(1, RUN_STORE, 1, wire.Submit(0, 1, read))
    assert not keeper.effects()
    for key in ("a", "b"):
        follower.ask(RUN_STORE, wire.Put(((key, b"1"),)))
    follower.configure(0, (0, 1), is_first=True, is_kept=True, follows=True)
    for sent in follower.effects():
        assert isinstance(sent, SendToReplica)
        assert not any(is_answer(effect) for effect in keeper.effects())
        keeper.heard(0, sent.store, sent.number, sent.body)
    assert SendToReplica(1, RUN_STORE, 1, wire.Done((b"a", b"b"))) in keeper.effects()


def test_a_keeper_waits_no_longer_for_a_follower_that_is_gone() -> None:
    keeper = Replica(KEEPER)
    keeper.configure(0, (0, 1), is_first=True, is_kept=True, follower=0)
    keeper.configure(1, (1,), is_kept=True)
    keeper.heard(1, RUN_STORE, 1, wire.Submit(1, 1, wire.Count()))
    assert keeper.effects() == [SendToReplica(1, RUN_STORE, 1, wire.Done())]


def test_a_member_keeps_of_a_later_configuration_no_copies_and_changes() -> None:
    """They are large, and an owner sends them only to a member that has the configuration."""
    member, change = Replica(1), wire.Put((("a", b"1"),))
    member.configure(0, (0, 1))
    for body in (wire.Entry(1, 1, 0, 0, 0, change), wire.Load(1, change, index=1), wire.Loaded(1, 1, 1)):
        member.heard(0, RUN_STORE, 0, body)
    assert not member._early
    member.heard(0, RUN_STORE, 0, wire.Recover(1, 0))
    member.effects()
    member.configure(1, (0, 1))
    assert member.effects() == [SendToReplica(0, 0, 0, wire.Last(1, NO_COPY))]


def test_a_process_asks_for_no_change_that_only_an_owner_orders() -> None:
    for change in (wire.Forget(), wire.Expire((("a", 1),))):
        with pytest.raises(RemoteProtocolError):
            wire.decode_body(wire.encode_body(wire.Submit(0, 1, change)))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
def test_a_keeper_answers_what_the_file_of_a_member_that_follows_has(is_known: bool) -> None:
    keeper, put = Replica(KEEPER), wire.Put((("a", b"1"),))
    for config in range(2):  # in every view
        keeper.configure(config, (0, 1), is_kept=True, follower=0 if is_known else None)
        keeper.heard(1, RUN_STORE, config + 1, wire.Submit(config, config + 1, put))
        keeper.heard(1, RUN_STORE, config + 8, wire.Submit(config, config + 1, wire.Count()))
        answers = [effect.number for effect in keeper.effects() if is_answer(effect)]
        assert answers == [config + 8] if is_known else [config + 1, config + 8]
        keeper.heard(0, 0, 0, wire.Last(config, NO_COPY))
        keeper.heard(0, 0, 0, wire.Ack(config, keeper._index))
        assert any(is_answer(effect) for effect in keeper.effects()) is is_known


def is_answer(effect: Any) -> bool:
    return isinstance(effect, SendToReplica) and isinstance(effect.body, wire.Done)


def test_a_store_of_one_process_answers_at_once() -> None:
    replica = Replica(7)
    first = replica.ask(5, wire.Open())
    assert replica.effects() == []
    replica.configure(0, (7,), is_first=True)
    second = replica.ask(5, wire.Add("n", 41))
    assert replica.effects() == [Answered(first, wire.Done()), Answered(second, wire.Done(number=41))]


def test_a_question_that_was_withdrawn_before_the_first_view_is_never_asked() -> None:
    replica = Replica(7)
    replica.withdraw(replica.ask(RUN_STORE, wire.Add("n", 1)))
    replica.configure(0, (7,), is_first=True)
    replica.ask(RUN_STORE, wire.Add("n", 1))
    assert replica.effects() == [Answered(2, wire.Done(number=1))]


def test_that_a_caller_waits_no_more_is_said_again_if_the_link_broke() -> None:
    world = World(2)
    world.start(2)
    world.settle()
    assert question_of(world, 1, wire.Pop("q", waits=True)) is None
    world.break_link(0, 1, are_late=False)
    world.give_up(1, 0)
    world.settle()
    assert question_of(world, 1, wire.Push("q", b"for another"), thread=1) == wire.Done()
    assert question_of(world, 1, wire.Pop("q", waits=True), thread=1) == wire.Done((b"for another",))


def test_newcomers_with_copies_of_different_age_go_on_without_the_older_members() -> None:
    world = World(3)
    world.start(1)
    world.settle()
    question_of(world, 0, wire.Put((("a", b"1"),)))
    one, other = world._add(), world._add()
    world.agree((0, one, other))
    for process in (0, one, other):
        world.install(process)
    for pair in ((0, one), (0, other), (one, 0), (other, 0)):  # asked how far they are, and they have no copy
        world.deliver(pair)
    while not world.replicas[other].has_copy:
        world.deliver((0, other))
    world.links.pop((0, one))
    world.replicas[0].repeat(one)
    world._perform(0)
    while not world.replicas[one].has_copy:
        world.deliver((0, one))
    while world.replicas[one]._index <= world.replicas[other]._index:  # it gets the change that the copies lack
        world.deliver((0, one) if world.links.get((0, one)) else (one, 0))
    world.agree((one, other))
    world.settle()
    assert question_of(world, one, wire.Get(("a",))) == wire.Done((b"1",))
    assert dump(world.replicas[one]) == dump(world.replicas[other])


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_late_question_whose_answer_was_acknowledged_in_a_later_view_is_not_performed_again(
    is_repeated: bool,
) -> None:
    owner = Replica(KEEPER)
    given: list[Any] = []

    def hear(config: int, number: int, settled: int) -> None:
        owner.heard(1, RUN_STORE, number, wire.Submit(config, settled, wire.Add("n", 1)))
        given.extend(effect.body for effect in owner.effects() if isinstance(effect, SendToReplica))

    owner.configure(0, (1,), is_kept=True)
    hear(0, number=1, settled=1)
    owner.configure(1, (1,), is_kept=True)
    if is_repeated:
        hear(1, number=1, settled=1)
    hear(1, number=2, settled=2)  # its asker has the first answer, perhaps since the view before
    hear(1, number=1, settled=1)  # on a link that was replaced
    assert given == [wire.Done(number=1)] * (1 + is_repeated) + [wire.Done(number=2)]


def test_a_long_wait_holds_up_no_later_question() -> None:
    replica = Replica(0)
    replica.configure(0, (0,), is_first=True)
    waits = replica.ask(RUN_STORE, wire.Get(("late",)))
    for count in range(1, 10 * ANSWERS_LIMIT):
        number = replica.ask(RUN_STORE, wire.Add("n", 1))
        assert replica.effects() == [Answered(number, wire.Done(number=count))]
    replica.ask(RUN_STORE, wire.Put((("late", b"came"),)))
    assert Answered(waits, wire.Done((b"came",))) in replica.effects()


def test_a_process_that_acknowledges_nothing_fills_only_its_own_share() -> None:
    copy = store_copy.StoreCopy()
    for number in range(1, 3 * ANSWERS_LIMIT):
        replies = copy.apply(store_copy.LogEntry(RUN_STORE, 1, number, 0, wire.Add("n", 1)))
        assert isinstance(replies[0][3], wire.Done) == (number <= ANSWERS_LIMIT)
    assert len(copy.answers[1]) == ANSWERS_LIMIT
    assert copy.apply(store_copy.LogEntry(RUN_STORE, 2, 1, 0, wire.Add("n", 0)))[0][3] == wire.Done(
        number=ANSWERS_LIMIT
    )


def test_a_set_of_numbers_is_that_of_its_ranges() -> None:
    chance = random.Random(5)
    numbers, plain = Numbers(), set[int]()
    for _ in range(500):
        number = chance.randrange(200)
        if chance.random() < 0.02:
            numbers.add_below(number // 3)
            plain.update(range(number // 3))
        numbers.add(number)
        plain.add(number)
        assert all((each in numbers) == (each in plain) for each in range(-1, 202))
    assert len(numbers) == sum(each - 1 not in plain for each in plain)
    for number in range(0, 4 * replication.RANGES_LIMIT, 2):
        numbers.add(number)
    assert len(numbers) == replication.RANGES_LIMIT


def test_the_search_for_an_order_finds_one_only_if_there_is_one() -> None:
    put, add = wire.Put((("k", b"1"),)), wire.Add("k", 1)
    read = wire.Observe("k", -1)
    assert is_linearizable([Operation(put, 1, 4, wire.Done()), Operation(read, 2, 3, wire.Done())])
    assert is_linearizable([Operation(put, 1, 4, wire.Done()), Operation(read, 2, 3, wire.Done((b"1",), 1))])
    assert not is_linearizable([Operation(put, 1, 2, wire.Done()), Operation(read, 3, 4, wire.Done())])
    assert is_linearizable([Operation(put, 1), Operation(read, 3, 4, wire.Done())])
    assert is_linearizable([Operation(add, 1), Operation(add, 2, 3, wire.Done(number=2))])
    assert not is_linearizable([Operation(add, 2, 3, wire.Done(number=2)), Operation(add, 4)])
    assert State().after(wire.Pop("q", waits=True)) is None
