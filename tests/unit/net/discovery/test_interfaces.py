"""Interfaces: what a pattern selects, what others are told, and what is dialled in which order."""

from __future__ import annotations

import ipaddress
import os
import resource
import time
from typing import TYPE_CHECKING

import ifaddr
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.in_turn import in_turn

from covey.base.errors import ConfigError, ConnectError
from covey.net.discovery import interfaces as interfaces_module
from covey.net.discovery.interfaces import (
    MOST_ADVERTISED,
    MOST_DIALLED,
    RECENT_INTERFACES_SECONDS,
    Interface,
    Kind,
    advertised,
    all_interfaces,
    describe,
    loopback_interfaces,
    on_link,
    parse_pattern,
    recent_interfaces,
    to_dial,
    usable_interfaces,
)

if TYPE_CHECKING:
    from collections.abc import Callable
from covey.wire.messages import Address


def interface(name: str, index: int, *networks: str, kind: Kind = "wired") -> Interface:
    parsed = tuple(ipaddress.ip_interface(network) for network in networks)
    return Interface(
        name=name,
        index=index,
        addresses=tuple(str(network.ip) for network in parsed),
        networks=parsed,
        is_loopback=kind == "loopback",
        is_up=True,
        kind=kind,
        mtu=1500,
        multicast=True,
    )


LO = interface("lo", 1, "127.0.0.1/8", "127.0.1.1/8", "::1/128", kind="loopback")
ETH = interface("eth0", 2, "fe80::2/64", "192.168.1.2/24", "fd00::2/64")
WLAN = interface("wlan0", 3, "192.168.7.2/24", "fe80::3/64", kind="wireless")
DOCKER = interface("docker0", 4, "172.17.0.1/16", kind="virtual")
V6_ONLY = interface("eth9", 9, "fe80::9/64")


def at(*ips: str, port: int = 5000) -> list[Address]:
    return [Address(ip, port, "theirs") for ip in ips]


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [
        ("", [("eth0", "10.0.0.1"), ("wlan0", "fe80::1")], []),
        ("eth*", [("eth0", "10.0.0.1"), ("eth17", "fe80::1")], [("wlan0", "10.0.0.1"), ("veth0", "10.0.0.1")]),
        ("!docker*", [("eth0", "172.17.0.1")], [("docker0", "172.17.0.1")]),
        ("10.0.0.0/8", [("any", "10.9.9.9")], [("any", "11.0.0.1"), ("any", "fd00::1")]),
        ("fd00::/8", [("any", "fd12::1")], [("any", "fe80::1"), ("any", "10.0.0.1")]),
        ("10.1.2.3", [("any", "10.1.2.3")], [("any", "10.1.2.4")]),
        ("10.1.2.3/8", [("any", "10.200.0.1")], [("any", "11.1.2.3")]),
        (
            " eth* , !eth1, 10.0.0.0/8, !10.66.0.0/16 ",
            [("eth0", "1.2.3.4"), ("wlan0", "10.0.0.1")],
            [("eth1", "10.0.0.1"), ("eth0", "10.66.1.1"), ("wlan0", "192.168.1.1")],
        ),
        ("en?[12]", [("ens1", "1.1.1.1")], [("ens3", "1.1.1.1")]),
    ],
)
def test_a_pattern_selects_by_name_and_by_network(
    text: str, allowed: list[tuple[str, str]], refused: list[tuple[str, str]]
) -> None:
    pattern = parse_pattern(text)
    assert [case for case in allowed if not pattern.allows(*case)] == []
    assert [case for case in refused if pattern.allows(*case)] == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("eth0,,wlan0", "empty part"),
        ("eth0,", "empty part"),
        ("!", "empty part"),
        (",", "empty part"),
        ("10.0.0.0/40", '"10.0.0.0/40"'),
        ("10.0.0", '"10.0.0"'),
        ("300.1.1.1", '"300.1.1.1"'),
        ("fd00::/200", '"fd00::/200"'),
        ("eth0;wlan0", '"eth0;wlan0"'),
        ("eth0 wlan0", '"eth0 wlan0"'),
        ("!!eth0", '"!eth0"'),
    ],
)
def test_nonsense_is_refused_and_named(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pattern(text)
    assert part in str(caught.value)
    assert f'interfaces="{text}"' in str(caught.value)


@given(st.text(max_size=30))
def test_any_text_is_a_pattern_or_a_config_error(text: str) -> None:
    try:
        pattern = parse_pattern(text)
    except ConfigError:
        return
    assert pattern.allows("eth0", "10.0.0.1") in (True, False)


def test_this_host_is_seen_as_it_is() -> None:
    everything = all_interfaces()
    loopback = loopback_interfaces()
    assert "127.0.0.1" in loopback[0].addresses
    assert (loopback[0].kind, loopback[0].is_loopback, loopback[0].is_up) == ("loopback", True, True)
    assert loopback[0].mtu > 0
    assert describe("127.0.0.1") == loopback[0].name
    assert describe("203.0.113.77") == ""
    for each in everything:
        assert each.index > 0
        assert each.addresses == tuple(str(network.ip) for network in each.networks)
        assert all("%" not in ip for ip in each.addresses)
    assert all(not each.is_loopback for each in usable_interfaces())


def test_loopback_is_usable_only_when_it_is_all_that_a_pattern_names() -> None:
    name = loopback_interfaces()[0].name
    assert [each.name for each in usable_interfaces(name)] == [name]
    (only4,) = usable_interfaces("127.0.0.0/8")
    assert only4.addresses == ("127.0.0.1",)


def test_a_pattern_that_selects_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="nosuch") as caught:
        usable_interfaces("nosuch*")
    assert "127.0.0.1" in str(caught.value)


