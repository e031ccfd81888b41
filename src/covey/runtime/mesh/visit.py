"""A visit to a cluster: meet those who are there, ask them, and leave. For commands, on their own thread.

A visitor has an identity for the time of its visit and takes part in no run. All that happens here has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from covey.base.config import PORTS
from covey.base.errors import ConnectError, CoveyError, DeadlineError
from covey.net.keys.identity import NodeIdentity, short_id
from covey.runtime import loop as control
from covey.runtime.mesh.endpoint import cluster_endpoint
from covey.runtime.mesh.mesh import Mesh
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.mesh.endpoint import Endpoint
    from covey.runtime.mesh.remote_node import RemoteNode

LOOK_SECONDS: Final = 0.05
"""How often `look` checks whether it has seen enough."""
LOOP_SECONDS: Final = 10.0
"""How long the control loop may take for what it does at once."""
ANSWERS: Final = {
    messages.Ask: messages.Tell,
    messages.Reach: messages.Reached,
    messages.NewSecret: messages.SecretKept,
}


@contextlib.contextmanager
def visiting(cluster: Cluster, config: GroupConfig, *, announce: bool = True) -> Iterator[Visit]:
    """Go and look who is in a cluster; with `announce`, others find the visitor, too. Leaves at the end of `with`.

    Raises:
        ConfigError: no port is free, or no interface matches.
    """
    # From the end: the first ports are where a seed without a port is looked for.
    own, ports = NodeIdentity.passing(), PORTS[::-1]
    endpoint = cluster_endpoint(cluster, config, run="", ports=ports, identity=own, has_lanes=False, is_visit=True)
    try:
        mesh = control.run(_open(cluster, config, endpoint, announce=announce), LOOP_SECONDS)
        try:
            yield Visit(mesh)
        finally:
            with contextlib.suppress(TimeoutError):
                control.run(mesh.close(), LOOP_SECONDS)
    finally:
        endpoint.leave()


class Visit:
    """Those who are in a cluster, as a visitor meets them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        """Lives on the control loop."""

    def look(self, seconds: float, until: Callable[[Visit], bool] = lambda _visit: False) -> None:
        """Wait for people to be met: for `seconds`, or until `until` is satisfied."""
        deadline = time.monotonic() + seconds
        while not until(self) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))

    def everyone(self) -> list[messages.Card]:
        """Return whom we are linked with, other visitors too, by name."""

        async def look() -> list[messages.Card]:
            return [remote.card for remote in self._by_name()]

        return control.run(look(), LOOP_SECONDS)

    def members(self) -> list[messages.PeerReport]:
        """Return those of them who take part in a run, or want to, and how they are reached from here."""

        async def look() -> list[messages.PeerReport]:
            members = (each for each in self._by_name() if each.purpose != "visitor" and each.link is not None)
            return [self.mesh.peer_report(each) for each in members]

        return control.run(look(), LOOP_SECONDS)

    def ask(self, card: messages.Card, question: messages.Question, within: float) -> messages.Answer:
        """Ask someone, and return the answer that belongs to the question.

        Raises:
            ConnectError: it has gone.
            DeadlineError: it did not answer within so many seconds.
        """
        return control.run(self._ask(card, question, within), within + LOOP_SECONDS)

    def ask_all(
        self, cards: list[messages.Card], question: messages.Question, within: float
    ) -> list[messages.Answer | CoveyError]:
        """Ask several the same at once; return what each answered, or why it did not."""
        return self.ask_each([(card, question) for card in cards], within)

    def ask_each(
        self, questions: list[tuple[messages.Card, messages.Question]], within: float
    ) -> list[messages.Answer | CoveyError]:
        """Ask several at once, each its own question; return what each answered, or why it did not."""

        async def ask() -> list[messages.Answer | CoveyError]:
            asked = (self._ask(card, question, within) for card, question in questions)
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, CoveyError):
                    raise answer
            return answers  # type: ignore[return-value]  # others were raised

        return control.run(ask(), within + LOOP_SECONDS)

    def _by_name(self) -> list[RemoteNode]:
        return sorted(self.mesh.met.values(), key=lambda remote: (remote.card.name, remote.card.id))

    async def _ask(self, card: messages.Card, question: messages.Question, within: float) -> messages.Answer:
        who = f"{card.name} ({short_id(card.id)})"
        deadline = time.monotonic() + within
        while (left := deadline - time.monotonic()) > 0:
            remote = self.mesh.met.get(card.id)
            if remote is None or remote.card.life != card.life:
                raise ConnectError(f"{who} has gone")
            answer = await _answer(remote, question, left)
            if isinstance(answer, ANSWERS[type(question)]):  # or else late, to an earlier question
                return answer
        raise DeadlineError(f"{who} did not answer within the timeout of {within:g} s")


async def _answer(remote: RemoteNode, question: messages.Question, within: float) -> messages.Answer | None:
    """Ask once; return None if time is up, or if the link was exchanged: what was on its way may be lost."""
    link, asking = remote.link, asyncio.ensure_future(remote.ask(question, within))
    try:
        while not asking.done() and remote.link is link:
            await asyncio.wait({asking}, timeout=LOOK_SECONDS)
        with contextlib.suppress(TimeoutError):
            return asking.result() if asking.done() else None
        return None
    finally:
        asking.cancel()


async def _open(cluster: Cluster, config: GroupConfig, endpoint: Endpoint, *, announce: bool) -> Mesh:
    mesh = Mesh(cluster, config, endpoint, announce=announce)
    await mesh.open()
    return mesh
