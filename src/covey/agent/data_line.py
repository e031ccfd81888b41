"""How machines give each other the content of data sets: calls of a service that can do nothing else.

A terminal gives to the agents to which the person sends. An agent gives to machines, and of data sets, that a terminal
has named which may start programs there (`Grants`): the machines that get the same data set, and need no right to start
anything.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from covey.agent.data_sets import Digest  # noqa: TC001 - calls read the annotations
from covey.agent.link_transport import LinkTransport
from covey.agent.requests import OUTPUT_CHUNK_BYTES, Chunk, Number
from covey.base.errors import AuthError, ConfigError, ConnectError
from covey.base.numbers import Seat
from covey.base.text import printable
from covey.runtime import loop as control
from covey.runtime.calls.handlers import current_caller
from covey.runtime.calls.service import CallService
from covey.wire.call_values import Signature
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from covey.agent.data_sets import DataManifest
    from covey.base.config import GroupConfig
    from covey.runtime.calls.transport import CallListener
    from covey.runtime.calls.work import CallWork
    from covey.runtime.links.link import Link
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire import messages

DATA_CALL_SECONDS: Final = 30.0
"""How long a machine may take to answer one call about a data set."""
HAS_EVERYTHING: Final = b""


class Holding(Protocol):
    """A data set that this machine has, whole or in part."""

    @property
    def manifest(self) -> DataManifest: ...

    def has(self) -> list[bool] | None:
        """Return which chunks are here: None for all."""

    def read(self, chunk: int, offset: int, size: int) -> bytes:
        """Return bytes of a chunk; ConfigError if it is not here, or cannot be read."""


class Grants:
    """Which machines may read which data sets, and which terminals have said so. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: dict[tuple[bytes, bytes], set[Seat]] = {}
        """By digest and machine: the terminals."""

    def give(self, seat: Seat, digest: bytes, machines: Iterable[bytes]) -> None:
        """Let machines read a data set as long as a terminal is linked."""
        with self._lock:
            for machine in machines:
                self._given.setdefault((digest, machine), set()).add(seat)

    def lost(self, seat: Seat) -> None:
        """Take back what a terminal has given, because it has gone."""
        with self._lock:
            for key, seats in list(self._given.items()):
                seats.discard(seat)
                if not seats:
                    del self._given[key]

    def allow(self, machine: bytes, digest: bytes | None = None) -> bool:
        """Tell whether a machine may read a data set, or any at all."""
        with self._lock:
            if digest is not None:
                return (digest, machine) in self._given
            return any(machine == each for _, each in self._given)


