"""The TLS of a coordinator or a gateway: proves the identity of each caller with TLS, and passes its bytes on to gRPC.

With certificates that may change, gRPC's own TLS ends the process under bursts of handshakes, and it does not tell
which callers it refused, or why. So the gRPC server listens at a unix socket that only
this process reaches, without TLS, and one connection there stands for one caller here. gRPC names the caller of a call
by the name of its socket, and `TlsFront.certificate` returns the certificate for that name. Names are never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import ssl
import sys
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.coordinator import tls
from covey.coordinator.refusal import MAX_CONNECTIONS, MAX_HANDSHAKES, Reason, RefusalError
from covey.net.host.descriptors import explain, raise_limit
from covey.net.host.folders import temporary_folder, writing_to
from covey.runtime.backoff import LimitedLog
from covey.runtime.links.sockets import accept_shortage, accepted, no_delay, spell
from covey.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.keys.organisation import KeyAndCertificates

COORDINATOR_BACKLOG: Final = 1024
"""Connections that the kernel keeps until they are accepted: all workers of a run may come at once."""
HANDSHAKES_BEGUN_AT_ONCE: Final = 64
TLS_FRONT_SECONDS: Final = 5.0
DESCRIPTORS: Final = 3
"""Descriptors of each connection: the caller's, and both ends of the one to gRPC."""
COORDINATOR_DESCRIPTORS: Final = 64
"""For the state, the listeners, and gRPC itself."""


