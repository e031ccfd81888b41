"""Messages to a router that speaks UPnP are as its standards say, and only answers that lead to it are read."""

from __future__ import annotations

import pytest
from tests.support.in_turn import in_turn

from covey.base.errors import RemoteProtocolError
from covey.wire.upnp import (
    MOST_DOCUMENT_BYTES,
    RouterUrl,
    UpnpReply,
    UpnpService,
    ask_call,
    ask_http,
    ask_search,
    read_description,
    read_external_ip,
    read_found,
    read_reply,
)

GATEWAY = "192.168.1.1"
AT = RouterUrl(GATEWAY, 5000, "/desc/root.xml")
KIND = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"


def found(location: str, first: str = "HTTP/1.1 200 OK", st: str = DEVICE) -> bytes:
    return f"{first}\r\nST: {st}\r\nLOCATION: {location}\r\n\r\n".encode()


def described(*services: tuple[str, str], base: str = "") -> bytes:
    each = [
        f"<service><controlURL>{url}</controlURL><serviceType>{kind}</serviceType></service>" for kind, url in services
    ]
    return f"<root xmlns='urn:x'>{base}<device><serviceList>{''.join(each)}</serviceList></device></root>".encode()


def replied(name: str, inner: str = "") -> bytes:
    return f"<s:Envelope xmlns:s='e'><s:Body><u:{name} xmlns:u='k'>{inner}</u:{name}></s:Body></s:Envelope>".encode()


def test_requests_are_as_the_standards_say() -> None:
    assert ask_search(2) == (
        b'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
        b"ST: urn:schemas-upnp-org:device:InternetGatewayDevice:2\r\n\r\n"
    )
    assert ask_http(AT) == b"GET /desc/root.xml HTTP/1.1\r\nHost: 192.168.1.1:5000\r\nConnection: close\r\n\r\n"
    service = UpnpService(KIND, RouterUrl(GATEWAY, 5000, "/control"))
    head, _, body = ask_call(service, "DeletePortMapping", NewRemoteHost="<&>", NewExternalPort=47600).partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"POST /control HTTP/1.1\r\nHost: 192.168.1.1:5000\r\n")
    assert f'\r\nSOAPAction: "{KIND}#DeletePortMapping"'.encode() in head
    assert f"\r\nContent-Length: {len(body)}\r\n".encode() in head
    assert b"<NewRemoteHost>&lt;&amp;&gt;</NewRemoteHost><NewExternalPort>47600</NewExternalPort></u:Delete" in body


def test_an_answer_to_a_search_says_where_the_description_is() -> None:
    assert read_found(found("http://192.168.1.1:5000/desc/root.xml"), GATEWAY) == AT
    assert read_found(found("http://192.168.1.1"), GATEWAY) == RouterUrl(GATEWAY, 80, "/")
    assert read_found(found("http://192.168.1.1:5000/desc/root.xml").replace(b"\r\n", b"\n"), GATEWAY) == AT


@in_turn(
    data=[
        b"",
        found("http://192.168.1.2/root.xml"),
        found("http://192.168.1.1.example/root.xml"),
        found("http://192.168.1.1@192.168.1.2/root.xml"),
        found("http://router/root.xml"),
        found("https://192.168.1.1/root.xml"),
        found("file:///etc/passwd"),
        found("http://192.168.1.1:0/"),
        found("http://192.168.1.1:65536/"),
        found("http://192.168.1.1/a b"),
        found("http://192.168.1.1/" + "a" * 600),
        found("http://192.168.1.1/", first="HTTP/1.1 404 Not Found"),
        found("http://192.168.1.1/", first="NOTIFY * HTTP/1.1"),
        found("http://192.168.1.1/", st="urn:schemas-upnp-org:device:MediaServer:1"),
    ]
)
def test_answers_to_a_search_that_lead_elsewhere_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_found(data, GATEWAY)


def test_services_that_map_ports_are_found_in_a_description() -> None:
    ppp, two = KIND.replace("WANIP", "WANPPP"), KIND[:-1] + "2"
    services = read_description(
        described((ppp, "/p"), ("urn:other", "/o"), (KIND, "ctl?x"), (two, "http://192.168.1.1/t")), AT
    )
    assert services == [
        UpnpService(two, RouterUrl(GATEWAY, 80, "/t")),
        UpnpService(KIND, RouterUrl(GATEWAY, 5000, "/desc/ctl?x")),
        UpnpService(ppp, RouterUrl(GATEWAY, 5000, "/p")),
    ]
    base = "<URLBase>http://192.168.1.1:49000/</URLBase>"
    assert read_description(described((KIND, "c"), base=base), AT) == [
        UpnpService(KIND, RouterUrl(GATEWAY, 49000, "/c"))
    ]
    assert len(read_description(described(*[(KIND, f"/{index}") for index in range(9)]), AT)) == 4


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no XML"),
        (b"<root>", "no XML"),
        (b"<root>&nothing;</root>", "no XML"),
        (b"<?xml version='1.0' encoding='nonsense'?><root/>", "no service"),
        (described(("urn:other", "/o")), "no service"),
        (described((KIND, "http://192.168.1.2/c")), "another machine, 192.168.1.2"),
        (described((KIND, "c"), base="<URLBase>http://192.168.1.2/</URLBase>"), "another machine, 192.168.1.2"),
        (described((KIND, "/c HTTP/1.1&#13;&#10;Host: x")), "none of HTTP"),
        (described((KIND, "https://192.168.1.1/c")), "none of HTTP"),
        (b"<!DOCTYPE a [<!ENTITY b 'bb'><!ENTITY c '&b;&b;&b;'>]><a>&c;</a>", "declares types"),
        (b"<!DOCTYPE a SYSTEM 'http://192.168.1.2/a.dtd'><a/>", "declares types"),
        (b"<a>" * 33 + b"</a>" * 33, "more than 32 levels"),
        (b"<a>" + b" " * MOST_DOCUMENT_BYTES + b"</a>", "more than 65536 bytes"),
    ],
)
def test_other_descriptions_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        read_description(data, AT)


def test_replies_are_read() -> None:
    said = "<NewExternalIPAddress> 203.0.113.5\n</NewExternalIPAddress>"
    assert read_external_ip(replied("GetExternalIPAddressResponse", said)) == "203.0.113.5"
    assert read_reply(replied("AddPortMappingResponse"), "AddPortMapping").error == 0
    fault = "<detail><UPnPError><errorCode>718</errorCode></UPnPError></detail>"
    assert read_reply(replied("Fault", fault), "AddPortMapping") == UpnpReply(718, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        replied("DeletePortMappingResponse"),
        replied("Fault"),
        replied("Fault", "<errorCode>0</errorCode>"),
        replied("Fault", "<errorCode>1234567</errorCode>"),
        replied("Fault", "<errorCode>٣</errorCode>"),
        replied("Other", "<errorCode>718</errorCode>"),
    ],
)
def test_anything_else_is_no_reply(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_reply(data, "AddPortMapping")


@pytest.mark.parametrize("said", ["", "fd00::1", "203.0.113.5.example", "999.0.0.1"])
def test_an_address_outside_is_one_of_ipv4(said: str) -> None:
    with pytest.raises(RemoteProtocolError, match="does not know its address"):
        read_external_ip(
            replied("GetExternalIPAddressResponse", f"<NewExternalIPAddress>{said}</NewExternalIPAddress>")
        )
