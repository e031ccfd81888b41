"""The part of a router for tests that speaks UPnP: it answers searches and, with HTTP, calls.

It is written from the standards of the UPnP forum, without `covey.wire`. What it says can be set, so that tests can
let it lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from typing import TYPE_CHECKING, Final

from covey.wire.upnp import SEARCH_PORT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

GROUP: Final = "239.255.255.250"
DEVICE: Final = "urn:schemas-upnp-org:device:InternetGatewayDevice:"
SERVICE_TYPE: Final = "urn:schemas-upnp-org:service:"
DEVICE_DESCRIPTION: Final = """<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>{base}
<device><deviceType>{device}1</deviceType><friendlyName>Test &amp; Co</friendlyName>
<serviceList><service><serviceType>{service}Layer3Forwarding:1</serviceType><serviceId>urn:upnp-org:serviceId:L3</serviceId>
<controlURL>/elsewhere</controlURL></service></serviceList>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><serviceList><service>
<serviceType>{service}{kind}</serviceType><serviceId>urn:upnp-org:serviceId:WAN</serviceId>
<SCPDURL>/scpd.xml</SCPDURL><controlURL>{control}</controlURL><eventSubURL>/event</eventSubURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>
"""


class UpnpGateway(asyncio.DatagramProtocol):
    """Answers searches and calls. On the loop on which it is opened."""

    def __init__(
        self, claims: str, map_exactly: Callable[[str, int, int], Awaitable[bool]], unmap: Callable[[int], bool]
    ) -> None:
        """Tell clients the address that it `claims`; the functions change the mappings, and say whether they did."""
        self._claims, self._map, self._unmap = claims, map_exactly, unmap
        self._search: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = self.search_port = 0
        self.kind = "WANIPConnection:1"
        self.location = ""
        """Where it says that its description is; by default where it is."""
        self.base = ""
        self.control = "/control"
        self.document = b""
        """What it sends instead of its description."""
        self.stalls = False
        """Whether it begins to answer calls and never ends."""
        self.only_permanent = False
        self.error = 0
        """What it answers to AddPortMapping: 0 is success."""
        self.calls: list[tuple[str, dict[str, str]]] = []
        self.seen: list[str] = []
        """The first line of each request of HTTP."""
        self.searches = 0

    async def open(self, inside: str, search_port: int = SEARCH_PORT) -> None:
        """Start to answer."""
        self._server = await asyncio.start_server(self._serve, inside, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.location = self.location or f"http://{inside}:{self.port}/root.xml"
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", search_port))
        member = struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton(inside))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        self.search_port = sock.getsockname()[1]
        self._search, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=sock)

    async def close(self) -> None:
        """Stop."""
        if self._search is not None:
            self._search.close()
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        wanted = re.search(rb"(?m)^ST: (.*?)\r$", data)
        if data.startswith(b"M-SEARCH * HTTP/1.1\r\n") and b'"ssdp:discover"' in data and wanted and self._search:
            self.searches += 1
            if wanted[1].decode() == f"{DEVICE}1":  # as routers of the first version: they do not know the second
                lines = ("HTTP/1.1 200 OK", "CACHE-CONTROL: max-age=120", f"ST: {DEVICE}1", "EXT:")
                said = "\r\n".join((*lines, f"Location: {self.location}", "USN: uuid:1", "", ""))
                self._search.sendto(said.encode(), addr)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.seen.append(head.split("\r\n", 1)[0])
                length = re.search(r"(?mi)^Content-Length: (\d+)", head)
                body = (await reader.readexactly(int(length[1]) if length else 0)).decode()
                client = writer.get_extra_info("peername")[0]
                status, said = await self._answer(head, body, client)
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(said)}\r\n".encode())
                writer.write(f"Location: http://127.0.0.9:{self.port}/away\r\n".encode() if status[0] == "3" else b"")
                writer.write(b"Content-Type: text/xml\r\n\r\n")
                if self.stalls and head.startswith("POST"):
                    await reader.read()  # until the client gives up
                writer.write(said)
                await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, body: str, client: str) -> tuple[str, bytes]:
        if head.startswith("GET /root.xml "):
            parts = {"base": self.base, "device": DEVICE, "service": SERVICE_TYPE, "kind": self.kind}
            return "200 OK", self.document or DEVICE_DESCRIPTION.format(control=self.control, **parts).encode()
        if head.startswith("GET /moved "):
            return "302 Found", b""
        action = re.search(rf'(?mi)^SOAPAction: "{re.escape(SERVICE_TYPE + self.kind)}#(\w+)"', head)
        if not head.startswith("POST /control ") or action is None:
            return "404 Not Found", b""
        values = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        self.calls.append((action[1], values))
        return await self._call(action[1], values, client)

    async def _call(self, name: str, values: dict[str, str], client: str) -> tuple[str, bytes]:
        error, said = 0, ""
        if name == "GetExternalIPAddress":
            said = f"<NewExternalIPAddress>{self._claims}</NewExternalIPAddress>"
        elif name == "DeletePortMapping":
            error = 0 if self._unmap(int(values["NewExternalPort"])) else 714
        elif name == "AddPortMapping":
            error = await self._add(values, client)
        else:
            error = 401
        return ("500 Internal Server Error", _fault(error)) if error else ("200 OK", self._reply(name, said))

    async def _add(self, values: dict[str, str], client: str) -> int:
        if self.error:
            return self.error
        if values["NewInternalClient"] != client:  # as routers in their safe mode
            return 606
        if self.only_permanent and values["NewLeaseDuration"] != "0":
            return 725
        is_mapped = await self._map(client, int(values["NewInternalPort"]), int(values["NewExternalPort"]))
        return 0 if is_mapped else 718

    def _reply(self, name: str, said: str) -> bytes:
        return _envelope(f'<u:{name}Response xmlns:u="{SERVICE_TYPE}{self.kind}">{said}</u:{name}Response>')


def _fault(error: int) -> bytes:
    detail = f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{error}</errorCode></UPnPError>'
    fault = f"<faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>{detail}</detail>"
    return _envelope(f"<s:Fault>{fault}</s:Fault>")


def _envelope(body: str) -> bytes:
    space = "http://schemas.xmlsoap.org/soap/"
    style = f'xmlns:s="{space}envelope/" s:encodingStyle="{space}encoding/"'
    return f'<?xml version="1.0"?><s:Envelope {style}><s:Body>{body}</s:Body></s:Envelope>'.encode()
