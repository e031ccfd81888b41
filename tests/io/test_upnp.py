"""UPnP: a router that speaks nothing else is found, asked for a port, and told when it is over."""

from __future__ import annotations

import socket

import pytest
from tests.support.waiting import DEADLINE, wait_until

from covey.base.errors import ConnectError
from covey.net.router import port_mapping, upnp
from covey.net.router.port_mapping import PortMapping, ask_gateway
from covey.net.router.upnp import UpnpPort
from covey.testing.gateway import GatewayThread

OUTSIDE = "192.0.2.7"
NONCE = bytes(range(12))


@pytest.fixture(autouse=True)
def _gateway_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "default_gateway", lambda: "127.0.0.1")
    monkeypatch.setattr(port_mapping, "ANSWER_WAITS", (0.05,))
    monkeypatch.setattr(upnp, "SEARCHES", (5.0, 5.0))
    monkeypatch.setattr(upnp, "HTTP_SECONDS", DEADLINE)


def use(monkeypatch: pytest.MonkeyPatch, router: GatewayThread) -> None:
    monkeypatch.setattr(port_mapping, "GATEWAY_PORT", router.port)
    monkeypatch.setattr(upnp, "SEARCH_PORT", router.gateway.upnp.search_port)


@pytest.mark.parametrize(
    ("kind", "control", "only_permanent"),
    [
        ("WANIPConnection:1", "/control", False),
        ("WANIPConnection:2", "control", False),
        ("WANPPPConnection:1", "/control", True),
    ],
)
def test_a_mapped_port_leads_here_until_the_mapping_is_closed(
    monkeypatch: pytest.MonkeyPatch, kind: str, control: str, only_permanent: bool
) -> None:
    with (
        GatewayThread(speaks="upnp", claims=OUTSIDE) as router,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        use(monkeypatch, router)
        port, answers = listener.getsockname()[1], router.gateway.upnp
        answers.kind, answers.control, answers.only_permanent = kind, control, only_permanent
        mapping = PortMapping(port)
        try:
            wait_until(lambda: mapping.mapped)
            assert mapping.mapped is not None
            ip, external, lifetime, used = mapping.mapped
            assert (ip, lifetime, used, mapping.problem) == (OUTSIDE, 7200, "UPnP", "")
            assert external != port  # the listener has it: the router was asked for another one
            with socket.create_connection(("127.0.0.1", external), DEADLINE) as outer:
                inner, _ = listener.accept()
                with inner:
                    inner.settimeout(DEADLINE)
                    outer.sendall(b"from outside")
                    assert inner.recv(100) == b"from outside"
        finally:
            mapping.close()
        wait_until(lambda: router.gateway.log[-1]["what"] == "unmapped")
        assert router.gateway.log[-1]["external"] == external
        assert mapping.mapped is None
        name, values = next(each for each in reversed(answers.calls) if each[0] == "AddPortMapping")
        assert name == "AddPortMapping"
        assert list(values.items()) == [
            ("NewRemoteHost", ""),
            ("NewExternalPort", str(external)),
            ("NewProtocol", "TCP"),
            ("NewInternalPort", str(port)),
            ("NewInternalClient", "127.0.0.1"),
            ("NewEnabled", "1"),
            ("NewPortMappingDescription", "covey"),
            ("NewLeaseDuration", "0" if only_permanent else "7200"),
        ]


def test_a_mapping_is_renewed_with_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "LEAST_RENEWAL_SECONDS", 0.01)
    monkeypatch.setattr(port_mapping, "MOST_RENEWAL_SECONDS", 0.01)
    with GatewayThread(speaks="upnp", claims=OUTSIDE) as router, socket.create_server(("127.0.0.1", 0)) as listener:
        use(monkeypatch, router)
        mapping = PortMapping(listener.getsockname()[1])
        try:
            wait_until(lambda: len(router.gateway.log) >= 3)
            assert len({each["external"] for each in router.gateway.log}) == 1
        finally:
            mapping.close()


