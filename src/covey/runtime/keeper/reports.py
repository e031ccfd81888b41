"""What came of a call in the process of a rank: its result, or its exception as another process can raise it.

`dumps` pickles by value what other interpreters cannot import, such as functions and classes of a notebook's cell.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import traceback
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ClosedError, ConnectError, PeerLostError, RankFailedError
from covey.runtime import tracebacks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SYMPTOMS: Final = (PeerLostError, ClosedError, ConnectError)
"""Errors that ranks raise because another rank failed; any other error explains more."""
_CACHE: Final = "__msgspec_cache__"
"""What msgspec notes in classes that it has decoded: it cannot be pickled, and is made anew where it is missing."""


@dataclass(frozen=True)
class CallReport:
    """The result of a rank's call."""

    ok: bool
    body: bytes
    """The pickled result or exception; empty when the exception cannot be pickled."""
    text: str = ""
    """The traceback."""

    def failure(self, rank: int, size: int) -> BaseException | None:
        """Return the exception of the call, with a note that names its rank; None if the call succeeded."""
        if self.ok:
            return None
        try:
            error = _unpack(self.body)
        except Exception:
            return RankFailedError(f"rank {rank} of {size} failed:\n{self.text}", rank=rank)
        error.add_note(f"raised in rank {rank} of {size}\n\n{self.text}")
        return error


def report_of(call: Callable[[], bytes], dumps: Callable[[object], bytes] = pickle.dumps) -> CallReport:
    """Call `call`, which returns a pickled result, and report what came of it; `dumps` pickles an exception."""
    try:
        return CallReport(ok=True, body=call())
    except BaseException as error:
        body = _pack(error, dumps)
        for _ in range(2):  # without the frames of this function and of `call`
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                error.__traceback__ = error.__traceback__.tb_next
        if not tracebacks.is_debugging():
            tracebacks.shorten(error)
        return CallReport(ok=False, body=body, text="".join(traceback.format_exception(error)).rstrip())


def most_telling(failures: Sequence[BaseException]) -> BaseException:
    """Return the earliest failure that is no consequence of another; the earliest if all may be."""
    return min(failures, key=lambda error: isinstance(error, SYMPTOMS))


def _pack(error: BaseException, dumps: Callable[[object], bytes]) -> bytes:
    """Return `error` pickled in a form that `_unpack` can read, or b"" if there is none."""
    if isinstance(error, Exception):  # SystemExit and KeyboardInterrupt would end the parent
        for form in (error, (type(error), error.args, error.__dict__)):
            with contextlib.suppress(Exception):
                body = dumps(form)
                _unpack(body)
                return body
    return b""


def _unpack(body: bytes) -> BaseException:
    form = pickle.loads(body)
    if isinstance(form, BaseException):
        return form
    kind, args, state = form  # an exception whose __init__ takes more than its args, which pickle cannot repeat
    error: BaseException = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def dumps(value: Any) -> bytes:
    """Return a value that `pickle.loads` reads where cloudpickle is installed, with all code that it refers to."""
    file = io.BytesIO()
    _pickler()(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


@functools.cache
def _pickler() -> Callable[..., Any]:
    import cloudpickle  # most programs pickle nothing by value

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
                contents = reduced[2][0]  # a copy of what the class holds
                contents.pop(_CACHE, None)
                if any(isinstance(each, str) for each in contents.get("__annotations__", {}).values()):
                    contents["__annotations__"] = _evaluated(obj, contents["__annotations__"])
            return reduced

    return Pickler


def _evaluated(made: type, annotations: dict[str, Any]) -> dict[str, Any]:
    """Return the annotations of a class, evaluated where the names in them are known; as they are if they cannot be."""
    try:
        hints = typing.get_type_hints(made, include_extras=True)
    except Exception:  # whatever an annotation raises; one that is never used does no harm
        return annotations
    return {name: hints[name] for name in annotations}