def test_the_system_is_asked_for_interfaces_twice_a_second_however_many_are_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    ask = ifaddr.get_adapters

    def count() -> object:
        asked.append(time.monotonic())
        return ask()

    monkeypatch.setattr(ifaddr, "get_adapters", count)
    name, began = loopback_interfaces()[0].name, time.monotonic()
    asked.clear()
    for _ in range(300):
        assert [each.name for each in recent_interfaces(name)] == [name]
        assert recent_interfaces("127.0.0.0/8")[0].addresses == ("127.0.0.1",)
        assert describe("127.0.0.1") == name
    assert len(asked) <= 1 + (time.monotonic() - began) / RECENT_INTERFACES_SECONDS
    time.sleep(RECENT_INTERFACES_SECONDS)
    before = len(asked)
    assert recent_interfaces() == usable_interfaces()
    assert len(asked) == before + 2
    with pytest.raises(ConfigError, match="nosuch"):
        recent_interfaces("nosuch*")


def test_others_are_told_every_address_that_they_could_reach_best_first() -> None:
    assert [(a.ip, a.port, a.interface) for a in advertised([ETH, WLAN, DOCKER], 4000)] == [
        ("192.168.1.2", 4000, "eth0"),
        ("fd00::2", 4000, "eth0"),
        ("192.168.7.2", 4000, "wlan0"),
        ("172.17.0.1", 4000, "docker0"),
        ("fe80::2", 4000, "eth0"),
        ("fe80::3", 4000, "wlan0"),
    ]


def test_loopback_and_wildcards_are_never_told_and_link_local_ipv4_only_if_there_is_nothing_else() -> None:
    odd = interface("odd", 7, "0.0.0.0/0", "169.254.7.7/16", "::/0")
    assert advertised([LO], 1) == ()
    assert [a.ip for a in advertised([LO, odd], 1)] == ["169.254.7.7"]
    assert [a.ip for a in advertised([odd, WLAN], 1)] == ["192.168.7.2", "fe80::3"]


def test_no_more_than_a_few_addresses_are_told() -> None:
    many = interface("eth0", 2, *(f"10.0.{i}.1/24" for i in range(100)))
    assert len(advertised([many], 1)) == MOST_ADVERTISED


def test_on_the_same_host_loopback_comes_first() -> None:
    order = to_dial([ETH], at("192.168.1.2", "fe80::2"), same_host=True)
    assert order[:2] == [("127.0.0.1", 5000), ("::1", 5000)]
    assert ("192.168.1.2", 5000) in order
    assert to_dial([], at("192.168.1.2"), same_host=True) == [("127.0.0.1", 5000), ("::1", 5000)]


def test_a_shared_network_comes_before_others_and_link_local_last_once_per_interface() -> None:
    theirs = at("10.5.5.5", "172.17.0.1", "192.168.7.9", "fe80::77", "fd00::9", "192.168.1.9")
    assert to_dial([ETH, WLAN, DOCKER], theirs, same_host=False) == [
        ("192.168.1.9", 5000),
        ("fd00::9", 5000),
        ("192.168.7.9", 5000),
        ("10.5.5.5", 5000),
        ("172.17.0.1", 5000),  # ours as well
        ("fe80::77", 5000, 0, 2),
        ("fe80::77", 5000, 0, 3),
    ]


