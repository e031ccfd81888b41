"""What the tests of restore share with the processes that they start; those do not wait for torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.proto.restore import elect
from covey.runtime.group import restore as restoring
from covey.runtime.group.exchange import Exchange
from covey.runtime.group.internals import issuer_of
from covey.runtime.group.restore import _Restore
from covey.runtime.group.state_transfer import REQUEST

if TYPE_CHECKING:
    from covey import Group
    from covey.runtime.group.restore import RestoreReport

    Array = np.ndarray[Any, np.dtype[Any]]

SECONDS = 20.0
"""What a restore in a test may take at most."""


def restore(group: Group, state: dict[str, Any], **options: Any) -> RestoreReport:
    """Restore without the second group that `Group.restore` may make."""
    return restoring.restore(issuer_of(group), state, **options)


def bits(seed: int, nbytes: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def leave_before_receiving(group: Group) -> None:
    """Be a newcomer that goes once it has said what it lacks."""
    _Restore(issuer_of(group), {}, time.monotonic() + SECONDS).compare(True, "repair")


def give_one_chunk(group: Group, mine: dict[str, Any], receiver: int) -> None:
    """Be a donor that goes after the first chunk of the first request."""
    call = _Restore(issuer_of(group), mine, time.monotonic() + SECONDS)
    winner = elect(call.compare(False, "repair")).winner
    with Exchange(issuer_of(group), call.tagger.number, call.deadline) as exchange:
        exchange.receive(receiver, REQUEST)
        request = exchange.next((receiver,)).result
        assert request.size > 4
        index = int(request.view(np.uint32)[0])
        chunk = winner.chunks()[index]
        exchange.send(mine[chunk.name][chunk.start : chunk.stop], receiver, index)
        assert exchange.next((receiver,)).error is None
