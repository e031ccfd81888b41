"""Pickles by value what other interpreters cannot import, such as functions and classes of a notebook's cell."""

from __future__ import annotations

import functools
import io
import pickle
import typing
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_CACHE: Final = "__msgspec_cache__"
"""What msgspec notes in classes that it has decoded: it cannot be pickled, and is made anew where it is missing."""


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
