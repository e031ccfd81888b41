"""covey's errors as torch's: what frameworks catch, they catch from covey, too.

An operation of a process group that fails raises the class that covey raises without torch, and at the same time one
of torch's: `dist.DistBackendError`, or `dist.DistNetworkError` if a rank is lost or cannot be reached. Both are
RuntimeErrors.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from covey.base.errors import ConnectError, CoveyError, GroupChangedError, PeerLostError, QuorumLostError

if TYPE_CHECKING:
    from collections.abc import Iterator

OF_THE_NETWORK: Final = (PeerLostError, ConnectError, QuorumLostError, GroupChangedError)
"""Errors about the way to other ranks; all others are torch's DistBackendError."""


def as_torchs(error: BaseException) -> BaseException:
    """Return an error of covey as one that is also torch's, with the same text, attributes, cause and traceback.

    Errors of the program, and those that are torch's already, are returned as they are.
    """
    if not isinstance(error, CoveyError) or isinstance(error, RuntimeError):
        return error
    remake, (kind, args, facts) = CoveyError.__reduce__(error)
    made: CoveyError = remake(_class_of(kind), args, facts)
    made.__cause__, made.__suppress_context__ = error.__cause__, True
    return made.with_traceback(error.__traceback__)


@contextlib.contextmanager
def torchs_errors() -> Iterator[None]:
    """Raise errors of covey as ones that are also torch's."""
    try:
        yield
    except CoveyError as error:
        raise as_torchs(error) from error.__cause__


@functools.cache
def _class_of(kind: type[CoveyError]) -> type[CoveyError]:
    torchs = dist.DistNetworkError if issubclass(kind, OF_THE_NETWORK) else dist.DistBackendError

    def reduced(self: CoveyError) -> tuple[Any, ...]:
        remake, (_, args, facts) = CoveyError.__reduce__(self)
        return remake, (kind, args, facts)  # the process that reads it may have no torch

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, torchs), {**named, "__reduce__": reduced})
