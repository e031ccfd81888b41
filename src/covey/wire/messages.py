"""Control messages: the catalogue of what nodes send each other on links, in the order of tags.

A new message goes after the last one, with the next tag, and into `Control` at the end of this module. One that earlier
releases may skip gets the next tag from OPTIONAL_TAGS on. A new field goes after the last field, with a default. Tags
and fields are never changed or removed. Messages with which nodes agree on views, or use a store, have modules of their
own: their bytes are the `body` of `Forming`, `Agreeing` and `Posting`.

Texts are bounded and have no control characters: the type of a name enforces it, and `Worded` cleans other texts, both
when a message is made and when it is decoded.
"""

from __future__ import annotations

import functools
import typing
from typing import Annotated, Final, TypeVar

import msgspec

from covey.base.config import YEAR_SECONDS
from covey.base.errors import RemoteProtocolError
from covey.base.numbers import MAX_MEMBERS as MAX_MEMBERS
from covey.base.numbers import NAME_LIMIT as NAME_LIMIT
from covey.base.numbers import REASON_LIMIT as REASON_LIMIT
from covey.base.numbers import Seat
from covey.base.settings import STREAMS_LIMIT
from covey.base.text import TEXT_LIMIT, printable
from covey.wire.decoding import UnknownMessageError, read_from_peer
from covey.wire.versions import OURS, Speaker, Versions, only

VERSION: Final = OURS.oldest
"""What the first field of Hello says. A release that does not negotiate compares it with the one version it speaks."""
ADDRESSES_LIMIT: Final = 16
"""Addresses of one node."""
CARDS_LIMIT: Final = 1000
QUESTION_LIMIT: Final = 8192
"""Bytes of what an asker says with a question."""
"""Cards in one message. If they have many addresses, fewer fit into a frame."""
RANKS_LIMIT: Final = 4096
"""Ranks that one message names."""
TOLD_CALLS_LIMIT: Final = 256
"""Calls of other ranks that a rank tells the others of when a rank is lost."""
CHARTER_LIMIT: Final = 2000
"""Nodes in each list of a charter: both lists fit into a frame."""
CERTIFICATES_LIMIT: Final = 6
"""Certificates of an organisation that a node presents."""
WAITING_NODES_LIMIT: Final = 64
"""How many nodes that wait for approval a node remembers: the latest ones."""
TROUBLES_LIMIT: Final = 8
"""Entries in each list of seeds, refused nodes and other problems of a waiting node."""
RELAYS_LIMIT: Final = 16
"""Relays that one message names."""
AGENT_CALL_LIMIT: Final = 64 << 10
"""Bytes of one message about a call to an agent."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,100}\Z")]
"""A short name of printable ASCII characters."""
Ip = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F.:]{0,45}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_LIMIT)]
SharedSettings = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,256}\Z")]
"""Settings that all ranks must share and that are not at their defaults: `name=value, name=value`."""
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LIMIT)]
"""An error of a program, in one line."""
SeatNumber = Annotated[Seat, msgspec.Meta(ge=0, lt=1 << 31)]
Story = Annotated[str, msgspec.Meta(max_length=8 * TEXT_LIMIT)]
"""Text about many ranks."""
Bytes = Annotated[bytes, msgspec.Meta(max_length=64)]
Certificate = Annotated[bytes, msgspec.Meta(max_length=8192)]
"""A certificate, as DER."""
NodeId = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""A finite time."""