def test_to_look_whether_the_router_speaks_upnp_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with GatewayThread(speaks="upnp", claims=OUTSIDE) as router:
        use(monkeypatch, router)
        assert ask_gateway("127.0.0.1", 9, NONCE, 0, (0.05,)) == (OUTSIDE, 0, 0, "UPnP")
        assert [name for name, _ in router.gateway.upnp.calls] == ["GetExternalIPAddress"]
        wait_until(lambda: router.gateway.upnp.searches >= 4)  # of both versions, each to the router and to all


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (606, "with UPnP: the router refuses: it does not allow it"),
        (718, "the port leads to another machine already"),
        (725, "its reason has the number 725"),
        (799, "its reason has the number 799"),
    ],
)
def test_a_router_that_refuses_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch, error: int, why: str) -> None:
    with GatewayThread(speaks="upnp", claims=OUTSIDE) as router:
        use(monkeypatch, router)
        router.gateway.upnp.error = error
        with pytest.raises(ConnectError, match=r"the router 127\.0\.0\.1 does not offer PCP or NAT-PMP; .*" + why):
            ask_gateway("127.0.0.1", 4711, NONCE, 60, (0.05,))
        asked = [values["NewExternalPort"] for name, values in router.gateway.upnp.calls if name == "AddPortMapping"]
        assert len(asked) == {718: 4, 725: 2}.get(error, 1)


@pytest.mark.parametrize("claims", ["10.1.2.3", "100.64.0.9", "192.168.0.2"])
def test_a_router_behind_another_one_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, claims: str
) -> None:
    with GatewayThread(speaks="upnp", claims=claims) as router, socket.create_server(("127.0.0.1", 0)) as listener:
        use(monkeypatch, router)
        mapping = PortMapping(listener.getsockname()[1])
        try:
            wait_until(lambda: "the internet does not lead to" in caplog.text)
            assert mapping.mapped is not None
            assert mapping.mapped.is_private
        finally:
            mapping.close()
    assert f"the internet does not lead to {claims}:" in caplog.text
    assert "a relay works everywhere: covey relay" in caplog.text


def test_a_router_whose_line_is_down_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with GatewayThread(speaks="upnp", claims="0.0.0.0") as router:
        use(monkeypatch, router)
        monkeypatch.setattr(upnp, "SEARCHES", (2.0,))
        with pytest.raises(ConnectError, match="its line is down"):
            ask_gateway("127.0.0.1", 4711, NONCE, 60, (0.05,))


def test_a_search_ends_when_the_mapping_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upnp, "SEARCHES", (3600.0,))
    monkeypatch.setattr(port_mapping, "UNMAP_SECONDS", DEADLINE)
    with GatewayThread(speaks="upnp") as router:
        use(monkeypatch, router)
        router.gateway.upnp.location = "http://127.0.0.9/"
        mapping = PortMapping(4711)
        wait_until(lambda: router.gateway.upnp.searches)
        mapping.close()
        assert not mapping._thread.is_alive()


def test_a_mapping_that_could_not_be_renewed_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "LEAST_RENEWAL_SECONDS", 0.01)
    monkeypatch.setattr(port_mapping, "MOST_RENEWAL_SECONDS", 0.01)
    monkeypatch.setattr(port_mapping, "UNMAP_SECONDS", DEADLINE)
    with GatewayThread(speaks="upnp", claims=OUTSIDE) as router, socket.create_server(("127.0.0.1", 0)) as listener:
        use(monkeypatch, router)
        mapping = PortMapping(listener.getsockname()[1])
        try:
            wait_until(lambda: router.gateway.log)
            router.gateway.upnp.error = 501
            wait_until(
                lambda: "has mapped a port before; with UPnP: the router refuses: it could not do it" in mapping.problem
            )
            assert mapping.mapped is None
        finally:
            mapping.close()
        assert router.gateway.log[-1] == router.gateway.log[0] | {"what": "unmapped"}


@pytest.mark.parametrize("claims", ["127.0.0.1", "224.0.0.1"])
def test_lies_about_the_address_outside_are_not_believed(monkeypatch: pytest.MonkeyPatch, claims: str) -> None:
    with GatewayThread(speaks="upnp", claims=claims) as router:
        use(monkeypatch, router)
        port = UpnpPort(4711)
        with pytest.raises(ConnectError, match=f"grants a port of {claims}, which is no address of a router"):
            ask_gateway("127.0.0.1", 4711, NONCE, 60, (0.05,), port)
        port.end()
        assert [each["what"] for each in router.gateway.log] == ["mapped", "unmapped"]
