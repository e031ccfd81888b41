"""`torchrun --rdzv-backend covey --rdzv-id RUN`: its agents are a run of the cluster, and find each other as such."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from covey.base.config import check_timeout
from covey.base.errors import ClosedError, ConfigError, DeadlineError, PeerLostError
from covey.runtime.fault import Fault
from covey.runtime.joining.generations import generations
from covey.runtime.joining.torch_env import address_of_first, free_port, gloo_variables
from covey.torch.backend.store import open_store
from covey.torch.entry import NAME, TORCHRUN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.group import Group

_SETTINGS: Final = {"cluster": "COVEY_CLUSTER", "seeds": "COVEY_SEEDS", "interfaces": "COVEY_INTERFACES"}
"""What --rdzv-conf may say, and by which variable workers hear of it, too."""
CLOSED: Final = "one of the agents has closed the run"
LOOK_SECONDS: Final = 0.1
"""How often an agent that waits for the others looks whether one of them has ended it all."""


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a handler of torchrun's parameters."""
    return Agent


class Agent(RendezvousHandler):  # type: ignore[misc]  # torch is not followed by the type checker
    """This host's agent among those of a run. Each rendezvous is a generation: agents may be lost, and come.

    Workers meet on covey, too: they are told by a variable that env:// is covey's.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run, self._local_address = parameters.run_id, parameters.local_addr
        self._most = parameters.max_nodes
        told = dict(parameters.config)
        seconds = told.pop("timeout", 600)
        try:
            self._timeout = check_timeout(float(seconds))
        except ValueError:
            raise ConfigError(f"--rdzv-conf: timeout={seconds}: give a number of seconds above 0") from None
        if unknown := told.keys() - _SETTINGS.keys():
            known = ", ".join((*_SETTINGS, "timeout"))
            raise ConfigError(f"--rdzv-conf: there is no {min(unknown)!r}; there are {known}")
        if parameters.endpoint:
            told["seeds"] = ",".join(filter(None, (told.get("seeds"), parameters.endpoint)))
        os.environ |= {_SETTINGS[name]: str(value) for name, value in told.items()}
        os.environ.setdefault("COVEY_RUN_PROGRAM", "torchrun")  # however it was called: `python -m` names it otherwise
        self._groups: Iterator[Group] | None = None
        if self._most > 1:
            limits = {"min_size": parameters.min_nodes, "max_size": self._most}
            self._groups = generations(self._run, **limits, timeout=self._timeout)
        self._group: Group | None = None
        self._round: Engine | None = None
        """A group beside that of the agents, which ends when one of them is lost or begins the next round."""
        self._all: Engine | None = None
        """Another, which one of them ends to close it all."""
        self._is_closed = False

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return str(self._run)

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the agents of the next round; those who work are told that it begins."""
        if self.is_closed():
            raise RendezvousClosedError(f"{self._run}: {CLOSED}")
        if self._round is not None:
            self._round.fail(Fault("GroupChangedError", "the next round begins"))
        while True:
            try:
                return self._meet(self._next_group())
            except PeerLostError:
                continue  # the first agent was lost before the others had its words: there are fewer now
            except DeadlineError as error:
                raise RendezvousTimeoutError(str(error)) from error
            except (ClosedError, StopIteration) as error:
                raise RendezvousClosedError(f"the run {self._run!r} is over: {error}") from error

    def _next_group(self) -> Group:
        if self._groups is None:
            from covey.runtime.environment import LaunchedRank
            from covey.runtime.joining.bootstrap import join_at

            return join_at(LaunchedRank(rank=0, size=1, name=self._run))
        with self._watching_for_the_end():
            self._group = next(self._groups)
        if self.is_closed():
            raise ClosedError(CLOSED)
        return self._group

    def _meet(self, group: Group) -> RendezvousInfo:
        node = group._engine.node
        for ended in (self._round, self._all):
            if ended is not None:
                ended.close()
        self._round, self._all = _side_group(group, "round"), _side_group(group, "all")
        store = open_store(group, timedelta(seconds=self._timeout))
        os.environ |= {TORCHRUN: f"{self._run}-{store.new_nonce()}"} | gloo_variables(group)  # workers inherit them
        address = self._local_address or (address_of_first(node) if node is not None else "127.0.0.1")
        # Rank 0 of the workers listens at the port after the master's.
        master = RendezvousStoreInfo.build(group.rank, store, address, free_port() - 1)
        return RendezvousInfo(dist.PrefixStore("torchrun", store), group.rank, group.size, master)

    def num_nodes_waiting(self) -> int:
        """Return how many agents are a reason for another round: those who wait outside, or one in the next already."""
        if self._group is None or self._round is None or self.is_closed():
            return 0
        node = self._group._engine.node
        waiting = len(list(node.lobby)) if node is not None and node.knows_change else 0
        return waiting or int(self._round.is_over)

    def is_closed(self) -> bool:
        """Tell whether one of the agents has closed it for all."""
        if not self._is_closed and self._all is not None:
            self._is_closed = str(self._all.fault_error()) == CLOSED
        return self._is_closed

    def set_closed(self) -> None:
        """Close it for all agents, those too that are waiting in the next round."""
        if self._all is not None and not self._is_closed:
            self._all.fail(Fault("ClosedError", CLOSED))
        self._is_closed = True

    def shutdown(self) -> bool:
        """Close it for all agents, and leave."""
        self.set_closed()
        if self._groups is not None:
            self._groups.close()  # type: ignore[attr-defined]  # a generator; it closes its group
        return True

    @contextlib.contextmanager
    def _watching_for_the_end(self) -> Iterator[None]:
        """End the group of the last round if an agent closes it all while this one waits for the next."""
        met, group = threading.Event(), self._group

        def watch() -> None:
            while not met.wait(LOOK_SECONDS):
                if group is not None and self.is_closed():
                    group._engine.end(Fault("ClosedError", CLOSED))
                    return

        watcher = threading.Thread(target=watch, name="covey-torchrun", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            met.set()
            watcher.join()


def _side_group(group: Group, purpose: str) -> Engine | None:
    """Return a group of the same agents that ends with the first thing that happens to one of them."""
    top = group._engine
    if top.node is None:
        return None
    name = f"{top.name}/{purpose}"
    return top.beside(f"{top.id}/{name}", top.members, name, replace(top.config, on_loss="raise"))
