"""`torchrun --rdzv-backend covey --rdzv-id RUN`: the agents join a run of the cluster to find each other."""

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
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.generations import generations
from covey.runtime.joining.node import node_of
from covey.runtime.joining.torch_env import address_of_first, free_port, gloo_variables
from covey.torch.backend.rendezvous import open_store
from covey.torch.entry import LAUNCHED, NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.group import Group

_SETTINGS: Final = {"cluster": "COVEY_CLUSTER", "seeds": "COVEY_SEEDS", "interfaces": "COVEY_INTERFACES"}
"""The settings of --rdzv-conf, and the variables that pass them on to the workers."""
CLOSED: Final = "one of the agents has closed the run"
CLOSED_RUN_CHECK_EVERY: Final = 0.1
"""How often a waiting agent checks whether another agent has closed the run."""


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes a handler from torchrun's parameters."""
    return Agent


class Agent(RendezvousHandler):  # type: ignore[misc]  # torch is not followed by the type checker
    """This host's agent in a run of agents. Each rendezvous is a generation of the run: agents may leave and join.

    The workers use covey, too: a variable tells them that covey handles env://.
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
        os.environ.setdefault(
            "COVEY_RUN_PROGRAM", "torchrun"
        )  # the same name for `torchrun` and `python -m torch.distributed.run`
        self._groups: Iterator[Group] | None = None
        if self._most > 1:
            limits = {"min_size": parameters.min_nodes, "max_size": self._most}
            self._groups = generations(self._run, **limits, timeout=self._timeout)
        self._group: Group | None = None
        self._round: Engine | None = None
        """A second group of the agents, which ends when one of them is lost or starts the next round."""
        self._all: Engine | None = None
        """A third group of the agents, which an agent ends to close the run for all."""
        self._is_closed = False

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return str(self._run)

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Tell the other agents that the next round begins, and wait for the agents of that round."""
        if self.is_closed():
            raise RendezvousClosedError(f"{self._run}: {CLOSED}")
        if self._round is not None:
            self._round.failure.declare(Fault("GroupChangedError", "the next round begins"))
        while True:
            try:
                return self._meet(self._next_group())
            except PeerLostError:
                continue  # the first agent was lost before the others had its data; try again without it
            except DeadlineError as error:
                raise RendezvousTimeoutError(str(error)) from error
            except (ClosedError, StopIteration) as error:
                raise RendezvousClosedError(f"the run {self._run!r} is over: {error}") from error

    def _next_group(self) -> Group:
        if self._groups is None:
            from covey.runtime.environment import LaunchedRank
            from covey.runtime.joining.bootstrap import join_at

            return join_at(LaunchedRank(rank=0, size=1, name=self._run))
        with self._ending_when_closed():
            self._group = next(self._groups)
        if self.is_closed():
            raise ClosedError(CLOSED)
        return self._group

    def _meet(self, group: Group) -> RendezvousInfo:
        for ended in (self._round, self._all):
            if ended is not None:
                ended.close()
        self._round, self._all = _side_group(group, "round"), _side_group(group, "all")
        store = open_store(group, timedelta(seconds=self._timeout))
        name = f"torchrun-{self._run}-{store.new_nonce()}"
        os.environ |= {LAUNCHED: name} | gloo_variables(group)  # workers inherit them
        address = self._local_address or address_of_first(group)
        # Rank 0 of the workers listens at the port after the master's.
        master = RendezvousStoreInfo.build(group.rank, store, address, free_port() - 1)
        return RendezvousInfo(dist.PrefixStore("torchrun", store), group.rank, group.size, master)

    def num_nodes_waiting(self) -> int:
        """Return the number of agents that wait for another round: newcomers, or a member that has started it."""
        if self._group is None or self._round is None or self.is_closed():
            return 0
        node = node_of(self._group)
        waiting = len(list(node.newcomers)) if node is not None and node.knows_change else 0
        return waiting or int(self._round.is_over)

    def is_closed(self) -> bool:
        """Tell whether an agent has closed the run for all."""
        if not self._is_closed and self._all is not None:
            self._is_closed = str(self._all.failure.message_error()) == CLOSED
        return self._is_closed

    def set_closed(self) -> None:
        """Close the run for all agents, including those that wait for the next round."""
        if self._all is not None and not self._is_closed:
            self._all.failure.declare(Fault("ClosedError", CLOSED))
        self._is_closed = True

    def shutdown(self) -> bool:
        """Close the run for all agents, and leave it."""
        self.set_closed()
        if self._groups is not None:
            self._groups.close()  # type: ignore[attr-defined]  # it is a generator, which closes its group
        return True

    @contextlib.contextmanager
    def _ending_when_closed(self) -> Iterator[None]:
        """End the group of the last round if an agent closes the run while this one waits for the next round."""
        met, group = threading.Event(), self._group

        def check() -> None:
            while not met.wait(CLOSED_RUN_CHECK_EVERY):
                if group is not None and self.is_closed():
                    engine_of(group).failure.end_here(Fault("ClosedError", CLOSED))
                    return

        checker = threading.Thread(target=check, name="covey-torchrun", daemon=True)
        checker.start()
        try:
            yield
        finally:
            met.set()
            checker.join()


def _side_group(group: Group, purpose: str) -> Engine | None:
    """Return a second group of the same agents, which ends with the first loss of an agent."""
    top = engine_of(group)
    if top.node is None:
        return None
    name = f"{top.name}/{purpose}"
    return top.subgroup(f"{top.id}/{name}", top.members, name, replace(top.config, on_loss="raise"))
