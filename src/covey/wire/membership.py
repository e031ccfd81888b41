"""The messages with which members of a run agree on its next view, and what they write to disk.

Every message may be lost, repeated or late without harm. Members are named by their rank in view 0, which never
changes; a `lineage` names the one sequence of views that a view belongs to. Tags and fields are only added, at the
end.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

from covey.wire.decoding import check_packed, read_from_peer
from covey.wire.formation import MAX_MEMBERS, Life, NodeId, ProposalId

BOUND_FORMAT: Final = 1
"""The format of the file of a member."""
MAX_GROUPS: Final = 1024
"""Groups in one answer."""
MAX_STATE_RANKS: Final = 1 << 17
"""Ranks of all groups in one answer together. This many fit into one control frame: 128 groups of all members of the
largest view, or as many groups as there may be with 128 ranks each."""
MAX_VERDICTS: Final = 2 * MAX_GROUPS
"""Groups of all members together. A promise carries an accepted view in addition to its own answer."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""The number of a view; as the attempt of a transfer it has four bytes."""
Ballot = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
"""Ballot b belongs to member b mod (members + 1); the last number is the keeper's. -1: none."""
Sequence = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Counts the operations of a group from 1; 0: none."""
Key = Annotated[int, msgspec.Meta(ge=0)]
"""The number of a group."""


class MemberKey(msgspec.Struct, frozen=True, array_like=True):
    """The process of a rank of view 0: one life of one node."""

    id: NodeId
    life: Life


class Successor(msgspec.Struct, frozen=True, array_like=True):
    """A generation, in the view that decides on it."""

    generation: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    lineage: ProposalId
    members: Annotated[tuple[MemberKey, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    """By rank of that generation."""
    tie_breaker: Rank


class State(msgspec.Struct, frozen=True, array_like=True):
    """The state of a frozen member in one group."""

    group: Key
    ranks: Ranks
    """All ranks of the group, in its order, including lost ones."""
    returned: Sequence
    """The last operation that has ended here: it returned, raised, or will raise by a view's verdict."""
    sequence: Sequence = 0
    """The running operation, returned + 1; 0: none."""
    attempt: Number = 0
    complete: bool = False
    """The result is complete here, and no other rank can write to it."""
    root: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_MEMBERS)] = -1
    """The root that the operation needs; -1: none."""
    pending: bool = False
    """All members know, as of operation `returned`, that a change is waiting."""
    gives_up: bool = False
    """Whether the member wants the group revoked, or knows that it is."""


class Fate(enum.IntEnum):
    """What happens to an operation that was running when the view changed."""

    REDO = 0
    """It runs again from its saved input, as the attempt of the new view."""
    COMMIT = 1
    """It returns its result."""
    RAISE = 2
    """It raises: its root is lost."""
    REVOKE = 3
    """It ends without a result, and so does every later operation of the group."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What happens to operation `sequence` of one group. Earlier ones have returned; later ones have not started."""

    group: Key
    sequence: Sequence
    fate: Fate
    pending: bool = False
    """What all members know as of the operation before it: `State.pending`."""


class View(msgspec.Struct, frozen=True, array_like=True):
    """The agreed members of a run, and what happens to the operations that were running."""

    lineage: ProposalId
    number: Number
    ranks: Ranks
    """Ranks, ascending. Empty: the run is over."""
    tie_breaker: Rank
    verdicts: Annotated[tuple[Verdict, ...], msgspec.Meta(max_length=MAX_VERDICTS)] = ()
    successor: Successor | None = None
    """The generation in which the members of this view continue; this one has no further view."""
    is_finished: bool = False
    """With no ranks: whether a member left because its program had ended."""


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`ballot` asks to propose view `number`: the receiver freezes and answers with Promise or Refuse."""

    lineage: ProposalId
    number: Number
    ballot: Ballot


class Promise(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The sender accepts nothing in an earlier ballot, and is frozen until a view is installed.

    Sent again when its contents change.
    """

    lineage: ProposalId
    number: Number
    ballot: Ballot
    hears: Ranks
    """The members that it has a link with and does not consider lost."""
    states: Annotated[tuple[State, ...], msgspec.Meta(max_length=MAX_GROUPS)] | None
    """None: it only votes and cannot be in the view: it leaves, was restarted, or is the keeper."""
    accepted_ballot: Ballot = -1
    accepted: View | None = None
    is_finished: bool = False
    """It leaves because its program has ended."""
    successor: Successor | None = None
    """The generation in which it continues, if this one is to end."""


