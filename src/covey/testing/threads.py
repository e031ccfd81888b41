"""Runs a whole group inside one process: every rank is a thread, everything else is real."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from covey.base.config import GroupConfig, from_argument
from covey.net.discovery.host_rendezvous import RUN_TOKEN_BYTES
from covey.runtime.environment import LaunchedRank
from covey.runtime.joining.bootstrap import join_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.base.settings import OnLoss


T = TypeVar("T")


def run_threads(
    size: int,
    function: Callable[..., T],
    *args: Any,
    lanes: str = "memory",
    timeout: float = 250.0,
    settings: Mapping[str, Any] | None = None,
    plan: str = "auto",
    on_loss: OnLoss = "raise",
) -> list[T]:
    """Call `function(group, *args)` once for each of `size` ranks, on threads; return the results by rank.

    `lanes` may be memory, unix, tcp, shm, secure or quic. `timeout` is each group's default and bounds the whole.
    `settings` are those of `covey.join`; `plan="always"` fits plans as if each rank were on a host of its own;
    `on_loss` is that of `covey.join`. If ranks fail, raises an ExceptionGroup of what they raised, each with a note
    that names its rank.
    """
    results: list[Any] = [None] * size
    errors: list[Exception] = []
    config = GroupConfig(lanes=lanes, timeout=timeout, plan=plan, on_loss=on_loss, **from_argument(settings or {}))
    token = secrets.token_bytes(RUN_TOKEN_BYTES)

    def rank_main(rank: int, folder: str) -> None:
        try:
            place = LaunchedRank(
                rank=rank, size=size, local_rank=rank, local_size=size, folder=folder, token=token, name="threads"
            )
            with join_at(place, config, timeout=timeout) as group:
                results[rank] = function(group, *args)
        except Exception as error:
            error.add_note(f"in rank {rank} of {size}")
            errors.append(error)

    with tempfile.TemporaryDirectory(prefix="covey-") as folder:
        threads = [threading.Thread(target=rank_main, args=(rank, folder), daemon=True) for rank in range(size)]
        deadline = time.monotonic() + 2 * timeout
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck:
        errors.append(TimeoutError(f"ranks {stuck} are still running after {2 * timeout:g} s"))
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {size} ranks failed", errors)
    return results
