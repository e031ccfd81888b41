"""Asks the router of this machine to pass connections from outside on to one of its ports.

A `PortMapping` asks with PCP, then with NAT-PMP, then with UPnP, and again at half of the time that the router grants.
Only answers from the address of the router are read.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final, NamedTuple

from covey.base.errors import ConnectError, RemoteProtocolError
from covey.net.host.descriptors import explain
from covey.net.router.upnp import UpnpPort
from covey.wire.port_mapping import (
    GATEWAY_PORT,
    PCP_DATAGRAM_BYTES,
    PCP_NONCE_BYTES,
    RESULTS,
    GatewayAnswer,
    PcpMapping,
    PmpAddress,
    PmpMapping,
    PmpRefusal,
    ask_pcp,
    ask_pmp,
    ask_pmp_address,
    read_answer,
)

logger = logging.getLogger("covey")

MAPPING_SECONDS: Final = 7200
"""Seconds that are asked for; both RFCs recommend it, and the mapping ends with the process anyway."""
LEAST_RENEWAL_SECONDS, MOST_RENEWAL_SECONDS = 10.0, 3600.0
"""Bounds of the time until the mapping is asked for again, whatever the router grants."""
FAILED_PAUSE: Final = 60.0
"""How long to wait after the router has refused, or has not answered."""
ANSWER_WAITS: Final = (0.25, 0.5, 1.0)
"""Seconds that each try of one request waits for an answer."""
UNMAP_SECONDS: Final = 3.0
"""How long closing waits until the router has removed the mapping."""
DATAGRAMS_LIMIT: Final = 16
"""Datagrams that are read for one try: most routers send one."""
ROUTES: Final = Path("/proc/net/route")
ELSE: Final = "a relay works everywhere: covey relay"
PRIVATE: Final = tuple(
    map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10"))
)
"""Networks that the internet does not lead to: those of homes and offices, and those of providers."""


class Mapping(NamedTuple):
    """Connections to this address and port come to this machine."""

    ip: str
    port: int
    lifetime: int
    protocol: str
    """`PCP`, `NAT-PMP` or `UPnP`."""

    @property
    def is_private(self) -> bool:
        """Whether the router is itself behind another one, so that the internet does not lead to its port."""
        address = ipaddress.ip_address(self.ip)
        return any(address in network for network in PRIVATE)


class PortMapping:
    """A port of the router that leads to a port of this machine, from `__init__` until `close`."""

    def __init__(self, port: int) -> None:
        """Begin to ask the router, on a thread."""
        self.mapped: Mapping | None = None
        """What the router grants now. Any thread may read it."""
        self.problem = "the router has not answered yet"
        """Why nothing is mapped; empty if something is."""
        self._port, self._nonce = port, secrets.token_bytes(PCP_NONCE_BYTES)
        self._ending = threading.Event()
        self._upnp = UpnpPort(port, self._ending)
        self._thread = threading.Thread(target=self._keep, name="covey-port-mapping", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the mapping back, and end. Closing twice is fine."""
        self._ending.set()
        self._thread.join(UNMAP_SECONDS)

    def _keep(self) -> None:
        while not self._ending.is_set():
            self._ending.wait(self._renew())
        if self.mapped is not None or self._upnp.external:
            with contextlib.suppress(ConnectError, OSError):
                if self._upnp.external:
                    self._upnp.end()
                else:
                    ask_gateway(default_gateway(), self._port, self._nonce, 0, tries=ANSWER_WAITS[:1])
            self.mapped = None

    def _renew(self) -> float:
        """Ask once; return the seconds until the next time."""
        before, known = self.mapped, self.problem
        try:
            self.mapped = ask_gateway(
                default_gateway(), self._port, self._nonce, MAPPING_SECONDS, ANSWER_WAITS, self._upnp
            )
        except (ConnectError, OSError) as error:
            self.mapped = None
            self.problem = explain(error) if isinstance(error, OSError) else str(error)
            if self.problem != known:
                logger.warning("no port of the router leads here: %s; %s", self.problem, ELSE)
            return FAILED_PAUSE
        except Exception as error:  # whatever a router answers, the next time may be better
            self.mapped, self.problem = None, f"{type(error).__name__}; see the log"
            if self.problem != known:
                logger.exception("no port of the router leads here: its answer could not be read")
            return FAILED_PAUSE
        self.problem = ""
        if before is None or before[:2] != self.mapped[:2]:
            where = f"{self.mapped.ip}:{self.mapped.port}"
            logger.warning("the router passes connections to %s on to this node, for COVEY_SEEDS=%s", where, where)
            if self.mapped.is_private:
                logger.warning("the internet does not lead to %s: the router is behind another one; %s", where, ELSE)
        return min(MOST_RENEWAL_SECONDS, max(LEAST_RENEWAL_SECONDS, self.mapped.lifetime / 2))