class Accept(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Asks to accept a view in a ballot. Answered by Accepted or Refuse."""

    ballot: Ballot
    view: View


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The sender has accepted the proposal of this ballot, which binds it."""

    lineage: ProposalId
    number: Number
    ballot: Ballot


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The sender has promised a later ballot."""

    lineage: ProposalId
    number: Number
    promised: Ballot


class Decided(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """This is the view of that number."""

    view: View


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The position of the sender: the leader sends it to all, all answer the leader, and new links start with it."""

    lineage: ProposalId
    number: Number
    """The number of its last view: a member that is behind is sent the views it missed."""
    promised: Ballot
    claims: bool = False
    """Whether the ballot is the sender's own: the receiver should promise it, and let the sender lead."""
    stamp: float = 0.0
    """The claimant's clock."""
    echo: float = 0.0
    """The stamp of the claim that this answers."""


class Trouble(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Asks for the view after `number`: a lane broke, an operation is late, or the sender leaves."""

    lineage: ProposalId
    number: Number
    leaves: bool = False
    is_finished: bool = False
    """Whether it leaves because its program has ended; the programs of other members may be about to end."""


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Under quorum="any": the members of `view` continue as a new lineage, from the last view of `parent`."""

    parent: ProposalId
    number: Number
    """The number of the last view of the parent."""
    view: View


class Seated(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The sender is, or votes, in this generation of the run. Sent to nodes that may not know of their seat in it.

    A node that never learned of its seat has promised nothing there, so it may vote from the beginning. A node that
    never accepted a founding learns that the founding failed.
    """

    lineage: ProposalId
    """The lineage of the whole run."""
    generation: Successor


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What a member must remember after a crash, so that its votes bind its next life, too."""

    members: Annotated[tuple[MemberKey, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    view: View
    """The last view that was installed."""
    promised: Ballot
    accepted_ballot: Ballot = -1
    accepted: View | None = None
    """The accepted view with the number after that of `view`."""


class Bound(msgspec.Struct, frozen=True, array_like=True):
    """What a member of a cluster's run writes to disk."""

    generation: Annotated[int, msgspec.Meta(ge=0)]
    record: Record
    origin: ProposalId
    """The lineage of the whole run, which the lineages of its generations follow from."""
    tie_breaker: Rank = 0
    """The tie-breaker of the first view of the generation."""
    format: Annotated[int, msgspec.Meta(ge=1)] = 1


Membership = Prepare | Promise | Accept | Accepted | Refuse | Decided | Pulse | Trouble | Fork | Seated

_messages: msgspec.msgpack.Decoder[Membership] = msgspec.msgpack.Decoder(Membership)
_bounds: msgspec.msgpack.Decoder[Bound] = msgspec.msgpack.Decoder(Bound)
_encode = msgspec.msgpack.Encoder().encode


def encode_membership(message: Membership) -> bytes:
    """Encode a message between members."""
    return _encode(message)


def decode_membership(data: bytes) -> Membership:
    """Decode a message between members; raise RemoteProtocolError for anything else."""
    return read_from_peer(_messages, data, "a message between members")


def encode_bound(bound: Bound) -> bytes:
    """Encode what a member writes to its disk."""
    return _encode(bound)


def decode_bound(data: bytes) -> Bound:
    """Decode what a member wrote to its disk; raise ValueError for anything else."""
    check_packed(data, 4, BOUND_FORMAT)
    try:
        return _bounds.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a record of a member: {error}") from error
