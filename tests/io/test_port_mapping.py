"""Port mapping: a router that passes connections on is asked, asked again, and told when it is over."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE, wait_until

from covey.base.errors import ConnectError
from covey.net.router import port_mapping, upnp
from covey.net.router.port_mapping import PortMapping, ask_gateway, default_gateway
from covey.testing.gateway import GatewayThread

if TYPE_CHECKING:
    from pathlib import Path

OUTSIDE = "192.0.2.7"
NONCE = bytes(range(12))


@pytest.fixture(autouse=True)
def _gateway_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "default_gateway", lambda: "127.0.0.1")
    monkeypatch.setattr(port_mapping, "ANSWER_WAITS", (0.5, 1.0, 2.0))
    monkeypatch.setattr(upnp, "SEARCHES", (0.05,))


def use(monkeypatch: pytest.MonkeyPatch, router: GatewayThread) -> None:
    monkeypatch.setattr(port_mapping, "GATEWAY_PORT", router.port)


@pytest.mark.parametrize(("speaks", "protocol"), [("pcp,pmp", "PCP"), ("pcp", "PCP"), ("pmp", "NAT-PMP")])
def test_a_mapped_port_of_the_router_leads_here_until_the_mapping_is_closed(
    monkeypatch: pytest.MonkeyPatch, speaks: str, protocol: str
) -> None:
    with GatewayThread(speaks=speaks, claims=OUTSIDE) as router, socket.create_server(("127.0.0.1", 0)) as listener:
        use(monkeypatch, router)
        port = listener.getsockname()[1]
        mapping = PortMapping(port)
        try:
            wait_until(lambda: mapping.mapped)
            assert mapping.mapped is not None
            ip, external, lifetime, used = mapping.mapped
            assert (ip, lifetime, used, mapping.problem) == (OUTSIDE, 3600, protocol, "")
            with socket.create_connection(("127.0.0.1", external), DEADLINE) as outer:
                inner, _ = listener.accept()
                with inner:
                    inner.settimeout(DEADLINE)
                    outer.sendall(b"from outside")
                    assert inner.recv(100) == b"from outside"
                    inner.sendall(b"from inside")
                    assert outer.recv(100) == b"from inside"
        finally:
            mapping.close()
        assert router.gateway.log[-1] == {"what": "unmapped", "external": external, "client": "127.0.0.1", "port": port}
        assert mapping.mapped is None
        mapping.close()


def test_a_mapping_is_renewed_at_half_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "LEAST_RENEWAL_SECONDS", 0.01)
    with GatewayThread(claims=OUTSIDE, lifetime=1) as router:
        use(monkeypatch, router)
        mapping = PortMapping(4711)
        try:
            wait_until(lambda: len(router.gateway.log) >= 3)
            assert len({each["external"] for each in router.gateway.log}) == 1
        finally:
            mapping.close()


def test_what_cannot_be_read_does_not_end_a_mapping_for_good(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    routes = tmp_path / "route"
    routes.write_text("Iface\nthis is no route\n")
    monkeypatch.setattr(port_mapping, "ROUTES", routes)
    monkeypatch.setattr(port_mapping, "default_gateway", default_gateway)
    mapping = PortMapping(4711)
    try:
        wait_until(lambda: mapping.problem == "ValueError; see the log")
        assert mapping._thread.is_alive()
    finally:
        mapping.close()
    assert "its answer could not be read" in caplog.text


def test_a_router_that_refuses_or_does_not_answer_is_named_with_what_works_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(port_mapping, "GATEWAY_PORT", free.getsockname()[1])
    with pytest.raises(ConnectError, match=r"the router 127\.0\.0\.1 does not offer PCP or NAT-PMP"):
        ask_gateway("127.0.0.1", 1, NONCE, 60, (0.1,))
    with GatewayThread(claims=OUTSIDE) as router:
        use(monkeypatch, router)
        router.gateway.result = 2
        with pytest.raises(ConnectError, match="refuses: it does not allow it"):
            ask_gateway("127.0.0.1", 1, NONCE, 60, (DEADLINE,))
        mapping = PortMapping(4711)
        try:
            wait_until(lambda: "refuses" in mapping.problem)
            assert mapping.mapped is None
        finally:
            mapping.close()
    assert "a relay works everywhere: covey relay" in caplog.text


def test_lies_of_a_router_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with GatewayThread(speaks="pcp", claims=OUTSIDE) as router:
        use(monkeypatch, router)
        router.gateway.spoils_nonce = True  # as the answer of a stranger that has not seen the request
        with pytest.raises(ConnectError, match="does not offer"):
            ask_gateway("127.0.0.1", 1, NONCE, 60, (0.2,))
    for claims in ("127.0.0.1", "0.0.0.0", "224.0.0.1"):
        with GatewayThread(claims=claims) as router:
            use(monkeypatch, router)
            with pytest.raises(ConnectError, match="no address of a router"):
                ask_gateway("127.0.0.1", 1, NONCE, 60, (DEADLINE,))


def test_the_router_is_that_of_the_default_route_with_the_lowest_metric(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    routes = tmp_path / "route"
    monkeypatch.setattr(port_mapping, "ROUTES", routes)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(ConnectError, match="no IPv4 router"):
        default_gateway()
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    wifi = "wlan0 00000000 FE01A8C0 0003 0 0 600 00000000 0 0 0\n"
    cable = "eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0\n"
    near = "eth0 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
    routes.write_text(head + near)
    with pytest.raises(ConnectError, match="no IPv4 router"):
        default_gateway()
    routes.write_text(head + wifi + near + cable)
    assert default_gateway() == "192.168.1.1"
