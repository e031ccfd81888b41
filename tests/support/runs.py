"""Runs of real nodes inside this process: each on a thread of its own, with a known identity, some under attack."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.support.attackers import LOOPBACK, Insider, Victim, call_on_loop
from tests.support.waiting import DEADLINE

from covey.net.keys.identity import NodeIdentity
from covey.runtime.environment import ClusterOptions, WantedRun
from covey.runtime.group.internals import engine_of
from covey.runtime.joining import cluster_join as joining
from covey.runtime.joining import generations
from covey.runtime.joining import node as node_module
from covey.runtime.joining.request import JoinRequest, JoinTarget
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.wire import formation, messages
from covey.wire.versions import OURS

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.group.group import Group
    from covey.runtime.joining.joiner import Joiner
    from covey.runtime.joining.node import NodeParts
    from covey.runtime.peers.endpoint import Endpoint

SURVIVING = dataclasses.replace(LOOPBACK, on_loss="continue", patience=40.0)
"""A member that is silent is waited for for half of it: longer than a machine stands still. A member that was cut off
and is told nothing gives up after the whole."""


class Participant:
    """A node that joins a run on a thread; `result` waits for what its function returns."""

    def __init__(self, thread_run: ThreadRun, function: Callable[..., Any], identity: NodeIdentity, *, elastic: bool):
        self._thread_run, self._function, self._is_elastic = thread_run, function, elastic
        self.identity = identity
        self.endpoint: Endpoint
        self._is_seated = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._is_seated.wait(DEADLINE)

    @property
    def joiner(self) -> Joiner:
        found = self.endpoint.acceptor._link_taker.__self__.listener  # type: ignore[union-attr]
        return found

    @property
    def node(self) -> NodeParts:
        """Its node, once it is in a run."""
        member = self.joiner.member
        assert member is not None
        return next(node for node in list(node_module._nodes) if node.links is member)

    @property
    def prey(self) -> Victim:
        """What an insider attacks."""
        address = ("127.0.0.1", self.endpoint.card.contact.addresses[0].port)
        return Victim(self._thread_run.cluster, self.endpoint, None, address)  # type: ignore[arg-type]

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def result(self, within: float = DEADLINE) -> Any:
        self._thread.join(within)
        assert not self._thread.is_alive(), f"{self.identity.name} hangs{self._thread_run.errors()}"
        if self._error is not None:
            raise self._error
        return self._value

    def seated(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._is_seated.set()

    def _main(self) -> None:
        self._thread_run.local.participant = self
        try:
            if self._is_elastic:
                with contextlib.closing(_Elastic(self._thread_run).each()) as groups:  # also if the function fails
                    self._value = self._function(groups)
            else:
                with self._thread_run.join() as group:
                    self._value = self._function(group)
        except BaseException as error:
            self._error = error
            self._is_seated.set()
            self._thread_run.failed()


class ThreadRun:
    """The nodes of one run of a cluster. At the end all of them must have ended by themselves."""

    def __init__(self, cluster: Cluster, config: GroupConfig = LOOPBACK, **limits: Any) -> None:
        self.cluster, self.config = cluster, config
        values = {"size": None, "min_size": 2, "max_size": None, "timeout": DEADLINE} | limits
        self.wanted = WantedRun("run", "program", **values)
        self.local = threading.local()
        self._all: list[Participant] = []
        self._barriers: list[threading.Barrier] = []
        self._undo = contextlib.ExitStack()

    def start(
        self, function: Callable[..., Any], identity: NodeIdentity | None = None, *, elastic: bool = False
    ) -> Participant:
        """Let a node join; `function` gets its group, or if it is elastic the groups of its generations."""
        participant = Participant(self, function, identity or NodeIdentity.ephemeral(), elastic=elastic)
        self._all.append(participant)
        return participant

    def steps(self, count: int) -> Callable[[], None]:
        """Return what lets so many threads go on together; one that fails does not keep the others waiting."""
        barrier = threading.Barrier(count)
        self._barriers.append(barrier)

        def together() -> None:
            barrier.wait(DEADLINE)

        return together

    def forgive(self) -> None:
        """Do not raise at the end what some participant has failed with."""
        self._all.clear()

    def errors(self) -> str:
        """Return what participants have failed with: others may wait for them."""
        return "".join(
            f"\n{each.identity.name} failed: {each._error!r}" for each in self._all if each._error is not None
        )

    def failed(self) -> None:
        for barrier in self._barriers:
            barrier.abort()

    def join(self, **how: Any) -> Group:
        options = ClusterOptions(self.cluster.name, self.cluster.secret.key)
        return joining.join_run(JoinTarget(config=self.config, run=self.wanted, options=options, wait=DEADLINE, **how))

    def terms(self) -> formation.Terms:
        """What all of them agree on."""
        wanted, config = self.wanted, self.config
        return formation.Terms(
            wanted.name, wanted.program, wanted.size, wanted.min_size, wanted.max_size, f"{messages.VERSION}",
            config.lanes, config.on_loss, versions=OURS,
        )  # fmt: skip

    def __enter__(self) -> ThreadRun:
        take = cluster_endpoint

        def seat_of_this_thread(*args: Any, **options: Any) -> Endpoint:
            participant = self.local.participant
            endpoint = take(*args, **{**options, "identity": participant.identity, "ports": (0,)})
            participant.seated(endpoint)
            return endpoint

        self._undo.enter_context(mock.patch.object(joining, "cluster_endpoint", seat_of_this_thread))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._undo.close()
        if kind is None or issubclass(kind, threading.BrokenBarrierError):
            for participant in self._all:
                participant.result()


class _Elastic(generations._Generations):
    """As `covey.generations`, of which a process has only one at a time."""

    def __init__(self, thread_run: ThreadRun) -> None:
        wanted = thread_run.wanted
        sizes = {"min_size": wanted.min_size, "max_size": wanted.max_size}
        super().__init__(JoinRequest.of({"run": "run", "timeout": DEADLINE, **sizes}))
        self._thread_run = thread_run

    def _seat(self, request: JoinRequest) -> Group:
        return self._thread_run.join(is_elastic=True, is_returning=request.is_newcomer, functions=request.functions)


def node_of(group: Group) -> NodeParts:
    node = node_module.node_of(group)
    assert node is not None
    return node


def ids_of(group: Group) -> list[bytes]:
    """Return the members of a group's generation by rank."""
    node = node_of(group)
    assert node.generation is not None
    return [member.card.id for member in node.generation.founded.members]


def say(group: Group, rank: int, message: messages.Control) -> None:
    """Let the node of a group send whatever it likes to another rank, and return when it is sent."""
    node = node_of(group)
    call_on_loop(node.peers.send, engine_of(group).members[rank], message)


def here(insider: Insider, terms: formation.Terms, hears: tuple[bytes, ...], **fields: Any) -> messages.Forming:
    """What a joiner tells of itself."""
    card = insider.card
    member = formation.FoundingMember(card.id, card.life, "insider", card.contact.host, b"")
    values: dict[str, Any] = {"phase": formation.Phase.JOINING}
    return messages.Forming(messages.encode(formation.Here(terms, member, hears, **(values | fields))))