def default_gateway() -> str:
    """Return the address of the router of this machine; ConnectError if there is none."""
    found = _linux_gateway() if sys.platform == "linux" else _other_gateway()
    if not found:
        raise ConnectError("this machine has no IPv4 router")
    return found


def _linux_gateway() -> str:
    routes = []
    with contextlib.suppress(OSError):
        for line in ROUTES.read_text().splitlines()[1:]:
            _, target, gateway, flags, _, _, metric, mask, *_ = line.split()
            if int(flags, 16) & 3 == 3 and int(target, 16) == int(mask, 16) == 0:  # up, and by a gateway
                routes.append((int(metric), socket.inet_ntoa(struct.pack("<I", int(gateway, 16)))))
    return min(routes)[1] if routes else ""


def _other_gateway() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["route", "-n", "get", "default"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
        for line in said.splitlines():
            name, _, value = line.strip().partition(": ")
            if name == "gateway":
                with contextlib.suppress(ValueError):
                    return str(ipaddress.IPv4Address(value.strip()))
    return ""


def ask_gateway(
    gateway: str,
    port: int,
    nonce: bytes,
    lifetime: int,
    tries: tuple[float, ...] = ANSWER_WAITS,
    upnp: UpnpPort | None = None,
) -> Mapping:
    """Ask a router for a mapping of a TCP port; with a lifetime of 0, to end it, except one of UPnP.

    A port that is mapped with `upnp` already is asked for with UPnP alone.

    Raises:
        ConnectError: the router offers none of the protocols, refuses, or answers with nonsense.
        OSError: no datagram can be sent there.
    """
    refusal = "has mapped a port before"
    if upnp is None or not upnp.external:
        answer = _ask_with_datagrams(gateway, port, nonce, lifetime, tries)
        if isinstance(answer, Mapping):
            return answer
        refusal = answer
    try:
        ip, external, granted = (upnp or UpnpPort(port)).ask(gateway, lifetime)
    except (ConnectError, OSError) as error:
        raise ConnectError(f"the router {gateway} {refusal}; with UPnP: {error}") from error
    return _checked(ip, external, granted, "UPnP")


def _ask_with_datagrams(
    gateway: str, port: int, nonce: bytes, lifetime: int, tries: tuple[float, ...]
) -> Mapping | str:
    """Ask with PCP, then with NAT-PMP; return what the router grants, or what it does instead."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((gateway, GATEWAY_PORT))
        own = sock.getsockname()[0]
        answer = _exchange(sock, ask_pcp(own, nonce, port, port, lifetime), (PcpMapping, PmpRefusal), tries, nonce)
        if isinstance(answer, PcpMapping) and answer.result == 0:
            return _checked(answer.external_ip, answer.external_port, answer.lifetime, "PCP")
        is_known = isinstance(answer, PcpMapping)
        where = _exchange(sock, ask_pmp_address(), (PmpAddress,), tries[:1] if is_known else tries)
        if isinstance(where, PmpAddress) and where.result == 0:
            mapped = _exchange(sock, ask_pmp(port, port if lifetime else 0, lifetime), (PmpMapping, PmpRefusal), tries)
            if isinstance(mapped, PmpMapping) and mapped.result == 0 and mapped.internal_port == port:
                return _checked(where.external_ip, mapped.external_port, mapped.lifetime, "NAT-PMP")
            answer = mapped or answer
        if answer is None or isinstance(answer, PmpRefusal):
            return "does not offer PCP or NAT-PMP"
        return f"refuses: {RESULTS.get(answer.result, f'its reason has the number {answer.result}')}"


def _exchange(
    sock: socket.socket,
    request: bytes,
    kinds: tuple[type[GatewayAnswer], ...],
    tries: tuple[float, ...],
    nonce: bytes | None = None,
) -> GatewayAnswer | None:
    """Send a request until it is answered; None if it is not. Other datagrams are dropped, a bounded number of them."""
    for seconds in tries:
        with contextlib.suppress(ConnectionError, TimeoutError):  # nothing listens there, or nothing came
            sock.settimeout(seconds)
            sock.send(request)
            for _ in range(DATAGRAMS_LIMIT):
                with contextlib.suppress(RemoteProtocolError):
                    answer = read_answer(sock.recv(PCP_DATAGRAM_BYTES + 1))
                    is_ours = not isinstance(answer, PcpMapping) or nonce is None or answer.nonce == nonce
                    if isinstance(answer, kinds) and is_ours:
                        return answer
    return None


def _checked(ip: str, port: int, lifetime: int, protocol: str) -> Mapping:
    address = ipaddress.ip_address(ip)
    if lifetime and (not port or address.is_unspecified or address.is_loopback or address.is_multicast):
        raise ConnectError(f"the router grants a port of {ip}, which is no address of a router")
    return Mapping(ip, port, lifetime, protocol)
