"""Strategies: what a training loop needs of other ranks, whatever connects them."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.group.group import Group


class Strategy(abc.ABC):
    """How the ranks of a training loop combine their gradients. All ranks make the same calls in the same order.

    Arrays are numpy arrays, torch tensors, or whatever the implementation takes; they are changed in place.
    """

    @abc.abstractmethod
    def init(self) -> None:
        """Prepare. Every rank calls it once, before all other calls."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """The rank of this process, from 0 to `size` - 1."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @abc.abstractmethod
    def all_reduce_gradients(self, gradients: Mapping[str, Any], op: Literal["mean", "sum"] = "mean") -> None:
        """Replace each array by the mean over all ranks, or by the sum. All ranks pass the same names and shapes."""

    @abc.abstractmethod
    def broadcast(self, x: Any, root: int = 0) -> None:
        """Copy `x` of rank `root` into `x` of all ranks."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Free what the strategy uses. A second call does nothing."""


class GroupStrategy(Strategy):
    """A covey group as a strategy. `shutdown` closes the group."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def init(self) -> None:
        """Do nothing: a group is ready once it is made."""

    @property
    def rank(self) -> int:
        """The rank in the group."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return self.group.size

    def all_reduce_gradients(self, gradients: Mapping[str, Any], op: Literal["mean", "sum"] = "mean") -> None:
        """Combine arrays by `group.sync_gradients`."""
        check_op(op)
        self.group.sync_gradients(gradients, op=op)

    def broadcast(self, x: Any, root: int = 0) -> None:
        """Copy `x` of rank `root` into `x` of all ranks."""
        self.group.broadcast(x, root)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.group.barrier()

    def shutdown(self) -> None:
        """Close the group."""
        self.group.close()


class HierarchicalStrategy(Strategy):
    """Combines gradients inside each host first, and then between hosts: one array per host crosses the network.

    `local` connects the ranks of one host, and `across` the first ranks (`local.rank == 0`) of all hosts; the other
    ranks pass None. Hosts may have different numbers of ranks: a mean is one over ranks, not over hosts. Ranks are
    numbered host by host, in the order of `across`. Sums are made in the same order every time, and all ranks have the
    same bits.

    Both may be any strategy that ends with an error when it loses a rank: the number of ranks is fixed in `init`.
    """

    def __init__(self, local: Strategy, across: Strategy | None) -> None:
        self._local, self._across = local, across
        self._firsts: tuple[int, ...] = ()
        """By host: its first rank, and at the end the number of all ranks."""
        self._host = -1
        self._is_shut = False

    def init(self) -> None:
        """Prepare both parts, and learn how many ranks each host has.

        Raises:
            ConfigError: `across` is missing on the first rank of a host, or there on another one, or a part continues
                after losses.
        """
        self._local.init()
        is_first = self._local.rank == 0
        if is_first != (self._across is not None):
            what = "is missing" if is_first else "must be None"
            raise ConfigError(f"across {what} on rank {self._local.rank} of its host: it connects the first ranks")
        for part in (self._local, self._across):
            if isinstance(part, GroupStrategy) and part.group.on_loss == "continue":
                raise ConfigError(
                    "a HierarchicalStrategy needs groups that end with their first loss (on_loss='raise'): the mean "
                    "would be wrong after a loss"
                )
        if self._across is not None:
            self._across.init()
        about = np.zeros(2, np.int64)  # how many hosts there are, and which of them this is
        if self._across is not None:
            about[:] = self._across.size, self._across.rank
        self._local.broadcast(about, 0)
        hosts, self._host = map(int, about)
        sizes = np.zeros(hosts, np.int64)
        if self._across is not None:
            sizes[self._host] = self._local.size
            self._across.all_reduce_gradients({"sizes": sizes}, "sum")
        self._local.broadcast(sizes, 0)
        self._firsts = (0, *np.cumsum(sizes).tolist())

    @property
    def rank(self) -> int:
        """The rank of this process among those of all hosts."""
        return self._first(self._host) + self._local.rank

    @property
    def size(self) -> int:
        """The number of ranks of all hosts."""
        return self._first(-1)

    def all_reduce_gradients(self, gradients: Mapping[str, Any], op: Literal["mean", "sum"] = "mean") -> None:
        """Replace each array by the mean over the ranks of all hosts, or by the sum."""
        check_op(op)
        total = self.size
        if op == "mean":
            for name, gradient in gradients.items():
                check_floats(name, gradient)
        self._local.all_reduce_gradients(gradients, "sum")
        if self._across is not None:
            self._across.all_reduce_gradients(gradients, "sum")
        for name in sorted(gradients):
            gradient = gradients[name]
            self._local.broadcast(gradient, 0)
            if op == "mean":
                gradient /= total  # on each rank, from the same bits

    def broadcast(self, x: Any, root: int = 0) -> None:
        """Copy `x` of rank `root`, of any host, into `x` of all ranks."""
        if not 0 <= root < self.size:
            raise ConfigError(f"root={root!r} is not a rank; there are ranks 0 to {self.size - 1}")
        host = max(host for host, first in enumerate(self._firsts[:-1]) if first <= root)
        if host == self._host:
            self._local.broadcast(x, root - self._firsts[host])
        if self._across is not None:
            self._across.broadcast(x, host)
        if host != self._host:
            self._local.broadcast(x, 0)

    def barrier(self) -> None:
        """Return when the ranks of all hosts have called it."""
        self._first(-1)
        self._local.barrier()
        if self._across is not None:
            self._across.barrier()
        self._local.barrier()

    def shutdown(self) -> None:
        """Shut both parts down. A second call does nothing."""
        if not self._is_shut:
            self._is_shut = True
            try:
                if self._across is not None:
                    self._across.shutdown()
            finally:
                self._local.shutdown()

    def _first(self, host: int) -> int:
        if not self._firsts:
            raise ConfigError("the strategy is not prepared; call init() on every rank first")
        return self._firsts[host]


def check_op(op: str) -> None:
    """Raise ConfigError for what strategies cannot do."""
    if op not in ("mean", "sum"):
        raise ConfigError(f"op={op!r} must be 'mean' or 'sum'")


def check_floats(name: str, x: Any) -> None:
    """Raise ConfigError for an array whose mean is not one of its own numbers."""
    is_floating = getattr(x, "is_floating_point", None)  # of torch's tensors
    if not (is_floating() if is_floating is not None else x.dtype.kind not in "iub"):
        raise ConfigError(f"{name!r} has the dtype {x.dtype}, which has no mean; use op='sum'")
