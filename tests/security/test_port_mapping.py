"""Answers about port mapping from other machines than the router, and from a hostile router."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE

from covey.base.config import GroupConfig
from covey.base.errors import ConnectError
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import NodeIdentity
from covey.net.router import port_mapping, upnp
from covey.net.router.port_mapping import DATAGRAMS_LIMIT, ask_gateway
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.testing.gateway import GatewayThread
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NONCE = bytes(range(12))


@pytest.fixture(autouse=True)
def _no_upnp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upnp, "SEARCHES", (0.05,))


def grant(request: bytes) -> bytes:
    """Return the answer of PCP that grants a request."""
    address = bytes(10) + b"\xff\xff" + bytes((192, 0, 2, 7))
    return struct.pack(">BBxBII12x", 2, 0x81, 0, 60, 7) + request[24:36] + b"\x06\0\0\0" + request[40:44] + address


def ask_one_that(
    answers: Callable[[bytes], Iterable[tuple[bool, bytes]]], monkeypatch: pytest.MonkeyPatch, seconds: float = 0.5
) -> object:
    """Ask a router that answers the first request with datagrams, each from its own address or a stranger's."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as router,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        router.bind(("127.0.0.1", 0))
        stranger.bind(("127.0.0.2", 0))
        router.settimeout(DEADLINE)
        monkeypatch.setattr(port_mapping, "GATEWAY_PORT", router.getsockname()[1])

        def answer() -> None:
            request, client = router.recvfrom(2000)
            for is_router, data in answers(request):
                (router if is_router else stranger).sendto(data, client)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            return ask_gateway("127.0.0.1", 4711, NONCE, 60, (seconds,))
        finally:
            thread.join(DEADLINE)


def test_only_the_router_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask_one_that(lambda request: [(True, b"?"), (True, grant(request))], monkeypatch, DEADLINE)
    with pytest.raises(ConnectError, match="does not offer"):
        ask_one_that(lambda request: [(False, grant(request))], monkeypatch)
    with pytest.raises(ConnectError, match="does not offer"):
        ask_one_that(lambda request: [(True, grant(request[:24] + bytes(12) + request[36:]))], monkeypatch)


def test_a_flood_of_answers_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DATAGRAMS_LIMIT == 16
    junk = [(True, secrets.token_bytes(60))] * (3 * DATAGRAMS_LIMIT)  # for the three requests of one try each
    with pytest.raises(ConnectError, match="does not offer"):
        ask_one_that(lambda request: [*junk, (True, grant(request))], monkeypatch)


@pytest.mark.usefixtures("home")
def test_a_node_asks_the_router_only_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not GroupConfig().map_port
    cluster = Cluster(ClusterSecret("lab", secrets.token_bytes(32)))
    with GatewayThread(claims="192.0.2.7") as router:
        monkeypatch.setattr(port_mapping, "GATEWAY_PORT", router.port)
        monkeypatch.setattr(port_mapping, "default_gateway", lambda: "127.0.0.1")
        for maps_port in (False, True):
            endpoint = cluster_endpoint(
                cluster,
                GroupConfig(interfaces="lo"),
                run="r",
                ports=(0,),
                identity=NodeIdentity.ephemeral(),
                maps_port=maps_port,
            )
            threads = [each.name for each in threading.enumerate()]
            endpoint.leave()
            assert ("covey-port-mapping" in threads) == maps_port
            assert bool(router.gateway.log) == maps_port
