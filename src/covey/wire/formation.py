"""The messages with which joiners of a run agree on its first view.

Every message may be lost, repeated or late without harm: `Here` replaces what its sender said before, a `Propose` is
identified by its number, and the facts of two `Standing`s add up. Tags and fields are only added, at the end.

And lineages: the ids of runs from their founding to their end, and what a machine records about them. Lineages tell
runs of the same name apart. An id starts with the time of the founding, by the founder's clock, so of two ids the
smaller one is the older, and all nodes compare the same bytes.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Final

import msgspec

from covey.base.errors import ConfigError
from covey.base.settings import differences_of
from covey.wire.decoding import check_packed, read_from_peer
from covey.wire.messages import MAX_MEMBERS as MAX_MEMBERS
from covey.wire.messages import SharedSettings, Worded
from covey.wire.versions import Disagreement, Versions, agree, only

REMEMBERED_FORMAT: Final = 1
"""The format of the file of lineages."""
LINEAGE_BYTES: Final = 16
_TIME_BYTES: Final = 6
RANDOM_BYTES: Final = LINEAGE_BYTES - _TIME_BYTES
MAX_OPEN: Final = 16
"""Lineages of one run that a machine waits for at the same time."""
MAX_ENDED: Final = 64
"""Lineages of one run whose end a machine remembers, to tell the machines that missed it."""
MAX_GIVEN_UP: Final = 64
"""Lineages of one run that a user gave up, as far as a machine remembers them."""
MAX_NAMES: Final = 128

Lineage = Annotated[bytes, msgspec.Meta(min_length=LINEAGE_BYTES, max_length=LINEAGE_BYTES)]
_encode = msgspec.msgpack.Encoder().encode
ID_BYTES: Final = 32
LIFE_BYTES: Final = 16
MAX_LINKS: Final = 2048
"""Links in a Here, including those with joiners of other runs."""
CONTACT_BYTES: Final = 1024
NodeId = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Life = Annotated[bytes, msgspec.Meta(min_length=LIFE_BYTES, max_length=LIFE_BYTES)]
ProposalId = Lineage
"""The id of a proposal. If it is committed, it is the lineage of the run."""
MAX_ENDINGS: Final = 16
"""Ended lineages in a Here."""
Name = Annotated[str, msgspec.Meta(max_length=80)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Release = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,40}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,3}")
encode_formation = msgspec.msgpack.Encoder().encode


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """The end of a lineage: a quorum of its last view decided it, or its founding was given up."""

    lineage: Lineage
    is_finished: bool
    """Whether a member left because its program had ended. False: all processes were lost, or it never started."""


class KnownLineage(msgspec.Struct, frozen=True, array_like=True):
    """A lineage whose run may still exist."""

    lineage: Lineage
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMES)]
    """Its members, as far as this machine knows them."""
    is_ours: bool = False
    """Whether a node of this machine was in it, or accepted its founding. Other nodes reported the rest."""


class Remembered(msgspec.Struct, frozen=True, array_like=True):
    """What a machine knows about the lineages of one run."""

    open: Annotated[tuple[KnownLineage, ...], msgspec.Meta(max_length=MAX_OPEN)] = ()
    ended: Annotated[tuple[Ending, ...], msgspec.Meta(max_length=MAX_ENDED)] = ()
    """In the order in which this machine learned of them."""
    given_up: Annotated[tuple[Lineage, ...], msgspec.Meta(max_length=MAX_GIVEN_UP)] = ()
    """Lineages that a user gave up here: promises of nodes of this machine in them are forgotten. Oldest first."""
    format: Annotated[int, msgspec.Meta(ge=1)] = 1


_remembered: msgspec.msgpack.Decoder[Remembered] = msgspec.msgpack.Decoder(Remembered)


def new_lineage(seconds: float, random: bytes) -> bytes:
    """Return an id for a run founded at `seconds` since 1970; `random` has RANDOM_BYTES bytes."""
    milliseconds = min(max(0, int(seconds * 1000)), (1 << 8 * _TIME_BYTES) - 1)
    return milliseconds.to_bytes(_TIME_BYTES, "big") + random


def founded_at(lineage: bytes) -> float:
    """Return when a lineage was founded, in seconds since 1970 by its founder's clock."""
    return int.from_bytes(lineage[:_TIME_BYTES], "big") / 1000


def encode_remembered(remembered: Remembered) -> bytes:
    """Encode what a machine writes to its disk."""
    return _encode(remembered)


def decode_remembered(data: bytes) -> Remembered:
    """Decode what a machine wrote to its disk; raise ValueError for anything else."""
    check_packed(data, 3, REMEMBERED_FORMAT)
    try:
        return _remembered.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a record of lineages: {error}") from error


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """The terms on which all members of a run must agree before they form a group."""

    run: Text
    program: Text
    size: int | None
    """The exact number of members; None: from `min_size` to `max_size`."""
    min_size: int
    max_size: int | None
    version: Text
    """The oldest version of the protocol that the sender speaks; `versions` has the others."""
    lanes: Text
    on_loss: Text = "raise"
    settings: SharedSettings = ""
    versions: Versions | None = None
    """What the sender speaks, and in a run what all members of the run speak; None: only `version`."""
    release: Release = ""
    """The sender's release of covey, for display."""

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest <= MAX_MEMBERS:
            raise ConfigError(
                f"size={self.size}, min_size={self.min_size}, max_size={self.max_size} cannot be: "
                f"need 1 <= min_size <= max_size <= {MAX_MEMBERS}, or 1 <= size <= {MAX_MEMBERS}"
            )

    @property
    def speaks(self) -> Versions:
        """What the sender speaks; once it is in a run, what all members of the run speak."""
        if self.versions is not None:
            return self.versions
        return only(int(self.version) if _NUMBER.fullmatch(self.version) else 0)

    def fixed(self, versions: Versions) -> Terms:
        """Return the terms of a run whose members have agreed on what they speak."""
        return msgspec.structs.replace(self, version=f"{versions.oldest}", versions=versions)

    @property
    def smallest(self) -> int:
        """The fewest members a view may have."""
        return self.min_size if self.size is None else self.size

    @property
    def largest(self) -> int:
        """The most members a view may have."""
        most = MAX_MEMBERS if self.max_size is None else self.max_size
        return most if self.size is None else self.size


