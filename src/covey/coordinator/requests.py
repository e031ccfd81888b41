"""Checks what callers of the coordinator send, before it is used. Pure."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final

from covey.base.config import parse_seed
from covey.base.errors import ConfigError
from covey.base.numbers import NAME_LIMIT
from covey.base.text import TEXT_LIMIT
from covey.coordinator.records import Sizes, ViewRecord
from covey.coordinator.refusal import MAX_WORKERS, Reason, RefusalError
from covey.coordinator.run import Assignment, Registration
from covey.wire.formation import LIFE_BYTES

if TYPE_CHECKING:
    from covey.coordinator import coordinator_pb2 as pb

MOST: Final = 1 << 53
"""Numbers above this are no counts."""
LONGEST_SETTLE: Final = 3600.0


def registration(request: pb.RegisterWorkerRequest, identity: str, default: Sizes | None) -> Registration:
    """Return what a worker asks for, checked; `default` are the sizes that the coordinator itself was given."""
    return Registration(
        worker_id=name("worker_id", request.worker_id),
        identity=identity,
        life=life(request.life),
        name=text("name", request.name),
        address=address(request.address),
        sizes=_sizes(request.sizes, default),
        assignment=_assignment(request.assignment) if request.HasField("assignment") else None,
    )


def name(what: str, value: str) -> str:
    """Return a name of 1 to 100 printable characters."""
    if not 0 < len(value) <= NAME_LIMIT or not value.isprintable():
        raise _malformed(f"{what} must be a name of 1 to {NAME_LIMIT} printable characters")
    return value


def text(what: str, value: str) -> str:
    """Return a text of at most 1000 printable characters."""
    if len(value) > TEXT_LIMIT or not value.isprintable():
        raise _malformed(f"{what} must be a text of at most {TEXT_LIMIT} printable characters")
    return value


def path(value: str) -> str:
    """Return the path of a checkpoint, which is not empty."""
    if not value:
        raise _malformed("path is empty; say where the checkpoint goes")
    return text("path", value)


def life(value: bytes) -> bytes:
    """Return 16 bytes."""
    if len(value) != LIFE_BYTES:
        raise _malformed(f"life must be {LIFE_BYTES} bytes")
    return value


def address(value: str) -> str:
    """Return an address host:port."""
    try:
        if not value.rpartition(":")[2].isdigit() or len(value) > NAME_LIMIT:
            raise ConfigError("there is no port")
        parse_seed(value)
    except ConfigError:
        raise _malformed("address must be host:port or [IPv6]:port, like 192.168.1.5:29400") from None
    return value


def view(request: pb.HeartbeatRequest | pb.UnregisterWorkerRequest) -> ViewRecord | None:
    """Return the view that a worker reports, if it does."""
    if not request.HasField("view"):
        return None
    found = request.view
    members = tuple(found.members)
    is_ordered = all(one < other for one, other in itertools.pairwise(members))
    if not 0 < len(members) <= MAX_WORKERS or not is_ordered:
        raise _malformed(f"a view has 1 to {MAX_WORKERS} members in the order of their ranks")
    for number in (found.round, found.generation, found.number, found.sequence):
        if number > MOST:
            raise _malformed("a number of the view is too large")
    return ViewRecord(found.round, found.generation, found.number, members)


def _assignment(found: pb.Assignment) -> Assignment:
    if not 0 < found.round <= MOST or not 0 <= found.rank < found.size <= MAX_WORKERS:
        raise _malformed("the assignment has a rank that its size does not have")
    return Assignment(found.round, found.rank, found.size, found.address)


def _sizes(found: pb.Sizes, default: Sizes | None) -> Sizes:
    if not found.min_size and not found.max_size:
        if default is None:
            raise _malformed("declare how many workers there are: size= of the worker, or --size of the coordinator")
        return default
    try:
        return sizes(found.min_size, found.max_size, found.settle_seconds)
    except ConfigError as error:
        raise _malformed(str(error)) from None


def sizes(least: Any, most: Any, settle: float) -> Sizes:
    """Return sizes, checked; ConfigError if they cannot work."""
    if not 0 < least <= most <= MAX_WORKERS:
        raise ConfigError(
            f"min_workers must not exceed max_workers, and both must be 1 to {MAX_WORKERS} (got {least} and {most})"
        )
    if not (math.isfinite(settle) and 0 <= settle <= LONGEST_SETTLE):
        raise ConfigError(f"workers settle for 0 to {LONGEST_SETTLE:g} seconds")
    return Sizes(least, most, float(settle) if least < most else 0.0)


def _malformed(problem: str) -> RefusalError:
    return RefusalError(Reason.MALFORMED, problem)
