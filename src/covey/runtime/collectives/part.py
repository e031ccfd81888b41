"""The base of the objects that an `Engine` is made of."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.runtime.collectives.engine import Engine


class EnginePart:
    """An object that an engine owns. It refers back weakly, so that a dropped group is freed without a collection."""

    def __init__(self, engine: Engine) -> None:
        self._owner = weakref.ref(engine)

    @property
    def engine(self) -> Engine:
        """The engine that owns this object."""
        engine = self._owner()
        assert engine is not None
        return engine