class DataLine:
    """Gives data sets to other machines, and takes them from others. On any thread, but for `heard`."""

    def __init__(
        self,
        find: Callable[[bytes], Holding | None],
        may_read: Callable[[bytes, bytes | None], bool],
        config: GroupConfig,
    ) -> None:
        """`find` returns a data set by its digest; `may_read` tells whether a machine may read one, or any."""
        self._find, self._may_read = find, may_read
        self._transport: LinkTransport
        self._open: dict[bytes, tuple[Link, Seat]] = {}
        """By node: the session in use. On the control loop."""
        self.calls = CallService(self._connect, config, "data")
        for function in (self.read_list, self.chunks_here, self.read_piece):
            self.calls.functions.register(function.__name__, function)

    def heard(self, remote: RemoteProcess, message: messages.AgentCall | messages.AgentRefusal) -> None:
        """Take a message; on the control loop."""
        self._transport.heard(remote, message)

    def source(self, remote: Callable[[], RemoteProcess | None], name: str) -> DataSource:
        """Return another machine to read from; `remote` returns its process on the control loop, None without a link.

        Raises:
            ConnectError: it is not linked.
        """

        async def connect() -> Seat:
            found = remote()
            if found is None:
                raise ConnectError(f"{name} is not linked")
            link, seat = self._open.get(found.card.id, (None, Seat(0)))
            if link is None or link is not found.link:
                seat = self._transport.connect(found)
                assert found.link is not None
                self._open[found.card.id] = found.link, seat
            return seat

        return DataSource(self.calls, control.run(connect(), control.LOOP_SECONDS), name)

    def close(self) -> None:
        """End all calls."""
        self.calls.close()

    # What other machines call

    def read_list(self, digest: Digest, offset: Number) -> Chunk:
        """Return a part of the encoded list of a data set."""
        return self._held(digest).manifest.encoded[offset : offset + OUTPUT_CHUNK_BYTES]

    def chunks_here(self, digest: Digest, offset: Number) -> Chunk:
        """Return a part of a bit for each chunk, whether it is here; nothing at all if all of them are."""
        here = self._held(digest).has()
        if here is None:
            return HAS_EVERYTHING
        return np.packbits(np.array(here, bool)).tobytes()[offset : offset + OUTPUT_CHUNK_BYTES]

    def read_piece(self, digest: Digest, chunk: Number, offset: Number) -> Chunk:
        """Return bytes of a chunk, from an offset on."""
        held = self._held(digest)
        if chunk >= held.manifest.chunks or offset >= held.manifest.spot(chunk).size:
            raise ConfigError("the data set has no such chunk")
        return held.read(chunk, offset, OUTPUT_CHUNK_BYTES)

    def _held(self, digest: bytes) -> Holding:
        caller = current_caller.get()
        assert caller is not None
        machine = machine_of(self._transport.card_of(Seat(caller.seat)))
        if not self._may_read(machine, digest) or (held := self._find(digest)) is None:
            raise ConfigError("this machine was not told to give this data set to yours")
        return held

    def _connect(self, listener: CallListener) -> LinkTransport:
        self._transport = LinkTransport(listener, self._objection, self._ended, is_data=True)
        return self._transport

    def _ended(self, seat: Seat) -> None:
        for node in [node for node, (_, other) in self._open.items() if other == seat]:
            del self._open[node]

    def _objection(self, card: messages.Card) -> str:
        try:
            machine = machine_of(card)
        except AuthError as error:
            return str(error)
        if self._may_read(machine, None):
            return ""
        return f"this machine was not told to give data sets to {printable(card.name, 60)}"


class DataSource:
    """Another machine, from which a data set is read."""

    def __init__(self, calls: CallService, seat: Seat, name: str) -> None:
        self._calls, self._seat, self.name = calls, seat, name
        self.received = 0
        """Bytes of chunks that came from it."""

    def list_bytes(self, digest: bytes, size: int) -> bytes:
        """Return the encoded list of a data set, which has so many bytes.

        Raises:
            CoveyError: the machine cannot be reached, or does not give it.
        """
        parts, have = list[bytes](), 0
        while have < size:
            part = self._begin("read_list", digest, have).wait_or_cancel()
            if not part or len(part) > size - have:
                raise ConfigError(f"{self.name} sent a list of files with another length than announced")
            parts.append(part)
            have += len(part)
        return b"".join(parts)

    def chunks_there(self, digest: bytes, count: int) -> np.ndarray:
        """Return, by chunk, whether the other machine has it; CoveyError if it does not tell."""
        size, bits = (count + 7) // 8, b""
        while len(bits) < size:
            part = self._begin("chunks_here", digest, len(bits)).wait_or_cancel()
            if not part and not bits:
                return np.ones(count, bool)
            if not part or len(part) > size - len(bits):
                return np.ones(count, bool)  # it has got the rest meanwhile
            bits += part
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool)

    def begin_piece(self, digest: bytes, chunk: int, offset: int) -> CallWork[bytes]:
        """Ask for bytes of a chunk."""
        return self._begin("read_piece", digest, chunk, offset)

    def _begin(self, function: str, *args: Any) -> CallWork[Any]:
        return self._calls.call_async(
            self._seat, function, args, {}, rank=0, timeout=DATA_CALL_SECONDS, decoder=_DECODERS[function]
        )


def _decoders(functions: Sequence[Callable[..., Any]]) -> dict[str, Any]:
    return {each.__name__: Signature(each, each.__name__).result for each in functions}


_DECODERS: Final = _decoders((DataLine.read_list, DataLine.chunks_here, DataLine.read_piece))
