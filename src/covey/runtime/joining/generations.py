"""`covey.generations`: the group of each generation of a run, as members join and leave.

Invariant: all members compute the next generation from the same exchanged data, and a view of the current one decides
it. Runs on the thread that calls.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Unpack

from covey.base.errors import (
    ClosedError,
    ConfigError,
    CoveyError,
    DeadlineError,
    GroupChangedError,
    RemoteProtocolError,
    SplitRunError,
)
from covey.base.numbers import Rank, Seat
from covey.base.text import printable
from covey.runtime import loop as control
from covey.runtime.fault import Fault
from covey.runtime.group.internals import engine_of, functions_of, restored_state, seat_of
from covey.runtime.group.restore import save_state
from covey.runtime.joining import bootstrap
from covey.runtime.joining.node import node_of
from covey.runtime.joining.request import JoinArguments, JoinRequest, takes_join_arguments
from covey.runtime.shutdown import signalled
from covey.runtime.views.view_driver import member_keys
from covey.wire import messages
from covey.wire.membership import Successor

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from covey.runtime.group.group import Group
    from covey.runtime.joining.node import NodeParts
    from covey.runtime.views.generation import Generation

MEMBERS_WAIT_SECONDS: Final = 300.0
"""How long a generation with too few members waits for more, by default."""
ROUND_SECONDS: Final = 0.2
"""How long it waits for newcomers before its members exchange again what they know."""
GENERATION_SURPLUS_SECONDS: Final = 30.0
"""How much longer than patience the members may take to agree on the next generation."""
MOST_SEATS: Final = 1 << 30
"""More than any run gives out; every number that a member adds to it still fits into a message."""


@takes_join_arguments(on_loss="continue")
def generations(run: str | None = None, **arguments: Unpack[JoinArguments]) -> Iterator[Group]:
    """Yield the group of each generation of a run; end when this process was asked to leave.

    A generation lasts until the loop asks for the next one. It should ask when `group.change_pending` is true:
    newcomers wait, a member wants to leave, or fewer than `min_size` members are left. Every rank asks after the same
    step. Newcomers are in the next group, which should begin with `group.restore(state)`. When the work is done, leave
    the loop with `break` or `return`: the last group is closed.

    If there is an older run of the same name in the cluster, this one ends after the step with SplitRunError; the state
    that was last given to `group.restore` has then been saved to a file.

    SIGTERM asks this process to leave: the loop ends after the step, and the other members continue.

    Args:
        run: the name of the run in the cluster; under `covey run` and other launchers it is not needed.
        min_size: the fewest members of a generation (default 1 under a launcher, else 2). A launcher's run that has
            lost all its members begins again with so many restarted processes; without it, only with all of them.
        max_size: the most members; further processes wait as spares, and replace lost members.
        timeout: seconds to wait for other members, at the start and whenever there are too few. A process that waits
            for a running or full run waits as long as the run lasts.
        arguments: the other arguments of `covey.join`; `on_loss` is "continue" by default.
    """
    asked: dict[str, Any] = {**arguments, "run": run, "on_loss": arguments.get("on_loss") or "continue"}
    for what in ("min_size", "max_size"):
        number = asked.get(what)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigError(f"{what}={number!r} must be a whole number above 0")
    return _Generations(replace(JoinRequest.of(asked), is_elastic=True)).each()


class _OverError(Exception):
    """The run ended while this process waited for a seat."""


class _Generations:
    """The generations of a run, as one process goes through them."""

    def __init__(self, request: JoinRequest) -> None:
        self._request = request
        self._min_size, self._max_size = request.asked.get("min_size"), request.asked.get("max_size")
        self._is_asked_to_leave = False
        """Set by a signal handler, which must take no lock: it may interrupt itself."""
        self._group: Group | None = None

    def each(self) -> Generator[Group]:
        """Yield one group after the other; close the last one."""
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
        """Return the group of the run's first generation, or of a later one with a seat for this process."""
        # An excluded process, or one that was alone or a spare, comes back with what it has registered.
        functions = None if self._group is None else functions_of(self._group)
        request = replace(self._request, is_newcomer=again, functions=functions)
        is_launched = "run" not in request.asked and "COVEY_RUN" not in os.environ
        if is_launched:  # the launcher decides how many processes there are
            asked = {name: value for name, value in request.asked.items() if name not in ("min_size", "max_size")}
            request = replace(request, asked=asked, fewest=self._min_size or 0)
        self._group = None
        try:
            group = self._seat(request)
        except ClosedError as error:
            raise _OverError from error
        if is_launched and (self._min_size or 1) > group.size and group.generation == 0:
            group.close()
            raise ConfigError(f"min_size={self._min_size}, but the launcher started {group.size}; start more, as in "
                              f"`covey run -n {self._min_size}`")  # fmt: skip
        if (node := node_of(group)) is not None:
            wishes = node.views.wishes
            wishes.wanted_size = self._min_size or 1
            wishes.most_size = self._most
            wishes.is_elastic = True
            engine_of(group).carry_news()
            wishes.is_draining = self._is_asked_to_leave
        return group

    def _seat(self, request: JoinRequest) -> Group:
        """Return the group that has a seat for this process, before it knows that the process is elastic."""
        return bootstrap.join_with(request)

    def _next(self, group: Group) -> Group | None:
        """Return the group of the next generation; None if this process was asked to leave, and is not in it."""
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
        except GroupChangedError:  # the program cannot catch it between two generations
            group.close()
            return self._join(again=True)
        if founded is None and not is_decided:  # a view has excluded this process
            error = engine.failure.message_error()
            group.close()
            if isinstance(error, GroupChangedError):
                return self._join(again=True)
            raise error if error is not None else DeadlineError("Timed out: no agreement on the next generation")
        if founded is None:
            group.close()
            return None
        if all(member.seat != node.seat for member in founded.members):
            group.close()
            return self._join(again=True)  # the generation is full: wait as a spare
        return _begin(group, node, founded)

    def _agree(self, group: Group, node: NodeParts) -> messages.Founded | None:
        """Return the next generation, as all its members compute it; None if this process leaves."""
        until = time.monotonic() + self._request.asked.get("timeout", MEMBERS_WAIT_SECONDS)
        while True:
            mine = {
                "lobby": messages.encode(tuple(each.card for each in node.newcomers)),
                "leaves": self._is_asked_to_leave,
                "next": node.peers.next_seat,
                "late": time.monotonic() > until,
                "rival": node.views.wishes.rival,
            }
            gathered = enumerate(group.all_gather_object(mine))
            checked = {Rank(rank): _checked(value) for rank, value in gathered if rank in group.contributors}
            proposals = {rank: proposal for rank, proposal in checked.items() if proposal is not None}
            if rivals := [proposal.rival for proposal in proposals.values() if proposal.rival]:
                raise _outlived(group, rivals[0])
            if proposals[engine_of(group).rank].leaves:
                return None
            staying = [rank for rank, proposal in proposals.items() if not proposal.leaves]
            founded = _founded(group, node, staying, proposals, self._most)
            if len(founded.members) >= (self._min_size or 1):
                return founded
            if any(proposal.is_late for proposal in proposals.values()):
                raise DeadlineError(
                    f"the next generation has {len(founded.members)} members and needs {self._min_size}, and the "
                    "timeout ended before more came; start some, or pass a smaller min_size= or a longer timeout="
                )
            _await_newcomer(node)

    @contextlib.contextmanager
    def _listening_for_sigterm(self) -> Iterator[None]:
        """Let SIGTERM ask this process to leave, if the loop runs on the main thread and the program has no handler."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) not in (
            signal.SIG_DFL,
            signalled,
            None,
        ):
            yield
            return

        def leave(_signum: int, _frame: object) -> None:
            self._is_asked_to_leave = True
            if self._group is None:
                raise SystemExit(0)  # without a seat, no member has to agree
            if (node := node_of(self._group)) is not None:
                node.views.wishes.is_draining = True

        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            if (
                threading.current_thread() is threading.main_thread()
            ):  # the garbage collector may end the loop on another thread
                signal.signal(signal.SIGTERM, before)


class _Proposal(NamedTuple):
    """What a member contributes when the members compute the next generation."""

    newcomers: dict[tuple[bytes, bytes], messages.Card]
    """The newcomers that it is linked with, by id and life."""
    leaves: bool
    next_seat: int
    is_late: bool
    rival: str


def _checked(value: Any) -> _Proposal | None:
    """Check what a member contributed; None if it is malformed: then all members ignore it."""
    try:
        newcomers, next_seat, rival = value["lobby"], value["next"], value["rival"]
        if not (isinstance(newcomers, bytes) and type(next_seat) is int and isinstance(rival, str)):
            return None
        cards = {messages.key_of(card): card for card in messages.decode_cards(newcomers)}
        leaves, is_late = bool(value["leaves"]), bool(value["late"])
    except (TypeError, KeyError, RemoteProtocolError):
        return None
    return _Proposal(cards, leaves, next_seat, is_late, rival) if 0 <= next_seat < MOST_SEATS else None


def _founded(
    group: Group, node: NodeParts, staying: list[Rank], proposals: dict[Rank, _Proposal], most: int
) -> messages.Founded:
    """Return the next generation, computed from the proposals: the same on every member.

    Only a newcomer that every member is linked with gets a seat.
    """
    generation = engine_of(group).generation
    assert generation is not None
    members = [generation.founded.members[generation.ranks_of((seat_of(group, rank),))[0]] for rank in staying]
    waiting = [proposals[rank].newcomers for rank in staying]
    known = [key for key in waiting[0] if all(key in newcomers for newcomers in waiting)] if waiting else []
    del members[most:]
    room = most - len(members)
    next_seat = max(proposal.next_seat for proposal in proposals.values())
    members += [
        messages.SeatedMember(Seat(next_seat + number), waiting[0][key]) for number, key in enumerate(known[:room])
    ]
    number = generation.number + 1
    keys = b"".join(part for member in members for part in messages.key_of(member.card))
    lineage = hashlib.blake2b(generation.founded.lineage + keys, digest_size=16, key=str(number).encode()).digest()
    old, config = generation.founded, node.config
    tie_breaker = _tie_breaker(generation, members)
    return messages.Founded(
        number,
        lineage,
        old.is_kept,
        tuple(members),
        config.on_loss,
        config.patience,
        old.origin,
        tie_breaker,
        old.versions,
    )


def _tie_breaker(generation: Generation, members: list[messages.SeatedMember]) -> int:
    """Return the rank that breaks ties: one that was started for it, else the previous one, else rank 0."""
    before = generation.founded.members[generation.view.tie_breaker].seat
    wished = (rank for rank, member in enumerate(members) if member.card.breaks_ties)
    kept = (rank for rank, member in enumerate(members) if member.seat == before)
    return next(wished, next(kept, 0))


def _decide(generation: Generation, founded: messages.Founded) -> messages.Founded | None:
    """Let a view decide that a generation follows; return that generation without members that were lost meanwhile.

    All members compute the same, so any of them may ask for it. The decision is on the disks of a quorum, so that a
    member which crashed cannot wake up in the old generation and find a quorum there.
    """
    keys = member_keys(founded)
    asked = Successor(founded.generation, founded.lineage, tuple(keys), founded.tie_breaker)
    agreed = generation.end_with(asked, generation.patience + GENERATION_SURPLUS_SECONDS)
    if agreed is None:
        return None
    by_key = dict(zip(keys, founded.members, strict=True))
    if agreed.lineage != founded.lineage or any(key not in by_key for key in agreed.members):
        raise CoveyError(f"the members agreed on another generation {founded.generation} than this process computed")
    members = tuple(by_key[key] for key in agreed.members)
    return messages.founded_with(founded, members, agreed.tie_breaker)


def _outlived(group: Group, rival: str) -> SplitRunError:
    """Save the state of a run that has to end, and return the error to raise; all members do so after one step."""
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


def _await_newcomer(node: NodeParts) -> None:
    """Wait until a newcomer comes, for `ROUND_SECONDS` at most."""
    until = time.monotonic() + ROUND_SECONDS
    known = {each.card.life for each in node.newcomers}
    while {each.card.life for each in node.newcomers} == known and time.monotonic() < until:
        time.sleep(0.01)


def _begin(group: Group, node: NodeParts, founded: messages.Founded) -> Group:
    """Begin a generation that the members of `group` have agreed on, and return its group."""

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
