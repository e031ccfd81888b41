"""Compare an all_reduce of 16 MiB through a gateway with a plain streaming echo of the same bytes by the same client.

    python -m tools.gateway_bench [ROUNDS]

Two ranks on this machine: one with covey, and the client, which calls the echo and the gateway in turn. Both listen at
a unix socket; the echo is what grpcio's own guide would write. Prints medians, and the median of the ratios of pairs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np

import covey
from covey.gateway import gateway_pb2 as pb
from covey.gateway.gateway_pb2_grpc import GatewayServicer, GatewayStub, add_GatewayServicer_to_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

BENCH_BYTES: Final = 16 << 20
BENCH_CHUNK: Final = 1 << 20
WARM_UP: Final = 5
OPTIONS: Final = (("grpc.max_receive_message_length", 4 << 20),)


class Echo(GatewayServicer):
    """Sends back what it gets, message by message."""

    async def AllReduce(self, requests: AsyncIterator[pb.Piece], context: Any) -> AsyncIterator[pb.Piece]:  # noqa: N802
        async for piece in requests:
            yield piece


async def echo(address: str) -> None:
    """Serve the echo until the process is ended."""
    server = grpc.aio.server(options=OPTIONS)
    add_GatewayServicer_to_server(Echo(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def rank(rounds: int) -> None:
    """Be the rank with covey."""
    array = np.ones(BENCH_BYTES // 4, np.float32)
    with covey.join() as group:
        for _ in range(rounds):
            group.all_reduce(array, op="mean")


def client(rounds: int) -> None:
    """Call the echo and the gateway in turn, and print how long both take."""
    data = np.ones(BENCH_BYTES // 4, np.float32).tobytes()
    with tempfile.TemporaryDirectory() as folder:
        at = f"unix:{folder}/echo"
        command = [sys.executable, "-m", "tools.gateway_bench", "echo", at]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == "ready\n"
                stubs = [connected(each) for each in (at, os.environ["COVEY_GATEWAY"])]
                registration = stubs[1].Register(pb.RegisterRequest(program="bench"))
                session = next(registration).joined.session
                times = [[timed(stub, session, data) for stub in stubs] for _ in range(rounds)][WARM_UP:]
                stubs[1].Leave(pb.LeaveRequest(session=session))
            finally:
                server.kill()
    echoed, reduced = (statistics.median(each) * 1000 for each in zip(*times, strict=True))
    ratio = statistics.median(one / other for one, other in times)
    best = min(one for one, _ in times) / min(other for _, other in times)
    print(f"echo {echoed:.1f} ms, all_reduce {reduced:.1f} ms, ratio {ratio:.2f} (of the fastest: {best:.2f})")


def connected(address: str) -> Any:
    """Return what calls the service at an address."""
    return GatewayStub(grpc.insecure_channel(address, OPTIONS))  # type: ignore[no-untyped-call]


def timed(stub: Any, session: bytes, data: bytes) -> float:
    """Return the seconds that one call takes."""

    def pieces() -> Iterator[pb.Piece]:
        yield pb.Piece(start=pb.Start(session=session, dtype="float32", shape=[len(data) // 4], op="mean"))
        for begin in range(0, len(data), BENCH_CHUNK):
            yield pb.Piece(chunk=data[begin : begin + BENCH_CHUNK])

    began = time.perf_counter()
    received = sum(len(piece.chunk) for piece in stub.AllReduce(pieces()))
    assert received == len(data)
    return time.perf_counter() - began


def main(*words: str) -> None:
    """Start the two ranks; or be one of them, or the echo."""
    if words[:1] == ("echo",):
        asyncio.run(echo(words[1]))
    elif "COVEY_GATEWAY" in os.environ:
        client(int(words[0]))
    elif os.environ.get("COVEY_RANK") == "0":
        rank(int(words[0]))
    elif "COVEY_RANK" in os.environ:
        program = str(Path(sys.executable).with_name("covey"))
        os.execv(program, [program, "gateway", sys.executable, "-m", "tools.gateway_bench", *words])
    else:
        rounds = words[0] if words else "40"
        subprocess.run(
            [sys.executable, "-m", "covey", "run", "-n", "2", "-m", "tools.gateway_bench", rounds], check=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
