"""`Node`, the public face of this process in its run: what it knows of the members, and calls between nodes.

A node belongs to a group, whose ranks name the other nodes. The groups of one process share their registered functions
and exported objects, also from generation to generation.
"""

from __future__ import annotations

import atexit
import functools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar, overload

from covey.base.errors import ConfigError
from covey.base.numbers import REALTIME
from covey.base.setting_kinds import check_priority
from covey.runtime import checks
from covey.runtime.calls.handlers import Caller, current_caller
from covey.runtime.events import EVENT_KINDS, check_kinds, follow
from covey.runtime.group import members as known_members
from covey.runtime.group.store import RunStore
from covey.wire.call_values import ANY_VALUE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable

    from covey.base.numbers import Priority, Rank
    from covey.runtime.calls.objects import Handle
    from covey.runtime.calls.service import CallService
    from covey.runtime.calls.work import CallStream, CallWork
    from covey.runtime.events import Event
    from covey.runtime.group.members import DescribedEngine, Member, MemberHealth, PeerLink
    from covey.runtime.group.topology import Topology
    from covey.runtime.state.store import Stores
    from covey.wire.call_values import ValueDecoder

    Peer = int | str | bytes
    """A node: its rank in the group, its name, or its id."""

F = TypeVar("F", bound="Callable[..., Any]")
P = ParamSpec("P")
T = TypeVar("T")


class Election(NamedTuple):
    """What a node knows of the members' agreement on views (`Node.election`)."""

    state: Literal["leading", "following", "electing", "excluded"]
    """`electing`: a ballot about the next view holds up operations. `excluded`: others continue without this node."""
    leader: int | None
    """The rank that leads, or leads next; None if it is not in this group, or not heard at present."""
    generation: int
    view: int
    """The term: each view has one leader, and each generation begins with view 0."""


