"""Lanes by QUIC between machines: an operation goes on when the address of a machine changes in the middle of it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("qh3")

from tests.support.members import STEADY, by_rank, start_with_keeper
from tests.support.nodes import Cluster
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from covey.testing.netns import Host

PREFIX = "covey-quic"
PROGRAM = STEADY.replace('on_loss="continue", ', "")


def without_ipv6(host: Host) -> None:
    """Leave a machine one address, so that nothing remains when that changes."""
    host.run(["sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6"])


def change_address(host: Host, ip: str) -> None:
    host.run(["sh", "-c", f"ip address flush dev eth0 && ip address add {ip}/24 dev eth0"])


@pytest.mark.parametrize("on_loss", [pytest.param("raise", marks=pytest.mark.thorough), "continue"])
def test_an_operation_goes_on_while_the_address_of_each_machine_changes(on_loss: str) -> None:
    """One of the two has dialled the lanes, the other has accepted them. Steps take a second each, without a pause."""
    with Lan(hosts=2, rate="8mbit", ula=False, prefix=PREFIX) as lan:
        for host in lan.hosts:
            without_ipv6(host)
        options = {"patience": DEADLINE, "count": 100_000, "pause": 0.0, "on_loss": on_loss, "lanes": "quic"}
        cluster = Cluster()
        started = [start_with_keeper(cluster, host, "quic", PROGRAM, "--size", "2", **options) for host in lan.hosts]
        members = by_rank(started)
        for number, host in enumerate(lan.hosts):
            for turn in range(2):  # an operation is under way at the first, and went on after the second
                members[0].signal(signal.SIGUSR2)
                for member in members:
                    member.said("marked", 2 * number + turn)
                if turn == 0:
                    change_address(host, f"10.213.0.{77 + number}")
        members[0].ask_to_end()
        assert len({member.end()["step"] for member in members}) == 1
        for member in members:
            assert member.all_said("error") == member.all_said("contributors") == member.all_said("wrong") == []
