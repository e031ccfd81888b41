"""The gateway as a process: its socket, limits, standard services, and an orderly end.

At a unix socket in a folder that only its user can enter, the folder proves both ends; at any other address TLS does,
with certificates from PEM files. Without one of the two a gateway does not listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from covey.base.errors import ConfigError
from covey.coordinator.certificates import subject_of
from covey.coordinator.refusal import MAX_CALLS, Reason, RefusalError
from covey.coordinator.standard_services import add_standard_services
from covey.coordinator.tls_front import TlsFront
from covey.gateway.pieces import STREAM_MESSAGE_BYTES
from covey.gateway.service import GATEWAY_SERVICE, GatewayService
from covey.net.host.descriptors import explain
from covey.net.host.folders import temporary_folder, writing_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import TracebackType

    from covey.gateway.ranks import ProgramRanks
    from covey.gateway.service import Limits
    from covey.net.keys.organisation import PemFiles

UNIX: Final = "unix:"
MAX_PROGRAM_CONNECTIONS: Final = 256
CONNECTIONS_EACH: Final = 32
"""Most connections with one certificate."""
MAX_SOCKET_PATH: Final = 100
SERVER_START_SECONDS: Final = 60.0
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Parameters of glibc's mallopt."""
MAPPED_BYTES: Final = 4 << 20
"""Memory from this size on is mapped, and given back when it is freed: arrays are, and messages are not."""
HEAP_BYTES: Final = 64 << 20
"""Free memory at the end of the heap that is kept for messages."""
CALLS_END_SECONDS: Final = 2.0
"""How long calls that are being answered may take when the gateway stops."""
GATEWAY_OPTIONS: Final = (
    ("grpc.max_receive_message_length", STREAM_MESSAGE_BYTES),
    ("grpc.max_send_message_length", STREAM_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 1 << 13),
    ("grpc.max_concurrent_streams", 64),
    # A program that vanished without closing its connection is noticed after half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
)


@dataclass(frozen=True)
class Listening:
    """Where a gateway listens: at a unix socket, or at an address with certificates."""

    path: str = ""
    host: str = ""
    port: int = 0
    pem: PemFiles | None = None


async def serve(
    at: Listening, ranks: ProgramRanks, limits: Limits, stopping: asyncio.Event, on_start: Callable[[str], None]
) -> bool:
    """Run a gateway until `stopping` is set or its only program has ended; call `on_start(address)` when it listens.

    Returns whether no rank was lost with its program, if there can be only one.

    Raises:
        ConfigError: it cannot listen there.
    """
    async with _listening(at, ranks, limits) as (service, address):
        on_start(address)
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait((stop, service.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
    return not service.ended.done() or service.ended.result()


@contextlib.asynccontextmanager
async def _listening(at: Listening, ranks: ProgramRanks, limits: Limits) -> AsyncIterator[tuple[GatewayService, str]]:
    """Give a service that listens, and its address as gRPC's clients write it; end it in order."""
    front: TlsFront | None = None
    if at.path:
        service = GatewayService(ranks, lambda _: f"user {os.getuid()}", limits)
    else:
        if at.pem is None:
            raise ConfigError(
                f"programs reach {at.host}:{at.port} over a network, and covey sends nothing to an end that has not "
                "proved itself: give --tls-ca, --tls-cert and --tls-key, or listen at unix:PATH"
            )
        front = TlsFront(at.pem.read, "the gateway", MAX_PROGRAM_CONNECTIONS, each=CONNECTIONS_EACH)
        service = GatewayService(ranks, lambda peer: _subject(front.certificate(peer)), limits)
    _reuse_message_memory()
    server = grpc.aio.server(options=GATEWAY_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((service.handler(),))
    checks = await add_standard_services(server, GATEWAY_SERVICE)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_socket_at(at.path)) if at.path else ""
        server.add_insecure_port(front.inner if front is not None else address)
        await server.start()
        try:
            if front is not None:
                port = front.open(at.host, at.port)
                address = f"[{at.host}]:{port}" if ":" in at.host else f"{at.host}:{port}"
            yield service, address
            await checks.enter_graceful_shutdown()
        finally:
            if front is not None:
                front.stop_accepting()
            await service.close()
            await server.stop(CALLS_END_SECONDS)
            if front is not None:
                await front.close()


def _subject(certificate: bytes) -> str:
    """Return the identity of the holder of a certificate (PEM); RefusalError if it names none."""
    if subject := subject_of(certificate):
        return subject
    raise RefusalError(Reason.UNPROVEN, "the certificate of the caller has no subject; give it one")


@contextlib.contextmanager
def _socket_at(path: str) -> Iterator[str]:
    """Make sure that no other user can reach a socket at `path`; give its name for gRPC, and remove it at the end.

    Raises:
        ConfigError: others may enter its folder, the path is too long, or another process listens there.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{path} is too long for a unix socket; choose a path of up to {MAX_SOCKET_PATH} bytes")
    folder = Path(path).parent
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {explain(error)}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} must be a folder of yours that no other user can enter (mode 0700): a process that "
            "reaches the socket is taken for one of your programs"
        )
    _remove_stale(path)
    try:
        yield f"{UNIX}{path}"
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _remove_stale(path: str) -> None:
    """Remove the socket of a gateway that was killed; ConfigError if anything else is there."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ConfigError(f"{path} exists, and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise ConfigError(f"another process listens at {path}; choose another path, or end it")
    os.unlink(path)


def _reuse_message_memory() -> None:
    """Let glibc reuse the memory of messages: by default it may map and unmap each, which takes longer than a copy."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, HEAP_BYTES)


@contextlib.contextmanager
def private_socket() -> Iterator[str]:
    """Give the path for a socket in a new folder of this user, which is removed at the end."""
    with writing_to(where := temporary_folder()), tempfile.TemporaryDirectory(prefix="covey-", dir=where) as folder:
        yield os.path.join(folder, "gateway")


class BackgroundGateway:
    """A gateway on a thread of its own, while the main thread waits for its program. Use it in `with`."""

    def __init__(self, at: Listening, ranks: ProgramRanks, limits: Limits) -> None:
        self._run: Callable[[], Any] = lambda: asyncio.run(self._serve(at, ranks, limits))
        self._thread = threading.Thread(target=self._attend, name="covey-gateway", daemon=True)
        self._begun = threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._error: BaseException | None = None
        self.address = ""
        self.is_in_order = True
        """At the end: whether no rank was lost with its program."""

    def __enter__(self) -> Self:
        """Return once it listens; raise what `serve` raises."""
        self._thread.start()
        self._begun.wait(SERVER_START_SECONDS)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._thread.join(SERVER_START_SECONDS)

    def _attend(self) -> None:
        try:
            self.is_in_order = self._run()
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()

    async def _serve(self, at: Listening, ranks: ProgramRanks, limits: Limits) -> bool:
        """Serve until the main thread stops it: the only program may still read what it was told."""
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        async with _listening(at, ranks, limits) as (service, self.address):
            self._stop = lambda: loop.call_soon_threadsafe(stopping.set)
            self._begun.set()
            await stopping.wait()
        return not service.has_lost
