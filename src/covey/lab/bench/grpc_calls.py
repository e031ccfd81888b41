"""The same small calls with grpc.aio, in the processes that covey's are measured in, plain and with TLS."""

from __future__ import annotations

import asyncio
import datetime
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Coroutine

_METHOD: Final = "/covey.Bench/add"
_NAME: Final = "localhost"


def grpc_aio() -> Any:
    """Return the module; ConfigError if it is not installed."""
    try:
        import grpc.aio
    except ImportError as error:
        raise ConfigError("grpc is not installed: pip install covey[grpc]") from error
    return grpc


class _LoopThread:
    """An asyncio loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench grpc", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


class GrpcServer:
    """Serves `add` on two ports of this host, one of them with TLS. Close it."""

    def __init__(self) -> None:
        self._loop = _LoopThread()
        self.certificate, self._key = _certificate()
        """What clients of the TLS port have to trust."""
        self._server, self.ports = self._loop.run(self._start())
        """The ports: plain, TLS."""

    async def _start(self) -> tuple[Any, tuple[int, int]]:
        grpc = grpc_aio()
        server = grpc.aio.server()

        async def add(request: tuple[int, int], _context: Any) -> int:
            return request[0] + request[1]

        handler = grpc.unary_unary_rpc_method_handler(
            add,
            request_deserializer=msgspec.msgpack.Decoder(tuple[int, int]).decode,
            response_serializer=msgspec.msgpack.encode,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("covey.Bench", {"add": handler}),))
        credentials = grpc.ssl_server_credentials([(self._key, self.certificate)])
        ports = server.add_insecure_port("127.0.0.1:0"), server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        return server, ports

    def close(self) -> None:
        self._loop.run(self._server.stop(None))
        self._loop.close()


class GrpcClient:
    """Calls `add` through one channel. Close it."""

    def __init__(self, port: int, certificate: bytes | None) -> None:
        """With a certificate, use TLS."""
        self._runner = asyncio.Runner()
        self._channel, self._add = self._runner.run(self._open(port, certificate))

    async def _open(self, port: int, certificate: bytes | None) -> tuple[Any, Any]:
        grpc, address = grpc_aio(), f"127.0.0.1:{port}"
        if certificate is None:
            channel = grpc.aio.insecure_channel(address)
        else:
            options = [("grpc.ssl_target_name_override", _NAME)]
            channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate), options=options)
        add = channel.unary_unary(
            _METHOD,
            request_serializer=msgspec.msgpack.encode,
            response_deserializer=msgspec.msgpack.Decoder(int).decode,
        )
        return channel, add

    def one_by_one(self, count: int) -> list[float]:
        """Return how long each of so many calls took, one after the other."""
        return self._runner.run(self._one_by_one(count))

    async def _one_by_one(self, count: int) -> list[float]:
        taken = []
        for number in range(count):
            began = time.perf_counter()
            result = await self._add((number, 1))
            taken.append(time.perf_counter() - began)
            _check(result, number)
        return taken

    def at_once(self, count: int, in_flight: int) -> None:
        """Make so many calls, a few of them at a time."""
        self._runner.run(self._at_once(count, in_flight))

    async def _at_once(self, count: int, in_flight: int) -> None:
        numbers = iter(range(count))

        async def take_turns() -> None:
            for number in numbers:
                _check(await self._add((number, 1)), number)

        await asyncio.gather(*(take_turns() for _ in range(in_flight)))

    def close(self) -> None:
        self._runner.run(self._channel.close())
        self._runner.close()


def _check(result: int, number: int) -> None:
    if result != number + 1:
        raise ArithmeticError(f"a call of grpc returned {result}, not {number + 1}")


def _certificate() -> tuple[bytes, bytes]:
    """Return a certificate for this benchmark and its key, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
