"""Networks of namespaces are what they say they are, and nothing is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path
from typing import Literal

import pytest
from tests.support import forked, pipes
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan, require_namespaces


def prefix() -> str:
    """Begin the names of what this process makes: other tests of this file may run in another one at the same time."""
    return f"covey-lantest{os.getpid()}"


"""Other workers may be in this file, too."""
FACTS = """
import json, os, socket
print(json.dumps([socket.gethostbyname(socket.gethostname()), dict(os.environ)]))
"""


def reach(lan: Lan, host: int, address: str, other: int, scope: int = 0) -> None:
    """Open a connection from one host to an address of another, and close it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    full = (address, 0, 0, scope) if ":" in address else (address, 0)
    with lan.hosts[other].socket(family) as listener, lan.hosts[host].socket(family) as client:
        listener.bind(full)
        listener.listen()
        for sock in (listener, client):
            sock.settimeout(DEADLINE)
        client.connect((address, listener.getsockname()[1], 0, scope)[: len(full)])
        listener.accept()[0].close()


def stream(sender: socket.socket, receiver: socket.socket, size: int) -> float:
    """Return how many seconds so many bytes take from one to the other."""
    sender.settimeout(DEADLINE)
    receiver.settimeout(DEADLINE)
    thread = threading.Thread(target=sender.sendall, args=(bytes(size),), daemon=True)
    start = time.monotonic()
    thread.start()
    while size and (data := receiver.recv(1 << 18)):
        size -= len(data)
    thread.join(DEADLINE)
    return time.monotonic() - start


