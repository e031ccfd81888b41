"""Ranks on the workers of an engine: which worker gets which rank, and what it needs to join the others.

The engine carries the functions of its users, and thus whatever they do: it also carries the secret of the run, which
is made anew for every launch.

Collected are the results of all ranks, or the failure that explains most.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError, DeadlineError, RankFailedError
from covey.net.keys.secret_sources import forgetting_secrets
from covey.runtime.keeper.reports import CallReport, most_telling, report_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from covey.runtime.group.group import Group

RUN_SECRET_BYTES: Final = 32
ENGINE_START_SECONDS: Final = 120.0
"""How long Ray or Dask may take to start one worker for each rank."""
PORT_TRIES: Final = 64
RENDEZVOUS_PORTS: Final = range(20_000, 32_000)
"""Below those that systems give to programs that ask for any port, so that none takes it before rank 0 does."""
_OF_OTHER_LAUNCHERS: Final = ("COVEY_RANK", "COVEY_RUN")
"""Variables that come before those of a seat, and would place the process in another run."""
_seats: dict[str, Group | None] = {}
"""The seat that this process has, by its secret, and the group once it has joined."""
CALL_FAILURE_GRACE: Final = 3.0
"""Seconds that the other ranks have to report after the first failure: one of theirs may explain more."""


@dataclass(frozen=True)
class Site:
    """Where a worker runs."""

    machine: str
    """What the engine calls the machine; the same for workers of one machine."""
    ip: str
    """The address at which the other workers reach it."""
    port: int
    """A free port there; so is the next one."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a worker needs to join as one rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    first: Site
    """Where rank 0 runs."""
    run: str
    secret: str = field(repr=False)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that tell `covey.join`, and torch's `init_process_group`, about this seat."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.first.ip,
            "MASTER_PORT": str(self.first.port),
            "COVEY_LAUNCHED": self.run,
            "COVEY_SECRET": self.secret,
        }


def seat_workers(engine: str, sites: Sequence[Site]) -> list[Seat]:
    """Return a seat in a new run for each worker: consecutive ranks on each machine, rank 0 for the first worker."""
    machines: dict[str, list[int]] = {}
    for position, site in enumerate(sites):
        machines.setdefault(site.machine, []).append(position)
    run, secret, size = f"{engine}-{secrets.token_hex(4)}", secrets.token_hex(RUN_SECRET_BYTES), len(sites)
    seats: dict[int, Seat] = {}
    for workers in machines.values():
        for local_rank, position in enumerate(workers):
            seats[position] = Seat(
                rank=len(seats),
                size=size,
                local_rank=local_rank,
                local_size=len(workers),
                first=sites[0],
                run=run,
                secret=secret,
            )
    return [seats[position] for position in range(size)]


def free_pair() -> int:
    """Return a port of this machine that is free, as is the next one: torch's store and rank 0 take one each."""
    for _ in range(PORT_TRIES):
        port = RENDEZVOUS_PORTS.start + secrets.randbelow(len(RENDEZVOUS_PORTS))
        with contextlib.suppress(OSError), socket.create_server(("", port)), socket.create_server(("", port + 1)):
            return port
    raise ConfigError("no two free ports next to each other; end what is not needed on this machine")


def sit(
    seat: Seat,
    fn: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    dumps: Callable[[Any], bytes],
) -> CallReport:
    """Join as the rank of `seat`, call `fn(group, *args)`, and report its result, pickled by `dumps`."""

    def join_and_call() -> bytes:
        import covey

        with _seated(seat), covey.join(**options) as group:
            _seats[seat.secret] = group
            # Pickled while the group is open, because the result may be a view of the group's memory.
            return dumps(fn(group, *args))

    return report_of(join_and_call)


def end(secret: str) -> None:
    """End the operations of the rank that this process has in the run with that secret, if it has one."""
    group = _seats.get(secret)
    if group is not None:
        group.revoke()


@contextlib.contextmanager
def _seated(seat: Seat) -> Iterator[None]:
    """Take a seat: set its variables, of which a process has room for one set."""
    if _seats:
        raise ConfigError("this process is a rank of another launch already; a process can be one rank at a time")
    variables = seat.variables
    names = (*variables, *_OF_OTHER_LAUNCHERS)
    before = {name: os.environ[name] for name in names if name in os.environ}
    _seats[seat.secret] = None
    try:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(variables)
        with forgetting_secrets():  # a later launch in this process, or a cluster by name, has another secret
            yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
        del _seats[seat.secret]


def need_workers(number: int) -> int:
    """Return the number of workers to start; ConfigError if there can be no such number."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"num_workers={number!r} must be a whole number above 0")
    return number


def collect(
    size: int,
    wait: Callable[[float | None], Iterable[tuple[int, CallReport | str]]],
    loads: Callable[[bytes], Any],
    *,
    timeout: float | None,
    tolerate_losses: bool,
) -> list[Any]:
    """Return the results of all ranks, by rank.

    `wait(seconds)` waits at most so long (None: without limit) for ranks to end, and returns those that have since it
    was last called: each with its report, or with a text that says how its process was lost. With `tolerate_losses`,
    the result of a lost rank is None, unless all are lost.

    Raises:
        DeadlineError: some have not ended within `timeout` seconds.
        RankFailedError: a rank was lost, or its exception cannot be pickled. Any other exception is raised as it is.
    """
    results: list[Any] = [None] * size
    missing, lost = set(range(size)), 0
    failures: list[BaseException] = []
    deadline = None if timeout is None else time.monotonic() + timeout
    while missing:
        patience = None if deadline is None else deadline - time.monotonic()
        if patience is not None and patience <= 0:
            break
        for rank, ended in wait(patience):
            missing.remove(rank)
            if isinstance(ended, CallReport):
                failure = ended.failure(rank, size)
                if failure is None:
                    results[rank] = loads(ended.body)
                    continue
            else:
                lost += 1
                if tolerate_losses and lost < size:
                    continue
                failure = RankFailedError(f"rank {rank} of {size} is lost: {ended}", rank=rank)
            failures.append(failure)
            grace = time.monotonic() + CALL_FAILURE_GRACE
            deadline = grace if deadline is None else min(deadline, grace)
    if failures:
        raise most_telling(failures)
    if missing:
        late = tuple(sorted(missing))
        names = ", ".join(map(str, late))
        raise DeadlineError(
            f"launch: no result from rank {names} of {size} within the timeout of {timeout:g} s", late=late
        )
    return results
