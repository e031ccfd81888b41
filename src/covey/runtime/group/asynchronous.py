"""Forms of blocking calls of a group for programs that run on asyncio. Operations have `async_op=True` instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from covey.runtime.off_loop import off_loop

if TYPE_CHECKING:
    from types import TracebackType

    from covey.runtime.group.group import Group
    from covey.runtime.group.restore import RestoreReport


class AsyncForms:
    """Calls that can be awaited; a base of `Group`. Each runs on a thread of its own, and the event loop goes on.

    They are collectives like the calls they stand for: every rank issues them in the same order, and while one runs, no
    other collective of the group may be issued. A cancelled await does not end them.
    """

    async def split_async(self: Any, color: int | None, key: int | None = None, **arguments: Any) -> Any:
        """Return what `split` returns, without blocking the event loop."""
        return await off_loop(self.split, color, key, discard=_close, **arguments)

    async def restore_async(self: Any, state: Any, **arguments: Any) -> RestoreReport:
        """Return what `restore` returns, without blocking the event loop."""
        report: RestoreReport = await off_loop(self.restore, state, **arguments)
        return report

    async def close_async(self: Any) -> None:
        """Close the group without blocking the event loop."""
        await off_loop(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await off_loop(self.__exit__, kind, error, trace)


def _close(made: Group | None) -> None:
    if made is not None:
        made.close()