class Node:
    """This process in its run: functions that other nodes may call, and calls to theirs. See `group.node`.

    Other nodes are named by their rank in the group, their name, or their id. Nothing can be called until it is
    registered. Arguments and results are what msgspec encodes (numbers, text, bytes, containers, dataclasses, dates),
    numpy arrays, torch CPU tensors and handles. The annotations of the function that is called say what its arguments
    become, and wrong ones are refused; nothing is pickled. Arrays that are sent must not change until the call is over.
    Methods may be called on any thread; a blocking one must not be called on an event loop.

    Calls may raise:
        RemoteCallError: the function raised.
        CallRefusedError: there is no such function, its arguments do not fit, or something is too large to be sent.
        DeadlineError: there was no result within `timeout` seconds (default: the group's timeout).
        CallCancelledError: the call was cancelled.
        PeerLostError: the node was lost, or has left.
        ClosedError: this node or the called one leaves the run.
        TypeError: an argument cannot be sent.
    """

    def __init__(self, engine: DescribedEngine, service: CallService, stores: Stores | None) -> None:
        self._engine, self._service, self._stores = engine, service, stores

    def __repr__(self) -> str:
        return f"<Node of rank {self._engine.roster.rank} of {self._engine.roster.size} in {self._engine.facts.name!r}>"

    # The members

    @property
    def id(self) -> str:
        """The public key of this node, in hexadecimal; empty in a run that uses a launcher's token."""
        return self.members[self._engine.roster.rank].id

    @property
    def name(self) -> str:
        """The name of this node."""
        return self.members[self._engine.roster.rank].name

    @property
    def leader(self) -> int | None:
        """The rank that leads when members agree on views, from the moment when the view begins.

        None if it is not in this group, or not heard at present.
        """
        generation = self._engine.generation
        leads = None if generation is None else generation.view_driver.expected_leader()
        if generation is None or leads is None:
            return None
        return self._engine.roster.rank_of.get(generation.seats[leads])

    @property
    def election(self) -> Election:
        """What this node knows of the members' agreement on views; nothing is sent."""
        generation = self._engine.generation
        if generation is None:
            return Election("leading", self._engine.roster.rank, 0, 0)
        views, leader = generation.view_driver, self.leader
        term = generation.number, views.view.number
        if not views.is_member:
            return Election("excluded", leader, *term)
        if views.is_electing:
            return Election("electing", leader, *term)
        leads = views.leader() == generation.rank
        return Election("leading" if leads else "following", leader, *term)

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the group by rank, lost ones included: names, machines and what these have."""
        return known_members.members(self._engine)

    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Return the live ranks of each machine, by its name, in the order of their first ranks."""
        return known_members.hosts(self._engine)

    def links(self) -> tuple[PeerLink, ...]:
        """Return how this node reaches the other live members: lane, interface, round trip, speed."""
        return known_members.links(self._engine)

    def topology(self) -> Topology:
        """Return the network between the live members as a graph: machines, sites, links with their speeds.

        The speeds are those that all ranks have measured together, or what this node has seen itself before that.
        """
        from covey.runtime.group.topology import topology  # most programs do not ask

        return topology(self._engine)

    def health(self) -> tuple[MemberHealth, ...]:
        """Return the state of each member by rank, as this node knows it: since when, and why."""
        return known_members.health(self._engine)

    def on_event(self, listener: Callable[[Event], None], kinds: Collection[str] = EVENT_KINDS) -> None:
        """Call `listener(event)` for every event of these kinds from now on, on a thread of covey's."""
        check_kinds(kinds)
        if self._engine.roster.node is not None:
            self._engine.roster.node.events.listen(listener, frozenset(kinds))

    async def events(self, kinds: Collection[str] = EVENT_KINDS) -> AsyncIterator[Event]:
        """Yield the last events of these kinds, and then new ones as they come, until the run is over here.

        A reader that falls behind by more than a thousand events misses the oldest ones.
        """
        check_kinds(kinds)
        if self._engine.roster.node is not None:
            async for event in follow(self._engine.roster.node.events, frozenset(kinds)):
                yield event

    def add_check(self, name: str, function: Callable[[], Any]) -> None:
        """Let this process be ready only while a function says so: it returns None or True, or the reason why not.

        Also False and an exception mean that the process is not ready. The checks are those of the whole process, and
        are run when `/readyz` is asked for (`covey.serve_http`, `covey run --http`), each on a thread of its own; one
        that takes more than two seconds has failed. A check of the same name is replaced.

        Raises:
            ConfigError: the name cannot be used, or there are 32 checks already.
        """
        checks.add(name, function)

    def remove_check(self, name: str) -> None:
        """Take a check away; one that does not exist is fine."""
        checks.remove(name)

    @functools.cached_property
    def store(self) -> RunStore:
        """The key-value store of the run."""
        config, stores = self._engine.facts.config, self._stores
        if stores is None:
            from covey.net.host.store_file import StoreFile
            from covey.runtime.state.store import Stores

            file = StoreFile(config.store_file) if config.store_file else None
            stores = Stores(bytes_limit=config.store_bytes, file=file)
            if file is not None:
                atexit.register(stores.keep)
        return RunStore(stores, config.timeout)

    # Functions of this node

    def register(self, name: str, function: Callable[..., Any]) -> None:
        """Let other nodes call `function`: a plain or an asynchronous one, or a generator of either kind for `stream`.

        Plain functions run on threads, asynchronous ones on an event loop of covey's own; up to 64 run at a time.

        Raises:
            ConfigError: the name is taken, or the annotations cannot be used.
        """
        self._service.functions.register(name, function)

    def unregister(self, name: str) -> None:
        """Let other nodes no longer call the function of this name; calls that have begun go on."""
        self._service.functions.unregister(name)

    @overload
    def rpc(self, function: F, /) -> F: ...

    @overload
    def rpc(self, function: str | None = None, /) -> Callable[[F], F]: ...

    def rpc(self, function: Any = None, /) -> Any:
        """Register a function under its own name, or under the given one: `@node.rpc`, or `@node.rpc("name")`."""
        if function is None or isinstance(function, str):

            def register(named: F) -> F:
                self.register(function or named.__name__, named)
                return named

            return register
        self.register(function.__name__, function)
        return function

    def export(self, value: Any) -> Handle:
        """Return a handle of an object, which can be sent to other nodes: they can call its public methods.

        The object is kept until this handle and all those that other nodes hold are dropped, or their nodes left.
        """
        return self._service.export(value)

    def caller(self) -> Caller:
        """Return the call that the running function serves: which rank called, and whether it still waits.

        Raises:
            ConfigError: the caller of this method is not a function that another node called.
        """
        caller = current_caller.get()
        if caller is None:
            raise ConfigError("node.caller() works inside of a function that another node has called")
        caller.rank = self._engine.roster.rank_of.get(caller.seat, -1)
        return caller

    # Functions of other nodes

    @overload
    def call(
        self, peer: Peer, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **named: P.kwargs
    ) -> T: ...

    @overload
    def call(self, peer: Peer, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T: ...

    @overload
    def call(  # type: ignore[overload-cannot-match]
        self,
        peer: Peer,
        function: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        timeout: float | None,
        **named: Any,
    ) -> T: ...

    @overload
    def call(self, peer: Peer, function: Callable[..., T], /, *args: Any, timeout: float | None, **named: Any) -> T: ...  # type: ignore[overload-cannot-match]

    @overload
    def call(  # type: ignore[overload-cannot-match]
        self,
        peer: Peer,
        function: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        priority: Priority,
        timeout: float | None = ...,
        **named: Any,
    ) -> T: ...

    @overload
    def call(  # type: ignore[overload-cannot-match]
        self,
        peer: Peer,
        function: Callable[..., T],
        /,
        *args: Any,
        priority: Priority,
        timeout: float | None = ...,
        **named: Any,
    ) -> T: ...

    @overload
    def call(
        self,
        peer: Peer,
        function: str,
        /,
        *args: Any,
        priority: Priority = ...,
        timeout: float | None = ...,
        **named: Any,
    ) -> Any: ...

    def call(  # type: ignore[misc]
        self,
        peer: Peer,
        function: str | Callable[..., Any],
        /,
        *args: Any,
        priority: Priority = "realtime",
        timeout: float | None = None,
        **named: Any,
    ) -> Any:
        """Call a function of another node and return its result.

        `function` is a name, or a function that is registered here under the same name as there. The result is decoded
        by the annotation of the function that is registered here under this name, if there is one. `priority` says what
        it goes before: large arguments and results of others on their way, and calls that wait for a handler there.
        """
        rank, name, decoder = self._target(peer, function)
        seat = self._engine.roster.seats[rank]
        urgency = REALTIME if priority == "realtime" else check_priority(priority)
        return self._service.call(
            seat, name, args, named, rank=rank, timeout=timeout, decoder=decoder, priority=urgency
        )

    @overload
    def call_async(
        self, peer: Peer, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **named: P.kwargs
    ) -> CallWork[T]: ...

    @overload
    def call_async(self, peer: Peer, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> CallWork[T]: ...

    @overload
    def call_async(  # type: ignore[overload-cannot-match]
        self,
        peer: Peer,
        function: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        timeout: float | None,
        **named: Any,
    ) -> CallWork[T]: ...

    @overload
    def call_async(  # type: ignore[overload-cannot-match]
        self, peer: Peer, function: Callable[..., T], /, *args: Any, timeout: float | None, **named: Any
    ) -> CallWork[T]: ...

    @overload
    def call_async(  # type: ignore[overload-cannot-match]
        self,
        peer: Peer,
        function: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        priority: Priority,
        timeout: float | None = ...,
        **named: Any,
    ) -> CallWork[T]: ...

    @overload
    def call_async(  # type: ignore[overload-cannot-match]
        self,
        peer: Peer,
        function: Callable[..., T],
        /,
        *args: Any,
        priority: Priority,
        timeout: float | None = ...,
        **named: Any,
    ) -> CallWork[T]: ...

    @overload
    def call_async(
        self,
        peer: Peer,
        function: str,
        /,
        *args: Any,
        priority: Priority = ...,
        timeout: float | None = ...,
        **named: Any,
    ) -> CallWork[Any]: ...

    def call_async(  # type: ignore[misc]
        self,
        peer: Peer,
        function: str | Callable[..., Any],
        /,
        *args: Any,
        priority: Priority = "realtime",
        timeout: float | None = None,
        **named: Any,
    ) -> CallWork[Any]:
        """Start a call; the work that it returns can be waited for, awaited and cancelled."""
        rank, name, decoder = self._target(peer, function)
        seat = self._engine.roster.seats[rank]
        return self._service.call_async(
            seat, name, args, named, rank=rank, timeout=timeout, decoder=decoder, priority=check_priority(priority)
        )

    @overload
    def stream(
        self, peer: Peer, function: Callable[P, AsyncIterator[T] | Iterable[T]], /, *args: P.args, **named: P.kwargs
    ) -> CallStream[T]: ...

    @overload
    def stream(  # type: ignore[overload-cannot-match]
        self,
        peer: Peer,
        function: Callable[..., AsyncIterator[T] | Iterable[T]],
        /,
        *args: Any,
        timeout: float | None,
        **named: Any,
    ) -> CallStream[T]: ...

    @overload
    def stream(  # type: ignore[overload-cannot-match]
        self,
        peer: Peer,
        function: Callable[..., AsyncIterator[T] | Iterable[T]],
        /,
        *args: Any,
        priority: Priority,
        timeout: float | None = ...,
        **named: Any,
    ) -> CallStream[T]: ...

    @overload
    def stream(
        self,
        peer: Peer,
        function: str,
        /,
        *args: Any,
        priority: Priority = ...,
        timeout: float | None = ...,
        **named: Any,
    ) -> CallStream[Any]: ...

    def stream(  # type: ignore[misc]
        self,
        peer: Peer,
        function: str | Callable[..., Any],
        /,
        *args: Any,
        priority: Priority = "realtime",
        timeout: float | None = None,
        **named: Any,
    ) -> CallStream[Any]:
        """Call a generator of another node; iterate over the result with `for` or `async for`.

        The generator runs a few items ahead of the reader. `timeout` is for the whole stream.
        """
        rank, name, decoder = self._target(peer, function)
        seat = self._engine.roster.seats[rank]
        return self._service.stream(
            seat, name, args, named, rank=rank, timeout=timeout, decoder=decoder, priority=check_priority(priority)
        )

    @overload
    def broadcast_call(
        self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **named: P.kwargs
    ) -> dict[int, T]: ...

    @overload
    def broadcast_call(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> dict[int, T]: ...

    @overload
    def broadcast_call(
        self, function: str | Callable[..., Any], /, *args: Any, peers: Iterable[Peer] | None, **named: Any
    ) -> dict[int, Any]: ...

    @overload
    def broadcast_call(
        self, function: str | Callable[..., Any], /, *args: Any, timeout: float | None, **named: Any
    ) -> dict[int, Any]: ...

    @overload
    def broadcast_call(
        self, function: str | Callable[..., Any], /, *args: Any, return_exceptions: bool, **named: Any
    ) -> dict[int, Any]: ...

    @overload
    def broadcast_call(self, function: str, /, *args: Any, **named: Any) -> dict[int, Any]: ...

    def broadcast_call(  # type: ignore[misc]
        self,
        function: str | Callable[..., Any],
        /,
        *args: Any,
        peers: Iterable[Peer] | None = None,
        timeout: float | None = None,
        return_exceptions: bool = False,
        **named: Any,
    ) -> dict[int, Any]:
        """Call a function of several nodes at the same time (default: all other ranks); return the results by rank.

        All calls end before this returns. With `return_exceptions` the errors are among the results; otherwise the one
        of the lowest rank is raised.
        """
        engine = self._engine
        chosen = set(engine.live) - {engine.roster.rank} if peers is None else set(map(self._rank, peers))
        works = {rank: self.call_async(rank, function, *args, timeout=timeout, **named) for rank in sorted(chosen)}
        results: dict[int, Any] = {}
        try:
            errors = {rank: work.exception() for rank, work in works.items()}
        except BaseException:  # Ctrl-C
            for work in works.values():
                work.cancel()
            raise
        for rank, error in errors.items():
            if error is not None and not return_exceptions:
                raise error
            results[rank] = works[rank].wait() if error is None else error
        return results

    def proxy(self, peer: Peer, *, timeout: float | None = None) -> NodeProxy:
        """Return an object whose methods are the functions of another node: `node.proxy(1).add(2, 3)`."""
        return NodeProxy(self, peer, timeout)

    # Helpers

    def _target(self, peer: Peer, function: str | Callable[..., Any]) -> tuple[Rank, str, ValueDecoder]:
        """Return the rank of a node, the name of a function there, and what decodes its results."""
        functions = self._service.functions
        name = function if isinstance(function, str) else functions.name_of(function)
        here = functions.by_name.get(name)
        ranks = self._engine.roster.ranks
        rank = ranks[peer] if type(peer) is int and peer in ranks else self._rank(peer)
        return rank, name, ANY_VALUE if here is None else here.signature.result

    def _rank(self, peer: Peer) -> Rank:
        """Return the rank of a node; ConfigError if there is none, or several."""
        engine = self._engine
        if isinstance(peer, int) and not isinstance(peer, bool):
            if peer not in engine.roster.ranks:
                raise ConfigError(f"there is no rank {peer} in a group of {engine.roster.size}")
            return engine.roster.ranks[peer]
        cards = {} if engine.roster.node is None else {rank: engine.roster.card(rank) for rank in engine.roster.ranks}
        found = [rank for rank, card in cards.items() if peer in (card.name, card.id)]
        if len(found) != 1 or not peer:
            what = "several nodes are" if found and peer else "no node is"
            raise ConfigError(f"{what} named {peer!r} in this group; use the rank of one")
        return found[0]


class NodeProxy:
    """The functions of another node as methods."""

    def __init__(self, node: Node, peer: Peer, timeout: float | None) -> None:
        self._node, self._peer, self._timeout = node, peer, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **named: self._node.call(self._peer, name, *args, timeout=self._timeout, **named)

    def __repr__(self) -> str:
        return f"<Proxy of {self._peer!r}>"
