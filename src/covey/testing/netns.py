"""A local network of hosts that are network namespaces, for tests with real processes. Linux only; needs root.

with Lan(hosts=3, kind="switch") as lan:
    lan.switch.allow_multicast(False)
    server = lan.hosts[0].popen(["python", "server.py"])
    lan.hosts[1].run(["python", "client.py", lan.hosts[0].ip4])
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from covey.testing.switch import Switch, inside

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LAN_PREFIX: Final = "covey-lan"
_NAMESPACES: Final = Path("/run/netns")
_ETC: Final = Path("/etc/netns")
_FOLDERS: Final = Path("/tmp")
"""Where hosts have their folders: the paths of sockets in them must be short, wherever TMPDIR is."""
_COMMAND_SECONDS: Final = 300.0
"""A guard against hangs: what a command takes depends on what else the machine does."""
_NAME_TRIES: Final = 100
_LAUNCHERS: Final = ("COVEY_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")


def permitted() -> str:
    """Return "" if this process may make networks of namespaces, else the reason why not."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (package iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    try:
        with Lan(hosts=1):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made: {error}"


def require_namespaces() -> None:
    """Skip the calling test if namespaces are not permitted; in CI and as root, fail it instead."""
    if reason := permitted():
        if os.environ.get("CI") or os.getuid() == 0:
            raise AssertionError(f"{reason}; this test is never skipped in CI or as root")
        raise unittest.SkipTest(reason)