class Worded(msgspec.Struct, frozen=True, array_like=True):
    """A message with sentences, which are made printable and bounded whatever the sender wrote."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str):
                msgspec.structs.force_setattr(self, name, printable(value, _limit(type(self), name)))
            elif isinstance(value, tuple) and value and isinstance(value[0], str):
                most = _limit(type(self), name)
                msgspec.structs.force_setattr(self, name, tuple(printable(text, most) for text in value))


@functools.cache
def _limit(kind: type[Worded], field: str) -> int:
    """Return how many characters a text of a message, or each of a list of texts, may have."""
    hint = typing.get_type_hints(kind, include_extras=True)[field]
    if typing.get_origin(hint.__origin__) is tuple:
        hint = typing.get_args(hint.__origin__)[0]
    return next((meta.max_length for meta in hint.__metadata__ if meta.max_length is not None), NAME_LIMIT)


class Address(msgspec.Struct, frozen=True, array_like=True):
    """An address at which a node listens, on one of its interfaces."""

    ip: Ip
    """Numeric; an IPv6 link-local address has no scope, which differs from host to host."""
    port: int
    interface: Name = ""
    """The name of the interface, for display only."""


class Contact(msgspec.Struct, frozen=True, array_like=True):
    """How to reach a node."""

    host: Name
    """Equal for processes that can share memory."""
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=ADDRESSES_LIMIT)]
    """The addresses at which it accepts TCP connections, best first."""
    socket: Text
    """The path of the unix socket at which it accepts connections, or empty."""
    relay: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """The token under which it is registered with its relays, or empty."""
    relay_port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    """The port at which its machine offers a relay to members, or 0."""


class Hardware(Worded, frozen=True, array_like=True):
    """What the machine of a node has, for display and for the node's own plans."""

    cores: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    """Cores that the process may use."""
    memory: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes."""
    accelerators: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)]
    """Their names."""
    platform: Name


class Card(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a node. In a cluster, TLS has proved the id."""

    id: Bytes
    """The public key; empty in a run that uses a launcher's token."""
    life: Bytes
    """Random per process: a restarted node has another life."""
    name: Name
    host_name: Name
    pid: int
    contact: Contact
    version: Name = ""
    """The version of the covey package."""
    keeper: Bytes = b""
    """The id of the keeper that may report on this process; empty if there is none."""
    breaks_ties: bool = False
    """Whether it was started as the tie-breaker of its run."""
    machine: Bytes = b""
    """The first key of its machine, if it is not `id`; see `wire.signed`."""
    endorsement: Bytes = b""
    """The signature of that key over `id`."""
    hardware: Hardware | None = None
    keeps_store: bool = False
    """Whether it has a file for the entries of its run's store (`store_file`)."""


def key_of(card: Card) -> tuple[bytes, bytes]:
    """Return the key that identifies a process: its public key and its life."""
    return card.id, card.life


def moved(card: Card, addresses: tuple[Address, ...]) -> Card:
    """Return the card of a node with new addresses."""
    return msgspec.structs.replace(card, contact=msgspec.structs.replace(card.contact, addresses=addresses))


def reached_at(card: Card, contact: Contact) -> Card:
    """Return the card of a node that listens elsewhere."""
    return msgspec.structs.replace(card, contact=contact)


def as_member(card: Card) -> Card:
    """Return what other nodes are told of a member: its card without what only its own links need."""
    return msgspec.structs.replace(card, breaks_ties=False, machine=b"", endorsement=b"")


