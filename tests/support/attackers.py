"""What attackers use: real nodes as victims, and sockets that say whatever an attacker likes."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import struct
import threading
import time
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.waiting import DEADLINE

from covey.base.config import GroupConfig
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import NodeIdentity
from covey.net.keys.tls import Credentials
from covey.runtime import loop as control
from covey.runtime.environment import ClusterOptions, WantedRun
from covey.runtime.joining.cluster_join import join_run
from covey.runtime.joining.joiner import Joiner
from covey.runtime.joining.request import JoinTarget
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.runtime.peers.peer_table import Routes
from covey.testing.proxy import Proxy
from covey.wire import decoding, door, messages
from covey.wire.formation import Terms
from covey.wire.secret import ClusterSecret
from covey.wire.versions import OURS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Iterator

    from covey.runtime.group.group import Group
    from covey.runtime.peers.cluster_mesh import ClusterMesh
    from covey.runtime.peers.endpoint import Endpoint

T = TypeVar("T")
Args = TypeVarTuple("Args")
LOOPBACK = GroupConfig(interfaces="lo", lanes="secure", timeout=DEADLINE)
BROKEN = (OSError, EOFError)
"""How a connection ends under an attacker's hands; TLS alerts are OSErrors, too."""


def new_cluster(name: str = "prey", **options: Any) -> Cluster:
    return Cluster(ClusterSecret(name, secrets.token_bytes(32)), **options)


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine where nodes live, and return what it returns."""
    return control.start(work).result(DEADLINE)


def call_on_loop(function: Callable[..., T], *args: Any) -> T:
    async def call() -> T:
        return function(*args)

    return on_loop(call())


def until(condition: Callable[[*Args], Any], *args: *Args, within: float = DEADLINE - 1) -> None:
    """Return when `condition(*args)` holds on the control loop; TimeoutError if it does not in time."""
    deadline = time.monotonic() + within
    while not call_on_loop(condition, *args):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


class Victim:
    """A node of a cluster, in this process, that waits for others to come."""

    def __init__(self, cluster: Cluster, endpoint: Endpoint, node: ClusterMesh, address: tuple[str, int]) -> None:
        self.cluster, self.endpoint, self.node, self.address = cluster, endpoint, node, address

    @property
    def joiner(self) -> Any:
        return self.node.listener

    @property
    def acceptor(self) -> Any:
        return self.endpoint.acceptor


@contextlib.contextmanager
def victim(
    cluster: Cluster, identity: NodeIdentity | None = None, run: str = "run", terms: Terms | None = None
) -> Iterator[Victim]:
    """A node that joins a run, listens and searches on loopback; by default for at least two nodes."""
    identity = identity or NodeIdentity.ephemeral()
    endpoint = cluster_endpoint(cluster, LOOPBACK, run=run, ports=(0,), identity=identity)
    try:
        terms = terms or Terms(run, "program", None, 2, None, f"{messages.VERSION}", "secure")
        node = call_on_loop(Joiner, cluster, LOOPBACK, endpoint, terms).mesh
        try:
            on_loop(node.open())
            yield Victim(cluster, endpoint, node, ("127.0.0.1", endpoint.card.contact.addresses[0].port))
        finally:
            on_loop(node.close())
    finally:
        endpoint.on_close()


# Connections of an attacker's own


def dial_door(
    address: tuple[str, int],
    key: bytes,
    purpose: int = door.Purpose.LINK,
    source: str = "127.0.0.1",
    first: bytes = b"",
    token: bytes = b"",
) -> socket.socket:
    """Pass the door with its key, for any purpose; the connection is bound to `first`, which follows, or to `token`."""
    sock = socket.create_connection(address, timeout=DEADLINE, source_address=(source, 0))
    try:
        challenge = read(sock, door.CHALLENGE_BYTES)
        bound = door.bind(first or token or secrets.token_bytes(16))
        sock.sendall(door.answer(key, challenge, typing.cast("door.Purpose", purpose), bound) + first)
    except BaseException:
        sock.close()
        raise
    return sock


class Tls:
    """TLS on a socket, as a dialler; its ClientHello is there before the socket is. Two threads may use it."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._arrived, self._leaving)
        self._lock = threading.Lock()
        """Held while records are made and sent: one thread may speak while another one listens."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._session.do_handshake()
        self.hello = self._leaving.read()
        self._sock: socket.socket | None = None

    def shake_hands(self, sock: socket.socket) -> Tls:
        """Go on from where the ClientHello was sent on `sock`, which it owns from then on."""
        self._sock = sock
        self._until_done(self._session.do_handshake)
        return self

    def _until_done(self, step: Callable[[], T]) -> T:
        assert self._sock is not None
        while True:
            with self._lock, contextlib.suppress(ssl.SSLWantReadError):
                try:
                    return step()
                finally:
                    self._send()
            data = self._sock.recv(1 << 16)
            if not data:
                raise EOFError("the other side has ended the connection")
            with self._lock:
                self._arrived.write(data)

    def _send(self) -> None:
        assert self._sock is not None
        if data := self._leaving.read():
            self._sock.sendall(data)

    def sendall(self, data: bytes) -> None:
        with self._lock:
            self._session.write(data)
            self._send()

    def recv(self, count: int) -> bytes:
        try:
            return self._until_done(lambda: self._session.read(count))
        except (EOFError, ssl.SSLZeroReturnError):
            return b""

    def settimeout(self, seconds: float) -> None:
        assert self._sock is not None
        self._sock.settimeout(seconds)

    def getpeercert(self) -> bytes | None:
        """Return the certificate of the other side, if it has shown one."""
        try:
            return self._session.getpeercert(binary_form=True)
        except ValueError:  # the handshake has not come so far
            return None

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def __enter__(self) -> Tls:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def dial_tls(address: tuple[str, int], key: bytes, context: ssl.SSLContext) -> Tls:
    """Pass the door with its key, and finish a TLS handshake behind it."""
    end = Tls(context)
    sock = dial_door(address, key, first=end.hello)
    try:
        return end.shake_hands(sock)
    except BaseException:
        sock.close()
        raise


class Wire(Protocol):
    def recv(self, count: int, /) -> bytes: ...


def read(sock: Wire, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError(f"{len(data)} of {count} bytes came")
        data += piece
    return data


def hear(sock: Wire) -> bytes:
    """Return the next frame."""
    (length,) = struct.unpack("<I", read(sock, 4))
    return read(sock, length)


def is_hung_up(sock: Wire) -> bool:
    """Wait until the other side ends the connection; False if it says something instead."""
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def dialling_context(seed: bytes, private: Ed25519PrivateKey | None = None) -> ssl.SSLContext:
    """Return what an attacker dials with: a certificate by the authority of `seed`, and no questions asked."""
    context = Credentials(seed, private or Ed25519PrivateKey.generate()).dialling
    context.verify_mode = ssl.CERT_NONE
    return context


class Insider:
    """A process that holds a cluster's secret, and a link on which it may say what it wants."""

    def __init__(
        self,
        prey: Victim,
        identity: NodeIdentity | None = None,
        *,
        purpose: str = "candidate",
        hello: dict[str, Any] | None = None,
        card: dict[str, Any] | None = None,
    ) -> None:
        self.identity = identity or NodeIdentity.ephemeral()
        secret = prey.cluster.secret
        self.card = card_of(self.identity, **(card or {}))
        context = dialling_context(secret.derive("node-ca"), self.identity.private)
        self.link = dial_tls(prey.address, secret.derive("door"), context)
        try:
            values: dict[str, Any] = {
                "version": messages.VERSION, "nonce": secrets.token_bytes(32), "purpose": purpose, "run": "run",
                "rank": -1, "size": 0, "lanes": "secure", "card": self.card, "versions": OURS,
            }  # fmt: skip
            self.say(messages.Hello(**(values | (hello or {}))))
            self.greeting = messages.decode_handshake(hear(self.link))
        except BaseException:
            self.link.close()
            raise

    def say(self, message: Any) -> None:
        self.link.sendall(decoding.frame(messages.encode(message)))

    def hear(self, kind: type[T]) -> T:
        """Return the next message of a kind, whatever comes before it."""
        while True:
            message = messages.decode_control(hear(self.link))
            if isinstance(message, kind):
                return message

    def ping(self) -> None:
        """Return once everything said so far was heard."""
        number = secrets.randbits(32)
        self.say(messages.Ping(number))
        while self.hear(messages.Pong).number != number:
            pass

    def __enter__(self) -> Insider:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()


