"""The machine on which a code is typed: finds machines that show one, and gets the secret from one of them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.config import parse_seed
from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, RemoteProtocolError
from covey.base.version import __version__
from covey.net.discovery.host_registry import PAIRING_TAG, HostRegistry
from covey.net.discovery.interfaces import to_dial, usable_interfaces
from covey.net.discovery.mdns import Beacon
from covey.net.host.descriptors import explain
from covey.net.keys.identity import node_name, own_machine, sign_as_machine
from covey.proto.pairing import PairingApplicant, PairingMachine, RefusedPairingError
from covey.runtime import loop as control
from covey.runtime.links.handshake import NO_ANSWER
from covey.runtime.links.sockets import new_socket, no_delay, receive_exactly, spell
from covey.runtime.peers.endpoint import numeric
from covey.runtime.tasks import Tasks
from covey.wire import beacon
from covey.wire.decoding import FRAME_LENGTH, frame, frame_length
from covey.wire.messages import Address
from covey.wire.pairing import PAIRING_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from covey.runtime.links.sockets import Where
    from covey.wire.pairing import Grant

WHO_SECONDS: Final = 2.0
"""How long a machine may take to name itself."""
APPLYING_SECONDS: Final = 40.0
"""How long an exchange may take, with what both machines store."""
INVITERS_LIMIT: Final = 16
"""Machines that show a code, and addresses that are asked for one."""
BUSY_SECONDS: Final = 15.0
"""How long an applicant tries again while another one is served."""
HOST_LOOK_EVERY: Final = 0.2
"""Seconds between looks at the registry of this host."""


class FoundInviter(NamedTuple):
    """A machine that says that it shows a code; nothing proves it."""

    where: Where
    machine: PairingMachine

    @property
    def host_name(self) -> str:
        """What the machine calls itself, without the letters of its key."""
        return self.machine.name.rpartition("-")[0] or self.machine.name

    @property
    def address(self) -> str:
        """Its address, without the port."""
        return str(self.where[0])


class PairingSearch:
    """Looks for machines that show a code, on this network and this host.

    Methods without `async` are for any thread.
    """

    def __init__(self, interfaces: str) -> None:
        self._interfaces = interfaces
        self._beacon = Beacon(beacon.PAIRING_KEY, 0, interfaces, self._heard, announce=False)
        self._host_registry: HostRegistry | None = None
        self._tasks = Tasks("the search for machines that show a code")
        self._asked: set[tuple[Address, ...]] = set()
        self._asking = 0
        self._found: dict[bytes, FoundInviter] = {}
        self.unreachable: dict[str, str] = {}
        """Addresses of machines that announce a code and do not answer, and why."""

    async def open(self) -> None:
        """Begin to look."""
        self._tasks.spawn(self._look_at_this_host())
        self._tasks.spawn(self._listen())

    async def close(self) -> None:
        """Stop, and free everything."""
        await self._tasks.close()
        await self._beacon.close()
        if self._host_registry is not None:
            self._host_registry.close()

    def found(self) -> list[FoundInviter]:
        """Return the machines that were found, this one left out."""
        own = own_machine()
        return sorted((each for id, each in list(self._found.items()) if id != own), key=lambda each: each.machine.name)

    @property
    def is_here(self) -> bool:
        """Whether this machine itself shows a code."""
        return own_machine() in self._found

    @property
    def multicast(self) -> str:
        """Where it listens, or why it does not."""
        return self._beacon.state

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, CoveyError):  # `multicast` says why
            await self._beacon.start()

    async def _look_at_this_host(self) -> None:
        while True:
            with contextlib.suppress(OSError, CoveyError):  # a folder that cannot be used prevents no more than that
                self._host_registry = self._host_registry or HostRegistry(PAIRING_TAG)
                for each in self._host_registry.others():
                    self._heard((Address("127.0.0.1", each.port),), "lo")
            await asyncio.sleep(HOST_LOOK_EVERY)

    def _heard(self, addresses: tuple[Address, ...], interface: str) -> None:
        if addresses not in self._asked and len(self._asked) < INVITERS_LIMIT and not self._tasks.is_closing:
            self._asked.add(addresses)
            self._tasks.spawn(self._ask(addresses))

    async def _ask(self, addresses: tuple[Address, ...]) -> None:
        try:
            found = await ask_who(addresses, self._interfaces)
        except CoveyError as error:
            self.unreachable[spell((addresses[0].ip, addresses[0].port))] = str(error)
        else:
            known = self._found.get(found.machine.id)
            if known is None or _is_loopback(found.where):
                self._found[found.machine.id] = found


@contextlib.contextmanager
def searching(interfaces: str) -> Iterator[PairingSearch]:
    """Look for machines that show a code during the `with` block."""
    search = PairingSearch(interfaces)
    try:
        control.run(search.open(), control.LOOP_SECONDS)
        yield search
    finally:
        with contextlib.suppress(TimeoutError):
            control.run(search.close(), control.LOOP_SECONDS)


async def ask_who(addresses: Sequence[Address], interfaces: str = "") -> FoundInviter:
    """Ask the machine at these addresses, of which one is enough, whether it shows a code.

    Raises:
        ConnectError: no machine that does answers there.
    """
    is_here = all(ipaddress.ip_address(each.ip).is_loopback for each in addresses)
    asking = [
        asyncio.ensure_future(_ask_at(each)) for each in to_dial(usable_interfaces(interfaces), addresses, is_here)
    ]
    problem = "no interface leads there"
    try:
        for answer in asyncio.as_completed(asking):
            try:
                return await answer
            except ConnectError as error:
                problem = str(error)
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    raise ConnectError(problem)


async def _ask_at(where: Where) -> FoundInviter:
    try:
        async with asyncio.timeout(WHO_SECONDS):
            with await _connect(where) as sock:
                core = PairingApplicant(_own(), _sign, random=secrets.token_bytes)
                return FoundInviter(where, core.heard_hello(await _receive(sock)))
    except RefusedPairingError as error:
        raise ConnectError(f"{spell(where)}: {error}") from error
    except RemoteProtocolError as error:
        raise ConnectError(f"{spell(where)}: another program listens there, or a node of covey") from error
    except OSError as error:  # TimeoutError, too
        raise ConnectError(f"{spell(where)}: {explain(error) or NO_ANSWER}") from error


def addresses_at(text: str, ports: Sequence[int]) -> list[tuple[Address, ...]]:
    """Return the addresses that are meant by what a person types: for each of some ports, if none is named.

    Raises:
        ConfigError: it is no address.
        ConnectError: there is no such host.
    """
    try:
        meant = dict.fromkeys(parse_seed(text, port) for port in ports)  # one, if the text names a port
    except ConfigError as error:
        what = str(error).partition(". Seeds are")[0].removeprefix("seed ")
        raise ConfigError(f"{what}; a code has six digits, and a join code begins with `covey1-`") from None
    return [numeric(*each) for each in meant]


async def get_in(found: FoundInviter, code: str, store: Callable[[Grant, PairingMachine], None]) -> Grant:
    """Get into a cluster with a code: return what was stored by `store`, which may block.

    Raises:
        RefusedPairingError: the code is wrong, or the other machine does not go on.
        AuthError: the other machine has not proved that it knows the code; nothing was stored.
        ConnectError: the connection ended, or the other machine is too slow.
    """
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return await _try_once(found, code, store)
        except RefusedPairingError as error:
            if error.refusal.kind != "later" or time.monotonic() + error.refusal.seconds > until:
                raise
            await asyncio.sleep(error.refusal.seconds)


async def _try_once(found: FoundInviter, code: str, store: Callable[[Grant, PairingMachine], None]) -> Grant:
    core = PairingApplicant(_own(), _sign, random=secrets.token_bytes)
    try:
        async with asyncio.timeout(APPLYING_SECONDS):
            with await _connect(found.where) as sock:
                machine = core.heard_hello(await _receive(sock))
                if machine.id != found.machine.id:
                    raise AuthError(f"another machine than {found.host_name} answers at {found.address} now")
                await _send(sock, core.request(code))
                await _send(sock, core.answered(await _receive(sock)))
                grant = core.granted(await _receive(sock))
                await control.aside(store, grant, machine)
                with contextlib.suppress(OSError):  # this machine is in the cluster all the same
                    await _send(sock, core.stored())
                return grant
    except OSError as error:  # TimeoutError, too
        raise ConnectError(f"{found.host_name} at {found.address}: {explain(error) or NO_ANSWER}") from error


async def _connect(where: Where) -> socket.socket:
    sock = new_socket(where, spares=False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, where)
        no_delay(sock)
    except BaseException:
        sock.close()
        raise
    return sock


async def _receive(sock: socket.socket) -> bytes:
    return await receive_exactly(sock, frame_length(await receive_exactly(sock, FRAME_LENGTH.size), PAIRING_LIMIT))


async def _send(sock: socket.socket, body: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, frame(body))


def _own() -> PairingMachine:
    own = own_machine()
    return PairingMachine(own, node_name(socket.gethostname(), own), __version__)


def _sign(words: bytes) -> bytes:
    return sign_as_machine(words)[1]


def _is_loopback(where: Where) -> bool:
    return ipaddress.ip_address(str(where[0])).is_loopback
