"""Machines of one network get into a cluster with a code of six digits, or are told why they do not."""

from __future__ import annotations

import json
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

from tests.support import pipes
from tests.support.nodes import SOURCE
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    import subprocess

    from covey.testing.netns import Host

PREFIX = "covey-pairing"
HELLO = """
import covey

with covey.join() as group:
    print(f"rank {group.rank} of {group.size}: {group.all_reduce(group.rank + 1)}")
"""
SHOWN = re.compile(r"Code: (\d{3} \d{3})")


def start(host: Host, *words: str) -> subprocess.Popen[str]:
    return host.popen([sys.executable, "-m", "covey", *words], env={"PYTHONPATH": str(SOURCE)})


def show(host: Host, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a command that shows codes; return it and the first code."""
    process = start(host, *words)
    shown = SHOWN.search(pipes.read_until(pipes.stdout(process), "Code: "))
    assert shown is not None
    return process, shown[1]


def end(process: subprocess.Popen[str], text: str | None = None) -> tuple[int, str]:
    """Return the exit code of a command and all that it wrote, with what is typed at its standard input."""
    out, err = process.communicate(text, timeout=DEADLINE)
    return process.returncode, out + err


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = pipes.stdout(process).readline()
    assert line, pipes.stderr(process).read()
    found: dict[str, Any] = json.loads(line)
    return found


def type_in(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()


def key(host: Host, cluster: str = "home") -> str:
    return str(json.loads((host.home / "clusters" / f"{cluster}.json").read_text())["key"])


def test_three_machines_train_after_five_commands_and_one_code() -> None:
    with Lan(hosts=3, prefix=PREFIX, names=("north", "south", "west")) as lan:
        north, south, west = lan.hosts
        process, code = show(north, "init", "--machines", "2")
        agents = [start(host, "enroll", "--up", "-") for host in (south, west)]
        for agent in agents:
            type_in(agent, code)
            said = pipes.read_until(pipes.stdout(agent), "itself.\n")
            assert "is now in the cluster 'home', with north." in said
            assert re.search(r"north-\w{4} can run anything as your user, and this machine itself.", said), said
        assert end(process)[0] == 0
        assert len({key(host) for host in lan.hosts}) == 1
        files = [json.loads((host.home / "clusters" / "home.json").read_text()) for host in (south, west)]
        assert all(any(seed.startswith(f"{north.ip4}:") for seed in file["seeds"]) for file in files)

        agents.append(start(north, "up"))
        pipes.read_until(pipes.stdout(agents[-1]), "--allow lets others.")
        (north.temp / "work").mkdir()
        (north.temp / "work" / "hello.py").write_text(HELLO)
        for host, status in ((north, 0), (south, 1)):  # the machine with the code may start programs, and no other
            (host.temp / "work").mkdir(exist_ok=True)
            (host.temp / "work" / "hello.py").write_text(HELLO)
            words = f"cd {host.temp}/work && exec {sys.executable} -m covey run --on all --yes hello.py"
            ended, said = end(host.popen(["sh", "-c", words], env={"PYTHONPATH": str(SOURCE)}))
            assert ended == status, said
            assert ("may not use north-" in said) is (host is south), said
            if host is north:
                for rank in range(3):
                    assert re.search(rf"^\[(north|south|west) {rank}\] rank {rank} of 3: 6$", said, re.MULTILINE), said
        for agent in agents:
            agent.send_signal(signal.SIGINT)
            assert agent.wait(DEADLINE) == 0


def test_where_multicast_is_dropped_the_address_does_it_and_that_is_said() -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        lan.switch.allow_multicast(False)
        north, south = lan.hosts
        process, code = show(north, "init", "--machines", "1")
        status, said = end(start(south, "enroll", "-"), code)
        assert status == 2
        assert "No machine of this network shows a code" in said
        assert "the other one prints an address as well" in said
        status, said = end(start(south, "enroll", north.ip4, "-"), code)
        assert status == 0, said
        assert end(process)[0] == 0


def test_where_a_firewall_lets_no_connection_in_the_machine_and_the_ports_are_named() -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        lan.switch.forbid_dialling("host1", "host0")
        north, south = lan.hosts
        _, code = show(north, "init", "--machines", "1")
        status, said = end(start(south, "enroll", "-"), code)
        assert status == 2
        assert "A machine announces that it shows a code, and cannot be reached" in said
        assert f"A firewall there, at {north.ip4}:47730, has to let 47700-47731/tcp in" in said


def test_who_types_init_on_both_machines_is_told_so_on_both() -> None:
    with Lan(hosts=2, prefix=PREFIX) as lan:
        for host in lan.hosts:
            end(start(host, "init", "--json"))
        shown = [start(host, "pair", "--json") for host in lan.hosts]
        for process, other in zip(shown, reversed(lan.hosts), strict=True):
            while not (said := heard(process))["others"]:
                pass
            assert [f"({other.ip4})" in each for each in said["others"]] == [True]
