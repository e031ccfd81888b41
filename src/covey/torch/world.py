"""All ranks of `init_process_group`: one run of covey, which the groups that torch makes of them share."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import secrets
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.base.config import group_config
from covey.base.errors import ConfigError
from covey.net.meeting import host_token, meeting_folder
from covey.runtime.bootstrap import Place, find_place, join, join_at
from covey.runtime.engine import Engine
from covey.runtime.torch_env import free_port
from covey.torch.exchange import TensorGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.group import Group


class World:
    """The run that all process groups of this process are in."""

    def __init__(self, top: Group, nonce: str, *, owns_run: bool) -> None:
        """`nonce` is the same on all ranks, and new for each world. Who `owns_run` leaves it at the end."""
        self._top, self._nonce, self._owns_run = top, nonce, owns_run
        self._made: Counter[tuple[Any, ...]] = Counter()
        self._closers: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether the run has ended here."""
        return self._top._engine.is_over

    def group(self, name: str, ranks: list[int]) -> TensorGroup:
        """Return a group of these ranks; each of them makes it, as often and by the same name. Nothing is sent."""
        parent = self._top._engine
        node = parent.node if len(ranks) > 1 else None
        self._made[name, *ranks] += 1
        words = f"torch/{self._nonce}/{name}/{ranks}/{self._made[name, *ranks]}"
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        engine = Engine(
            node,
            int.from_bytes(digest, "little"),
            tuple(parent.members[rank] for rank in ranks) if node is not None else (0,),
            name,
            parent.config,
            generation=parent.generation if node is not None else None,
        )
        return TensorGroup(engine, local_rank=self._top.local_rank)

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call `closer` before the run is left, unless it is forgotten before."""
        self._closers.append(closer)

    def forget(self, closer: Callable[[], None]) -> None:
        """What `closer` closes is closed."""
        with contextlib.suppress(ValueError):
            self._closers.remove(closer)

    def close(self) -> None:
        """Close what was made here, newest first, and leave the run."""
        closers, self._closers = self._closers, []
        for closer in reversed(closers):
            closer()
        if self._owns_run:
            self._top.close()


_lock = threading.Lock()
_world: World | None = None
_worlds = 0
"""How many there have been in this process: stores outlive them, and remember what the earlier ones said."""


def world_of(store: Any, rank: int, size: int, timeout: float) -> World:
    """Return the world of this process, made on first use with the others who use the store."""
    global _world, _worlds
    with _lock:
        if _world is None:
            _worlds += 1
            _world = _meet(store, f"covey/{_worlds}/", rank, size, timeout)
            atexit.register(close_world)  # before the group of all ranks, which registered first, is closed
        return _world


def close_world() -> None:
    """Leave the run, with all groups: the default group is destroyed, or the program ends."""
    global _world
    with _lock:
        world, _world = _world, None
    if world is not None:
        atexit.unregister(close_world)
        world.close()


def _meet(store: Any, prefix: str, rank: int, size: int, timeout: float) -> World:
    """Meet as covey's own launcher says, if it started us; else exchange what is needed through torch's store."""
    if rank == 0:
        store.set(prefix + "nonce", f"{secrets.token_hex(8)} {free_port()}")
    nonce, port = store.get(prefix + "nonce").decode().split()
    if "COVEY_RANK" in os.environ or "COVEY_RUN" in os.environ:
        top = join()
        if (top.rank, top.size) != (rank, size):
            raise ConfigError(
                f"covey gave this process rank {top.rank} of {top.size}, and init_process_group was told rank {rank} "
                f"of {size}; leave rank= and world_size= out"
            )
        return World(top, nonce, owns_run=False)
    name = f"torch-{nonce}"
    place = Place(rank=rank, size=size, name=name)
    if size > 1:
        store.set(f"{prefix}host/{rank}", host_token(Path(tempfile.gettempdir())))
        hosts = [store.get(f"{prefix}host/{other}") for other in range(size)]
        here = [other for other in range(size) if hosts[other] == hosts[rank]]
        place = replace(place, local_rank=here.index(rank), local_size=len(here))
        if len(here) == size:
            place = replace(place, folder=str(meeting_folder(name)))
        else:
            place = replace(place, master=(_master(store, rank, size), int(port) - 1))
    return World(join_at(place, group_config(os.environ), timeout=timeout), nonce, owns_run=True)


def _master(store: Any, rank: int, size: int) -> str:
    """Return the address of rank 0's host: torchrun says it, or it is where torch's store is."""
    place = find_place(os.environ)
    if place.master is not None and (place.rank, place.size) == (rank, size):
        return place.master[0]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if host := getattr(store, "host", ""):
        return str(host)
    raise ConfigError(
        "the ranks are on several hosts, and nothing says where rank 0 is: start them with torchrun, or set "
        "MASTER_ADDR and MASTER_PORT, or use init_method='tcp://HOST:PORT' with the address of rank 0's host"
    )
