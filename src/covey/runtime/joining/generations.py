"""Going from generation to generation: the group of those who are there, again and again, as members come and go."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import (
    ClosedError,
    ConfigError,
    CoveyError,
    DeadlineError,
    GroupChangedError,
    RemoteProtocolError,
    SplitRunError,
)
from covey.base.text import printable
from covey.runtime import loop as control
from covey.runtime.fault import Fault
from covey.runtime.group.internals import engine_of, node_of, restored_state, seat_of
from covey.runtime.group.saved import save_state
from covey.runtime.joining import bootstrap
from covey.runtime.members.view_driver import seats_of
from covey.wire import messages
from covey.wire.membership import Successor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.runtime.group.group import Group
    from covey.runtime.members.generation import Generation
    from covey.runtime.members.node import Node

WAIT_SECONDS: Final = 300.0
"""How long a generation that has too few members waits for more, by default."""
LOOK_SECONDS: Final = 0.2
"""How often it looks whether they have come."""
SURPLUS_SECONDS: Final = 30.0
"""How much longer than patience the members may take to agree on the next generation."""
MOST_SEATS: Final = 1 << 30
"""No run gives out as many, and every number that a member adds to it still fits into a message."""


def generations(
    run: str | None = None,
    *,
    min_size: int | None = None,
    max_size: int | None = None,
    timeout: float | None = None,
    on_loss: str = "continue",
    **options: Any,
) -> Iterator[Group]:
    """Yield the group of each generation of a run; end when this process was asked to leave.

    A generation lasts until the loop comes back for the next. It should when `group.change_pending` is true: newcomers
    wait to get in, somebody wants to leave, or fewer than `min_size` are left. Every rank comes back after the same
    step; newcomers are then in the next group, which should begin with `group.restore(state)`. When the work is done,
    leave the loop with `break` or `return`: the last group is closed.

    If an older run of the same name is met in the cluster, this one ends after the step with SplitRunError; the state
    that was last given to `group.restore` is in a file by then.

    SIGTERM asks this process to leave: the others go on without it, and the loop ends here after the step.

    Args:
        run: the name of the run in the cluster; under `covey run` and other launchers it is not needed.
        min_size: a generation waits until so many are there (default 1 under a launcher, else 2).
        max_size: more than so many wait outside, and step in when somebody is lost.
        timeout: seconds to wait for others, at the start and whenever too few are left. A process that comes to a run
            which goes on, or is full, waits as long as the run lasts.
        on_loss: as for `covey.join`.
        options: all that `covey.join` takes besides.
    """
    for what, number in (("min_size", min_size), ("max_size", max_size)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigError(f"{what}={number!r} must be a whole number above 0")
    return _Generations(run, min_size, max_size, timeout, {**options, "on_loss": on_loss}).each()


class _OverError(Exception):
    """The run ended while this process waited outside: there is nothing more to do."""


class _Generations:
    """One program's way through the generations of a run."""

    def __init__(
        self,
        run: str | None,
        min_size: int | None,
        max_size: int | None,
        timeout: float | None,
        options: dict[str, Any],
    ) -> None:
        self._run, self._timeout, self._options = run, timeout, options
        self._min_size, self._max_size = min_size, max_size
        self._is_asked_to_leave = False
        """Set by a signal handler, which must not lock: it may interrupt itself."""
        self._group: Group | None = None

    def each(self) -> Iterator[Group]:
        with self._listening_for_sigterm():
            try:
                self._group = self._join()
                while True:
                    if self._group is None:
                        return
                    if self._group.size <= self._most:
                        yield self._group
                    self._group = self._next(self._group)
            except _OverError:
                return
            finally:
                if self._group is not None:
                    self._group.close()

    @property
    def _most(self) -> int:
        return self._max_size or messages.MAX_MEMBERS

    def _join(self, *, again: bool = False) -> Group:
        """Return the group of the run's first generation, or of the one that takes this process in."""
        asked = {**self._options, "run": self._run, "timeout": self._timeout}
        if self._run is not None or "COVEY_RUN" in os.environ:
            asked |= {"min_size": self._min_size, "max_size": self._max_size}
        self._group = None
        try:
            group = bootstrap.join_as_asked(asked, is_elastic=True, is_newcomer=again)
        except ClosedError as error:
            raise _OverError from error
        if "min_size" not in asked and (self._min_size or 1) > group.size and group.generation == 0:
            group.close()
            raise ConfigError(f"min_size={self._min_size}, but the launcher started {group.size}; start more, as in "
                              f"`covey run -n {self._min_size}`")  # fmt: skip
        if (node := node_of(group)) is not None:
            node.wanted_size = self._min_size or 1
            node.most_size = self._most
            node.is_elastic = True
            node.is_draining = self._is_asked_to_leave
        return group

    def _next(self, group: Group) -> Group | None:
        """Return the group of the next generation; None if this process is not in it, because it wanted to leave."""
        node, engine = node_of(group), engine_of(group)
        if node is None or engine.is_over:
            error = engine.failure.message_error()
            group.close()
            if node is None and error is None:
                return self._join()
            if isinstance(error, GroupChangedError):
                return self._join(again=True)
            raise error if error is not None else ClosedError(f"group {group.name!r} is closed")
        try:
            founded = self._agree(group, node)
            is_decided = founded is None or engine.generation is None or founded.is_kept
            if founded is not None and engine.generation is not None and not is_decided:
                founded = _decide(engine.generation, founded)
        except GroupChangedError:  # between two generations the loop of the program cannot catch it
            group.close()
            return self._join(again=True)
        if founded is None and not is_decided:  # this process is in no view any more
            error = engine.failure.message_error()
            group.close()
            if isinstance(error, GroupChangedError):
                return self._join(again=True)
            raise error if error is not None else DeadlineError("Timed out: no agreement on the next generation")
        if founded is None:
            group.close()
            return None
        if all(member.seat != node.rank for member in founded.members):
            group.close()
            return self._join(again=True)  # there is no room: wait outside
        return _begin(group, node, founded)

    def _agree(self, group: Group, node: Node) -> messages.Founded | None:
        """Agree with the other members on who is in the next generation."""
        until = time.monotonic() + (self._timeout if self._timeout is not None else WAIT_SECONDS)
        while True:
            mine = {
                "lobby": messages.encode(tuple(each.card for each in node.newcomers)),
                "leaves": self._is_asked_to_leave,
                "next": node.next_seat,
                "late": time.monotonic() > until,
                "rival": node.rival,
            }
            gathered = enumerate(group.all_gather_object(mine))
            heard = {rank: _understood(words) for rank, words in gathered if rank in group.contributors}
            said = {rank: words for rank, words in heard.items() if words is not None}
            if rivals := [words.rival for words in said.values() if words.rival]:
                raise _outlived(group, rivals[0])
            if said[group.rank].leaves:
                return None
            staying = [rank for rank, words in said.items() if not words.leaves]
            founded = _founded(group, node, staying, said, self._most)
            if len(founded.members) >= (self._min_size or 1):
                return founded
            if any(words.is_late for words in said.values()):
                raise DeadlineError(
                    f"the next generation has {len(founded.members)} members and needs {self._min_size}, and the "
                    "timeout ended before more came; start some, or pass a smaller min_size= or a longer timeout="
                )
            _await_someone(node)

    @contextlib.contextmanager
    def _listening_for_sigterm(self) -> Iterator[None]:
        """Take SIGTERM as the wish to leave; only programs whose main thread loops can."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) not in (
            signal.SIG_DFL,
            None,
        ):
            yield
            return

        def leave(_signum: int, _frame: object) -> None:
            self._is_asked_to_leave = True
            if self._group is None:
                raise SystemExit(0)  # outside, nobody has to agree
            if (node := node_of(self._group)) is not None:
                node.is_draining = True

        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():  # else the garbage collector ends the loop
                signal.signal(signal.SIGTERM, before)


class _Words(NamedTuple):
    """What a member says when the members agree on the next generation."""

    lobby: dict[tuple[bytes, bytes], messages.Card]
    """The newcomers that it is linked with, by id and life."""
    leaves: bool
    next_seat: int
    is_late: bool
    rival: str


def _understood(words: Any) -> _Words | None:
    """Return what a member said; None if no member says such a thing, and then all go on without that one."""
    try:
        lobby, next_seat, rival = words["lobby"], words["next"], words["rival"]
        if not (isinstance(lobby, bytes) and type(next_seat) is int and isinstance(rival, str)):
            return None
        cards = {messages.key_of(card): card for card in messages.decode_cards(lobby)}
        leaves, is_late = bool(words["leaves"]), bool(words["late"])
    except (TypeError, KeyError, RemoteProtocolError):
        return None
    return _Words(cards, leaves, next_seat, is_late, rival) if 0 <= next_seat < MOST_SEATS else None


def _founded(group: Group, node: Node, staying: list[int], said: dict[int, _Words], most: int) -> messages.Founded:
    """Return the next generation, from what its members said: the same on all of them.

    Only a newcomer that every member is linked with can be taken in.
    """
    generation = engine_of(group).generation
    assert generation is not None
    members = [generation.founded.members[generation.ranks_of((seat_of(group, rank),))[0]] for rank in staying]
    lobbies = [said[rank].lobby for rank in staying]
    known = [key for key in lobbies[0] if all(key in lobby for lobby in lobbies)] if lobbies else []
    del members[most:]
    room = most - len(members)
    next_seat = max(words.next_seat for words in said.values())
    members += [messages.SeatedMember(next_seat + number, lobbies[0][key]) for number, key in enumerate(known[:room])]
    number = generation.number + 1
    keys = b"".join(part for member in members for part in messages.key_of(member.card))
    lineage = hashlib.blake2b(generation.founded.lineage + keys, digest_size=16, key=str(number).encode()).digest()
    old, config = generation.founded, node.config
    tie_breaker = _tie_breaker(generation, members)
    return messages.Founded(
        number, lineage, old.is_kept, tuple(members), config.on_loss, config.patience, old.origin, tie_breaker
    )


def _tie_breaker(generation: Generation, members: list[messages.SeatedMember]) -> int:
    """Return the rank that breaks ties: a member that was started to, else the one that did before, else the first."""
    before = generation.founded.members[generation.view.tie_breaker].seat
    wished = (rank for rank, member in enumerate(members) if member.card.breaks_ties)
    kept = (rank for rank, member in enumerate(members) if member.seat == before)
    return next(wished, next(kept, 0))


def _decide(generation: Generation, founded: messages.Founded) -> messages.Founded | None:
    """Have the members decide, by a view, that a generation follows; return it without those lost on the way.

    All members compute the same, so any of them may ask for it. But a member that crashed must not wake up in the old
    generation and find enough others there: what a quorum of it has decided is on their disks.
    """
    seats = seats_of(founded)
    asked = Successor(founded.generation, founded.lineage, tuple(seats), founded.tie_breaker)
    agreed = generation.end_with(asked, generation.patience + SURPLUS_SECONDS)
    if agreed is None:
        return None
    by_seat = dict(zip(seats, founded.members, strict=True))
    if agreed.lineage != founded.lineage or any(seat not in by_seat for seat in agreed.members):
        raise CoveyError(f"the members agreed on another generation {founded.generation} than this process computed")
    members = tuple(by_seat[seat] for seat in agreed.members)
    return messages.founded_with(founded, members, agreed.tie_breaker)


def _outlived(group: Group, rival: str) -> SplitRunError:
    """Save the state of a run that has to end, and return what to raise; all members do so after the same step."""
    text, saved = f"{rival}, so it ends here after {group.sequence} operations", ""
    state, generation = restored_state(group), engine_of(group).generation
    if state is not None and group.local_rank == 0:
        try:
            lineage = generation.founded.origin if generation is not None else b""
            saved = save_state(state, f"covey-{printable(group.name)}-{lineage.hex()[:16]}-{group.rank}")
            text += f". Its state is in {saved} (covey.load_state)"
        except (CoveyError, TypeError) as error:
            text += f". Its state could not be saved: {error}"
    return SplitRunError(f"{text}. Start again to be in the older one", saved=saved)


def _await_someone(node: Node) -> None:
    """Wait a moment for a newcomer."""
    until = time.monotonic() + LOOK_SECONDS
    known = {each.card.life for each in node.newcomers}
    while {each.card.life for each in node.newcomers} == known and time.monotonic() < until:
        time.sleep(0.01)


def _begin(group: Group, node: Node, founded: messages.Founded) -> Group:
    """Return the group of a generation that was agreed on in the group of the last."""

    async def found() -> None:
        node.generation_table.found(founded)

    before = engine_of(group).generation
    control.start(found()).result(bootstrap.FOUND_SECONDS)
    node.newcomers.defer()
    new = bootstrap.group_of(node, group.local_rank, is_fresh=False)
    atexit.unregister(group.close)
    bootstrap.replace_joined(group, new)
    for each in node.groups:
        if each.generation is before:
            text = f"the group belongs to generation {group.generation} of the run, which is over; split the new one"
            each.end(Fault("ClosedError", text))
            each.close()
    return new
