"""The rules of views, as functions: quorums, the members of the next view, and the fate of operations.

And how many groups a member reports in an answer to a ballot: open ones, and some that it has closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.base.errors import BusyError
from covey.wire.membership import MAX_GROUPS, MAX_STATE_RANKS, Fate, State, Verdict, View

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

SEARCHED: Final = 4096
"""Steps in the search for the largest clique. Broken links are few, or split a run in parts; both take far fewer."""
MOST_OPERATIONS: Final = 1 << 61
"""The number of an operation, and that of the next one, fit into every message."""
DISMISSED: Final = 256
"""Closed groups that this member reports in every view."""
DISMISSED_RANKS: Final = MAX_STATE_RANKS // 4
"""Ranks of all these groups together."""
OPEN_GROUPS: Final = MAX_GROUPS - DISMISSED
"""Groups that may be open at once: a member reports its state in each."""
OPEN_RANKS: Final = MAX_STATE_RANKS - DISMISSED_RANKS
"""Ranks of all open groups together: those of 96 groups of 1,024 ranks, for example."""


def is_quorum(view: View, ranks: Collection[int]) -> bool:
    """Tell whether these members of a view can decide the next: more than half, or half with the tie-breaker.

    All members of the view count in the denominator, dead or alive, so two quorums always have a member in common.
    """
    return is_majority(view.ranks, view.tie_breaker, ranks)


def is_majority(members: Collection[int], tie_breaker: int, some: Collection[int]) -> bool:
    """Tell whether `some` of these members are more than half of them, or half with the tie-breaker."""
    votes, size = len(set(some) & set(members)), len(members)
    return 2 * votes > size or (2 * votes == size and tie_breaker in some)


def next_tie_breaker(view: View, ranks: Collection[int]) -> int:
    """Return the tie-breaker among `ranks`: that of `view` if it is among them, else the lowest rank."""
    return view.tie_breaker if view.tie_breaker in ranks else min(ranks)


def largest_clique(hears: Mapping[int, Collection[int]], tie_breaker: int) -> tuple[int, ...]:
    """Return the most members that all hear each other, as both of each pair say; among equals the tie-breaker counts.

    The search branches on the rank that misses most others: without it, or without the ranks that it misses.
    """
    deaf = _deaf(hears)
    best: tuple[int, bool, list[int]] = (0, False, [])
    steps = 0
    open_sets = [frozenset(hears)]
    while open_sets and steps < SEARCHED:
        steps += 1
        ranks = open_sets.pop()
        if len(ranks) < best[0]:
            continue
        worst = max(sorted(ranks), key=lambda rank: len(deaf[rank] & ranks), default=None)
        if worst is None or not deaf[worst] & ranks:
            best = max(best, (len(ranks), tie_breaker in ranks, sorted((-rank for rank in ranks), reverse=True)))
        else:
            open_sets += [ranks - deaf[worst], ranks - {worst}]
    return tuple(sorted(-rank for rank in best[2]))


def _deaf(hears: Mapping[int, Collection[int]]) -> dict[int, set[int]]:
    """Return for each rank the ranks that it misses, or that miss it. Called after each of up to a hundred answers."""
    ranks = set(hears)
    deaf = {rank: ranks.difference(heard, (rank,)) for rank, heard in hears.items()}
    for rank, missed in [(rank, tuple(missed)) for rank, missed in deaf.items() if missed]:
        for other in missed:
            deaf[other].add(rank)
    return deaf


def judge(answers: Mapping[int, tuple[State, ...]]) -> tuple[Verdict, ...]:
    """Return the verdicts of a view whose members gave these answers, for every group that one of them is in.

    No rank returns an operation before all are complete. So every operation that the foremost rank has passed is
    complete everywhere, or raises because its root is gone; only the next one is in doubt. It is committed if all
    remaining ranks are complete in the same attempt, because a lost rank may have returned it. Otherwise no rank has
    returned it or ever will, because the members are frozen.

    If a rank gives up, the first operation that no rank can have returned is revoked: the one in doubt, or the one
    after it if that one is committed. So a view always grants a request to give up that it knows of, all its members
    see the group end at the same operation, and a result that a lost rank may have used is never taken back. Only a
    rank in no such view can have seen the revoked operation end otherwise, and only by raising: its root was gone.
    """
    groups: dict[int, dict[int, State]] = {}
    for rank in sorted(answers):
        for state in answers[rank]:
            groups.setdefault(state.group, {})[rank] = state
    return tuple(_judge_group(group, groups[group], answers.keys()) for group in sorted(groups))


def rests_on(view: View, states: Collection[State]) -> bool:
    """Tell whether the verdicts of a view can come from `judge`, if one of its members answered with these states.

    Members pass an operation together, so no member is ahead by more than one operation that is complete here, unless
    operations raised because a member of the group is gone. A member that gives a group up may have lost its count.
    """
    verdicts = {verdict.group: verdict for verdict in view.verdicts}
    for state in states:
        verdict = verdicts.get(state.group)
        is_bounded = set(state.ranks) <= set(view.ranks) and not state.gives_up
        most = state.returned + 1 + state.complete if is_bounded else MOST_OPERATIONS
        if verdict is None or not state.returned < verdict.sequence <= most:
            return False
        if verdict.fate is Fate.COMMIT and not (state.complete and state.sequence == verdict.sequence):
            return False
    return True


def fits(answer: Collection[State], states: Collection[State], view: View) -> bool:
    """Tell whether the states that a member reports are possible, given the states of this one."""
    mine = {state.group: state for state in states}
    for theirs in answer:
        ours = mine.get(theirs.group)
        if ours is None or not {*theirs.ranks, *ours.ranks} <= set(view.ranks):
            continue
        is_ahead = theirs.returned > ours.returned + ours.complete and not ours.gives_up
        is_behind = ours.returned > theirs.returned + theirs.complete and not theirs.gives_up
        if is_ahead or is_behind:
            return False
    return True


def _judge_group(group: int, states: Mapping[int, State], clique: Collection[int]) -> Verdict:
    ranks = {rank for state in states.values() for rank in state.ranks if rank in clique}
    due = 1 + max(state.returned for state in states.values())
    # Ranks that returned the same last operation know the same, from the same barrier.
    pending = any(state.pending for state in states.values() if state.returned == due - 1)
    trying = {rank: state for rank, state in states.items() if state.sequence == due}
    is_whole = trying.keys() == ranks and all(state.complete for state in trying.values())
    is_over = is_whole and len({state.attempt for state in trying.values()}) == 1
    if any(state.gives_up for state in states.values()):
        return Verdict(group, due + is_over, Fate.REVOKE, pending)
    if is_over:
        return Verdict(group, due, Fate.COMMIT, pending)
    is_headless = any(state.root >= 0 and state.root not in clique for state in trying.values())
    return Verdict(group, due, Fate.RAISE if is_headless else Fate.REDO, pending)


def check_room(sizes: Iterable[int], size: int) -> None:
    """Raise BusyError if a group of `size` ranks is one too many beside open ones of `sizes`."""
    open_sizes = list(sizes)
    if len(open_sizes) >= OPEN_GROUPS:
        raise BusyError(f"{OPEN_GROUPS} groups that survive losses are open; close some")
    if sum(open_sizes) + size > OPEN_RANKS:
        raise BusyError(
            f"{len(open_sizes)} groups that survive losses are open, with {sum(open_sizes)} ranks in all; with one of "
            f"{size} these would be more than {OPEN_RANKS}; close some"
        )


def forget_oldest(dismissed: dict[int, State]) -> None:
    """Drop the groups that were closed first, until the others fit into an answer."""
    ranks = sum(len(state.ranks) for state in dismissed.values())
    while len(dismissed) > DISMISSED or ranks > DISMISSED_RANKS:
        ranks -= len(dismissed.pop(next(iter(dismissed))).ranks)