class TlsFront:
    """Where callers connect to. On the loop of its service; `open` it after gRPC listens, and `close` it."""

    def __init__(
        self,
        papers: Callable[[], KeyAndCertificates],
        owner: str = "the coordinator",
        most: int = MAX_CONNECTIONS,
        *,
        each: int = MAX_CONNECTIONS,
    ) -> None:
        """`papers` returns the key and certificates of now; it is called for each connection.

        `owner` is what the log calls the service. `most` connections may be open, and `each` with one certificate.

        Raises:
            ConfigError: they cannot be used, or there is no folder for a socket.
        """
        self._papers, self._read = papers, papers()
        self._context = tls.accepting(self._read)
        self._inner = _InnerSocket()
        self._most = min(most, max(1, (raise_limit() - COORDINATOR_DESCRIPTORS) // DESCRIPTORS))
        self._each = each
        self._open: Counter[bytes] = Counter()
        """By certificate: its connections."""
        self._listeners: list[socket.socket] = []
        self._tasks = Tasks(owner)
        self._connections = 0
        self._unproven: dict[asyncio.Task[None], None] = {}
        """The tasks of connections in their handshakes, the oldest first."""
        self._certificates: dict[str, bytes] = {}
        """Certificates of callers, by the name that gRPC has for their connection."""
        self._log = LimitedLog(1.0)
        self._shortage = accept_shortage(owner)

    @property
    def inner(self) -> str:
        """Where gRPC must listen, as gRPC writes addresses."""
        return self._inner.address

    def open(self, host: str, port: int) -> int:
        """Begin to accept; return the port. gRPC listens at `inner` already.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._inner.hide()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                # With port 0, all addresses of a name get the port of the first.
                self._listeners.append(_listener(family, (address[0], port, *address[2:])))
                port = self._listeners[0].getsockname()[1]
        except OSError as error:
            raise ConfigError(f"cannot listen at {spell((host, port))}: {explain(error)}") from error
        for listener in self._listeners:
            self._listen(listener)
        return port

    def certificate(self, peer: str) -> bytes:
        """Return the certificate (PEM) of the caller that gRPC knows by this name; RefusalError if there is none."""
        try:
            return self._certificates[peer]
        except KeyError:
            raise RefusalError(Reason.UNPROVEN, "the caller has not proved its identity") from None

    def stop_accepting(self) -> None:
        """Accept no more connections; those that are open stay."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._listeners.clear()

    async def close(self) -> None:
        """Close all connections. A second call does nothing."""
        self.stop_accepting()
        await self._tasks.close()
        self._inner.close()

    # Connections

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for sock in accepted(listener, HANDSHAKES_BEGUN_AT_ONCE, self._listen, self._shortage):
            if self._connections - len(self._unproven) >= self._most:
                self._log.log(logging.WARNING, "a caller was turned away: there are %d connections", self._most)
                sock.close()
                continue
            if len(self._unproven) >= min(MAX_HANDSHAKES, self._most):
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            sock.setblocking(False)
            no_delay(sock)
            self._connections += 1
            self._unproven[self._tasks.spawn(self._attend(sock))] = None

    async def _attend(self, sock: socket.socket) -> None:
        """Serve one connection to its end."""
        task = asyncio.current_task()
        assert task is not None
        try:
            with contextlib.suppress(OSError):  # it ended, or took too long
                caller = tls.TlsConnection(sock, self._current())
                certificate = await self._shake(caller, spell(sock.getpeername()[:2]))
                self._unproven.pop(task, None)
                if self._open[certificate] >= self._each:
                    self._log.log(logging.WARNING, "a caller with %d connections was turned away", self._each)
                    return
                await self._pass_on(caller, certificate)
        finally:
            self._unproven.pop(task, None)
            self._connections -= 1
            sock.close()

    async def _shake(self, caller: tls.TlsConnection, where: str) -> bytes:
        """Return the certificate of a caller that has proved itself; OSError if it has not."""
        try:
            async with asyncio.timeout(TLS_FRONT_SECONDS):
                return await caller.shake()
        except ssl.SSLEOFError:  # it only tried whether the port is open
            raise
        except ssl.SSLError as error:
            self._log.log(logging.WARNING, "refused a connection from %s: %s", where, tls.in_words(error))
            raise

    def _current(self) -> ssl.SSLContext:
        """Return what the next handshake uses: what the files or the secret say now, if that can be used."""
        papers = self._papers()
        if papers != self._read:
            self._read = papers
            try:
                self._context = tls.accepting(papers)
            except ConfigError as error:
                self._log.log(logging.WARNING, "the certificates were not changed: %s", error)
        return self._context

    async def _pass_on(self, caller: tls.TlsConnection, certificate: bytes) -> None:
        """Carry bytes between a caller and gRPC until one of them ends the connection."""
        inner, name = self._inner.connected()
        self._certificates[name] = ssl.DER_cert_to_PEM_cert(certificate).encode()
        self._open[certificate] += 1
        pumps = [asyncio.create_task(pump(caller, inner)) for pump in (_bring, _take)]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            del self._certificates[name]
            self._open[certificate] -= 1
            if not self._open[certificate]:
                del self._open[certificate]
            inner.close()
            caller.farewell()


async def _bring(caller: tls.TlsConnection, inner: socket.socket) -> None:
    """Carry what a caller sends to gRPC."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while piece := await caller.read():
            async with asyncio.timeout(tls.STALLED_SECONDS):
                await loop.sock_sendall(inner, piece)


async def _take(caller: tls.TlsConnection, inner: socket.socket) -> None:
    """Carry what gRPC sends to a caller."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while piece := await loop.sock_recv(inner, tls.TLS_PIECE_BYTES):
            await caller.write(piece)


def _listener(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_every_address = address[0] == "::"
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_every_address))
        listener.bind(address)
        listener.listen(COORDINATOR_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class _InnerSocket:
    """The unix socket of the gRPC server, in a folder of its own that only this user can enter.

    On Linux the folder is removed as soon as gRPC listens, and a descriptor of the socket leads there from then on: no
    other user can connect, and a coordinator that is killed leaves nothing behind.
    """

    def __init__(self) -> None:
        with writing_to(where := temporary_folder()):
            self._folder = tempfile.mkdtemp(prefix="covey-", dir=where)  # mode 0700
        self._path = os.path.join(self._folder, "s")
        self._descriptor = -1
        self._token, self._number = secrets.token_hex(16), 0
        self.address = f"unix:{self._path}"

    def hide(self) -> None:
        if sys.platform == "linux":
            self._descriptor = os.open(self._path, os.O_PATH | os.O_CLOEXEC)
            shutil.rmtree(self._folder, ignore_errors=True)

    def connected(self) -> tuple[socket.socket, str]:
        """Return a connection to gRPC, and the name by which gRPC knows it."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._number += 1
        try:
            if self._descriptor >= 0:
                name = f"covey-{self._token}-{self._number}"
                sock.bind(f"\0{name}")
                sock.connect(f"/proc/self/fd/{self._descriptor}")
                found = f"unix-abstract:{name}"
            else:
                path = os.path.join(self._folder, str(self._number))
                sock.bind(path)
                sock.connect(self._path)
                os.unlink(path)
                found = f"unix:{path}"
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock, found

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        shutil.rmtree(self._folder, ignore_errors=True)
