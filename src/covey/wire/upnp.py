"""Messages between a machine and a router that speaks UPnP: the search for it, its description, and calls to it.

The router says where its description is, the description names services, and a service is called with SOAP over HTTP.
Answers are hostile input. Only addresses of the router itself count, and documents have no types or entities of their
own, which is how a small document becomes a large one.
"""

from __future__ import annotations

import html
import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from xml.parsers import expat

from covey.base.errors import RemoteProtocolError

SEARCH_GROUP: Final = "239.255.255.250"
SEARCH_PORT: Final = 1900
MOST_SEARCH_BYTES: Final = 4096
"""Most bytes of an answer to a search; routers send about 300."""
MOST_DOCUMENT_BYTES: Final = 1 << 16
"""Most bytes of an answer of HTTP, with its headers; descriptions have about 5,000."""
MOST_DELAY: Final = 1
"""Seconds within which routers answer a search: they choose a moment at random."""
SERVICES_LIMIT: Final = 4
"""Services of one router that are asked: most have one for each kind of line."""
_MOST_DEPTH: Final = 32
_MOST_URL: Final = 512
_DEVICE: Final = "urn:schemas-upnp-org:device:InternetGatewayDevice:"
_SERVICE_KINDS: Final = tuple(
    f"urn:schemas-upnp-org:service:{kind}" for kind in ("WANIPConnection:2", "WANIPConnection:1", "WANPPPConnection:1")
)
"""Services that map ports, in the order in which they are asked."""
_URL: Final = re.compile(r"http://(\d{1,3}(?:\.\d{1,3}){3})(?::(\d{1,5}))?(/[!\"$-~]*)?", re.ASCII)
NOT_MAPPED, CONFLICT, ONLY_PERMANENT = 714, 718, 725
"""Errors that are no refusal: there is nothing to end, another port would do, and mappings must have no end."""
UPNP_ERRORS: Final = {
    401: "it does not know the request",
    402: "it did not understand the request",
    501: "it could not do it",
    606: "it does not allow it",
    CONFLICT: "the port leads to another machine already",
    724: "it does not give another port",
    728: "it has no room",
}
"""What a router means that refuses."""


@dataclass(frozen=True)
class RouterUrl:
    """A place at a router that answers HTTP."""

    ip: str
    port: int
    path: str

    def __str__(self) -> str:
        return f"http://{self.ip}:{self.port}{self.path}"


@dataclass(frozen=True)
class UpnpService:
    """A service of a router that maps ports, and where it is called."""

    kind: str
    control: RouterUrl


@dataclass(frozen=True)
class UpnpReply:
    """What a service answers: an error, or values by name."""

    error: int
    values: dict[str, str]


def ask_search(version: int) -> bytes:
    """Return the question which routers there are; `version` is 1 or 2."""
    host = f"{SEARCH_GROUP}:{SEARCH_PORT}"
    lines = ("M-SEARCH * HTTP/1.1", f"HOST: {host}", 'MAN: "ssdp:discover"', f"MX: {MOST_DELAY}")
    return "\r\n".join((*lines, f"ST: {_DEVICE}{version}", "", "")).encode()


def read_found(data: bytes, gateway: str) -> RouterUrl:
    """Return where the description of a router is; raise RemoteProtocolError for anything else.

    It must be at the router's own address, `gateway`.
    """
    first, *lines = re.split("\r?\n", data[:MOST_SEARCH_BYTES].decode("ascii", "replace"))
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if not re.match(r"HTTP/1\.[01] 200\b", first) or not fields.get("st", "").startswith(_DEVICE):
        raise RemoteProtocolError("no answer of a router to a search")
    return _own_url(fields.get("location", ""), gateway)


def ask_http(url: RouterUrl, body: bytes = b"", action: str = "") -> bytes:
    """Return a request of HTTP: for a document or, with an action, a call."""
    lines = [f"{'POST' if action else 'GET'} {url.path} HTTP/1.1", f"Host: {url.ip}:{url.port}", "Connection: close"]
    if action:
        lines += ['Content-Type: text/xml; charset="utf-8"', f"Content-Length: {len(body)}", f'SOAPAction: "{action}"']
    return "\r\n".join((*lines, "", "")).encode() + body


