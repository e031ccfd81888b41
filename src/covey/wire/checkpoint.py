"""What members of a run tell each other about a checkpoint of the whole run; `proto.checkpointing` has the protocol.

All of it is the `body` of `messages.CheckpointNews`. Tags and fields are only added, at the end.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from covey.base.errors import ConfigError
from covey.wire.decoding import read_from_peer
from covey.wire.messages import MAX_MEMBERS, NAME_LIMIT, Count, Reason, Worded

PATH_LIMIT: Final = 1000
"""Characters of the path of a checkpoint."""
IDS_LIMIT: Final = 16
"""Checkpoints that are over, which a member names, so that a late request does not repeat one."""

CheckpointId = Annotated[str, msgspec.Meta(max_length=NAME_LIMIT, pattern=r"^[!-~]{1,100}\Z")]
"""Names a checkpoint: printable ASCII characters without spaces."""
Path = Annotated[str, msgspec.Meta(max_length=PATH_LIMIT, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
"""Where to save, in whatever form the program likes; empty if the program knows."""


class CheckpointOrder(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that was requested."""

    id: CheckpointId
    path: Path


class Held(Worded, frozen=True, array_like=True):
    """A checkpoint for which a member has accepted a sequence number."""

    id: CheckpointId
    path: Path
    sequence: Count
    has_begun: bool
    is_saved: bool = False
    """Whether the program of the member has ended it."""
    error: Reason = ""
    """Why the member could not save; empty if it could."""


class Unsaved(Worded, frozen=True, array_like=True):
    """A member that could not save, and why."""

    seat: Count
    error: Reason


class Standing(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """All that the leader has to know of a member. Sent when there is news, and as the answer to all that it says."""

    issued: Count
    """Operations that the program has issued in the group of the run."""
    round: Count
    """The last proposal that the member has heard of."""
    wanted: CheckpointOrder | None = None
    held: Held | None = None
    over: Over | None = None
    """The last checkpoint that ended."""
    ids: Annotated[tuple[CheckpointId, ...], msgspec.Meta(max_length=IDS_LIMIT)] = ()
    """The last ones that ended."""


class Query(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The leader asks for the standing of a member."""


class ProposeStart(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The leader proposes that a checkpoint begins after an operation. It takes the place of earlier proposals."""

    round: Count
    order: CheckpointOrder
    sequence: Count


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """All members have accepted: the checkpoint begins after this operation."""

    order: CheckpointOrder
    sequence: Count


class Over(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """All members have ended the checkpoint."""

    order: CheckpointOrder
    failed: Annotated[tuple[Unsaved, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()


FromLeader = Query | ProposeStart | Begin | Over
CheckpointMessage = Standing | FromLeader

_messages: msgspec.msgpack.Decoder[CheckpointMessage] = msgspec.msgpack.Decoder(CheckpointMessage)
encode_checkpoint = msgspec.msgpack.Encoder().encode


def decode_checkpoint(data: bytes) -> CheckpointMessage:
    """Decode a message about a checkpoint; RemoteProtocolError for anything else."""
    return read_from_peer(_messages, data, "a message about a checkpoint")


def check_order(path: str, checkpoint_id: str) -> None:
    """Raise ConfigError for a path or an id that members would take for a broken protocol; an empty id is fine."""
    if len(path) > PATH_LIMIT or not path.isprintable():
        raise ConfigError(f"the path {path[:50]!r} must be up to {PATH_LIMIT} printable characters")
    is_plain = checkpoint_id.isascii() and checkpoint_id.isprintable() and " " not in checkpoint_id
    if len(checkpoint_id) > NAME_LIMIT or not is_plain:
        raise ConfigError(
            f"the id {checkpoint_id[:50]!r} must be up to {NAME_LIMIT} printable ASCII characters without spaces"
        )
