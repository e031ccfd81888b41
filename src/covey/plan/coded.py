"""Plans whose transfers are encoded: what travels, and what each rank encodes and decodes on the way.

A plan is built in units of a codec (`Codec.unit` elements that are encoded together) and turned by `coded` into moves
of bytes. Every buffer of elements has a buffer of encoded bytes beside it, its wire. A send sends bytes of the wire;
what a receive has stored in the wire is decoded into the elements.

A range is encoded when it is sent for the first time, and again when a contribution was added since. What was received
as a finished range is passed on as it is, so that all ranks decode the same bytes and get the same bits. So each rank
encodes each range of an all-reduce exactly once: its error there is one array as long as the buffer.

The wire of a range is never received into while it is being sent: a plan orders its moves so that the ranges of
elements are safe (`check` proves it), and the wires have the same ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from covey.plan.moves import FINAL, REDUCE, Plan, Recv, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Encode(NamedTuple):
    """Encode elements start:stop of a buffer into bytes begin:end of its wire."""

    buffer: int
    start: int
    stop: int
    begin: int
    end: int
    settles: bool
    """The range is finished: this rank decodes it, too, and then has what all others will have."""


class Decode(NamedTuple):
    """Decode bytes begin:end of a wire into elements start:stop of its buffer."""

    buffer: int
    start: int
    stop: int
    begin: int
    end: int
    adds: bool
    """Add to the elements; else overwrite them."""
    is_final: bool
    """This was the last contribution, so a mean is divided now."""


class CodedPlan(NamedTuple):
    """Moves of bytes, and what is done before a send starts and after a receive has ended."""

    plan: Plan
    encodes: tuple[Encode | None, ...]
    """By send. None: the bytes are sent as they are."""
    decodes: tuple[Decode, ...]
    """By receive."""


def coded(
    plan: Plan, lengths: Sequence[int], unit: int, wire_bytes: Callable[[int], int], *, is_copy: bool
) -> CodedPlan:
    """Turn a plan that counts units into one that counts bytes; lengths[j] is the number of elements of buffer j.

    `is_copy` says that the plan reduces nothing: then what a rank sends of its own is finished.
    """

    def ranges(buffer: int, first: int, last: int) -> tuple[int, int, int, int]:
        start, stop = (min(units * unit, lengths[buffer]) for units in (first, last))
        return start, stop, wire_bytes(start), wire_bytes(stop)

    sends: list[Send] = []
    encodes: list[Encode | None] = []
    encoded: set[tuple[int, int, int, int]] = set()
    changes: dict[tuple[int, int, int], list[int]] = {}
    """By range: the numbers of receives that change it."""
    for number, recv in enumerate(plan.recvs):
        assert not recv.after, "what is received early would wait in the wire of a range that is still sent"
        changes.setdefault(recv[1:4], []).append(number)
    for send in plan.sends:
        start, stop, begin, end = ranges(send.buffer, send.start, send.stop)
        before = [number for number in changes.get(send[1:4], ()) if number < send.after]
        last = plan.recvs[before[-1]].action if before else REDUCE
        version = (*send[1:4], len(before))
        if last & REDUCE and version not in encoded and start < stop:
            settles = is_copy or bool(last & FINAL)
            encodes.append(Encode(send.buffer, start, stop, begin, end, settles))
        else:
            encodes.append(None)
        encoded.add(version)
        sends.append(Send(send.peer, send.buffer, begin, end, send.after))
    recvs: list[Recv] = []
    decodes: list[Decode] = []
    for recv in plan.recvs:
        start, stop, begin, end = ranges(recv.buffer, recv.start, recv.stop)
        is_reduced = bool(recv.action & REDUCE)
        decodes.append(Decode(recv.buffer, start, stop, begin, end, is_reduced, bool(recv.action & FINAL)))
        recvs.append(Recv(recv.peer, recv.buffer, begin, end))
    return CodedPlan(Plan(tuple(sends), tuple(recvs)), tuple(encodes), tuple(decodes))
