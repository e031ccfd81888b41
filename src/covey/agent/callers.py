"""The agents of a cluster as a terminal sees them: finds them, and calls their functions. On any thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from covey.agent.agent import CALL_SECONDS, call_config
from covey.agent.link_transport import LinkTransport
from covey.agent.service import AgentService
from covey.base.errors import AuthError, CallRefusedError, ConfigError, ConnectError, RemoteCallError
from covey.net.keys.identity import ensure_identity, id_text
from covey.runtime import loop as control
from covey.runtime.calls.service import CallService
from covey.runtime.mesh.listener import MeshListener
from covey.runtime.mesh.visit import visiting
from covey.wire import messages
from covey.wire.signatures import Signature

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.net.keys.clusters import Cluster
    from covey.runtime.calls.transport import CallListener
    from covey.runtime.calls.work import CallWork
    from covey.runtime.mesh.remote_node import RemoteNode
    from covey.runtime.mesh.visit import Visit

SEARCH_SECONDS: Final = 2.0
"""How long to look for all agents."""
NAMED_SECONDS: Final = 10.0
"""How long to look for agents that were named."""
STREAM_SECONDS: Final = 30 * 24 * 3600.0
LOOP_SECONDS: Final = 5.0
SILENT_SECONDS: Final = 10.0
"""An agent that does not answer for so long is lost."""
_POLL_SECONDS: Final = 0.05


class Terminal(MeshListener):
    """A visitor of the cluster that calls agents. Nothing here can be called."""

    def __init__(self, config: GroupConfig) -> None:
        self.visit: Visit
        self.transport: LinkTransport
        self.calls = CallService(self._connect, call_config(config.interfaces), "terminal")

    def heard(self, remote: RemoteNode, message: messages.Control) -> None:
        if isinstance(message, messages.AgentCall | messages.AgentRefusal):
            self.transport.heard(remote, message)

    def _connect(self, listener: CallListener) -> LinkTransport:
        self.transport = LinkTransport(listener, lambda _card: "a terminal takes no calls")
        return self.transport

    async def part_silent(self) -> None:
        """End the links with agents that do not answer, so that their callers connect again."""
        while True:
            await asyncio.sleep(SILENT_SECONDS / 5)
            for remote in list(self.visit.mesh.met.values()):
                if remote.purpose == "agent" and remote.unanswered_seconds() > SILENT_SECONDS:
                    self.visit.mesh.part(remote)

    def agents(self) -> list[AgentCaller]:
        """Return the agents that are linked now, sorted by name."""

        async def look() -> list[AgentCaller]:
            found = (each.card for each in self.visit.mesh.met.values() if each.purpose == "agent")
            return [AgentCaller(self, card) for card in sorted(found, key=lambda card: (card.name, card.id))]

        return control.run(look(), LOOP_SECONDS)

    def find(self, names: Sequence[str] | None) -> list[AgentCaller]:
        """Return the agents with these names, in this order, or all of them.

        A name is that of a node, of a host if only one agent has it, or the beginning of an id.

        Raises:
            ConfigError: there is no such agent, or there are several.
        """
        deadline = time.monotonic() + (SEARCH_SECONDS if names is None else NAMED_SECONDS)
        while time.monotonic() < deadline:
            found = self.agents()
            if names is not None and all(_named(name, found) for name in names):
                break
            time.sleep(_POLL_SECONDS)
        found = self.agents()
        if names is None:
            if not found:
                raise ConfigError("no agent was found: run `covey up` on the machines that should start programs")
            return found
        return [_only(name, found) for name in dict.fromkeys(names)]


class AgentCaller:
    """One agent, called by a terminal."""

    def __init__(self, terminal: Terminal, card: messages.Card) -> None:
        self._terminal, self.card = terminal, card
        self.name = card.name
        self._seat: Seat | None = None

    def call(self, function: str, *args: Any, timeout: float = CALL_SECONDS) -> Any:
        """Call a function of the agent, and return its result.

        Raises:
            ConfigError: the agent refuses the request; the text says why.
            AuthError: this machine may not use the agent.
            ConnectError: the agent cannot be reached.
        """
        with self._errors():
            return self.begin(function, *args, timeout=timeout).wait_or_cancel()

    def begin(self, function: str, *args: Any, timeout: float = CALL_SECONDS) -> CallWork[Any]:
        """Start a call; `errors` around its `wait` gives the errors of `call`."""
        calls = self._terminal.calls
        return calls.call(self._connected(), function, args, {}, rank=0, timeout=timeout, decoder=_result(function))

    def stream(self, function: str, *args: Any) -> Iterator[Any]:
        """Yield the items of a stream of the agent; the errors are those of `call`."""
        with self._errors():
            items = self._terminal.calls.stream(
                self._connected(), function, args, {}, rank=0, timeout=STREAM_SECONDS, decoder=_result(function)
            )
            with items:
                yield from items

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors of calls in the block as `call` does."""
        with self._errors():
            yield

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RemoteCallError as error:
            raise ConfigError(f"{self.name}: {error.text}") from None
        except CallRefusedError as error:
            raise ConfigError(f"{self.name}: {error}; do both machines have the same version of covey?") from None
        except AuthError as error:
            raise AuthError(f"{self.name}: {error}") from None
        except ConnectError as error:
            self._seat = None
            raise ConnectError(f"{self.name}: {error}") from None

    def _connected(self) -> Seat:
        """Return the seat of the agent for calls; ConnectError if it is not linked now."""
        if self._seat is None:

            async def connect() -> Seat:
                remote = self._terminal.visit.mesh.met.get(self.card.id)
                if remote is None or remote.card.life != self.card.life:
                    raise ConnectError("it is not linked")
                return self._terminal.transport.connect(remote)

            self._seat = control.run(connect(), LOOP_SECONDS)
        return self._seat


@contextlib.contextmanager
def calling(cluster: Cluster, config: GroupConfig) -> Iterator[Terminal]:
    """Visit a cluster to call its agents, until the end of `with`."""
    ensure_identity()  # agents know a terminal by the key of its machine
    terminal = Terminal(config)
    with visiting(cluster, config, announce=False, listener=terminal) as visit:
        terminal.visit = visit
        control.soon(visit.mesh.spawn, terminal.part_silent())
        try:
            yield terminal
        finally:
            terminal.calls.close()


def _named(name: str, agents: list[AgentCaller]) -> list[AgentCaller]:
    """Return the agents that a name can mean."""
    text = name.strip().lower()
    exact = [each for each in agents if text in (each.card.name.lower(), id_text(each.card.id), each.card.id.hex())]
    hosts = [each for each in agents if text == each.card.host_name.lower()]
    begun = [each for each in agents if len(text) >= 4 and id_text(each.card.id).startswith(text)]
    return exact or hosts or begun


def _only(name: str, agents: list[AgentCaller]) -> AgentCaller:
    found = _named(name, agents)
    if len(found) == 1:
        return found[0]
    listed = ", ".join(each.name for each in found or agents) or "none"
    if found:
        raise ConfigError(f"{name!r} means several agents: {listed}; write the name of one of them")
    raise ConfigError(f"no agent {name!r} was found (there: {listed}); does `covey up` run on that machine?")


def _result(function: str) -> Any:
    """Return what decodes the result of a function of agents."""
    if function not in _decoders:
        _decoders[function] = Signature(getattr(AgentService, function), function).result
    return _decoders[function]


_decoders: dict[str, Any] = {}