class Papers(msgspec.Struct, frozen=True, array_like=True):
    """What an organisation's certificate says about a node: a signature by its key over the node's id."""

    certificates: Annotated[tuple[Certificate, ...], msgspec.Meta(min_length=1, max_length=CERTIFICATES_LIMIT)]
    """The certificate of the node's machine, then those above it, without the authority."""
    signature: Annotated[bytes, msgspec.Meta(max_length=1024)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first message of the end that opens a link."""

    version: int
    """The oldest version of the protocol that the sender speaks; `versions` has the others."""
    nonce: Bytes
    purpose: Name
    """`rank` (its launcher gave it a rank), `newcomer` (to a launcher's run in progress), `kept` (to its keeper),
    `candidate` (joins a run of the cluster), `visitor` (asks and leaves), `keeper` (reports on its processes) or
    `agent` (starts programs for members)."""
    run: Text
    rank: int
    size: int
    lanes: Name
    card: Card
    on_loss: Name = "raise"
    charter: Charter | None = None
    """The latest charter that the sender knows: a node that has missed it may not know that the sender is allowed."""
    settings: SharedSettings = ""
    papers: Papers | None = None
    """What proves that the organisation knows the sender, if there is one."""
    versions: Versions | None = None
    """What the sender speaks; None: only `version`."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to a Hello that is accepted."""

    rank: int
    card: Card
    purpose: Name = ""
    """As in Hello."""
    charter: Charter | None = None
    """As in Hello."""
    papers: Papers | None = None
    """As in Hello."""
    versions: Versions | None = None
    """What the sender speaks; None: only the `version` of the Hello."""


Opening = TypeVar("Opening", Hello, Welcome)


def speaker_of(card: Card, versions: Versions | None, version: int = VERSION) -> Speaker:
    """Return a process as refusals name it; without `versions` it speaks only `version`."""
    return Speaker(card.host_name, card.version, versions if versions is not None else only(version), card.pid)


class Refusal(Worded, frozen=True, array_like=True, tag=3):
    """The answer to a Hello that is refused; or, on a link, the reason why its sender ends it."""

    reason: Text
    retry: bool
    """Whether trying again can help."""


class Roster(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The contacts of all ranks; rank 0 sends them once it is linked with all ranks."""

    contacts: tuple[Contact, ...]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The sender is connected to all ranks."""


class Goodbye(Worded, frozen=True, array_like=True, tag=6):
    """The sender leaves; what it sent before still counts. From a keeper: the run is over."""

    reason: Text = ""
    """Why the run is over, if its work is not finished."""


class Dial(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Asks the other end to open a lane: of each pair, one end opens all lanes."""

    group: int
    purpose: Name
    attempt: int = 0


class Announce(Worded, frozen=True, array_like=True, tag=8):
    """The sender's operation `sequence` is stalled. Asks for the receiver's Position."""

    group: int
    sequence: int
    fingerprint: int
    call: Story


class Position(Worded, frozen=True, array_like=True, tag=9):
    """Answer to Announce: the last operation entered here, and what was called at the announced sequence."""

    group: int
    entered: int
    sequence: int
    fingerprint: int
    call: Story
    """Empty if this rank has not entered that operation, or no longer remembers it."""


class Revoke(Worded, frozen=True, array_like=True, tag=10):
    """The group has failed on the sender, with this fault."""

    group: int
    kind: Name
    text: Story
    ranks: Annotated[tuple[int, ...], msgspec.Meta(max_length=RANKS_LIMIT)]
    """The ranks that caused it, lost or late, in the group's numbering."""
    calls: Annotated[tuple[CallRun, ...], msgspec.Meta(max_length=64)] = ()
    """With a loss: the sender's last calls, in the order of their sequences."""
    found: Annotated[tuple[FoundCall, ...], msgspec.Meta(max_length=TOLD_CALLS_LIMIT)] = ()
    """With a loss: what the sender's lanes show of the calls of other ranks."""


class NoLane(Worded, frozen=True, array_like=True, tag=11):
    """Answer to Dial or Offer: the lane is refused."""

    group: int
    purpose: Name
    reason: Text
    attempt: int = 0


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The sender is about to open a lane with this key."""

    lane: Bytes
    """16 random bytes that identify the lane."""
    secret: Bytes
    """32 random bytes that only the two ends know, because links are private."""
    group: int
    purpose: Name
    """`collectives`, `messages`, or `replacement`: to replace one for collectives."""
    kind: Name
    capacity: int
    """The size of each of its rings in bytes, for shared memory."""
    streams: int
    """The number of its connections."""
    attempt: int = 0
    """The number of the view whose attempts use it: each view has its own lanes for collectives."""
    is_striped: bool = False
    """Whether its connections go over different networks; only a replacement is."""

    def __repr__(self) -> str:  # keys must not appear in logs
        return f"Offer({self.kind} for {self.purpose} of group {self.group:#x})"


class Expect(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Answer to Offer: the lane is accepted."""

    lane: Bytes
    udp_port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    """Where the sender accepts QUIC connections, if the lane is of that kind."""


class Known(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Nodes that the sender is linked with, so that nodes with a common seed find each other."""

    cards: Annotated[tuple[Card, ...], msgspec.Meta(max_length=CARDS_LIMIT)]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Asks for a Pong at once."""

    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Answer to Ping, with the sender's clock in seconds since 1970."""

    number: int
    clock: Seconds


class Forming(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Carries an encoded message of `wire.formation`."""

    body: bytes


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """A visitor asks for the state of the receiver."""


class Tell(Worded, frozen=True, array_like=True, tag=19):
    """Answer to Ask: the run, as the sender knows it."""

    run: Text
    state: Name
    """`joining` or `running`."""
    leader: Bytes
    """The id of the first member of the view; empty while there is none."""
    tie_breaker: Bytes
    since: Seconds
    """Seconds in this state."""
    peers: tuple[PeerReport, ...]
    rank: int = -1
    """The sender's rank in the current generation of its run; -1 while it has none."""
    turned_away: Count = 0
    """Connections that failed at its door or in the handshake."""
    too_many: Count = 0
    """How many of these exceeded the rate limit of their source."""
    charter: Count = 0
    """The serial of the charter that the sender uses; 0 if it has none."""
    waiting: Annotated[tuple[Waiting, ...], msgspec.Meta(max_length=WAITING_NODES_LIMIT)] = ()
    """Nodes that it refused because they are not on the list of the charter."""
    wait: Wait | None = None
    """What the sender waits for, if it waits."""
    versions: Versions | None = None
    """What the sender speaks; once it is in a run, what all members of the run speak."""


def counted(tell: Tell, turned_away: int, too_many: int, charter: int, waiting: tuple[Waiting, ...]) -> Tell:
    """Return `tell` with the counts of the sender's door, and its charter."""
    return msgspec.structs.replace(tell, turned_away=turned_away, too_many=too_many, charter=charter, waiting=waiting)


class Wait(Worded, frozen=True, array_like=True):
    """What a node waits for, on which terms, and which problems it has met."""

    cause: Name
    """`nodes` (there are too few), `links` (not all of them are linked with each other), `agreement`, `run` (to be
    taken into a run in progress), `earlier-run` (for the members of a run that was started before), `members` (of a run
    in progress, which are not heard) or `quorum` (too few of them are heard)."""
    text: Text
    """The cause as a sentence."""
    program: Text = ""
    size: int | None = None
    min_size: int = 0
    max_size: int | None = None
    version: Text = ""
    lanes: Text = ""
    on_loss: Text = ""
    here: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """Nodes that could be in the run, the sender among them."""
    missing: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """Members that the node waits for, if it knows them."""
    seeds: Annotated[tuple[AddressTrouble, ...], msgspec.Meta(max_length=TROUBLES_LIMIT)] = ()
    """Seeds at which no node of the cluster was found."""
    refused: Annotated[tuple[AddressTrouble, ...], msgspec.Meta(max_length=TROUBLES_LIMIT)] = ()
    """Nodes that were found and cannot be in the run."""
    problems: Annotated[tuple[AddressTrouble, ...], msgspec.Meta(max_length=TROUBLES_LIMIT)] = ()
    """Other problems while the sender looked for nodes."""


class AddressTrouble(Worded, frozen=True, array_like=True):
    """An address or node, and its problem."""

    where: Text
    why: Text


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A node that has the secret and waits for the owner's approval."""

    id: NodeId
    """The id of its machine."""
    name: Name
    host_name: Name
    ip: Ip
    """The address from which it connected."""


class PeerReport(Worded, frozen=True, array_like=True):
    """How a node reaches another."""

    card: Card
    rank: int
    """In the current generation of the sender's run; -1 if the node is not in it."""
    lane: Name
    """The kind of lane between them."""
    local: Text
    """The address that the sender uses, and its interface."""
    remote: Text
    interface: Text
    round_trip: Seconds
    """Negative if not measured."""
    clock_offset: Seconds
    """How far the peer's clock is ahead of the sender's."""
    relay: Text = ""
    """The address of the relay that their link goes through, or empty."""


class Reach(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Asks the receiver to connect to these addresses of the sender, and to report the results.

    The receiver tries only addresses from which the sender has connected: with its link, or with a probe that was bound
    to `token`.
    """

    addresses: Annotated[tuple[Address, ...], msgspec.Meta(max_length=ADDRESSES_LIMIT)]
    token: Bytes = b""


class Reached(Worded, frozen=True, array_like=True, tag=21):
    """Answer to Reach, in the same order."""

    round_trips: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=ADDRESSES_LIMIT)]
    """Negative for an address that could not be reached."""
    problems: Annotated[tuple[Text, ...], msgspec.Meta(max_length=ADDRESSES_LIMIT)]


class NewSecret(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The owner of the cluster has changed its secret to this one."""

    key: Bytes
    serial: Count
    """Grows with every change."""
    grace: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    """Seconds for which the old secret stays valid."""
    signature: Bytes
    """The owner's signature of `signed.rotation_words` for this receiver."""

    def __repr__(self) -> str:
        return f"NewSecret({self.serial})"


class SecretKept(Worded, frozen=True, array_like=True, tag=23):
    """Answer to NewSecret."""

    problem: Text
    """Why the secret was not stored; empty if it was."""


class Agreeing(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Carries an encoded message of `wire.membership`: members of a generation agree on its next view."""

    generation: int
    body: bytes


class Vouch(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """The state of a keeper's processes: by life, values of `proto.health.Vouch`."""

    processes: Annotated[tuple[tuple[Bytes, int], ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Founded(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """The sender is in this generation of the run. Newcomers learn their seats from it, keepers the members."""

    generation: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    lineage: Bytes
    is_kept: bool
    """Whether the keeper that receives this decides on views, because all members are its own processes."""
    members: Annotated[tuple[SeatedMember, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    """By rank."""
    on_loss: Name = "raise"
    """What operations do when a member is lost: `raise` or `continue`."""
    patience: Annotated[float, msgspec.Meta(gt=0, le=YEAR_SECONDS)] = 30.0
    """Seconds that members wait for a view: a keeper that decides on views must do so within them."""
    origin: Bytes = b""
    """The lineage of the whole run, from its founding on."""
    tie_breaker: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)] = 0
    """A rank: half of the members may continue if this rank is among them."""
    versions: Versions | None = None
    """What all members of the run speak; None: `VERSION`, and no feature."""
    store_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    """How much each store of the run may hold, for a keeper that orders the changes; 0 to others."""


def surviving(founded: Founded) -> Founded:
    """Return the same generation with `on_loss="continue"`."""
    return msgspec.structs.replace(founded, on_loss="continue")


def to_keeper(founded: Founded, store_bytes: int) -> Founded:
    """Return the same generation with what only a keeper needs to know of it."""
    return msgspec.structs.replace(founded, store_bytes=store_bytes)


def with_versions(message: Opening) -> Opening:
    """Return a Hello or Welcome that says what its sender speaks: by default what this release does."""
    return message if message.versions is not None else msgspec.structs.replace(message, versions=OURS)


def with_papers(message: Opening, papers: Papers) -> Opening:
    """Return the same Hello or Welcome with papers."""
    return msgspec.structs.replace(message, papers=papers)


def founded_with(founded: Founded, members: tuple[SeatedMember, ...], tie_breaker: int) -> Founded:
    """Return the same generation with these members."""
    return msgspec.structs.replace(founded, members=members, tie_breaker=tie_breaker)


class SeatedMember(msgspec.Struct, frozen=True, array_like=True):
    """A member of a generation."""

    seat: SeatNumber
    """Its position in the run, which no other process ever gets."""
    card: Card


class Posting(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """A message of `wire.store`: a question to the owner of a store, or the answer."""

    store: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """The number of the question; the process that asks counts its questions."""
    body: bytes


class Ended(Worded, frozen=True, array_like=True, tag=28):
    """A run is over. Members tell keepers, and processes that wait for the run."""

    run: Text
    lineage: Bytes
    is_finished: bool
    """Whether the run ended because a program had ended."""


class Calls(msgspec.Struct, frozen=True, array_like=True, tag=29):
    """The sender's last calls in a group that it closes, for comparison with the calls of other ranks."""

    group: int
    runs: Annotated[tuple[CallRun, ...], msgspec.Meta(max_length=64)]
    """In the order of their sequences."""
    in_order: bool = False
    """Whether the program closes the group without an error: it calls nothing more, and has missed no call."""


class CallRun(Worded, frozen=True, array_like=True):
    """Consecutive equal calls."""

    first: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    """The number of the first operation."""
    count: Annotated[int, msgspec.Meta(ge=1, le=64)]
    fingerprint: Annotated[int, msgspec.Meta(ge=0)]
    call: Text


class FoundCall(Worded, frozen=True, array_like=True):
    """A call of a rank, as the bytes that it sent show it."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    sequence: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    fingerprint: Annotated[int, msgspec.Meta(ge=0)]
    call: Text


class Charter(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """The nodes that may be in the cluster, signed by its owner. Members pass on the latest one."""

    serial: Count
    """Grows with every charter."""
    machine: Name
    """The name of the owner's machine, where charters are made."""
    denied: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=CHARTER_LIMIT)]
    allowed: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=CHARTER_LIMIT)] | None
    """The only nodes that may be in the cluster. None: all nodes that have the secret and are not denied."""
    signature: Bytes = b""
    """The owner's signature of `signed.charter_words`."""
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=CHARTER_LIMIT)] = ()
    """The names of the allowed machines, in their order, as the owner approved them; "" for one without a name."""
    names_signature: Bytes = b""
    """The owner's signature of `signed.names_words`, which earlier releases do not know."""


class Failing(Worded, frozen=True, array_like=True, tag=31):
    """The sender leaves because its program ended with an error. It counts only for the sender itself."""

    reason: Reason
    """The class of the error and the first line of its message."""
    cause: Bytes = b""
    """To a keeper: the life of the process whose loss was that error; empty if the sender failed by itself."""


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """Asks for numbers of the receiver's process: a keeper asks its processes, a visitor asks any node."""

    what: Name
    """`metrics`; `operations`: the last ones of its groups; `events`: the last ones of its run; `network`: the links
    that its ranks have measured; `progress`, `reports` and `readings` (`wire.progress`); or `output` of the run's
    processes on its machine, if it was told to share that."""
    page: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    about: Annotated[bytes, msgspec.Meta(max_length=QUESTION_LIMIT)] = b""
    """What is known already: for `output` an encoded `wire.reports.OutputKnown`."""


class Inspected(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Answer to Inspect."""

    what: Name
    page: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    pages: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """How many there are; 0 if the question was asked too often or is not known."""
    body: bytes
    """An encoded message of `wire.reports` or `wire.progress`."""


class CheckpointNews(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Carries an encoded message of `wire.checkpoint`: members of a view agree on a checkpoint of the run."""

    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """The number of the generation, and in the lower 32 bits that of the view."""
    body: bytes


class Past(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """The last events of the run, as the sender knows them. Members tell newcomers, right before `Founded`."""

    body: bytes
    """Encoded `wire.reports.PastEvents`."""


class AgentCall(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """A message of `wire.calls` between a terminal and an agent, which are in no run."""

    session: Count
    """A random number of the terminal; the agent answers with the same."""
    serial: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    """Counts the messages of the session in one direction."""
    body: Annotated[bytes, msgspec.Meta(max_length=AGENT_CALL_LIMIT)]
    is_data: bool = False
    """Whether the session is about data sets (`covey push`): it can call nothing else."""


class AgentRefusal(Worded, frozen=True, array_like=True, tag=37):
    """Answer to the first AgentCall of a session: the terminal may not call this agent."""

    session: Count
    reason: Text


class RequestCheckpoint(Worded, frozen=True, array_like=True, tag=38):
    """Asks for a checkpoint of the receiver's run: keepers, and visitors."""

    id: Name
    """Its own id, or empty for a new one."""
    path: Text
    is_question: bool = False
    """Only asks for the state of the checkpoint with this id."""


class CheckpointProgress(Worded, frozen=True, array_like=True, tag=39):
    """Answer to RequestCheckpoint."""

    id: Name
    """That of the checkpoint that the request is for."""
    state: Name
    """`requested`, `pending` or `over`; `refused`; empty if the receiver knows no such checkpoint."""
    text: Text
    """Which ranks could not save, or why the request is refused; empty otherwise."""


class MoveLane(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """A step of agreeing on the operation from which a replacement is used instead of the one for collectives."""

    group: int
    attempt: int
    step: Annotated[str, msgspec.Meta(pattern=r"^(propose|accept|refuse|leave)\Z")]
    """`leave` asks the end that dials for lanes over another path: what the sender sends is not acknowledged."""
    sequence: Count
    """The operation that was proposed. It is answered once; a repeated proposal gets the same answer."""
    begun: Count = 0
    """With `refuse`: how many operations the sender has begun, or 0 if it has no such lane now."""


class RelayTrips(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """The relays with which the sender is registered now. Nodes whose link goes through a relay tell each other."""

    trips: Annotated[tuple[RelayTrip, ...], msgspec.Meta(max_length=RELAYS_LIMIT)]


class RelayTrip(msgspec.Struct, frozen=True, array_like=True):
    """How far a relay is from a node."""

    relay: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """The id with which the relay begins every connection."""
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    """The round trip."""


class Rest(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """The question whether this link may rest, or the answer that it may."""

    is_agreed: bool


class Allowance(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """So many bytes a second may the receiver send to the sender of this message, over all lanes together."""

    rate: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


class Departures(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """Members that said to the sender, which leads the view, that they leave or fail."""

    members: Annotated[tuple[Departure, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Departure(Worded, frozen=True, array_like=True):
    """What one member said."""

    seat: SeatNumber
    has_left: bool
    reason: Reason
    """The error that ended its program; empty if it named none."""


class StreamNews(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """What an end of a lane says of one of its streams: a connection of it has died, or how far it is."""

    lane: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    stream: Annotated[int, msgspec.Meta(ge=0, lt=STREAMS_LIMIT)]
    what: Annotated[str, msgspec.Meta(pattern=r"^(dial|check|gone|received)\Z")]
    """`dial`: open another connection. `check`: say whether you have the lane. `gone`: the sender does not have it."""
    position: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """With `received`: how many bytes of the stream the sender has."""


HandshakeMessage = Hello | Welcome | Refusal
Question = Ask | Reach | NewSecret | Inspect | RequestCheckpoint
Answer = Tell | Reached | SecretKept | Inspected | CheckpointProgress
Control = (
    Roster
    | Ready
    | Goodbye
    | Dial
    | Announce
    | Position
    | Revoke
    | NoLane
    | Offer
    | Expect
    | Known
    | Ping
    | Pong
    | Forming
    | Ask
    | Tell
    | Reach
    | Reached
    | NewSecret
    | SecretKept
    | Agreeing
    | Vouch
    | Founded
    | Posting
    | Ended
    | Calls
    | Charter
    | Failing
    | Inspect
    | Inspected
    | CheckpointNews
    | Past
    | AgentCall
    | AgentRefusal
    | RequestCheckpoint
    | CheckpointProgress
    | MoveLane
    | RelayTrips
    | Rest
    | Departures
    | Allowance
    | StreamNews
)

_cards: msgspec.msgpack.Decoder[tuple[Card, ...]] = msgspec.msgpack.Decoder(tuple[Card, ...])
_handshakes: msgspec.msgpack.Decoder[HandshakeMessage] = msgspec.msgpack.Decoder(HandshakeMessage)
_controls: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
encode = msgspec.msgpack.Encoder().encode


def decode_handshake(data: bytes) -> HandshakeMessage:
    """Decode a message of the handshake; raise RemoteProtocolError for anything else."""
    return read_from_peer(_handshakes, data, "a message of the handshake")


class LinkRefusedError(RemoteProtocolError):
    """The other end has ended the link, and says why."""


def decode_control(data: bytes) -> Control:
    """Decode a message of a link; raise RemoteProtocolError for anything else.

    The error is a LinkRefusedError if the other end says why it ends the link.
    """
    try:
        return read_from_peer(_controls, data, "a control message")
    except UnknownMessageError as error:
        if error.tag != Refusal.__struct_config__.tag:
            raise
    raise LinkRefusedError(typing.cast("Refusal", decode_handshake(data)).reason)


def decode_cards(data: bytes) -> tuple[Card, ...]:
    """Decode what `encode` makes of a tuple of cards; raise RemoteProtocolError for anything else."""
    return read_from_peer(_cards, data, "a list of cards")
