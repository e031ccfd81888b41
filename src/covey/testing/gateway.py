"""A router in user space for tests: it answers PCP, NAT-PMP and UPnP, and passes connections to mapped ports on.

python -m covey.testing.gateway 10.0.0.1 10.1.0.1 --speaks pmp,upnp

The first address is the one inside, the second the one outside. Each change of a mapping is printed as a line of JSON.
Ports that are not mapped are not listened at. It is written from the standards, without `covey.wire`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import struct
import threading
from typing import TYPE_CHECKING, Any, Final

from covey.testing.upnp_gateway import UpnpGateway
from covey.wire.upnp import SEARCH_PORT

if TYPE_CHECKING:
    from collections.abc import Callable

PCP_PORT: Final = 5351
GRANTED_SECONDS: Final = 3600
"""Seconds that it grants at most."""
GATEWAY_START_SECONDS: Final = 10.0


class Gateway(asyncio.DatagramProtocol):
    """Mappings, by external port. On the loop on which it is opened."""

    def __init__(
        self, outside: str, *, speaks: str = "pcp,pmp", claims: str = "", lifetime: int = GRANTED_SECONDS
    ) -> None:
        """Pass connections to `outside` on; `claims` is the address that clients are told, by default the same."""
        self._outside, self._claims = outside, claims or outside
        self._speaks, self._lifetime = speaks.split(","), lifetime
        self._servers: dict[int, tuple[tuple[str, int], asyncio.Server]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._transport: asyncio.DatagramTransport | None = None
        self.log: list[dict[str, Any]] = []
        """Every change."""
        self.echo = False
        """Whether changes are printed."""
        self.result = 0
        """What it answers to requests for mappings: 0 is success."""
        self.spoils_nonce = False
        self.upnp = UpnpGateway(self._claims, self._map_exactly, self._unmap_external)

    async def open(self, inside: str, port: int = PCP_PORT, search_port: int = SEARCH_PORT) -> int:
        """Start to answer; return the port of PCP."""
        if "upnp" in self._speaks:
            await self.upnp.open(inside, search_port)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(inside, port))
        return int(self._transport.get_extra_info("sockname")[1])

    async def close(self) -> None:
        """Stop, and end every mapping."""
        if self._transport is not None:
            self._transport.close()
        await self.upnp.close()
        for external in list(self._servers):
            self._unmap(external)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        task = asyncio.ensure_future(self._answer(data, addr))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = b""
        if data[:1] == b"\x02" and len(data) >= 60:
            answer = await self._pcp(data, addr[0])
        elif data[:1] == b"\0" and "pmp" in self._speaks:
            answer = await self._pmp(data, addr[0])
        if answer and self._transport is not None:
            self._transport.sendto(answer, addr)

    async def _pcp(self, data: bytes, client: str) -> bytes:
        if "pcp" not in self._speaks:  # RFC 6886, 3.5: a NAT-PMP router answers so
            return struct.pack(">BBHI", 0, 0x81, 1, 7) if "pmp" in self._speaks else b""
        (lifetime,) = struct.unpack_from(">I", data, 4)
        nonce, port, wanted = data[24:36], *struct.unpack_from(">HH", data, 40)
        sender = ipaddress.IPv6Address(data[8:24]).ipv4_mapped
        result = self.result or (12 if str(sender) != client else 0)
        granted = min(lifetime, self._lifetime)
        external = 0 if result else await self._map(client, port, wanted, granted)
        address = bytes(10) + b"\xff\xff" + ipaddress.IPv4Address(self._claims).packed
        nonce = bytes(12) if self.spoils_nonce else nonce
        head = struct.pack(">BBxBII12x", 2, 0x81, result, granted, 7)
        return head + nonce + struct.pack(">B3xHH", 6, port, external) + address

    async def _pmp(self, data: bytes, client: str) -> bytes:
        if len(data) == 2 and data[1] == 0:
            return struct.pack(">BBHI", 0, 128, 0, 7) + ipaddress.IPv4Address(self._claims).packed
        if len(data) != 12 or data[1] != 2:
            return struct.pack(">BBHI", 0, 128 | data[1] if len(data) > 1 else 128, 5, 7)
        port, wanted, lifetime = struct.unpack_from(">HHI", data, 4)
        granted = min(lifetime, self._lifetime)
        external = 0 if self.result else await self._map(client, port, wanted, granted)
        return struct.pack(">BBHIHHI", 0, 130, self.result, 7, port, external, granted)

    async def _map(self, client: str, port: int, wanted: int, lifetime: int) -> int:
        known = next((each for each, (target, _) in self._servers.items() if target == (client, port)), 0)
        if not lifetime:
            if known:
                self._unmap(known)
            return 0
        if not known:
            server = await self._listen(client, port, wanted)
            known = server.sockets[0].getsockname()[1]
            self._servers[known] = (client, port), server
        self._note("mapped", known, client, port)
        return known

    async def _map_exactly(self, client: str, port: int, external: int) -> bool:
        if external not in self._servers:
            try:
                server = await asyncio.start_server(self._passer(client, port), self._outside, external)
            except OSError:
                return False
            self._servers[external] = (client, port), server
        if self._servers[external][0] != (client, port):
            return False
        self._note("mapped", external, client, port)
        return True

    def _unmap_external(self, external: int) -> bool:
        is_known = external in self._servers
        if is_known:
            self._unmap(external)
        return is_known

    async def _listen(self, client: str, port: int, wanted: int) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._passer(client, port), self._outside, wanted)
        except OSError:  # taken: another one is as good
            return await asyncio.start_server(self._passer(client, port), self._outside, 0)

    def _passer(self, client: str, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._pass_on(reader, writer, client, port)

        return serve

    def _unmap(self, external: int) -> None:
        (client, port), server = self._servers.pop(external)
        server.close()
        self._note("unmapped", external, client, port)

    def _note(self, what: str, external: int, client: str, port: int) -> None:
        self.log.append({"what": what, "external": external, "client": client, "port": port})
        if self.echo:
            print(json.dumps(self.log[-1]), flush=True)

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: str, port: int
    ) -> None:
        with contextlib.suppress(OSError):
            inner, outer = await asyncio.open_connection(client, port)
            await asyncio.gather(_copy(reader, outer), _copy(inner, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    with contextlib.suppress(OSError):
        target.close()


class GatewayThread:
    """A gateway beside a test, on a thread of its own, inside at 127.0.0.1."""

    def __init__(self, outside: str = "127.0.0.1", **options: Any) -> None:
        self.gateway = Gateway(outside, **options)
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._is_open, self._ending = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="covey-gateway", daemon=True)

    def __enter__(self) -> GatewayThread:
        self._thread.start()
        if not self._is_open.wait(GATEWAY_START_SECONDS):
            raise TimeoutError("the gateway did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(GATEWAY_START_SECONDS)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.port = await self.gateway.open("127.0.0.1", 0, 0)
        self._is_open.set()
        await self._ending.wait()
        await self.gateway.close()


async def _serve(inside: str, outside: str, speaks: str) -> None:
    gateway = Gateway(outside, speaks=speaks)
    gateway.echo = True
    await gateway.open(inside)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inside")
    parser.add_argument("outside")
    parser.add_argument("--speaks", default="pcp,pmp")
    given = parser.parse_args()
    asyncio.run(_serve(given.inside, given.outside, given.speaks))
