"""The tags of the messages that carry calls: all that a node needs to know of calls until the first one is made."""

from __future__ import annotations

from typing import Final

CALL_TAG: Final = 1 << 62
"""The tag, among those that `Group` refuses, of the messages of `wire.calls`."""
ANSWER_PARTS: Final = 1 << 61
"""Set in the tag of a payload's parts if they belong to an answer; the rest of the tag is CALL_TAG plus the number."""


def parts_tag(number: int, *, is_answer: bool) -> int:
    """Return the tag of the messages that carry the parts of a payload."""
    return CALL_TAG | (ANSWER_PARTS if is_answer else 0) | number
