"""Decoding what a peer sent: whatever is wrong with it, the error is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from covey.base.errors import RemoteProtocolError

if TYPE_CHECKING:
    from msgspec.msgpack import Decoder

T = TypeVar("T")


def read_from_peer(decoder: Decoder[T], data: bytes, what: str) -> T:
    """Decode `data`; RemoteProtocolError, which says that it is not `what`, for all that the decoder does not take."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not {what}: {error}") from error
