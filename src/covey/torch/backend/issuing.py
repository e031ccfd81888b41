"""Issues the operations of one process group: at once on the calling thread, or queued for the thread of the group."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import CoveyError
from covey.torch.backend.errors import as_torchs
from covey.torch.backend.work import Notices, TorchWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from covey.runtime.work import Work
    from covey.torch.backend.exchange import TensorGroup

LENT_ELEMENTS: Final = 64
LENT_WORKS: Final = 1024
"""The last LENT_WORKS works on up to LENT_ELEMENTS elements are kept alive, and no large tensor with them."""


class TorchIssuer:
    """Issues the operations of one process group. Any thread may call; the calls are issued one after the other."""

    def __init__(self, group: TensorGroup, size: int, seconds: float) -> None:
        self._group = group
        self.seconds = seconds
        """The timeout of operations that are called without one."""
        self._survives = group.on_loss == "continue"
        self.notices = Notices()
        self._everyone = list(range(size))
        self._lock = threading.Lock()
        self._last: Work[Any] | None = None
        """The last collective that was queued."""
        self._lent: deque[TorchWork] = deque(maxlen=LENT_WORKS)
        """Works that Python may have passed to C++ and dropped, as DDP's join does: C++ alone cannot wait for them."""

    def issue(
        self, opts: Any, filled: list[torch.Tensor], operation: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
    ) -> TorchWork:
        """Call `operation` with each of `calls`: now if torch waits at once and nothing is queued, else queue them.

        Errors are also torch's.
        """
        timeout = opts.timeout.total_seconds()
        if timeout <= 0:
            timeout = self.seconds
        is_async = opts.asyncOp
        works: list[Work[Any]] = []
        contributors = self._everyone
        try:
            with self._lock:
                if not is_async and (self._last is None or self._last.done()):
                    self._last = None
                    for args in calls:
                        operation(*args, timeout=timeout)
                        if self._survives and len(self._group.contributors) < len(contributors):
                            contributors = list(self._group.contributors)
                else:
                    works = [operation(*args, timeout=timeout, async_op=True) for args in calls]
                    self._last = works[-1] if works else self._last
        except CoveyError as error:
            raise as_torchs(error) from error.__cause__
        work = self._work(works, filled, contributors)
        if not is_async:
            if works:
                work.wait()
        elif len(filled) == 1 and filled[0].numel() <= LENT_ELEMENTS:
            self._lent.append(work)
        return work

    def _work(self, works: list[Work[Any]], filled: list[torch.Tensor], contributors: list[int]) -> TorchWork:
        """Return the handle of started operations."""
        return TorchWork(works, filled, self.notices, contributors)
