"""Lanes by QUIC between machines: an operation goes on when the address of a machine changes in the middle of it."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("qh3")

from tests.support.members import STEADY, by_rank, start_with_keeper
from tests.support.nodes import Cluster

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from covey.testing.netns import Host

PREFIX = "covey-quic"
GOES_ON_SECONDS = 30.0
"""How long an operation may take whose lanes have to move, on a machine that stands still for moments."""
PROGRAM = STEADY.replace('on_loss="continue", ', "")


def without_ipv6(host: Host) -> None:
    """Leave a machine one address, so that nothing remains when that changes."""
    host.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6"])


def change_address(host: Host, ip: str) -> None:
    host.run(["sh", "-c", f"ip address flush dev eth0 && ip address add {ip}/24 dev eth0"])


@pytest.mark.parametrize("on_loss", ["raise", "continue"])
def test_an_operation_goes_on_while_the_address_of_each_machine_changes(on_loss: str) -> None:
    """One of the two has dialled the lanes, the other has accepted them. Steps take a second each, without a pause."""
    with Lan(hosts=2, rate="30mbit", ula=False, prefix=PREFIX) as lan:
        for host in lan.hosts:
            without_ipv6(host)
        options = {"patience": 20, "count": 400_000, "pause": 0.0, "on_loss": on_loss, "lanes": "quic"}
        cluster = Cluster()
        started = [start_with_keeper(cluster, host, "quic", PROGRAM, "--size", "2", **options) for host in lan.hosts]
        members = by_rank(started)
        for number, host in enumerate(lan.hosts):
            time.sleep(1.5)
            change_address(host, f"10.213.0.{77 + number}")
            time.sleep(0.2)
            members[0].signal(signal.SIGUSR2)
            for member in members:
                member.said("marked", number, within=GOES_ON_SECONDS)
        members[0].ask_to_end()
        assert len({member.end()["step"] for member in members}) == 1
        for member in members:
            assert member.all_said("error") == member.all_said("contributors") == member.all_said("wrong") == []
