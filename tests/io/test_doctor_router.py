"""The doctor asks the router while it examines the rest, and does not wait longer than it has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE

from covey.cli.doctor import probes as doctor_router
from covey.cli.doctor.probes import RouterFacts, RouterQuestion
from covey.net.router import port_mapping, upnp
from covey.testing.gateway import GatewayThread

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(name="router", params=["192.0.2.7"])
def _router(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayThread]:
    monkeypatch.setattr(port_mapping, "default_gateway", lambda: "127.0.0.1")
    monkeypatch.setattr(port_mapping, "ANSWER_WAITS", (0.05, 0.05, 0.05))
    monkeypatch.setattr(doctor_router, "ROUTER_SECONDS", DEADLINE)
    with GatewayThread(speaks="upnp", claims=request.param) as router:
        monkeypatch.setattr(port_mapping, "GATEWAY_PORT", router.port)
        monkeypatch.setattr(upnp, "SEARCH_PORT", router.gateway.upnp.search_port)
        monkeypatch.setattr(upnp, "SEARCHES", (5.0,))
        yield router


def test_the_protocol_is_named_and_nothing_is_mapped(router: GatewayThread) -> None:
    with RouterQuestion() as question:
        assert question.answer() == RouterFacts("UPnP")
    assert not router.gateway.log
    assert [name for name, _ in router.gateway.upnp.calls] == ["GetExternalIPAddress"]


@pytest.mark.parametrize("router", ["100.64.0.9"], indirect=True)
@pytest.mark.usefixtures("router")
def test_an_address_that_is_private_is_named() -> None:
    with RouterQuestion() as question:
        assert question.answer() == RouterFacts("UPnP", "100.64.0.9")


def test_a_router_that_takes_too_long_is_left(router: GatewayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upnp, "SEARCHES", (3600.0,))
    monkeypatch.setattr(doctor_router, "ROUTER_SECONDS", 0.5)
    router.gateway.upnp.location = "http://127.0.0.9/"
    with RouterQuestion() as question:
        assert question.answer() == RouterFacts(problem="the router has not answered in time")
    end = time.monotonic() + DEADLINE
    while question._thread.is_alive():
        assert time.monotonic() < end
        time.sleep(0.01)
