"""covey on Dask: ranks as tasks on the workers of a Dask cluster.

covey.dask.launch(Client(), fn)   # fn(group) on every worker
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError, DeadlineError
from covey.engines.seats import ENGINE_START_SECONDS, Site, collect, end, free_pair, need_workers, seat_workers, sit

try:
    import cloudpickle
    import distributed
except ImportError as error:
    raise ConfigError("covey.dask needs Dask: pip install 'covey[dask]'") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from covey.engines.seats import Seat
    from covey.runtime.keeper.reports import CallReport

__all__ = ["launch"]

WORKERS_ASK_EVERY: Final = 0.5
"""How often the scheduler is asked which workers are there: it keeps the task of a lost worker for its return."""


def launch(
    client: distributed.Client,
    fn: Callable[..., Any],
    *args: Any,
    num_workers: int | None = None,
    workers: Sequence[str] | None = None,
    timeout: float | None = None,
    start_timeout: float = ENGINE_START_SECONDS,
    **join: Any,
) -> list[Any]:
    """Call `fn(group, *args)` on workers of a Dask cluster, one rank on each, and return the results, by rank.

    `workers` names the workers by address; default: the first `num_workers` that the scheduler lists, or all of them.
    Each must be a process of its own with a thread to spare. Workers of one machine get consecutive ranks. A secret
    that is made for this launch protects what they send each other. `join` has arguments of `covey.join`, such as
    `on_loss="continue"`: then the others finish without a rank whose worker dies, and its result is None.

    Raises:
        ConfigError: an argument is wrong.
        DeadlineError: the cluster did not have `num_workers` workers within `start_timeout` seconds, or not all ranks
            returned within `timeout` seconds.
        RankFailedError: a worker died, or `fn` raised an exception that cannot be pickled. Any other exception of `fn`
            is raised here as it is, with the rank and its traceback as a note.
    """
    chosen = _choose(client, num_workers, workers, start_timeout)
    ports = client.run(free_pair, workers=chosen)
    seats = seat_workers("dask", [Site(_host(each), _host(each), ports[each]) for each in chosen])
    pending = {
        seat.rank: (
            address,
            client.submit(
                _sit, seat, fn, args, join, key=f"covey-{seat.run}-{seat.rank}", workers=[address], pure=False
            ),
        )
        for address, seat in zip(chosen, seats, strict=True)
    }

    def wait(seconds: float | None) -> Iterator[tuple[int, CallReport | str]]:
        with contextlib.suppress(TimeoutError):
            distributed.wait(
                [future for _, future in pending.values()],
                timeout=WORKERS_ASK_EVERY if seconds is None else min(seconds, WORKERS_ASK_EVERY),
                return_when="FIRST_COMPLETED",
            )
        try:
            there = _addresses(client)
        except OSError:  # the client connects anew, or ends its futures
            there = [address for address, _ in pending.values()]
        for rank, (address, future) in list(pending.items()):
            if future.done():
                error = future.exception() if future.status == "error" else None
                yield rank, str(error) if error is not None else future.result()
            elif address not in there:
                yield rank, f"Dask's worker {address} is gone"
            else:
                continue
            del pending[rank]

    try:
        survives = join.get("on_loss") == "continue"
        return collect(len(seats), wait, cloudpickle.loads, timeout=timeout, tolerate_losses=survives)
    finally:
        if pending:  # Dask cannot stop a task that runs: end its group, so that its next operation does
            client.cancel([future for _, future in pending.values()], force=True)
            with contextlib.suppress(OSError):  # the scheduler is gone: say why the launch ended, and not this
                there = _addresses(client)
                left = [address for address, _ in pending.values() if address in there]
                client.run(end, seats[0].secret, workers=left, on_error="ignore")


def _choose(
    client: distributed.Client, number: int | None, workers: Sequence[str] | None, start_timeout: float
) -> list[str]:
    """Return the addresses of the workers that become ranks, those of one machine side by side."""
    if workers is not None and number is not None:
        raise ConfigError("workers= names the workers, num_workers= says how many; give one of them")
    if number is not None:
        try:
            client.wait_for_workers(need_workers(number), timeout=start_timeout)
        except TimeoutError:
            raise DeadlineError(
                f"Dask's cluster did not have {number} workers within the start timeout of {start_timeout:g} s"
            ) from None
    there = _addresses(client)
    chosen = list(workers) if workers is not None else there[:number]
    if missing := [each for each in chosen if each not in there]:
        raise ConfigError(f"{missing[0]} is no worker of this Dask cluster; it has: {', '.join(there) or 'none'}")
    if not chosen:
        raise ConfigError("this Dask cluster has no workers; start some, or say how many to wait for: num_workers=2")
    if inside := [each for each in chosen if each.startswith("inproc://")]:
        raise ConfigError(f"{inside[0]} is a thread, and a rank needs a process: use LocalCluster(processes=True)")
    return chosen


def _addresses(client: distributed.Client) -> list[str]:
    """Ask the scheduler which workers are there.

    `Client.scheduler_info` would read the answer from a cache that the client refreshes every two seconds on another
    thread, then without any worker.
    """

    async def ask() -> list[str]:
        return list((await client.scheduler.identity())["workers"])

    addresses: list[str] = client.sync(ask)
    return addresses


def _host(address: str) -> str:
    host: str = distributed.comm.get_address_host(address)
    return host


def _sit(seat: Seat, fn: Callable[..., Any], args: Sequence[Any], join: Mapping[str, Any]) -> CallReport:
    return sit(seat, fn, args, join, cloudpickle.dumps)
