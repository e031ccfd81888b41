"""The agents of a cluster as a terminal sees them: finds them, and calls their functions. On any thread.

Machines of `--on` are meant by keys that this machine trusts, never by the name that a node claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.agent.agent import AGENT_CALL_SECONDS, call_config
from covey.agent.data_line import DataLine
from covey.agent.data_service import DataService
from covey.agent.link_transport import LinkTransport
from covey.agent.service import AgentService
from covey.base.errors import AuthError, CallRefusedError, ConfigError, ConnectError, RemoteCallError
from covey.base.text import CUT
from covey.net.keys.identity import ensure_identity, id_text, is_whole_id, machine_name, meant_ids
from covey.runtime import loop as control
from covey.runtime.calls.service import CallService
from covey.runtime.peers.mesh import MeshListener
from covey.runtime.peers.visit import visiting
from covey.wire import messages
from covey.wire.call_values import Signature
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from covey.agent.data_line import Holding
    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.net.keys.clusters import Cluster
    from covey.net.keys.trust import TrustedMachine
    from covey.runtime.calls.transport import CallListener
    from covey.runtime.calls.work import CallWork
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.peers.visit import Visit

AGENT_SEARCH_SECONDS: Final = 2.0
"""How long to look for all agents."""
NAMED_SECONDS: Final = 10.0
"""How long to look for agents that were named."""
STREAM_SECONDS: Final = 30 * 24 * 3600.0
AGENT_SILENCE: Final = 10.0
"""An agent that does not answer for so long is lost."""
AGENTS_CHECK_EVERY: Final = 0.05
"""How often a search checks whether all agents that it needs are linked."""
_decoders: dict[str, Any] = {}


class Selection(NamedTuple):
    """The machines that are meant, by id."""

    trusted: tuple[bytes, ...]
    new: tuple[bytes, ...]
    """They were named, and a person has to confirm their keys first."""


def is_complete(words: Sequence[str], claimed: Mapping[bytes, str], book: Mapping[bytes, TrustedMachine]) -> bool:
    """Tell whether each word means one machine that is there, so that there is no need to look for more."""
    try:
        select(words, claimed, book)
    except ConfigError:
        return False
    return True


def select(words: Sequence[str], claimed: Mapping[bytes, str], book: Mapping[bytes, TrustedMachine]) -> Selection:
    """Return the machines that words mean: names, ids, or the beginnings of ids.

    `claimed` are the machines that are there, with the names that they claim. `book` are the trusted ones. A word that
    means a trusted machine means no other one, even if that one claims the same name.

    Raises:
        ConfigError: a word means no machine that is there, or several; or only one that has another key than the
            trusted machine of that name. The text has the ids.
    """
    chosen, new = dict[bytes, None](), dict[bytes, None]()
    for word in words:
        known = meant_ids(word, {machine: each.name for machine, each in book.items()})
        strangers = meant_ids(word, {machine: name for machine, name in claimed.items() if machine not in book})
        if len(known) > 1:
            raise _several(word, {each: book[each].name for each in known})
        if known and known[0] in claimed:
            chosen[known[0]] = None
        elif known and strangers:
            raise _changed(word, known[0], strangers, book[known[0]])
        elif known:
            raise ConfigError(f"{_label(known[0], book[known[0]].name)} was not found; does `covey up` run there?")
        elif len(strangers) == 1:
            new[strangers[0]] = None
        elif strangers:
            raise _several(word, {each: claimed[each] for each in strangers})
        else:
            raise _missing(word, claimed, book)
    return Selection(tuple(chosen), tuple(new))


def _label(machine: bytes, name: str) -> str:
    return f"{name} ({id_text(machine)})" if name else id_text(machine)


def _listed(machines: Mapping[bytes, str]) -> str:
    return ", ".join(_label(each, name) for each, name in sorted(machines.items())[:10])


def _several(word: str, machines: Mapping[bytes, str]) -> ConfigError:
    return ConfigError(f"{word!r} means several machines: {_listed(machines)}; write the id of one of them")


def _changed(word: str, known: bytes, strangers: Iterable[bytes], trusted: TrustedMachine) -> ConfigError:
    others = " and ".join(map(id_text, strangers))
    if trusted.by_owner:
        cure = (
            f"on the owner's machine, `covey allow {id_text(known)} --undo` takes the old key off the list, and "
            "`covey allow` with the new id approves the new one"
        )
    else:
        cure = (
            f"`covey trust {id_text(known)} --undo` here forgets the old key, and the next start asks about the new one"
        )
    return ConfigError(
        f"{word!r} is not the machine that this one trusts: its key was {id_text(known)}, and the machine that calls "
        f"itself so now has the key {others}. Nothing was sent. If you have set {word} up anew: {cure}"
    )


def _missing(word: str, claimed: Mapping[bytes, str], book: Mapping[bytes, TrustedMachine]) -> ConfigError:
    renamed = meant_ids(word, {machine: name for machine, name in claimed.items() if machine in book})
    if renamed and not is_whole_id(word):
        known = _label(renamed[0], book[renamed[0]].name)
        return ConfigError(f"the machine that calls itself {word!r} is {known} for this one; use that name, or the id")
    there = _listed(claimed) or "none"
    return ConfigError(f"no agent {word!r} was found (there: {there}); does `covey up` run on that machine?")


class RestartedError(ConfigError):
    """The agent was restarted: the programs that it had started have ended with it."""


class Terminal(MeshListener):
    """A visitor of the cluster that calls agents. Nothing here can be called."""

    def __init__(self, config: GroupConfig) -> None:
        self.visit: Visit
        self.transport: LinkTransport
        self.calls = CallService(self._connect, call_config(config.interfaces), "terminal")
        self._data: DataLine | None = None
        self._config = config

    @contextlib.contextmanager
    def giving(self, held: Holding, machines: Container[bytes]) -> Iterator[None]:
        """Let agents of these machines read a data set of this machine, during the `with` block."""
        digest = held.manifest.digest

        def may_read(machine: bytes, asked: bytes | None) -> bool:
            return machine in machines and asked in (None, digest)

        line = DataLine(lambda asked: held if asked == digest else None, may_read, call_config(self._config.interfaces))
        self._data = line
        try:
            yield
        finally:
            self._data = None
            line.close()

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        if isinstance(message, messages.AgentCall | messages.AgentRefusal):
            self.transport.heard(remote, message)
            if (data := self._data) is not None:
                data.heard(remote, message)

    def _connect(self, listener: CallListener) -> LinkTransport:
        self.transport = LinkTransport(listener, lambda _card: "a terminal takes no calls")
        return self.transport

    async def part_silent(self) -> None:
        """End the links with agents that do not answer, so that their callers connect again."""
        while True:
            await asyncio.sleep(AGENT_SILENCE / 5)
            for remote in list(self.visit.mesh.met.values()):
                if remote.purpose == "agent" and remote.unanswered_seconds() > AGENT_SILENCE:
                    self.visit.mesh.part(remote)

    def agents(self, book: Mapping[bytes, TrustedMachine]) -> list[AgentCaller]:
        """Return the agents that are linked now, one of each machine, sorted by name; `book` has the trusted ones."""

        async def look() -> list[messages.Card]:
            return [each.card for each in self.visit.mesh.met.values() if each.purpose == "agent"]

        cards = sorted(control.run(look(), control.LOOP_SECONDS), key=lambda card: (card.name, card.id))
        found = {machine_of(card): card for card in cards}  # a card whose machine has not signed it is not linked
        named = {machine: _name(machine, card, book) for machine, card in found.items()}
        often = Counter(named.values())
        longer = {machine: name if often[name] == 1 else _longer(name, machine) for machine, name in named.items()}
        return [AgentCaller(self, card, machine, longer[machine]) for machine, card in found.items()]

    def find(self, names: Sequence[str] | None, book: Mapping[bytes, TrustedMachine]) -> FoundAgents:
        """Return the agents that were named, or all of machines that this one trusts (`book`).

        A name is that of a trusted machine; of any other machine only if no trusted one has it. An id is that of a
        machine, or its beginning.

        Raises:
            ConfigError: there is no such agent, there are several, or one has another key than the trusted machine of
                that name.
        """
        deadline = time.monotonic() + (AGENT_SEARCH_SECONDS if names is None else NAMED_SECONDS)
        while time.monotonic() < deadline:
            if names is not None and is_complete(names, _claims(self.agents(book)), book):
                break
            time.sleep(AGENTS_CHECK_EVERY)
        found = self.agents(book)
        if names is None:
            return _all_trusted(found, book)
        chosen = select(names, _claims(found), book)
        by_machine = {each.machine: each for each in found}
        return FoundAgents([by_machine[each] for each in chosen.trusted], [by_machine[each] for each in chosen.new], [])


class FoundAgents(NamedTuple):
    """The agents that were asked for."""

    trusted: list[AgentCaller]
    new: list[AgentCaller]
    """Named machines that this one does not trust yet."""
    left_out: list[AgentCaller]
    """Machines that this one does not trust, if all were asked for."""


class AgentCaller:
    """One agent, called by a terminal."""

    def __init__(self, terminal: Terminal, card: messages.Card, machine: bytes, name: str) -> None:
        """`name` is what the terminal calls the machine, whose first key is `machine`."""
        self._terminal, self.card, self.machine, self.name = terminal, card, machine, name
        self._seat: Seat | None = None

    def call(self, function: str, *args: Any, timeout: float = AGENT_CALL_SECONDS) -> Any:
        """Call a function of the agent, and return its result.

        Raises:
            ConfigError: the agent refuses the request; the text says why.
            AuthError: this machine may not use the agent.
            ConnectError: the agent cannot be reached.
            RestartedError: it is another process than the one that was found first.
        """
        with self._errors():
            return self.begin(function, *args, timeout=timeout).wait_or_cancel()

    def begin(self, function: str, *args: Any, timeout: float = AGENT_CALL_SECONDS) -> CallWork[Any]:
        """Start a call; `errors` around its `wait` gives the errors of `call`."""
        calls = self._terminal.calls
        seat, decoder = self._connected(), _result(function)
        return calls.call_async(seat, function, args, {}, rank=0, timeout=timeout, decoder=decoder)

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
            raise ConfigError(f"{self.name}: {_in_lines(error)}") from None
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
                if remote is None:
                    raise ConnectError("it is not linked")
                if remote.card.life != self.card.life:
                    raise RestartedError("the agent was restarted, and its programs have ended with it")
                return self._terminal.transport.connect(remote)

            self._seat = control.run(connect(), control.LOOP_SECONDS)
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


def _in_lines(error: RemoteCallError) -> str:
    """Return the text of an exception with its line breaks, which only the lines of the traceback have."""
    lines, start = error.traceback.splitlines(), f"{error.type}: "
    at = next((at for at in reversed(range(len(lines))) if lines[at].startswith(start)), None)
    if at is None or any(line.endswith(CUT) for line in lines[at:]):  # the traceback cuts long lines off
        return error.text
    return "\n".join([lines[at].removeprefix(start), *lines[at + 1 :]])


def _name(machine: bytes, card: messages.Card, book: Mapping[bytes, TrustedMachine]) -> str:
    """Return what a machine is called here: what a person agreed to, or what it claims, with letters of its own id."""
    known = book[machine].name if machine in book else ""
    return known or machine_name(card.name, machine)


def _longer(name: str, machine: bytes) -> str:
    """Return a name with more letters of the id, for machines of one name."""
    return f"{name.rpartition('-')[0] or name}-{id_text(machine)[:12]}"


def _claims(agents: list[AgentCaller]) -> dict[bytes, str]:
    """Return, by machine, the names that agents claim."""
    return {each.machine: machine_name(each.card.name, each.machine) for each in agents}


def _all_trusted(found: list[AgentCaller], book: Mapping[bytes, TrustedMachine]) -> FoundAgents:
    trusted = [each for each in found if each.machine in book]
    left_out = [each for each in found if each.machine not in book]
    if not found:
        raise ConfigError("no agent was found: run `covey up` on the machines that should start programs")
    if not trusted:
        there = ", ".join(f"{each.name} ({id_text(each.machine)})" for each in left_out[:10])
        raise ConfigError(
            f"--on all means all machines that this one trusts, and none of them was found. There are: {there}. "
            f"Name those that you mean, as in --on {left_out[0].name}: the first time, you are asked"
        )
    return FoundAgents(trusted, [], left_out)


def _result(function: str) -> Any:
    """Return what decodes the result of a function of agents."""
    if function not in _decoders:
        described = getattr(AgentService, function, None) or getattr(DataService, function)
        _decoders[function] = Signature(described, function).result
    return _decoders[function]
