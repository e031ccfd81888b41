"""The world of `init_process_group`: one run of covey, shared by the process groups that torch makes of its ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.arrays.torch_devices import any_here
from covey.base.config import group_config
from covey.base.errors import ConfigError
from covey.net.discovery.host_rendezvous import host_token, rendezvous_folder
from covey.net.host.folders import host_folder
from covey.net.host.settings_files import effective_environment
from covey.runtime.environment import LaunchedRank, find_launched_rank
from covey.runtime.group.internals import engine_of, home_of, steps_between_checks
from covey.runtime.joining.bootstrap import join, join_at, joined
from covey.runtime.joining.torch_env import free_port
from covey.torch.backend.exchange import TensorGroup
from covey.torch.backend.rendezvous import CoveyStore
from covey.torch.entry import is_launched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.runtime.group.group import Group


class World:
    """A run of covey, or some ranks of one, in which process groups are made."""

    def __init__(self, top: Group, nonce: str, *, owns_run: bool, ranks: Sequence[int] | None = None) -> None:
        """`nonce` is equal on all ranks, and new for each world. A world that `owns_run` leaves it at the end.

        `ranks` are the ranks of the run that are in the world, in its order; by default all.
        """
        self._top, self._nonce, self._owns_run = top, nonce, owns_run
        self._ranks = range(top.size) if ranks is None else ranks
        self._made: Counter[tuple[Any, ...]] = Counter()
        self._closers: list[Callable[[], None]] = []
        with (
            contextlib.nullcontext(top) if ranks is None else self.group("devices", list(range(len(ranks)))) as members
        ):
            told = np.array([any_here(), steps_between_checks(top)], np.int64)
            has_devices, check_every = members.all_reduce(told, op="max").tolist()
            self.has_devices = bool(has_devices)
            """Whether tensors of some rank may be on a device. Equal on all ranks."""
            self.check_every: int = check_every
            """Every how many steps the ranks compare their parameters, 0 for never. Equal on all ranks."""

    @property
    def is_new(self) -> bool:
        """Whether no process group was made here yet."""
        return not self._closers

    def group(self, name: str, ranks: list[int]) -> TensorGroup:
        """Return a group of some ranks of the world; each of them makes it, equally often and with the same name."""
        parent = engine_of(self._top)
        self._made[name, *ranks] += 1
        words = f"torch/{self._nonce}/{name}/{ranks}/{self._made[name, *ranks]}"
        members = tuple(parent.members[self._ranks[rank]] for rank in ranks)
        engine = parent.subgroup(words, members, name)
        home = home_of(self._top)
        if self.is_new and home is not None and len(ranks) == self._top.size:
            home.checkpoints.follow(engine)  # from now on the steps of the program are operations of this group
        return TensorGroup(engine, home, local_rank=self._top.local_rank)

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call `closer` before the run is left, unless `forget` is called before."""
        self._closers.append(closer)

    def forget(self, closer: Callable[[], None]) -> None:
        """Do not call `closer` any more."""
        with contextlib.suppress(ValueError):
            self._closers.remove(closer)

    def close(self) -> None:
        """Close the groups made here, newest first, and leave the run. A second call does nothing."""
        atexit.unregister(self.close)
        closers, self._closers = self._closers, []
        with contextlib.ExitStack() as stack:  # it calls the last one first, and all of them, also if one raises
            if self._owns_run:
                stack.callback(self._top.close)
            for closer in closers:
                stack.callback(closer)


_lock = threading.Lock()
_world: World | None = None
"""The world of torch's default group, if its backend is covey; subgroups share it."""
_worlds: Counter[tuple[int, ...]] = Counter()
"""The number of worlds made of the same ranks, () for all ranks. Stores outlive worlds, so keys must differ."""


def world_of(store: Any, rank: int, size: int, timeout: float, ranks: list[int]) -> World:
    """Return the world of a process group; `ranks` are ranks of the default group, empty for that group itself.

    If the default group has another backend, each covey group has its own world.
    """
    global _world
    with _lock:
        if _world is not None:
            return _world
        _worlds[tuple(ranks)] += 1
        world = _meet(store, f"covey/{_worlds[tuple(ranks)]}/", rank, size, timeout, ranks)
        atexit.register(world.close)  # runs before the close of the run's group, which was registered first
        if not ranks:
            _world = world
        return world


def close_world(world: World) -> None:
    """Close the groups of a world, and leave the run. For when its first group is destroyed, or the program ends."""
    global _world
    with _lock:
        _world = None if world is _world else _world
    world.close()


def _meet(store: Any, prefix: str, rank: int, size: int, timeout: float, ranks: list[int]) -> World:
    """Return a world in the run of the store, else in that of covey's launcher, else meet through torch's store."""
    if isinstance(ours := _innermost(store), CoveyStore) and not ranks:
        _check_place(ours.group, rank, size)
        return World(ours.group, ours.new_nonce(), owns_run=ours.owns_run)
    if rank == 0:
        store.set(prefix + "nonce", f"{secrets.token_hex(8)} {free_port()}")
    nonce, port = store.get(prefix + "nonce").decode().split()
    if is_launched() or isinstance(ours, CoveyStore):
        top = ours.group if isinstance(ours, CoveyStore) else joined() or join()
        if ranks:
            return World(top, nonce, owns_run=False, ranks=ranks)
        _check_place(top, rank, size)
        return World(top, nonce, owns_run=False)
    name = f"torch-{nonce}"
    place = LaunchedRank(rank=rank, size=size, name=name)
    if size > 1:
        store.set(f"{prefix}host/{rank}", host_token(Path(host_folder())))
        hosts = [store.get(f"{prefix}host/{other}") for other in range(size)]
        here = [other for other in range(size) if hosts[other] == hosts[rank]]
        place = replace(place, local_rank=here.index(rank), local_size=len(here))
        if len(here) == size:
            place = replace(place, folder=str(rendezvous_folder(name)))
        else:
            place = replace(place, master=(_master(store, rank, size), int(port) - 1))
    return World(join_at(place, group_config(effective_environment()), timeout=timeout), nonce, owns_run=True)


def _check_place(top: Group, rank: int, size: int) -> None:
    if (top.rank, top.size) != (rank, size):
        raise ConfigError(
            f"covey gave this process rank {top.rank} of {top.size}, but init_process_group was given rank {rank} "
            f"of {size}; leave rank= and world_size= out"
        )


def _innermost(store: Any) -> Any:
    """Return the store inside PrefixStores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _master(store: Any, rank: int, size: int) -> str:
    """Return the address of rank 0's host: that of torchrun, or that of torch's store."""
    place = find_launched_rank(os.environ)
    if place.master is not None and (place.rank, place.size) == (rank, size):
        return place.master[0]
    if host := getattr(_innermost(store), "host", ""):
        return str(host)
    raise ConfigError(
        "the ranks are on several hosts, and the address of rank 0 is not known: start them with torchrun, or set "
        "MASTER_ADDR and MASTER_PORT, or use init_method='tcp://HOST:PORT' with the address of rank 0's host"
    )
