"""A visit to a cluster: link with its nodes, ask them, and leave. For commands, on their own thread.

A visitor has an identity only for its visit, and takes part in no run. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConnectError, CoveyError, DeadlineError
from covey.base.settings import NODE_PORTS
from covey.net.keys.identity import NodeIdentity, short_id
from covey.runtime import loop as control
from covey.runtime.peers.cluster_mesh import ClusterMesh
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.mesh import MeshListener
    from covey.runtime.peers.remote_process import RemoteProcess

CONDITION_CHECK_EVERY: Final = 0.05
"""How often `look` and `ask` check their condition."""
ANSWERS: Final = {
    messages.Ask: messages.Tell,
    messages.Reach: messages.Reached,
    messages.NewSecret: messages.SecretKept,
    messages.Inspect: messages.Inspected,
    messages.RequestCheckpoint: messages.CheckpointProgress,
}


@contextlib.contextmanager
def visiting(
    cluster: Cluster, config: GroupConfig, *, announce: bool = True, listener: MeshListener | None = None
) -> Iterator[Visit]:
    """Visit a cluster until the end of `with`; with `announce`, other nodes find the visitor, too.

    `listener` hears what happens in the mesh.

    Raises:
        ConfigError: no port is free, or no interface matches.
    """
    # From the end: the first ports are where a seed without a port is looked for.
    own, ports = NodeIdentity.passing(), NODE_PORTS[::-1]
    endpoint = cluster_endpoint(cluster, config, run="", ports=ports, identity=own, has_lanes=False, is_visit=True)
    try:
        mesh = control.run(_open(cluster, config, endpoint, listener, announce=announce), control.LOOP_SECONDS)
        try:
            yield Visit(mesh)
        finally:
            with contextlib.suppress(TimeoutError):
                control.run(mesh.close(), control.LOOP_SECONDS)
    finally:
        endpoint.leave()


class Visit:
    """The nodes of a cluster, as a visitor sees them."""

    def __init__(self, mesh: ClusterMesh) -> None:
        self.mesh = mesh
        """Lives on the control loop."""

    def look(self, seconds: float, until: Callable[[Visit], bool] = lambda _visit: False) -> None:
        """Wait for links with nodes: for `seconds`, or until `until` is true."""
        deadline = time.monotonic() + seconds
        while not until(self) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, CONDITION_CHECK_EVERY))

    def cards(self) -> list[messages.Card]:
        """Return the cards of all linked nodes, other visitors included, sorted by name."""

        async def look() -> list[messages.Card]:
            return [remote.card for remote in self._by_name()]

        return control.run(look(), control.LOOP_SECONDS)

    def members(self) -> list[messages.PeerReport]:
        """Return the linked nodes that are neither visitors nor agents, and how they are reached from here."""

        async def look() -> list[messages.PeerReport]:
            in_runs = (each for each in self._by_name() if each.purpose not in ("visitor", "agent"))
            return [each.report() for each in in_runs if each.link is not None]

        return control.run(look(), control.LOOP_SECONDS)

    def agents(self) -> list[messages.Card]:
        """Return the cards of the linked agents (`covey up`), sorted by name."""

        async def look() -> list[messages.Card]:
            return [each.card for each in self._by_name() if each.purpose == "agent"]

        return control.run(look(), control.LOOP_SECONDS)

    def has_visitors(self) -> bool:
        """Tell whether another visitor is linked."""

        async def look() -> bool:
            return any(each.purpose == "visitor" for each in self._by_name())

        return control.run(look(), control.LOOP_SECONDS)

    def ask(self, card: messages.Card, question: messages.Question, within: float) -> messages.Answer:
        """Ask a node, and return the answer to this question.

        Raises:
            ConnectError: the node has gone.
            DeadlineError: the node did not answer within `within` seconds.
        """
        return control.run(self._ask(card, question, within), within + control.LOOP_SECONDS)

    def ask_all(
        self, cards: list[messages.Card], question: messages.Question, within: float
    ) -> list[messages.Answer | CoveyError]:
        """Ask several nodes the same question at once; return each answer, or why there is none."""
        return self.ask_each([(card, question) for card in cards], within)

    def ask_each(
        self, questions: list[tuple[messages.Card, messages.Question]], within: float
    ) -> list[messages.Answer | CoveyError]:
        """Ask several nodes at once, each its own question; return each answer, or why there is none."""

        async def ask() -> list[messages.Answer | CoveyError]:
            asked = (self._ask(card, question, within) for card, question in questions)
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, CoveyError):
                    raise answer
            return answers  # type: ignore[return-value]  # others were raised

        return control.run(ask(), within + control.LOOP_SECONDS)

    def converse(
        self, card: messages.Card, questions: Sequence[messages.Question], within: float
    ) -> Future[list[tuple[messages.Answer, float]]]:
        """Begin to ask a node these questions, one after the other, and return at once.

        The result is each answer with the monotonic time at which it came. It has fewer answers than there are
        questions if the node has gone, or did not answer all of them within `within` seconds. Until it is there, or
        cancelled, the node must not be asked anything else.
        """
        return control.start(self._converse(card, questions, time.monotonic() + within))

    async def _converse(
        self, card: messages.Card, questions: Sequence[messages.Question], until: float
    ) -> list[tuple[messages.Answer, float]]:
        answers: list[tuple[messages.Answer, float]] = []
        with contextlib.suppress(CoveyError):
            for question in questions:
                answers.append((await self._ask(card, question, until - time.monotonic()), time.monotonic()))
        return answers

    def _by_name(self) -> list[RemoteProcess]:
        return sorted(self.mesh.met.values(), key=lambda remote: (remote.card.name, remote.card.id))

    async def _ask(self, card: messages.Card, question: messages.Question, within: float) -> messages.Answer:
        node = f"{card.name} ({short_id(card.id)})"
        deadline = time.monotonic() + within
        while (left := deadline - time.monotonic()) > 0:
            remote = self.mesh.met.get(card.id)
            if remote is None or remote.card.life != card.life:
                raise ConnectError(f"{node} has gone")
            answer = await _answer(remote, question, left)
            if _fits(answer, question):  # else it is a late answer to an earlier question
                return answer  # type: ignore[return-value]  # it is one
        raise DeadlineError(f"{node} did not answer within the timeout of {within:g} s")


def _fits(answer: messages.Answer | None, question: messages.Question) -> bool:
    if isinstance(answer, messages.Inspected) and isinstance(question, messages.Inspect):
        return answer.what == question.what
    return isinstance(answer, ANSWERS[type(question)])


async def _answer(remote: RemoteProcess, question: messages.Question, within: float) -> messages.Answer | None:
    """Ask once; return None if time is up, or if another link is in use: the question may be lost on the old one."""
    link, asking = remote.link, asyncio.ensure_future(remote.ask(question, within))
    try:
        while not asking.done() and remote.link is link:
            await asyncio.wait({asking}, timeout=CONDITION_CHECK_EVERY)
        with contextlib.suppress(TimeoutError):
            return asking.result() if asking.done() else None
        return None
    finally:
        asking.cancel()


async def _open(
    cluster: Cluster, config: GroupConfig, endpoint: Endpoint, listener: MeshListener | None, *, announce: bool
) -> ClusterMesh:
    mesh = ClusterMesh(cluster, config, endpoint, listener, announce=announce)
    await mesh.open()
    return mesh