def difference(mine: Terms, theirs: Terms) -> str:
    """Return text that says how the terms of another joiner differ from those of this one; empty if they do not.

    The text follows the other joiner's name: "west: was started with --size 3, this node with --min 2; ...".
    """
    if mine == theirs:
        return ""
    differences = [
        f"{verb} {there}, this node {here}"
        for verb, there, here in (
            ("is in run", theirs.run, mine.run),
            ("runs", theirs.program, mine.program),
            ("was started with", _spell_sizes(theirs), _spell_sizes(mine)),
            ("has lanes", theirs.lanes, mine.lanes),
            ("has on_loss", theirs.on_loss, mine.on_loss),
            *((f"has {name}", there, here) for name, here, there in differences_of(mine.settings, theirs.settings)),
        )
        if there != here
    ]
    remedies = ["use the same on both"] if differences else []
    if isinstance(found := agree(mine.speaks, theirs.speaks), Disagreement):
        differences.append(
            f"speaks protocol {theirs.speaks} (covey {theirs.release or 'of unknown release'}), "
            f"this node {mine.speaks} (covey {mine.release or 'of unknown release'})"
        )
        differences += [f"needs {', '.join(found.i_lack)}, which this node does not know"] * bool(found.i_lack)
        differences += [f"does not know {', '.join(found.they_lack)}, which this node needs"] * bool(found.they_lack)
        where = [place for place, is_old in (("there", found.theirs_is_old), ("here", found.mine_is_old)) if is_old]
        remedies.append(f"update covey {' and '.join(where)}")
    return "; ".join([*differences, *remedies])


def _spell_sizes(terms: Terms) -> str:
    """Return the options of `covey run` that stand for the sizes of these terms."""
    if terms.size is not None:
        return f"--size {terms.size}"
    return f"--min {terms.min_size}" + (f" --max {terms.max_size}" if terms.max_size is not None else "")


class FoundingMember(Worded, frozen=True, array_like=True):
    """One life of a node, as other nodes know it."""

    id: NodeId
    life: Life
    name: Name
    """For display."""
    host: Annotated[str, msgspec.Meta(max_length=64)]
    """Equal for members that can share memory."""
    contact: Annotated[bytes, msgspec.Meta(max_length=CONTACT_BYTES)]
    """How to reach it. Not interpreted while the run is formed."""
    breaks_ties: bool = False
    """Whether it was started as the tie-breaker; of several, the lowest rank is the tie-breaker."""


class Phase(enum.IntEnum):
    """What a joiner is doing."""

    JOINING = 0
    LOCKED = 1
    FORMED = 2


class Here(Worded, frozen=True, array_like=True, tag=1):
    """The announcement of a joiner: its terms, the lives it hears, and its phase."""

    terms: Terms
    member: FoundingMember
    hears: Annotated[tuple[Life, ...], msgspec.Meta(max_length=MAX_LINKS)]
    """The lives it has a link with now."""
    phase: Phase
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """The members of `lineage`; once formed, the members of the sender's generation, by rank."""
    lineage: Lineage | None = None
    """Once formed: the run that the sender is in. Before that: the run that it waits for, if it knows one."""
    generation: Count = 0
    """Once formed: the generation that the sender is in."""
    endings: Annotated[tuple[Ending, ...], msgspec.Meta(max_length=MAX_ENDINGS)] = ()
    """Lineages of this run that the sender knows to be over."""


class Propose(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A view to accept or refuse; its proposer and nodes that accepted it send it to nodes that have not answered."""

    proposal: ProposalId
    members: Annotated[tuple[FoundingMember, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    """In rank order."""
    versions: Versions | None = None
    """What all of them speak."""


class Answer(enum.IntEnum):
    """The answer of a member to a proposal; it never changes."""

    NONE = 0
    ACCEPTED = 1
    REFUSED = 2


class Outcome(enum.IntEnum):
    """The outcome of a proposal; it never changes."""

    OPEN = 0
    COMMIT = 1
    ABORT = 2


class Row(Worded, frozen=True, array_like=True):
    """What one member of a proposal has promised. Its numbers only grow, so the later of two rows is known."""

    answer: Answer = Answer.NONE
    promised: Count = 0
    """It will never vote in a ballot below this one."""
    voted: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = -1
    """The last ballot it voted in; -1: none."""
    commit: bool = False
    """What it voted for there."""
    reason: Text = ""
    """Why it refused."""


class Standing(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What the sender knows about a proposal: its own row, and the rows of others that it passes on."""

    proposal: ProposalId
    rows: Annotated[tuple[Row, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    """One per member, by rank."""
    outcome: Outcome
    ended: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """Ranks that the sender has met in a later life: it ignores messages of the life that was proposed."""


Formation = Here | Propose | Standing

_formations: msgspec.msgpack.Decoder[Formation] = msgspec.msgpack.Decoder(Formation)


def decode_formation(data: bytes) -> Formation:
    """Decode a message between joiners; raise RemoteProtocolError for anything else."""
    return read_from_peer(_formations, data, "a message of a formation")
