"""The readers of what a router answers with UPnP: how to call them, what must hold then, and answers to begin with."""

from __future__ import annotations

import io
from typing import Final

from covey.net.router import upnp as exchange
from covey.wire import upnp

ROUTER: Final = upnp.RouterUrl("192.0.2.1", 80, "/root.xml")


def read_found(data: bytes) -> upnp.RouterUrl:
    """Read the answer to a search; it leads to the router."""
    url = upnp.read_found(data, ROUTER.ip)
    assert url.ip == ROUTER.ip, "an answer leads to another machine"
    assert upnp.ask_http(url).count(b"\r\n") == 4, "an address adds to the request"
    return url


def found_seeds() -> list[bytes]:
    """Return answers to searches."""
    head = b"HTTP/1.1 200 OK\r\nST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\nLOCATION: http://"
    ends = (b"192.0.2.1/x\r\n\r\n", b"192.0.2.1:99\r\n\r\n", b"192.0.2.1:99999/", b"192.0.2.2/")
    return [head + end for end in (*ends, b"192.0.2.1/" + b"a" * 600)]


def read_description(data: bytes) -> list[upnp.UpnpService]:
    """Read a description; the services are called at the router, and with requests that it cannot add to."""
    services = upnp.read_description(data, ROUTER)
    assert 0 < len(services) <= upnp.SERVICES_LIMIT
    for service in services:
        assert service.control.ip == ROUTER.ip, "a service is called at another machine"
        head = upnp.ask_call(service, "DeletePortMapping", NewExternalPort=1).partition(b"\r\n\r\n")[0]
        assert head.count(b"\r\n") == 5, "an address adds to the request"
    return services


def description_seeds() -> list[bytes]:
    """Return descriptions."""
    kind = b"<serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType>"
    urls = (b"/c", b"c?d", b"http://192.0.2.1:99/c", b"http://192.0.2.2/c", b"c&#13;&#10;d")
    plain = [b"<r><service>%s<controlURL>%s</controlURL></service></r>" % (kind, url) for url in urls]
    based = plain[1].replace(b"<r>", b"<r><URLBase>http://192.0.2.1:99/a/b</URLBase>")
    typed = b"<!DOCTYPE r [<!ENTITY a 'b'>]><r>&a;</r>"
    large = b"<r>" + b" " * upnp.MOST_DOCUMENT_BYTES + b"</r>"
    return [*plain, based, typed, large, b"<r>" * 40, b"", b"<?xml version='1.0' encoding='x'?><r/>"]


def read_reply(data: bytes) -> upnp.UpnpReply:
    """Read the answer to a call for a mapping."""
    return upnp.read_reply(data, "AddPortMapping")


def read_external_ip(data: bytes) -> str:
    """Read the answer to a call for the address outside."""
    return upnp.read_external_ip(data)


def reply_seeds() -> list[bytes]:
    """Return answers to calls."""
    ip = b"<NewExternalIPAddress>192.0.2.7</NewExternalIPAddress>"
    fault = b"<Fault><faultstring>UPnPError</faultstring><errorCode>718</errorCode></Fault>"
    names = (b"GetExternalIPAddressResponse", b"AddPortMappingResponse")
    return [*(b"<e><%s>%s</%s></e>" % (name, ip, name) for name in names), fault, b"<e/>", b""]


def read_http(data: bytes) -> bytes:
    """Read an answer of HTTP."""
    return exchange.read_http(io.BytesIO(data))


def http_seeds() -> list[bytes]:
    """Return answers of HTTP."""
    head = b"HTTP/1.1 200 OK\r\n"
    whole = head + b"Content-Length: 3\r\n\r\nabc"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    others = [b"HTTP/1.1 302 No\r\n\r\n", b"HTTP/1.1 100 Go on\r\n\r\n" + whole, b"HTTP/0.9", b""]
    huge = [whole.replace(b"3", b"1" + b"0" * 18), chunked.replace(b"3", b"DE0B6B3A7640000")]
    return [whole, whole[:-1], chunked, chunked.replace(b"3", b"-3"), head + b"\r\nabc", *others, *huge]
