"""Invariants of a simulated run: records the outcomes of its members, and raises `BrokenError` at the first violation.

Members are named by the letter of their rank, operations by group and number.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from covey.wire.membership import Fate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.wire.membership import State, View


class BrokenError(AssertionError):
    """An invariant is violated."""


class End(NamedTuple):
    """How an operation ended for a member."""

    what: str
    """ "returned" and its result, "raised" or "revoked"."""
    pending: bool
    """Whether it returned, and all members then knew of a waiting change."""


class Invariants:
    """The installed views and the ended operations of all members, in all lineages."""

    def __init__(self) -> None:
        self.views: dict[tuple[bytes, int], tuple[View, str]] = {}
        self.ends: dict[tuple[bytes, int, int], dict[int, End]] = {}
        """By lineage, group and operation, then by rank."""
        self.revoked_at: dict[tuple[bytes, int], int] = {}
        """By lineage and group: the first operation without an end of its own."""
        self._pending: dict[tuple[bytes, int, int, int], tuple[bool, str]] = {}

    def installed(self, name: str, view: View) -> None:
        """Check that a view number has one value."""
        known, by = self.views.setdefault((view.lineage, view.number), (view, name))
        if known != view:
            raise BrokenError(f"view {view.number} is {tell_view(view)} for {name}, {tell_view(known)} for {by}")
        for verdict in view.verdicts:
            if verdict.fate is Fate.REVOKE:
                self.revoked_at.setdefault((view.lineage, verdict.group), verdict.sequence)

    def froze(self, name: str, view: View, state: State) -> None:
        """Check that members of a view that returned the same operation agree on a change: a proposer asks only one."""
        key = (view.lineage, view.number, state.group, state.returned)
        pending, by = self._pending.setdefault(key, (state.pending, name))
        if pending != state.pending:
            knows = name if state.pending else by
            raise BrokenError(f"after {state.group}.{state.returned} only {knows} of {name} and {by} knows of a change")

    def ended(self, rank: int, lineage: bytes, group: int, sequence: int, end: End) -> None:
        """Check that an operation either has a result on all members that ended it, lost ones included, or on none.

        Whether it raised or was revoked, and what was known after it, is equal on all members of the view that ended
        it.
        """
        what, at = f"{tell_ranks([rank])} {end.what} for {group}.{sequence}", self.revoked_at.get((lineage, group))
        if end.what == "revoked" and at != sequence:
            raise BrokenError(f"{what}, but {at} is the operation that a view revoked")
        ends = self.ends.setdefault((lineage, group, sequence), {})
        for other, theirs in ends.items():
            if end == theirs:
                continue
            is_alike = end.what == theirs.what or {end.what, theirs.what} == {"raised", "revoked"}
            if not is_alike or not self._are_parted(rank, other, lineage, group, sequence):
                knows = tell_ranks(one for one, its in ((rank, end), (other, theirs)) if its.pending) or "no rank"
                raise BrokenError(f"{what}, {tell_ranks([other])} {theirs.what}; {knows} knows of a change")
        ends[rank] = end

    def count(self) -> Counter[str]:
        """Return how many views and operations were checked."""
        ends = Counter(min(end.what.split()[0] for end in ends.values()) for ends in self.ends.values())
        return Counter(
            {
                "views": len(self.views),
                "operations that returned": ends["returned"],
                "operations that raised": ends["raised"],
                "groups that were revoked": len(self.revoked_at),
            }
        )

    def _are_parted(self, one: int, other: int, lineage: bytes, group: int, sequence: int) -> bool:
        """Tell whether a view that ended the operation lacks one of the two members."""
        by = [
            (view.number, view.ranks)
            for view, _ in self.views.values()
            for verdict in view.verdicts
            if (view.lineage, verdict.group) == (lineage, group)
            and (verdict.sequence > sequence or (verdict.sequence == sequence and verdict.fate is not Fate.REDO))
        ]
        return bool(by) and not {one, other} <= set(min(by)[1])


def tell_ranks(ranks: Iterable[int]) -> str:
    """Return the letters of ranks."""
    return "".join("abcdefgh"[rank] for rank in ranks)


def tell_view(view: View) -> str:
    """Return the members of a view, its tie-breaker, and its verdicts; + marks a verdict with a waiting change."""
    fates = (f" {one.group}.{one.sequence}:{one.fate.name.lower()}{'+' * one.pending}" for one in view.verdicts)
    return f"{tell_ranks(view.ranks)}*{tell_ranks([view.tie_breaker])}{''.join(fates)}"


def tell_state(state: State) -> str:
    """Return the state of a member as text.

    2.7+>8!@3: it has returned 7 in group 2, knows of a change, is complete in 8, attempt 3. A question mark: it gives
    up.
    """
    trying = f">{state.sequence}{'!' * state.complete}@{state.attempt}" if state.sequence else ""
    return f"{state.group}.{state.returned}{'+' * state.pending}{'?' * state.gives_up}{trying}"
