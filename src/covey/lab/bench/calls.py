"""`covey bench calls`: measures calls between two processes: their latency, their rate, and large payloads.

The same small calls are made with grpc.aio, in the same processes, plain and with TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import os
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from covey.base.errors import ConfigError
from covey.cli.layout import Column
from covey.cli.terminal import FittedTable
from covey.lab.bench.sweep import MEASURED_LANES, format_bytes
from covey.runtime.keeper.launch import launch

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from covey.runtime.group.group import Group
    from covey.runtime.work import Work

_METHOD: Final = "/covey.Bench/add"
_CALLED_HOST: Final = "localhost"
AGAINST: Final = ("grpc",)


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
            options = [("grpc.ssl_target_name_override", _CALLED_HOST)]
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
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _CALLED_HOST)])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_CALLED_HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private


@dataclass(frozen=True, kw_only=True)
class CallTrial:
    """What is measured; checked when built."""

    lanes: str = "secure"
    in_flight: int = 32
    nbytes: int = 64 << 20
    rounds: int = 5
    calls: int = 1000
    """Small calls of a round, one after the other; half as many are made beside payloads, and four times as many with
    others in flight."""
    against: tuple[str, ...] = ()
    """Libraries that make the same small calls."""

    def __post_init__(self) -> None:
        if self.lanes not in MEASURED_LANES:
            raise ConfigError(f"unknown lane {self.lanes!r}; choose from {', '.join(MEASURED_LANES)}")
        if unknown := set(self.against) - set(AGAINST):
            raise ConfigError(
                f"cannot compare calls with {', '.join(sorted(unknown))}; choose from {', '.join(AGAINST)}"
            )
        if "grpc" in self.against:
            grpc_aio()
        if min(self.in_flight, self.rounds, self.nbytes) < 1 or self.calls < 2:
            raise ConfigError("at least one call in flight, one round, two small calls and one byte are needed")


@dataclass(frozen=True)
class CallFigures:
    """What was measured; each list has one number for each round."""

    p50_us: list[float]
    p99_us: list[float]
    calls_per_second: list[float]
    call_bytes_per_second: list[float]
    """The rate of a payload as the argument of a call."""
    lane_bytes_per_second: list[float]
    """The rate of the same payload in a broadcast."""
    beside_p50_us: list[float]
    beside_p99_us: list[float]
    """Latency of small calls while calls with the payload are under way to the same node."""
    others: dict[str, dict[str, list[float]]]
    """Library → its `p50_us`, `p99_us` and `calls_per_second`."""

    @property
    def share_of_lane(self) -> float:
        """The speed of a payload in a call, by that of the lane in the same round; the median of all rounds."""
        pairs = zip(self.call_bytes_per_second, self.lane_bytes_per_second, strict=True)
        return statistics.median(call / lane for call, lane in pairs)


def measure(trial: CallTrial) -> CallFigures:
    """Measure calls from one process to another."""
    os.environ["COVEY_LANES"] = trial.lanes  # the ranks inherit it
    return CallFigures(**launch(_rank, 2, trial, timeout=120 + 30 * trial.rounds)[0])


def _rank(group: Group, trial: CallTrial) -> dict[str, Any]:
    figures: dict[str, list[float]] = {name: [] for name in CallFigures.__dataclass_fields__ if name != "others"}
    others: dict[str, dict[str, list[float]]] = {}
    payload = np.arange(trial.nbytes, dtype=np.uint8)
    node, at_once = group.node, 4 * trial.calls

    @node.rpc
    def add(a: int, b: int) -> int:
        return a + b

    @node.rpc
    def check(data: np.ndarray[Any, Any]) -> bool:
        return data.nbytes == trial.nbytes and bool((data[:: 1 << 16] == payload[:: 1 << 16]).all())

    with contextlib.ExitStack() as stack:
        rivals = _rivals(group, trial, stack)
        for turn in range(trial.rounds + 1):  # the first one warms up
            found = dict[str, float]()
            group.barrier()
            if group.rank == 0:
                found["p50_us"], found["p99_us"] = _percentiles(_one_by_one(group, trial.calls))
                found["calls_per_second"] = at_once / _timed(lambda: _call_at_once(group, at_once, trial.in_flight))
                took = _timed(lambda: _expect(node.call(1, "check", payload), True))
                found["call_bytes_per_second"] = trial.nbytes / took
                found["beside_p50_us"], found["beside_p99_us"] = _percentiles(
                    _beside_payloads(group, payload, trial.calls // 2)
                )
            group.barrier()
            found["lane_bytes_per_second"] = trial.nbytes / _timed(lambda: group.broadcast(payload, root=0))
            group.barrier()
            if group.rank == 0 and turn:
                for name, value in found.items():
                    figures[name].append(value)
            for name, client in rivals.items():
                p50, p99 = _percentiles(client.one_by_one(trial.calls))
                rate = at_once / _timed(functools.partial(client.at_once, at_once, trial.in_flight))
                if turn:
                    kept = others.setdefault(name, {"p50_us": [], "p99_us": [], "calls_per_second": []})
                    for figure, value in zip(kept.values(), (p50, p99, rate), strict=True):
                        figure.append(value)
        group.barrier()  # the server is needed until here
    return {**figures, "others": others}


def _rivals(group: Group, trial: CallTrial, stack: contextlib.ExitStack) -> dict[str, GrpcClient]:
    """Start the servers of other libraries on rank 1; return the clients on rank 0, by name."""
    if "grpc" not in trial.against:
        return {}
    if group.rank == 1:
        server = stack.enter_context(contextlib.closing(GrpcServer()))
        group.send_object([*server.ports, server.certificate.decode()], 0)
        return {}
    plain, secured, certificate = group.recv_object(1)
    return {
        "grpc.aio": stack.enter_context(contextlib.closing(GrpcClient(plain, None))),
        "grpc.aio, TLS": stack.enter_context(contextlib.closing(GrpcClient(secured, certificate.encode()))),
    }


def _one_by_one(group: Group, count: int) -> list[float]:
    """Return how long each of so many small calls took, one after the other."""
    return [_timed(lambda: _expect(group.node.call(1, "add", 1, 2), 3)) for _ in range(count)]


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile, in microseconds."""
    seconds.sort()
    return 1e6 * seconds[len(seconds) // 2], 1e6 * seconds[len(seconds) * 99 // 100]


def _beside_payloads(group: Group, payload: np.ndarray[Any, Any], count: int) -> list[float]:
    """Return how long small calls took while another thread made calls with the payload, all the time."""
    is_over = threading.Event()
    errors: list[BaseException] = []

    def fill() -> None:
        try:
            while not is_over.is_set():
                _expect(group.node.call(1, "check", payload), True)
        except BaseException as error:
            errors.append(error)

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        taken = _one_by_one(group, count)
    finally:
        is_over.set()
        filler.join()
    _expect(errors, [])
    return taken


def _timed(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _expect(value: object, wanted: object) -> None:
    if value != wanted:
        raise ArithmeticError(f"a call returned {value}, not {wanted}")


def _call_at_once(group: Group, count: int, in_flight: int) -> None:
    """Make calls, so many at a time, and check their results."""
    room, wrong = threading.Semaphore(in_flight), list[object]()

    def ended(work: Work[int], wanted: int) -> None:
        if work.exception() is not None or work.wait() != wanted:
            wrong.append(work)
        room.release()

    for number in range(count):
        room.acquire()
        work = group.node.call_async(1, "add", number, 1)
        work.add_done_callback(lambda work, wanted=number + 1: ended(work, wanted))  # type: ignore[misc]
    for _ in range(in_flight):
        room.acquire()
    _expect(wrong, [])


def table(trial: CallTrial, figures: CallFigures) -> FittedTable:
    """Return what was measured as a table."""
    mebibytes = [f"{statistics.median(each) / 2**20:.0f} MiB/s" for each in (
        figures.call_bytes_per_second, figures.lane_bytes_per_second)]  # fmt: skip
    size = format_bytes(trial.nbytes)
    rows = [
        ("small call, p50", f"{statistics.median(figures.p50_us):.0f} us"),
        ("small call, p99", f"{statistics.median(figures.p99_us):.0f} us"),
        (f"small calls, {trial.in_flight} in flight", f"{statistics.median(figures.calls_per_second):.0f} /s"),
        (f"call with {size}", mebibytes[0]),
        (f"broadcast of {size}", mebibytes[1]),
        ("call against broadcast", f"{figures.share_of_lane:.2f}x"),
        (f"small call beside {size}, p50", f"{statistics.median(figures.beside_p50_us):.0f} us"),
        (f"small call beside {size}, p99", f"{statistics.median(figures.beside_p99_us):.0f} us"),
    ]
    for name, other in figures.others.items():
        rows += [
            (f"{name}: small call, p50", f"{statistics.median(other['p50_us']):.0f} us"),
            (f"{name}: small call, p99", f"{statistics.median(other['p99_us']):.0f} us"),
            (f"{name}: {trial.in_flight} in flight", f"{statistics.median(other['calls_per_second']):.0f} /s"),
        ]
    titles, cells = (f"calls, {trial.lanes}", "median"), zip(*rows, strict=True)
    return FittedTable([Column(*each, is_right=each[0] == "median") for each in zip(titles, cells, strict=True)])


def as_json(trial: CallTrial, figures: CallFigures, facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything as plain values."""
    numbers = {**asdict(figures), "share_of_lane": figures.share_of_lane}
    return {"machine": facts, "trial": asdict(trial), "figures": numbers}