def ask_call(service: UpnpService, name: str, **values: str | int) -> bytes:
    """Return a request of HTTP that calls a service. The order of the values matters to some routers."""
    given = "".join(f"<{key}>{html.escape(str(value))}</{key}>" for key, value in values.items())
    body = (
        '<?xml version="1.0"?>\r\n<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{name} xmlns:u="{service.kind}">{given}</u:{name}></s:Body></s:Envelope>\r\n'
    )
    return ask_http(service.control, body.encode(), f"{service.kind}#{name}")


def read_description(data: bytes, at: RouterUrl) -> list[UpnpService]:
    """Return the services of a router that map ports, the preferred ones first, from its description `at` an address.

    Services that are called at another machine are left out.

    Raises:
        RemoteProtocolError: the document cannot be read, or has no such service.
    """
    base, kind, control, named = str(at), "", "", []
    for name, text in _elements(data):
        if name == "URLBase" and text:
            base = text
        elif name == "serviceType":
            kind = text
        elif name == "controlURL":
            control = text
        elif name == "service":
            named.append((kind, control))
            kind = control = ""
    found, elsewhere = [], ""
    for kind, control in named:
        if kind in _SERVICE_KINDS and control:
            try:
                found.append(UpnpService(kind, _joined(_own_url(base, at.ip), control)))
            except RemoteProtocolError as error:
                elsewhere = f": {error}"
    if not found:
        raise RemoteProtocolError(f"the description of the router has no service that maps ports{elsewhere}")
    return sorted(found, key=lambda service: _SERVICE_KINDS.index(service.kind))[:SERVICES_LIMIT]


def read_reply(data: bytes, name: str) -> UpnpReply:
    """Return what a service answers to the call with this name; raise RemoteProtocolError for anything else."""
    values = dict(_elements(data))
    if f"{name}Response" in values:
        return UpnpReply(0, values)
    code = values.get("errorCode", "")
    if "Fault" not in values or not re.fullmatch(r"[1-9][0-9]{0,4}", code, re.ASCII):
        raise RemoteProtocolError(f"no answer of a router to {name}")
    return UpnpReply(int(code), {})


def read_external_ip(data: bytes) -> str:
    """Return the router's address on the other side, from the answer to GetExternalIPAddress.

    Raises:
        RemoteProtocolError: it is an error, or names no IPv4 address.
    """
    text = read_reply(data, "GetExternalIPAddress").values.get("NewExternalIPAddress", "")
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise RemoteProtocolError("the router does not know its address outside") from None


def _own_url(text: str, gateway: str) -> RouterUrl:
    match = _URL.fullmatch(text) if len(text) <= _MOST_URL else None
    if match is None or not 0 < (port := int(match[2] or 80)) < 1 << 16:
        raise RemoteProtocolError("the router names an address that is none of HTTP")
    if match[1] != gateway:
        raise RemoteProtocolError(f"the router {gateway} names another machine, {match[1]}")
    return RouterUrl(gateway, port, match[3] or "/")


def _joined(base: RouterUrl, text: str) -> RouterUrl:
    """Return an address that a description gives in full, from the root, or beside the document."""
    if "://" in text:
        return _own_url(text, base.ip)
    path = text if text.startswith("/") else base.path.rpartition("/")[0] + "/" + text
    return _own_url(f"http://{base.ip}:{base.port}{path}", base.ip)


def _elements(data: bytes) -> list[tuple[str, str]]:
    """Return the elements of a document in the order in which they end: the name without a prefix, and the text.

    Raises:
        RemoteProtocolError: it is too long or too deep, is no XML, or declares types or entities.
    """
    if len(data) > MOST_DOCUMENT_BYTES:
        raise RemoteProtocolError(f"a document of a router has more than {MOST_DOCUMENT_BYTES} bytes")
    found: list[tuple[str, str]] = []
    open_texts: list[list[str]] = []

    def start(_name: str, _attributes: object) -> None:
        if len(open_texts) == _MOST_DEPTH:
            raise RemoteProtocolError(f"a document of a router has more than {_MOST_DEPTH} levels")
        open_texts.append([])

    def end(name: str) -> None:
        found.append((name.rpartition(":")[2], "".join(open_texts.pop()).strip()))

    def refuse(*_declared: object) -> None:
        raise RemoteProtocolError("a document of a router declares types or entities")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = lambda text: open_texts[-1].append(text)
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data.decode("utf-8", "replace"), True)  # text: no encoding that the document names is looked up
    except expat.ExpatError as error:
        raise RemoteProtocolError(f"a document of a router is no XML: {error}") from None
    return found
