"""The shape that all cores with deadlines have towards their drivers.

A core is told what happened by calls of its own (`link_up`, `received`, ...), each with the time at which it happened.
It answers with effects: messages to send, records to write, news for the program. A driver takes `effects` after every
call and performs them in order, and calls `tick` at `next_deadline`. `runtime.driver` does so for any core; the
simulations in `covey.lab` do it with a virtual clock.

`Membership`, `Joining`, `Health`, `RelayTable`, `Calling` and `Parting` have this shape; `runtime.calls.service` drives
`Calling`, under a lock, and `runtime.collectives.closure` drives `Parting`, on the thread that closes a group.
`Formation` is a part of `Joining`, which wraps its messages into effects. The other cores have no deadlines: `Matcher`
and `Commit` run on the thread that moves the bytes, and answer its calls directly, as the tables of `store`,
`transferring` and `references` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

EffectT_co = TypeVar("EffectT_co", covariant=True)


class TimedCore(Protocol[EffectT_co]):
    """A state machine without I/O: inputs and time in, effects out."""

    def effects(self) -> Sequence[EffectT_co]:
        """Return the effects to perform, in order, and clear them."""

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never. It may change with every call."""

    def tick(self, now: float) -> None:
        """Act on the deadlines that have passed."""