def is_running(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not re.search(r"\) [ZX] ", status)  # killed, and not yet reaped by the process that adopted it


def left_behind() -> list[str]:
    folders = ("/run/netns", "/etc/netns", "/tmp")
    found = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            found += [name for name in os.listdir(folder) if name.startswith(f"{prefix()}-")]
    return found


@pytest.mark.parametrize("kind", ["bridge", "switch"])
def test_all_hosts_reach_each_other_on_all_networks_and_are_gone_at_the_end(kind: Literal["bridge", "switch"]) -> None:
    with Lan(hosts=3, kind=kind, two_networks=True, prefix=prefix()) as lan:
        assert [host.ip4s for host in lan.hosts] == [[f"10.213.{net}.{i}" for net in (0, 1)] for i in (1, 2, 3)]
        for host, other in ((0, 1), (1, 2), (2, 0)):
            for address in (*lan.hosts[other].ip4s, *lan.hosts[other].ip6s):
                reach(lan, host, address, other)
    assert left_behind() == []


@pytest.mark.parametrize("kind", ["bridge", "switch"])
def test_a_network_without_ipv4_has_no_address_of_it_and_works_at_once(kind: Literal["bridge", "switch"]) -> None:
    with Lan(hosts=2, kind=kind, ipv4=False, prefix=prefix()) as lan:
        assert "inet " not in lan.hosts[0].run(["ip", "address", "show", "dev", "eth0"]).stdout
        assert lan.hosts[0].ip4 == ""
        reach(lan, 0, lan.hosts[1].ip6, 1)


@pytest.mark.parametrize("kind", ["bridge", "switch"])
def test_a_network_may_have_link_local_addresses_only(kind: Literal["bridge", "switch"]) -> None:
    with Lan(hosts=2, kind=kind, ipv4=False, ula=False, prefix=prefix()) as lan:
        assert all(host.ip6.startswith("fe80::") for host in lan.hosts)
        assert "scope global" not in lan.hosts[0].run(["ip", "address"]).stdout
        index = int(lan.hosts[1].run(["cat", "/sys/class/net/eth0/ifindex"]).stdout)
        reach(lan, 0, lan.hosts[1].ip6, 1, scope=index)


def test_a_rate_holds_for_each_host_and_direction() -> None:
    with Lan(hosts=2, rate="200mbit", prefix=prefix()) as lan:
        assert "tbf" in lan.hosts[0].run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
        for here, there in (lan.hosts, lan.hosts[::-1]):
            with there.socket() as listener, here.socket() as client:
                listener.bind((there.ip4, 0))
                listener.listen()
                client.connect(listener.getsockname())
                server, _ = listener.accept()
                with server:
                    seconds = stream(client, server, 8_000_000)
            assert seconds > 0.25  # 0.32 s, less what may go in a burst


def test_an_unplugged_host_has_no_carrier_and_reaches_no_other_until_it_is_plugged_in_again() -> None:
    with Lan(hosts=2, prefix=prefix()) as lan:
        lan.unplug(lan.hosts[1])
        assert "NO-CARRIER" in lan.hosts[1].run(["ip", "link", "show", "eth0"]).stdout
        with lan.hosts[1].socket() as client:
            client.settimeout(DEADLINE)
            with pytest.raises(OSError, match=r"unreachable|No route"):
                client.connect((lan.hosts[0].ip4, 9))
        lan.plug(lan.hosts[1])
        reach(lan, 1, lan.hosts[0].ip4, 0)


def test_processes_have_a_host_of_their_own_and_know_of_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_SECRET", "not for them")
    monkeypatch.setenv("RANK", "3")
    with Lan(hosts=2, prefix=prefix()) as lan:
        facts = [json.loads(host.run([sys.executable, "-c", FACTS], env={"X": "1"}).stdout)[1] for host in lan.hosts]
        for host, env in zip(lan.hosts, facts, strict=True):
            assert (env["COVEY_HOME"], env["TMPDIR"], env["X"]) == (str(host.home), str(host.temp), "1")
            assert Path(env["COVEY_HOME"]).stat().st_mode & 0o777 == 0o700
            assert not {"COVEY_SECRET", "RANK"} & set(env)
        assert facts[0]["TMPDIR"] != facts[1]["TMPDIR"]


def test_a_hosts_file_may_say_that_this_host_is_127_0_1_1() -> None:
    before = Path("/etc/hosts").read_text()
    with Lan(hosts=1, hosts_file=True, prefix=prefix()) as lan:
        assert json.loads(lan.hosts[0].run([sys.executable, "-c", FACTS]).stdout)[0] == "127.0.1.1"
        assert Path("/etc/hosts").read_text() == before
    assert left_behind() == []


def test_a_process_that_fails_or_takes_too_long_is_an_error() -> None:
    with Lan(hosts=1, prefix=prefix()) as lan:
        with pytest.raises(subprocess.CalledProcessError) as raised:
            lan.hosts[0].run(["sh", "-c", "echo because >&2; exit 3"])
        assert (raised.value.returncode, raised.value.stderr) == (3, "because\n")
        with pytest.raises(subprocess.TimeoutExpired):
            lan.hosts[0].run(["sleep", "60"], timeout=0.1)


def test_everything_that_was_started_is_ended_also_what_ran_away() -> None:
    with Lan(hosts=1, prefix=prefix()) as lan:
        shell = lan.hosts[0].popen(["sh", "-c", "setsid sleep 60 & sleep 61 & echo $!; wait"])
        assert pipes.stdout(shell).readline()
        namespace = lan.hosts[0].namespace
        pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout
        assert len(pids.split()) == 3
    assert not any(is_running(pid) for pid in pids.split())
    assert left_behind() == []


def test_what_a_killed_test_left_behind_is_removed_by_the_next() -> None:
    code = f"""
from covey.testing.netns import Lan
lan = Lan(hosts=2, kind="switch", hosts_file=True, prefix={prefix()!r}).__enter__()
lan.hosts[0].popen(["sleep", "60"])
print("up", flush=True)
import time; time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert pipes.stdout(process).readline() == "up\n"
        process.kill()
    assert len(left_behind()) == 5  # two namespaces, two hosts files, a folder
    with Lan(hosts=1, prefix=prefix()):
        pass
    assert left_behind() == []


def test_several_processes_may_remove_what_was_left_behind_at_the_same_time() -> None:
    """As tests of several checkouts do that share a machine."""
    code = f"""
import os, sys
from covey.testing.netns import Lan
lan = Lan(hosts=2, prefix={prefix()!r}).__enter__()
if sys.argv[1:] == ["leave"]:
    os._exit(0)
lan.__exit__()
"""
    command = [sys.executable, "-c", code]
    for _ in range(3):
        assert forked.run([*command, "leave"], timeout=DEADLINE, check=False).returncode == 0
    cleaners = [forked.Popen(command, stderr=forked.PIPE, text=True) for _ in range(3)]
    ends = [(cleaner.communicate(timeout=DEADLINE)[1], cleaner.returncode) for cleaner in cleaners]
    assert ends == [("", 0)] * 3
    assert left_behind() == []


def test_a_network_that_cannot_be_made_leaves_nothing() -> None:
    with pytest.raises(OSError, match="tbf"), Lan(hosts=2, rate="nonsense", prefix=prefix()):
        pass
    assert left_behind() == []


@pytest.mark.parametrize(("uid", "ci", "outcome"), [(1000, "", "skip"), (1000, "1", "fail"), (0, "", "fail")])
def test_where_namespaces_are_not_permitted_tests_are_skipped_but_not_in_ci_or_as_root(
    monkeypatch: pytest.MonkeyPatch, uid: int, ci: str, outcome: str
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    with pytest.raises(unittest.SkipTest if outcome == "skip" else AssertionError, match="no `ip` command"):
        require_namespaces()
