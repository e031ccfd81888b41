"""The machine that shows a code: listens, announces itself, and lets machines in that prove the code.

What a person sees is a `PairingView`, which any thread may read and wait for. Nothing of it is stored: after a restart
another code is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from covey.base.config import ports_from
from covey.base.errors import ConfigError, CoveyError
from covey.base.version import __version__
from covey.net.audit import audit_log
from covey.net.discovery.host_registry import PAIRING_TAG, HostRegistry
from covey.net.discovery.interfaces import advertised, current_seeds, usable_interfaces
from covey.net.discovery.mdns import Beacon
from covey.net.host.machine import waking_clock
from covey.net.host.settings_files import effective_environment
from covey.net.keys import charter, clusters, owner, trust
from covey.net.keys.identity import machine_name, node_name, own_machine, short_id, sign_as_machine
from covey.proto.pairing import (
    AdmitMachine,
    EndPairing,
    MachinePaired,
    PairingChanged,
    PairingInviter,
    PairingMachine,
    SendPairing,
)
from covey.runtime import loop as control
from covey.runtime.links.acceptor import remote_ip
from covey.runtime.links.limits import SourceLimits, source_of
from covey.runtime.links.sockets import accept_shortage, accepted, no_delay, receive_exactly
from covey.runtime.pairing.applicant import ask_who
from covey.runtime.peers.endpoint import listen_everywhere
from covey.runtime.tasks import CoreDriver, Tasks
from covey.wire import beacon
from covey.wire.decoding import FRAME_LENGTH, frame, frame_length
from covey.wire.messages import Address
from covey.wire.pairing import PAIRING_LIMIT, Grant
from covey.wire.secret import MAX_RELAYS, encode_join_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.proto.pairing import PairingEffect

PAIRING_ACCEPTS_AT_ONCE: Final = 8
MOST_OTHERS: Final = 8
"""Other machines that show a code of which a person is told."""
PAIRING_PORTS: Final = 4
"""Ports that are tried, the last but one of those of nodes first: visitors take the last."""
OTHERS_EVERY: Final = 1.0
"""Seconds between looks at the registry of this host."""


@dataclass(frozen=True)
class PairedMachine:
    """A machine that has got the secret."""

    name: str
    id: bytes
    release: str
    source: str
    """Where it connected from."""
    has_stored: bool
    """Whether it has said that it has stored the secret."""
    waits_at: str
    """The machine where the owner has to approve it; empty if nothing is missing."""


@dataclass(frozen=True)
class PairingView:
    """What a person sees; the next one has a higher `serial`."""

    serial: int
    cluster: str
    machine: str
    """The name of this machine."""
    addresses: tuple[str, ...]
    """Where it listens, best first, without the port."""
    port: int
    code: str
    """Empty when no code is shown any more."""
    until: float
    """When it ends, by `waking_clock`."""
    machines: int
    """How many machines the code still lets in."""
    failed: int
    """Wrong tries of this code."""
    failed_from: str
    over: str
    """Why no code is shown any more, or empty."""
    replaced: str = ""
    """Why the code before this one was given up; empty if it has let its machines in."""
    paired: tuple[PairedMachine, ...] = ()
    refused: str = ""
    """The last machine that knew the code and was refused, and why."""
    others: tuple[str, ...] = ()
    """Other machines nearby that show a code: most likely `covey init` was typed on them, too."""
    problem: str = ""
    """Why machines of this network may not find this one, or empty."""

    @property
    def seconds(self) -> float:
        """How long the code is still good."""
        return max(0.0, self.until - waking_clock())


class Pairing:
    """The codes of this machine, while it shows them. Methods without `async` are for any thread."""

    def __init__(self, cluster: Cluster, interfaces: str, listener: socket.socket, *, machines: int) -> None:
        """Take ownership of a listening socket."""
        self._cluster, self._listener = cluster.name, listener
        own = own_machine()
        here = PairingMachine(own, node_name(socket.gethostname(), own), __version__)
        self._core = PairingInviter(here, _sign, random=secrets.token_bytes, now=waking_clock(), machines=machines)
        self._driver = CoreDriver["PairingEffect"](self._core, self, clock=waking_clock)
        self._port: int = listener.getsockname()[1]
        usable = usable_interfaces(interfaces)
        self._addresses = tuple(each.ip for each in advertised(usable, self._port)) or ("127.0.0.1",)
        self._beacon = Beacon(beacon.PAIRING_KEY, self._port, interfaces, self._heard)
        self._host_registry: HostRegistry | None = None
        self._tasks = Tasks("pairing")
        self._arrivals = SourceLimits()
        self._shortage = accept_shortage("pairing")
        self._socks: dict[int, socket.socket] = {}
        self._number = 0
        self._others: dict[bytes, str] = {}
        self._asked: set[tuple[Address, ...]] = set()
        self._changed = threading.Condition()
        self._view = PairingView(0, cluster.name, here.name, self._addresses, self._port, "", 0.0, 0, 0, "", "")

    # For any thread

    def view(self) -> PairingView:
        """Return what a person sees now."""
        with self._changed:
            return self._view

    def next_after(self, serial: int, within: float) -> PairingView | None:
        """Return what a person sees once it has changed since `serial`; None if it does not within so many seconds."""
        with self._changed:
            has_changed = self._changed.wait_for(lambda: self._view.serial > serial, within)
            return self._view if has_changed else None

    # On the control loop

    async def open(self) -> None:
        """Begin to listen, and to announce this machine."""
        self._listen(self._listener)
        self._driver.settle()
        self._publish()
        self._tasks.spawn(self._announce())
        self._tasks.spawn(self._look_at_this_host())

    async def close(self) -> None:
        """Show no code any more, and free everything."""
        self._core.close()
        self._driver.settle()
        self._driver.close()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        await self._tasks.close()
        for sock in self._socks.values():  # of tasks that were cancelled before they began
            sock.close()
        self._socks.clear()
        await self._beacon.close()
        if self._host_registry is not None:
            self._host_registry.close()

    async def _announce(self) -> None:
        try:
            await self._beacon.start()
        except (OSError, CoveyError) as error:  # machines that are given the address find this one all the same
            self._publish(problem=f"this machine cannot be found by multicast: {error}")

    async def _look_at_this_host(self) -> None:
        """Be found by processes of this host, and find others; without a folder that can be used, do without."""
        while True:
            with contextlib.suppress(OSError, CoveyError):  # such as a full disk: the next try may work
                if self._host_registry is None:
                    host_registry = HostRegistry(PAIRING_TAG)
                    host_registry.announce(self._port, "")
                    self._host_registry = host_registry
                for each in self._host_registry.others():
                    self._heard((Address("127.0.0.1", each.port),), "lo")
            await asyncio.sleep(OTHERS_EVERY)

    # Connections

    def _listen(self, listener: socket.socket) -> None:
        if not self._tasks.is_closing:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for sock in accepted(listener, PAIRING_ACCEPTS_AT_ONCE, self._listen, self._shortage):
            source = remote_ip(sock)
            if self._arrivals.come(source, waking_clock(), is_member=False) is None:
                sock.close()
                continue
            sock.setblocking(False)
            no_delay(sock)
            self._number += 1
            self._socks[self._number] = sock
            self._tasks.spawn(self._hear(self._number, sock, source_of(source)))

    async def _hear(self, number: int, sock: socket.socket, source: str) -> None:
        """Pass on what comes on a connection until it ends."""
        try:
            self._core.came(number, source, waking_clock())
            self._driver.settle()
            while number in self._socks:
                length = frame_length(await receive_exactly(sock, FRAME_LENGTH.size), PAIRING_LIMIT)
                self._core.received(number, await receive_exactly(sock, length), waking_clock())
                self._driver.settle()
        except (OSError, CoveyError):
            pass
        finally:
            self._socks.pop(number, None)
            sock.close()
            self._core.gone(number)
            self._driver.settle()

    # Effects of the core

    def perform(self, effect: PairingEffect) -> None:
        match effect:
            case SendPairing(connection, message):
                sock = self._socks.get(connection)
                if sock is not None:
                    with contextlib.suppress(
                        OSError
                    ):  # all of it fits; a machine that does not read loses the connection
                        sock.send(frame(message))
            case EndPairing(connection):
                if (sock := self._socks.pop(connection, None)) is not None:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)  # what was sent arrives; the task that reads closes it
            case AdmitMachine(connection, machine):
                self._tasks.spawn(self._admit(connection, machine))
            case MachinePaired(machine, grant, has_stored):
                self._note_paired(machine, grant, has_stored=has_stored)
            case PairingChanged():
                pass

    def settled(self) -> None:
        self._publish()

    def failed(self, error: ConfigError) -> None:
        self._publish(problem=str(error))

    async def _admit(self, connection: int, machine: PairingMachine) -> None:
        """Approve a machine that has proved the code, on disk, and give it the join code."""
        try:
            grant = await control.aside(admit, self._cluster, machine)
        except (OSError, CoveyError) as error:
            self._publish(refused=f"{machine.name} knew the code and was refused: {error}")
            self._core.turned_away(connection, str(error))
        else:
            self._core.admitted(connection, grant, waking_clock())
        self._driver.settle()

    def _note_paired(self, machine: PairingMachine, grant: Grant, *, has_stored: bool) -> None:
        name = machine_name(machine.name, machine.id)
        paired = PairedMachine(name, machine.id, machine.release, machine.source, has_stored, grant.waits_at)
        self._publish(paired=(*self._view.paired, paired))

    # What a person sees

    def _publish(self, **changes: object) -> None:
        state = self._core.state()
        with self._changed:
            now = replace(
                self._view,
                code=state.code,
                until=state.until,
                machines=state.machines,
                failed=state.failed,
                failed_from=state.failed_from,
                over=state.over,
                replaced=state.replaced,
                **changes,  # type: ignore[arg-type]
            )
            if now != self._view:
                self._view = replace(now, serial=self._view.serial + 1)
                self._changed.notify_all()

    def _heard(self, addresses: tuple[Address, ...], interface: str) -> None:
        """Look which machine announces pairing: if it is another one, a person should know."""
        if addresses not in self._asked and len(self._asked) < MOST_OTHERS and not self._tasks.is_closing:
            self._asked.add(addresses)
            self._tasks.spawn(self._ask_other(addresses))

    async def _ask_other(self, addresses: tuple[Address, ...]) -> None:
        with contextlib.suppress(OSError, CoveyError):
            found = await ask_who(addresses)
            if found.machine.id != own_machine():
                where = "this machine, as another user or with another COVEY_HOME"
                where = where if found.where[0] in ("127.0.0.1", "::1") else found.where[0]
                self._others[found.machine.id] = f"{found.machine.name} ({where})"
                self._publish(others=tuple(sorted(self._others.values())))


def _sign(words: bytes) -> bytes:
    return sign_as_machine(words)[1]


def admit(name: str, machine: PairingMachine) -> Grant:
    """Approve a machine that has proved the code, and return what it gets.

    It is trusted under its key: `covey run --on` means it by its name. Writes to disk: not for the event loop.

    Raises:
        ConfigError: it is denied, or this machine is not in the cluster any more.
    """
    cluster = clusters.load(name)
    here = node_name(socket.gethostname(), own_machine())
    shown = machine_name(machine.name, machine.id)
    objection = charter.machine_objection(cluster, machine.id, here)
    waits_at = ""
    if objection and not _waits(cluster, machine.id):
        raise ConfigError(objection)
    if objection:
        private = owner.held(cluster)
        if private is None:
            assert cluster.charter is not None
            waits_at = cluster.charter.machine
            clusters.remember_waiting(name, machine.id, shown)
        else:
            allowed = (charter.lists(cluster)[1] or frozenset()) | {machine.id}
            cluster = charter.amend(cluster, private, lambda now: (now[0], allowed), {machine.id: shown})
            audit_log.note(name, "list-changed", reason=f"{shown} ({short_id(machine.id)}) was approved by its code")
            clusters.forget_waiting(name, [machine.id])
    trust.remember(cluster, {machine.id: shown})
    note = f"it knew the code{f', and waits for approval at {waits_at}' if waits_at else ''}"
    audit_log.note(name, "machine-paired", node=machine.id, name=shown, address=machine.source, reason=note)
    seeds = current_seeds(effective_environment())
    code = encode_join_code(cluster.secret, seeds, cluster.owner, cluster.relays[:MAX_RELAYS])
    return Grant(code, waits_at)


def _waits(cluster: Cluster, machine: bytes) -> bool:
    """Tell whether a machine lacks nothing but the owner's approval."""
    known = cluster.charter
    if known is None or machine in cluster.denied or machine in known.denied:
        return False
    return known.allowed is not None and machine not in known.allowed


@contextlib.contextmanager
def pairing(cluster: Cluster, config: GroupConfig, *, machines: int = 0) -> Iterator[Pairing]:
    """Show codes during the `with` block, each for one machine; or one code for so many `machines`.

    Raises:
        ConfigError: no port is free, no interface matches, or covey's folder cannot be used.
    """
    sock = listen_everywhere(pairing_ports())
    try:
        shown = Pairing(cluster, config.interfaces, sock, machines=machines)
    except BaseException:
        sock.close()
        raise
    try:
        control.run(shown.open(), control.LOOP_SECONDS)
        yield shown
    finally:
        with contextlib.suppress(TimeoutError):
            control.run(shown.close(), control.LOOP_SECONDS)


def pairing_ports() -> tuple[int, ...]:
    """Return the ports at which a machine shows codes, of which it takes the first free one.

    They are among those of nodes, so that a firewall that lets nodes in lets these through.
    """
    ports = ports_from(effective_environment().get("COVEY_PORT", ""))
    return tuple(ports[-2 : -2 - PAIRING_PORTS : -1]) or tuple(ports)