def card_of(identity: NodeIdentity, **changes: Any) -> messages.Card:
    contact = messages.Contact("elsewhere", (messages.Address("127.0.0.1", 9, "lo"),), "")
    card = messages.Card(identity.id, identity.life, identity.name, "host", os.getpid(), contact)
    return msgspec.structs.replace(card, **changes)


def welcomes_members(prey: Victim) -> bool:
    """Tell whether a node still accepts nodes that may come."""
    with Insider(prey, purpose="visitor") as visitor:
        visitor.ping()
        return isinstance(visitor.greeting, messages.Welcome)


# Nonsense


def nonsense(kind: Any, rng: random.Random) -> Any:
    """Return a value of a type that a decoder accepts and no node would send; addresses stay on loopback."""
    if kind is messages.Address:
        ip = rng.choice([f"127.{rng.randrange(256)}.0.1", "::1", "nowhere", "", "127.0.0.1%lo", "\0"])
        return messages.Address(ip, rng.choice([0, 1, 9, 65535, 65536, -1, 2**63 - 1]), _bounded(_text(rng), rng))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        while True:  # until a decoder would accept it
            with contextlib.suppress(ValueError):
                return kind(**{name: nonsense(hints[name], rng) for name in kind.__struct_fields__})
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _bounded(nonsense(args[0], rng), rng)
    if origin is tuple:
        return tuple(nonsense(args[0], rng) for _ in range(rng.choice([0, 1, 3, 40])))
    if origin in (typing.Union, types.UnionType):
        return nonsense(rng.choice(args), rng)
    makers: dict[Any, Callable[[], Any]] = {
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.choice([0, 1, -1, 2, 7, rng.getrandbits(31), 2**63 - 1, -(2**63), 2**64 - 1]),
        float: lambda: rng.choice([0.0, -1.0, 1e308, float("inf"), float("nan")]),
        bytes: lambda: rng.randbytes(rng.choice([0, 1, 16, 32, 1000])),
        str: lambda: _text(rng),
        type(None): lambda: None,
    }
    return makers[getattr(kind, "__supertype__", kind)]()  # of a `NewType`, the type below it


