"""Where the rank of a program comes from: from a coordinator, or from the launcher or cluster of the gateway itself.

A gateway of a coordinator has many programs, each a worker of its run. Any other gateway is the process of one rank:
its program takes the place of the script that the launcher would have started.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import CancelledError, ConfigError
from covey.coordinator.worker import WorkerNode
from covey.runtime.joining.bootstrap import join

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.coordinator.worker import WorkerNodeConfig
    from covey.runtime.group.group import Group

LONGEST_JOIN: Final = 300.0
"""The most seconds that a program may wait for its rank."""


class ProgramLostError(Exception):
    """A program ended, or its connection broke, before it left the run."""


@dataclass(frozen=True)
class Wish:
    """What a program registers with, checked."""

    program: str
    run: str
    size: int
    timeout: float
    on_loss: str


class ProgramRank(Protocol):
    """The rank of one program in its run. Each method may block, and is called on a thread of its own, once."""

    def join(self) -> Group:
        """Return the group, once all ranks are there; raise a CoveyError if there is none."""

    def interrupt(self) -> None:
        """End a `join` on another thread early, if that is possible. Does not block; on any thread."""

    def leave(self) -> None:
        """Leave the run in order."""

    def lose(self, error: Exception) -> None:
        """Leave the run as a rank that has failed with `error`; the other ranks are told. Also if `join` failed."""


class ProgramRanks(Protocol):
    """What gives programs their ranks."""

    is_single: bool
    """Whether there can be only one program, also one after the other."""

    def rank_for(self, wish: Wish) -> ProgramRank:
        """Return a rank, not joined yet; ConfigError if there is none for such a wish."""


class JoinedRanks:
    """The one rank that a launcher, a cluster or variables give to this process, as to any program with covey."""

    is_single = True

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` are those of `covey.join`."""
        self._arguments = arguments

    def rank_for(self, wish: Wish) -> ProgramRank:
        named = self._arguments.get("run")
        if wish.size or (wish.run and wish.run != named):
            raise ConfigError("this gateway is one rank of a run that has begun: leave out the run and the size")
        given = dict(self._arguments, timeout=wish.timeout)
        if wish.on_loss:
            given["on_loss"] = wish.on_loss
        return JoinedRank(lambda: join(**given))


class JoinedRank:
    """The rank of a process that joins as any program with covey does."""

    def __init__(self, join_group: Callable[[], Group]) -> None:
        self._join = join_group
        self._group: Group | None = None

    def join(self) -> Group:
        self._group = self._join()
        return self._group

    def interrupt(self) -> None:
        """Do nothing: this process ends with its program."""

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()

    def lose(self, error: Exception) -> None:
        if self._group is not None:
            self._group.__exit__(type(error), error, None)


class CoordinatedRanks:
    """Ranks that a coordinator gives: each program is a worker of a run."""

    is_single = False

    def __init__(self, config: WorkerNodeConfig) -> None:
        """`config` is that of all workers; programs say what they are called, and perhaps their run and its size."""
        self._config = config

    def rank_for(self, wish: Wish) -> ProgramRank:
        given: dict[str, Any] = {"worker_id": wish.program, "timeout": wish.timeout}
        if wish.run:
            given["run"] = wish.run
        if wish.size:
            given["size"] = wish.size
        if wish.on_loss:
            given["on_loss"] = wish.on_loss
        return WorkerRank(WorkerNode(replace(self._config, **given)))


class WorkerRank:
    """The rank of a worker of a coordinator's run."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node

    def join(self) -> Group:
        return self._node.start().group

    def interrupt(self) -> None:
        self._node.interrupt(CancelledError("the program ended before it had its rank"))

    def leave(self) -> None:
        self._node.close()

    def lose(self, error: Exception) -> None:
        self._node.__exit__(type(error), error, None)
