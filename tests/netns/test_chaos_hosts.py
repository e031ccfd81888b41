"""The hosts of `covey chaos --check --hosts`: what is cut is lost, in that direction, until every cut is healed."""

from __future__ import annotations

import socket

import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.lab.chaos.hosts import Hosts
from covey.testing.switch import inside

SHORT = 0.3
"""A connection on one machine opens in less than a millisecond; one whose packets are lost never does."""


def connects(hosts: Hosts, source: int, target: int, seconds: float) -> bool:
    """Tell whether one host can open a connection to another within so many seconds."""
    names = [hosts.inside(index)[-1] for index in (source, target)]
    with inside(names[1]), socket.create_server((f"10.213.0.{target + 1}", 0)) as listener:
        address = listener.getsockname()
        with inside(names[0]), socket.socket() as client:
            client.settimeout(seconds)
            try:
                client.connect(address)
            except TimeoutError:
                return False
            return True


def test_a_direction_that_is_cut_twice_works_again_when_both_cuts_are_healed() -> None:
    with Hosts(3) as hosts:
        assert connects(hosts, 0, 1, DEADLINE)
        hosts.cut([(0, 1)])
        hosts.cut([(0, 1), (0, 2)])
        assert not connects(hosts, 0, 1, SHORT)
        assert not connects(hosts, 2, 0, SHORT)  # the answers are lost
        assert connects(hosts, 1, 2, DEADLINE)
        hosts.heal([(0, 1), (0, 2)])
        assert not connects(hosts, 0, 1, SHORT)
        assert connects(hosts, 2, 0, DEADLINE)
        hosts.heal([(0, 1)])
        assert connects(hosts, 0, 1, DEADLINE)
        with inside(hosts.inside(0)[-1]), open("/proc/thread-self/net/if_inet6") as file:
            assert file.read() == ""  # a cut is of IPv4, so that there must be no other way


@pytest.mark.parametrize("count", [1, 17])
def test_a_number_of_hosts_that_is_not_possible_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--hosts {count} must be from 2 to 16"):
        Hosts(count)