class Host:
    """One namespace, which its processes see as their machine."""

    def __init__(self, name: str, index: int, folder: Path, host_name: str = "") -> None:
        self.name = name
        """The port of the switch it is plugged into."""
        self.host_name = host_name
        """What its processes take for the name of their machine; empty: that of this machine."""
        self.namespace = f"{folder.name}-{name}"
        self.index = index
        self.ip4: str = ""
        self.ip6: str = ""
        """The unique local address, or the link-local one if the network has no other."""
        self.ip4s: list[str] = []
        self.ip6s: list[str] = []
        """One for each network it is on; eth0 is on the first, eth1 on the second."""
        self.home = folder / name / "home"
        self.temp = folder / name / "t"
        for path in (self.home, self.temp):
            path.mkdir(parents=True, mode=0o700)
        self._processes: list[subprocess.Popen[str]] = []

    def popen(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a process here, with pipes for its three streams, and without variables of covey or a launcher.

        COVEY_HOME, TMPDIR and XDG_RUNTIME_DIR are folders of this host. The process leads a group that ends with the
        network.
        """
        clean = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
        clean |= {"COVEY_HOME": str(self.home), "TMPDIR": str(self.temp), "XDG_RUNTIME_DIR": str(self.temp)}
        process = subprocess.Popen(
            self.command(argv),
            env=clean | dict(env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return what starts a program here."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.host_name] if self.host_name else []
        return ["ip", "netns", "exec", self.namespace, *named, *argv]

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = _COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a process here to its end; CalledProcessError, with its output, if it fails."""
        process = self.popen(argv, env=env)
        out, err = process.communicate(timeout=timeout)
        if process.returncode:
            error = subprocess.CalledProcessError(process.returncode, list(argv), out, err)
            error.add_note(err)
            raise error
        return subprocess.CompletedProcess(list(argv), 0, out, err)

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """Return a socket of the calling process that is on this host, to listen, dial or attack with."""
        with inside(self.namespace):
            return socket.socket(family, kind, protocol)

    def end_processes(self) -> None:
        """Kill everything that runs here, and wait for what was started from here."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        _kill_inhabitants(self.namespace)
        for process in self._processes:
            process.wait(_COMMAND_SECONDS)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._processes.clear()


class Lan:
    """Hosts on one Ethernet, or on two. Leaving the block removes all of it.

    `kind="bridge"` joins them in the kernel, at full speed or at `rate` (as tc writes it: "1gbit") for each host and
    direction. `rates` has a rate for each host instead, "20mbit/100mbit" for what it sends and what it receives. With
    `sites`, the number of a site for each host, each site has a bridge, and `trunk` is the rate of the way from site 0
    to each other one. `kind="switch"` joins them by a `Switch`, which can drop, delay and forge.

    Without `ipv4` or `ula` the networks have no such addresses; link-local IPv6 is always there. `hosts_file` says that
    the host's own name is 127.0.1.1, as Debian does. `two_networks` gives each host a second interface on another
    network. `names` has the names that the hosts have for their programs.
    """

    def __init__(
        self,
        hosts: int = 2,
        *,
        kind: Literal["bridge", "switch"] = "bridge",
        rate: str = "",
        rates: Sequence[str] = (),
        sites: Sequence[int] = (),
        trunk: str = "",
        ipv4: bool = True,
        ula: bool = True,
        hosts_file: bool = False,
        two_networks: bool = False,
        names: Sequence[str] = (),
        prefix: str = LAN_PREFIX,
    ) -> None:
        if (rate or rates or sites) and kind != "bridge":
            raise ValueError("rates are for bridges; a switch has shape(bytes_per_second=...)")
        if len(rates) not in (0, hosts) or len(sites) not in (0, hosts):
            raise ValueError(f"rates and sites need one entry for each of the {hosts} hosts")
        self._names = list(names) or [""] * hosts
        self._rates, self._sites, self._trunk = list(rates) or [rate] * hosts, list(sites) or [0] * hosts, trunk
        self._kind, self._ipv4, self._ula, self._hosts_file = kind, ipv4, ula, hosts_file
        self._prefix, self._size = prefix, hosts
        self._networks = 2 if two_networks else 1
        self.hosts: list[Host] = []
        self.switches: list[Switch] = []
        """One for each network, if they are switches."""

    @property
    def switch(self) -> Switch:
        """The switch of the first network."""
        return self.switches[0]

    def __enter__(self) -> Lan:
        _remove_leftovers(self._prefix)
        unique = f"{self._prefix}-{os.getpid()}-{secrets.token_hex(2)}"
        self._folder = _FOLDERS / unique
        self._bridges = [f"{unique}-bridge{network}" for network in range(self._networks)]
        try:
            self._folder.mkdir(mode=0o700)
            self._make_hosts()
            for network in range(self._networks):
                if self._kind == "bridge":
                    self._make_bridge(network)
                else:
                    self._make_switch(network)
                self._give_addresses(network)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end_processes()
        for switch in self.switches:
            switch.close()
        _remove(self._folder, [*(host.namespace for host in self.hosts), *self._bridges])
        self.hosts, self.switches = [], []

    def shape(self, host: Host, rate: str, network: int = 0, *, queue: str = "20ms") -> None:
        """Change the speed of a host's link, as in `rates`, while processes use it; `queue` is what waits at most."""
        up, _, down = rate.partition("/")
        _shape(host.namespace, f"eth{network}", up, queue)
        _shape(self._bridges[network], host.name, down or up, queue)

    def unplug(self, host: Host, network: int = 0) -> None:
        """Take a host off a network that is a bridge, as by pulling its cable."""
        _ip(self._bridges[network], f"link set {host.name} down")

    def plug(self, host: Host, network: int = 0) -> None:
        """Connect a host with its network again."""
        _ip(self._bridges[network], f"link set {host.name} up")

    def _make_hosts(self) -> None:
        self.hosts += [
            Host(f"host{index}", index, self._folder, name)
            for index, name in zip(range(self._size), self._names, strict=True)
        ]
        _make_namespaces([host.namespace for host in self.hosts])
        for host in self.hosts:
            if self._hosts_file:
                path = _ETC / host.namespace / "hosts"
                _make_folder(path.parent)
                path.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n::1 localhost\n")

    def _make_bridge(self, network: int) -> None:
        middle = self._bridges[network]
        _make_namespaces([middle])
        for site in sorted({0, *self._sites}):
            _ip(
                middle,
                f"link add br{site} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
                f"link set br{site} up",
            )
            if site:
                _ip(
                    middle,
                    f"link add near{site} type veth peer name far{site}",
                    f"link set near{site} master br0 up",
                    f"link set far{site} master br{site} up",
                )
                for end in (f"near{site}", f"far{site}") if self._trunk else ():
                    _shape(middle, end, self._trunk)
        for host, rate, site in zip(self.hosts, self._rates, self._sites, strict=True):
            port, device = host.name, f"eth{network}"
            _ip(
                middle,
                f"link add {port} type veth peer name {device} netns {host.namespace}",
                f"link set {port} master br{site} up",
            )
            if rate:
                self.shape(host, rate, network)

    def _make_switch(self, network: int) -> None:
        self.switches.append(switch := Switch(seed=network))
        for host in self.hosts:
            switch.attach(host.name, host.namespace, f"eth{network}")

    def _give_addresses(self, network: int) -> None:
        for host in self.hosts:
            device = f"eth{network}"
            ip4, ip6 = f"10.213.{network}.{host.index + 1}", f"fd00:213:0:{network}::{host.index + 1:x}"
            commands = [f"link set {device} up"]
            if self._ipv4:
                commands.append(f"address add {ip4}/24 dev {device}")
                host.ip4s.append(ip4)
            if self._ula:
                commands.append(f"address add {ip6}/64 dev {device} nodad")
            _ip(host.namespace, *commands)
            host.ip6s.append(ip6 if self._ula else _link_local(host.namespace, device))
            host.ip4, host.ip6 = (host.ip4s or [""])[0], host.ip6s[0]


def _shape(namespace: str, device: str, rate: str, queue: str = "20ms") -> None:
    """Let a device send at most so fast, from now on, and drop what would wait longer than `queue`."""
    words = f"qdisc replace dev {device} root tbf rate {rate} burst 256kb latency {queue}"
    _call(["tc", "-n", namespace, *words.split()])


def _make_namespaces(names: list[str]) -> None:
    _call(["ip", "-batch", "-"], "".join(f"netns add {name}\n" for name in names))
    for name in names:
        with inside(name):
            # Duplicate address detection would keep an IPv6 address unusable for a second.
            for devices in ("all", "default"):
                Path(f"/proc/sys/net/ipv6/conf/{devices}/accept_dad").write_text("0")
        _ip(name, "link set lo up")


def _link_local(namespace: str, device: str) -> str:
    deadline = time.monotonic() + _COMMAND_SECONDS
    while time.monotonic() < deadline:  # the kernel makes it when it sees the carrier
        text = _call(["ip", "-n", namespace, "-6", "-o", "address", "show", "dev", device, "scope", "link"])
        if found := re.search(r"inet6 (\S+)/", text):
            return found[1]
        time.sleep(0.01)
    raise TimeoutError(f"{device} of {namespace} has no link-local address")


def _remove_leftovers(prefix: str) -> None:
    """Remove the namespaces of processes that were killed during a test."""
    if not _leftovers(prefix):
        return
    _NAMESPACES.mkdir(exist_ok=True)
    lock = os.open(_NAMESPACES, os.O_RDONLY)  # another process may be about to remove the same ones
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, unique in _leftovers(prefix):
            _kill_inhabitants(name)
            _remove(_FOLDERS / unique, [name] if name != unique else [])
    finally:
        os.close(lock)


def _leftovers(prefix: str) -> list[tuple[str, str]]:
    """Return what is left of networks whose processes are gone, each with the name of its network."""
    names = {path.name for folder in (_NAMESPACES, _ETC, _FOLDERS) for path in _list(folder)}
    pattern = re.compile(rf"({re.escape(prefix)}-(\d+)-[0-9a-f]{{4}})(-\w+)?")
    found = [match for name in sorted(names) if (match := pattern.fullmatch(name))]
    return [(match[0], match[1]) for match in found if not Path(f"/proc/{match[2]}").exists()]


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _kill_inhabitants(namespace: str) -> None:
    """Kill every process in a namespace, and return when they are dead."""
    deadline = time.monotonic() + _COMMAND_SECONDS
    while (_NAMESPACES / namespace).exists() and (pids := _call(["ip", "netns", "pids", namespace]).split()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {', '.join(pids)} in {namespace} cannot be killed")
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _remove(folder: Path, namespaces: Iterable[str]) -> None:
    names = list(namespaces)
    if existing := [name for name in names if (_NAMESPACES / name).exists()]:
        _call(["ip", "-batch", "-"], "".join(f"netns delete {name}\n" for name in existing))
    for name in names:
        shutil.rmtree(_ETC / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        _ETC.rmdir()  # ours if it is empty
    shutil.rmtree(folder, ignore_errors=True)


def _make_folder(path: Path) -> None:
    for _ in range(_NAME_TRIES):
        with contextlib.suppress(FileNotFoundError):  # another process removed the parent, which was empty
            path.mkdir(parents=True)
            return
    raise OSError(f"{path.parent} is removed as soon as it is made; find out which program does that")


def _ip(namespace: str, *commands: str) -> None:
    _call(["ip", "-n", namespace, "-batch", "-"], "".join(f"{command}\n" for command in commands))


def _call(argv: list[str], text: str = "") -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
