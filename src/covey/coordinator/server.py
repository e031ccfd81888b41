"""The coordinator as a process: its port, limits, health service, reflection, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any, Final

import grpc

from covey.coordinator import coordinator_pb2 as pb
from covey.coordinator.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from covey.coordinator.refusal import MAX_CALLS, REQUEST_BYTES, STATUS_BYTES
from covey.coordinator.service import CoordinatorService
from covey.coordinator.standard_services import add_standard_services
from covey.coordinator.tls_front import TlsFront

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.coordinator.records import Sizes
    from covey.coordinator.security import Security
    from covey.coordinator.state_file import StateFile

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
ANSWERS_END_SECONDS: Final = 2.0
"""How long calls that are being answered may take when the coordinator stops."""
SERVER_OPTIONS: Final = (
    ("grpc.max_receive_message_length", REQUEST_BYTES),
    ("grpc.max_send_message_length", STATUS_BYTES),
    ("grpc.max_metadata_size", 1 << 13),
    ("grpc.max_concurrent_streams", 256),
    # A worker that vanished without closing its connection is noticed after half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
)


async def serve(
    host: str,
    port: int,
    state: StateFile,
    security: Security,
    sizes: Sizes | None,
    on_start: Callable[[int], None],
    beside: Callable[[int, asyncio.Event], Coroutine[Any, Any, object]] | None = None,
) -> None:
    """Run a coordinator until SIGTERM or SIGINT; call `on_start(port)` when it listens.

    `beside(port, stopping)` is a service that runs on the same loop meanwhile, until `stopping` is set.

    Raises:
        ConfigError: it cannot listen at the address, or its state can no longer be written; or what `beside` raises.
    """
    front = TlsFront(lambda: security.papers("server"))
    service = CoordinatorService(state, lambda peer: security.identity(front.certificate(peer)), security.hear, sizes)
    server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    add_CoordinatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    checks = await add_standard_services(server, SERVICE_NAME)
    server.add_insecure_port(front.inner)
    await server.start()
    rounds = asyncio.create_task(service.begin_rounds())
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    further: asyncio.Task[object] | None = None
    try:
        port = front.open(host, port)
        on_start(port)
        ends: list[asyncio.Future[Any]] = [stop := asyncio.create_task(stopping.wait()), service.failure]
        if beside is not None:
            ends.append(further := asyncio.create_task(beside(port, stopping)))
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        stopping.set()
        if further is not None:
            await further
        await checks.enter_graceful_shutdown()
    finally:
        front.stop_accepting()
        service.close()
        rounds.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await rounds
        await server.stop(ANSWERS_END_SECONDS)
        await front.close()
    if service.failure.done():
        raise service.failure.result()