def test_families_that_we_have_not_are_not_dialled() -> None:
    theirs = at("10.5.5.5", "2001:db8::5", "fe80::77", "169.254.1.1")
    assert to_dial([V6_ONLY], theirs, same_host=False) == [("fe80::77", 5000, 0, 9)]
    assert to_dial([DOCKER], theirs, same_host=False) == [("10.5.5.5", 5000)]
    assert to_dial([], theirs, same_host=False) == []


def test_link_local_ipv4_is_dialled_from_link_local_ipv4() -> None:
    own = interface("eth0", 2, "169.254.3.3/16")
    assert to_dial([own], at("169.254.1.1", "10.0.0.1"), same_host=False) == [("169.254.1.1", 5000)]


@in_turn(
    ip=[
        "127.0.0.1",
        "127.0.1.1",
        "::1",
        "0.0.0.0",
        "::",
        "::ffff:127.0.0.1",
        "224.0.0.1",
        "ff02::1",
        "",
        "host",
        "1.2.3",
    ]
)
def test_another_hosts_loopback_and_what_is_no_address_are_never_dialled(ip: str) -> None:
    assert to_dial([LO, ETH, WLAN], at(ip), same_host=False) == []


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_what_is_no_port_is_never_dialled(port: int) -> None:
    assert to_dial([ETH], at("192.168.1.9", port=port), same_host=True) == []


def test_no_announcement_makes_a_node_dial_without_end() -> None:
    theirs = at(*(f"10.{i}.{j}.1" for i in range(20) for j in range(20)))
    assert len(to_dial([ETH], theirs, same_host=False)) == MOST_DIALLED


@pytest.mark.parametrize(
    ("where", "ip", "index", "is_there"),
    [
        (ETH, "192.168.1.77", 0, True),
        (ETH, "::ffff:192.168.1.77", 0, True),
        (ETH, "192.168.7.2", 0, False),
        (ETH, "8.8.8.8", 0, False),
        (ETH, "fd00::77", 0, True),
        (ETH, "fd01::77", 0, False),
        (ETH, "fe80::77", 2, True),
        (ETH, "fe80::77", 3, False),
        (ETH, "127.0.0.1", 0, False),
        (ETH, "::ffff:127.0.0.1", 0, False),
        (ETH, "::1", 0, False),
        (ETH, "224.0.0.251", 0, False),
        (ETH, "0.0.0.0", 0, False),
        (ETH, "ff02::fb", 2, False),
        (ETH, "no address", 0, False),
        (DOCKER, "fe80::77", 4, False),
        (LO, "127.9.9.9", 0, True),
        (LO, "::1", 0, True),
        (LO, "fe80::77", 1, False),
        (LO, "192.168.1.2", 0, False),
    ],
)
def test_an_address_is_on_the_link_of_one_interface_or_not(
    where: Interface, ip: str, index: int, is_there: bool
) -> None:
    assert on_link(where, ip, index) is is_there


def test_where_the_system_cannot_be_asked_the_interfaces_are_those_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe("127.0.0.1")

    def refuse() -> list[Interface]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(interfaces_module, "all_interfaces", refuse)
    seen_at, there = interfaces_module._known
    monkeypatch.setattr(interfaces_module, "_known", (seen_at - 2 * RECENT_INTERFACES_SECONDS, there))
    assert describe("127.0.0.1") == before != ""
    monkeypatch.setattr(interfaces_module, "_known", (-RECENT_INTERFACES_SECONDS, []))
    with pytest.raises(ConnectError, match="ulimit -n"):
        recent_interfaces()


def with_free_descriptors(number: int, check: Callable[[], bool]) -> bool:
    """Tell whether `check` returns True in a process that can open so many files.

    It is a fork of this process, with one thread: others might take what is free.
    """
    child = os.fork()
    if child == 0:
        passed = False
        try:
            last = max(os.dup(0) for _ in range(64))  # fills gaps between numbers in use
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + number, most))
            passed = check()
        finally:
            os._exit(0 if passed else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("free", [1, 2])
def test_with_one_descriptor_left_all_interfaces_are_listed(free: int) -> None:
    before = all_interfaces()

    def lists_all() -> bool:
        listed = all_interfaces()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        lasting = [each for each in all_interfaces() if each in before]  # other programs make and remove some meanwhile
        return [each for each in listed if each in lasting] == lasting != []

    assert with_free_descriptors(free, lists_all)


def test_without_a_descriptor_left_interfaces_are_not_listed_as_gone() -> None:
    def refuses() -> bool:
        with pytest.raises(OSError, match="Too many open files"):
            all_interfaces()
        return True

    assert with_free_descriptors(0, refuses)
