"""Under `on_loss="raise"`, a path that dies is no lost rank: lanes go on over another one, in mid-operation."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.members import STEADY, Member, by_rank
from tests.support.nodes import Cluster
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "covey-resume"
NOTICE_SECONDS = 2.0
"""How soon the end of a process is known on a machine that does nothing else."""
PROGRAM = STEADY.replace('run, on_loss="continue", ', 'run or None, on_loss="raise", ').replace(
    "[[e.kind, e.generation, list(e.ranks)]",
    '[[e.kind, e.generation, list(e.ranks), e.text if e.kind == "moved" else ""]',
)


def start_run(lan: Lan, *native: str, lanes: str = "secure", **options: Any) -> list[Member]:
    """Start a rank on each host, which adds large arrays up without a pause; `native` is the setting of each."""
    cluster = Cluster()
    given = {"patience": DEADLINE, "count": 300_000, "pause": 0.0, "talks": False, "size": len(lan.hosts)} | options
    if lanes == "tcp":  # without encryption, which only a launcher's run can have
        given |= {"address": f"{lan.hosts[0].ip4}:47900", "insecure": True}
    else:
        given |= {"lanes": lanes}
    members = []
    for rank, host in enumerate(lan.hosts):
        env = {"COVEY_STRIPE": "off", "COVEY_NATIVE": native[rank] if native else "auto"}
        own = {"rank": rank} if lanes == "tcp" else {}
        node = cluster.start(host, "" if lanes == "tcp" else "my-run", env=env, code=PROGRAM, **given, **own)
        members.append(Member(node.host, node.process))
    return by_rank(members)


def await_progress(members: list[Member], number: int) -> None:
    """Return once all members have taken a step that began after this call."""
    members[0].signal(signal.SIGUSR2)
    for member in members:
        member.said("marked", number)


def end_well(members: list[Member]) -> list[str]:
    """Let the run end; return what the events say of lanes that went on."""
    members[0].ask_to_end()
    assert len({member.end()["step"] for member in members}) == 1
    told = []
    for member in members:
        assert member.all_said("error") == member.all_said("contributors") == [], member.story()
        (events,) = member.all_said("events")
        assert not {"lost", "view"} & {kind for kind, *_ in events["kinds"]}, events
        told += [text for kind, _, _, text in events["kinds"] if kind == "moved" and "continues over" in text]
    return told


@pytest.mark.parametrize(
    ("lanes", "native"),
    [
        ("secure", ("auto", "auto")),
        *(
            pytest.param(lanes, each, marks=pytest.mark.thorough)
            for lanes, each in (
                ("secure", ("0", "auto")),
                ("secure", ("0", "0")),
                ("secure", ("auto", "0", "auto")),
                ("quic", ("auto", "auto")),
            )
        ),
    ],
    ids=["compiled", "mixed", "python", "three", "quic"],
)
def test_the_network_in_use_dies_and_every_sum_is_right(lanes: str, native: tuple[str, ...]) -> None:
    """Each network dies once, and comes back: one of them carries the lanes."""
    with Lan(hosts=len(native), two_networks=True, prefix=PREFIX) as lan:
        members = start_run(lan, *native, lanes=lanes)
        number = 0
        for device in ("eth0", "eth1"):
            await_progress(members, number)
            lan.hosts[1].run(["ip", "link", "set", device, "down"])
            await_progress(members, number + 1)
            lan.hosts[1].run(["ip", "link", "set", device, "up"])
            number += 2
        await_progress(members, number)
        assert end_well(members), "no lane went on over another path"


def test_one_of_two_address_families_dies_and_every_sum_is_right() -> None:
    with Lan(hosts=2, prefix=PREFIX) as lan:
        members = start_run(lan)
        await_progress(members, 0)
        for host, other in (lan.hosts, lan.hosts[::-1]):  # what is sent there reaches no machine
            host.run(f"ip neigh replace {other.ip4} lladdr 02:00:00:00:00:99 dev eth0 nud permanent".split())
        await_progress(members, 1)
        for host, other in (lan.hosts, lan.hosts[::-1]):
            host.run(f"ip neigh del {other.ip4} dev eth0".split())
        await_progress(members, 2)
        for host in lan.hosts:
            host.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6"])
        await_progress(members, 3)
        assert end_well(members), "no lane went on over the other family"


@pytest.mark.parametrize(
    "native",
    [("auto", "auto"), *(pytest.param(each, marks=pytest.mark.thorough) for each in (("0", "auto"), ("auto", "0")))],
    ids=["compiled", "python-beside", "beside-python"],
)
def test_an_unencrypted_lane_goes_on_when_the_address_of_a_machine_changes(native: tuple[str, ...]) -> None:
    """Ranks of such a run listen at one address only; the rank that dials may come from any."""
    with Lan(hosts=2, ula=False, prefix=PREFIX) as lan:
        members = start_run(lan, *native, lanes="tcp")
        for number in range(3):
            await_progress(members, 2 * number)
            lan.hosts[1].run(
                ["sh", "-c", f"ip address flush dev eth0 && ip address add 10.213.0.{77 + number}/24 dev eth0"]
            )
            await_progress(members, 2 * number + 1)
        assert end_well(members), "no lane went on over another connection"


def test_a_rank_that_is_killed_is_lost_at_once(promised: Callable[[float], float]) -> None:
    with Lan(hosts=2, two_networks=True, prefix=PREFIX) as lan:
        members = start_run(lan)
        await_progress(members, 0)
        at = time.monotonic()
        members[1].signal(signal.SIGKILL)
        said = members[0].said("error")
        assert said["kind"] == "PeerLostError"
        assert "rank 1" in said["text"], said
        assert said["at"] - at < promised(NOTICE_SECONDS), members[0].story()


@pytest.mark.thorough
def test_a_network_that_returns_soon_costs_time_and_nothing_else() -> None:
    """There is no other path, and health waits for longer than that."""
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        members = start_run(lan)
        await_progress(members, 0)
        lan.switch.cut("host0")
        time.sleep(2.5)
        lan.switch.mend()
        await_progress(members, 1)
        end_well(members)
        told = [kind for member in members for kind, *_ in member.said("events")["kinds"]]
        assert "mtu" not in told, "the length of packets was not the reason"
