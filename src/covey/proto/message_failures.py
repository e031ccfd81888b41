"""Which peers of a rank are gone, and which operations on messages learn of it."""

from __future__ import annotations

from covey.base.errors import PeerLostError
from covey.proto.message import ANY


class PeerFailures:
    """The peers of one rank that are gone, and which receives learn of it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.errors: dict[int, BaseException] = {}
        """By peer, in order."""
        self.end_of_all: BaseException | None = None
        """Why all operations end, if they do."""
        self._untold: list[BaseException] = []
        """Failures of peers while no receive from any rank waited: the next such receive gets each once."""

    def note(self, peer: int, error: BaseException, *, is_told: bool) -> None:
        """Note that a peer is gone; `is_told` if receives from any rank learn of it now."""
        self.errors[peer] = error
        if not is_told:
            self._untold.append(error)

    def of(self, source: int) -> BaseException | None:
        """Return the error of a receive from `source` that no message fits, if it cannot wait for one."""
        if source != ANY or self.end_of_all is not None:
            return self.errors.get(source, self.end_of_all)
        if self._untold:
            return self._untold.pop(0)
        if self._size > 1 and len(self.errors) == self._size - 1:
            text = f"no other rank of the group of {self._size} is left that could send a message"
            return PeerLostError(text, rank=-1, operation="recv from any rank")
        return None
