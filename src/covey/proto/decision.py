"""The decision about a proposed view: its members agree on COMMIT or ABORT.

Commit is possible once *all* members have accepted; abort is certain once one has refused. In between the members vote
in numbered ballots (single-decree Paxos, "The Part-Time Parliament"; the value is one bit):

- Ballot 0 belongs to all members and can only commit: a member votes in it as soon as it knows that all accepted,
  unless it has promised a later ballot. If nothing goes wrong, no other ballot is needed.
- Ballot k > 0 belongs to member k mod size. It starts one when a member is lost or the patience has passed; a member
  that learns of it promises never to vote in an earlier one. With the promises of a quorum the owner votes first: for
  the value of the latest vote that it knows; if there is none, to commit if all accepted and have links, otherwise to
  abort. The others follow.
- The value that a quorum voted for in one ballot is the outcome. A quorum is more than half, or half with member 0.

If a quorum of members died during the vote, the others would stay in doubt for ever. But a life has certainly ended
when there is a link with a later life of the same node. When all other members of a proposal have ended in this sense,
as each survivor sees it, the survivors are a quorum. Each says which lives it takes no more messages from, together
with all it knows of them. So the member that counts knows all that any survivor will ever know of the ended lives, and
no survivor can later learn of an outcome that was passed over. A node whose quorum is lost for good stays in doubt, as
it must: the others may have gone ahead with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.base.errors import RemoteProtocolError
from covey.wire.formation import Answer, Outcome, Row, Standing

if TYPE_CHECKING:
    from collections.abc import Collection

    from covey.wire.formation import FoundingMember
    from covey.wire.versions import Versions


class Decision:
    """One member's part in the choice about one proposal."""

    def __init__(
        self,
        proposal: bytes,
        members: tuple[FoundingMember, ...],
        rank: int,
        answer: Answer,
        reason: str = "",
        versions: Versions | None = None,
    ) -> None:
        """Answer the proposal; the answer is final. `versions` are what all members speak."""
        self.proposal, self.members, self.rank = proposal, members, rank
        self.versions = versions
        self.ranks = {member.id: index for index, member in enumerate(members)}
        self.rows = [Row()] * len(members)
        self.rows[rank] = Row(answer, reason=reason)
        self.outcome = Outcome.OPEN
        self._ended: frozenset[int] = frozenset()
        self._ended_for: dict[int, frozenset[int]] = {}
        """By member: the lives that it says have ended."""

    def standing(self) -> Standing:
        """Return all that this member knows, for the other members."""
        return Standing(self.proposal, tuple(self.rows), self.outcome, tuple(sorted(self._ended)))

    def heard(self, rank: int, standing: Standing) -> None:
        """Merge what the member `rank` knows."""
        size = len(self.rows)
        if len(standing.rows) != size or any(ended >= size for ended in standing.ended):
            raise RemoteProtocolError(f"a standing of {len(standing.rows)} members; the proposal has {size}")
        for index, row in enumerate(standing.rows):
            known = self.rows[index]
            if row != known and index != self.rank and _age(row) > _age(known):
                self.rows[index] = row
        self._ended_for[rank] = frozenset(standing.ended)
        if self.outcome is Outcome.OPEN:
            self.outcome = standing.outcome

    def met_later_life(self, rank: int) -> None:
        """Note that the node of member `rank` was started anew: the life in the proposal is over."""
        self._ended |= {rank}

    def hub(self) -> int:
        """Return the member that needs to know most: the owner of the latest ballot, and member 0 for ballot 0."""
        return self._owner(max(row.promised for row in self.rows))

    def start_ballot(self) -> bool:
        """Start a ballot of this member above all it knows, unless the latest is its own already."""
        latest = max(row.promised for row in self.rows)
        if latest > 0 and self._owner(latest) == self.rank == self._owner(self.rows[self.rank].promised):
            return False
        size = len(self.rows)
        self._promise(latest + 1 + (self.rank - latest - 1) % size)
        return True

    def advance(self, *, all_here: bool) -> bool:
        """Take all steps that are possible now; return whether this member's row or the outcome has changed.

        `all_here`: this member has a link with every other.
        """
        changed = False
        while self.outcome is Outcome.OPEN and self._step(all_here):
            changed = True
        return changed

    def _step(self, all_here: bool) -> bool:
        rows, mine = self.rows, self.rows[self.rank]
        outcome = self._chosen()
        if outcome is not Outcome.OPEN:
            self.outcome = outcome
            return True
        if mine.voted < 0 and self._may_confirm():
            return self._vote(0, commit=True)
        latest = max(row.promised for row in rows)
        if latest > mine.promised:
            return self._promise(latest)
        if latest == 0 or mine.voted >= latest:
            return False
        owner = self._owner(latest)
        if rows[owner].voted == latest:
            return self._vote(latest, commit=rows[owner].commit)
        if owner == self.rank and self._is_backed(latest):
            last = max(rows, key=lambda row: row.voted)
            return self._vote(latest, commit=last.commit if last.voted >= 0 else all_here and self._all_accepted())
        return False

    # Rules

    def _all_accepted(self) -> bool:
        return all(row.answer is Answer.ACCEPTED for row in self.rows)

    def _may_confirm(self) -> bool:
        return self._all_accepted() and self.rows[self.rank].promised == 0

    def _is_quorum(self, ranks: Collection[int]) -> bool:
        return 2 * len(ranks) > len(self.rows) or (2 * len(ranks) == len(self.rows) and 0 in ranks)

    def _is_backed(self, ballot: int) -> bool:
        """Tell whether enough members have promised this ballot, the latest, which is this member's own."""
        promised = [rank for rank, row in enumerate(self.rows) if row.promised == ballot]
        return self._is_quorum(promised) or self._are_survivors(promised)

    def _are_survivors(self, ranks: Collection[int]) -> bool:
        """Tell whether `ranks` are all members whose life has not ended, and each of them knows it."""
        agreeing = {
            rank for rank in ranks if rank == self.rank or self._ended <= self._ended_for.get(rank, frozenset())
        }
        return bool(self._ended) and len(self._ended | agreeing) == len(self.rows)

    def _chosen(self) -> Outcome:
        if any(row.answer is Answer.REFUSED for row in self.rows):
            return Outcome.ABORT
        latest = max(row.promised for row in self.rows)
        for ballot in sorted({row.voted for row in self.rows} - {-1}):
            voters = [rank for rank, row in enumerate(self.rows) if row.voted == ballot]
            # Only the owner counts survivors, and only in the latest ballot: ended members may have seen later ones.
            is_mine = ballot == latest > 0 and self._owner(ballot) == self.rank
            if self._is_quorum(voters) or (is_mine and self._are_survivors(voters)):
                return Outcome.COMMIT if self.rows[voters[0]].commit else Outcome.ABORT
        return Outcome.OPEN

    def _owner(self, ballot: int) -> int:
        return ballot % len(self.rows)

    def _promise(self, ballot: int) -> bool:
        mine = self.rows[self.rank]
        self.rows[self.rank] = Row(mine.answer, ballot, mine.voted, mine.commit)
        return True

    def _vote(self, ballot: int, *, commit: bool) -> bool:
        mine = self.rows[self.rank]
        self.rows[self.rank] = Row(mine.answer, max(mine.promised, ballot), ballot, commit)
        return True


def _age(row: Row) -> tuple[bool, int, int]:
    return row.answer is not Answer.NONE, row.promised, row.voted