def _bounded(value: Any, rng: random.Random) -> Any:
    """Return `value` mostly within the bounds that decoders have: what is beyond them gets its sender cut off."""
    if rng.random() < 0.05:
        return value
    if isinstance(value, int):
        return abs(value) % (1 << 31)
    if isinstance(value, float):
        return abs(value) if 0 < abs(value) < 1e6 else rng.uniform(0.1, 100.0)
    if isinstance(value, str):
        return "".join(letter for letter in value if " " <= letter <= "~")[:45]
    return value[:16]


def _text(rng: random.Random) -> str:
    return rng.choice(["", "collectives", "messages", "secure", "shm", "x" * 5000, "\n\x1b[2J", "\U0001f600", "../.."])


# Runs of which an attacker holds the wire


def run_nodes(
    cluster: Cluster, function: Callable[[Group], T], *, size: int = 2, config: GroupConfig = LOOPBACK
) -> list[T]:
    """Let `size` nodes of a cluster, threads of this process, join a run; return what they return, by rank."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    wanted = WantedRun("run", "program", size, size, size, DEADLINE)
    options = ClusterOptions(cluster.name, cluster.secret.key)

    def main() -> None:
        try:
            with join_run(JoinTarget(config=config, run=wanted, options=options, wait=DEADLINE)) as group:
                results[group.rank] = function(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, daemon=True) for _ in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * DEADLINE)
    assert not any(thread.is_alive() for thread in threads), "a node hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class Detour:
    """Sends every sealed lane that is opened through a proxy, which `prepare` may have altered."""

    def __init__(self) -> None:
        self.proxies: list[Proxy] = []
        self.prepare: Callable[[Proxy], None] = lambda _proxy: None
        self._current: Proxy | None = None
        self._routes_to = Routes.to

    def fresh(self, prepare: Callable[[Proxy], None] = lambda _proxy: None) -> None:
        """Use a new proxy from the next lane on."""
        self._current, self.prepare = None, prepare

    @property
    def proxy(self) -> Proxy:
        assert self._current is not None
        return self._current

    def to(self, routes: Routes, peer: Any, kind: str = "") -> Any:
        ways = self._routes_to(routes, peer, kind)
        if kind != "secure":
            return ways
        if self._current is None:
            self._current = Proxy(("127.0.0.1", int(ways[0][1])))
            self.proxies.append(self._current)
            self.prepare(self._current)
        return [self._current.address]

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()


def resident_bytes(pid: int | str = "self") -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
