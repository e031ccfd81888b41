"""What `covey relay` reads from its command line, and says."""

from __future__ import annotations

import pytest

from covey.base.config import parse_relay, split_relays
from covey.base.errors import ConfigError
from covey.cli.relay import describe, listen_at, parse_rate, parse_relay_limit
from covey.runtime.relaying.server import RelayCounts


@pytest.mark.parametrize(("text", "rate"), [("500k", 62.5e3), ("20M", 2.5e6), ("2.5MB", 2.5e6), ("1Gbit", 125e6)])
def test_a_rate_is_read(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "10", "7k", "-5M", "fast", "20m"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--limit"):
        parse_rate(text)


def test_it_listens_where_it_is_told_to() -> None:
    for text, host in (("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "::")):
        with listen_at(text) as listener:
            assert listener.getsockname()[0] == host
            assert listener.getsockname()[1] > 0
            with pytest.raises(ConfigError, match="in use"):
                listen_at(f"{text[:-1]}{listener.getsockname()[1]}")


@pytest.mark.parametrize("text", ["192.0.2.1:47690", "nowhere.invalid:1", "127.0.0.1:x", ""])
def test_an_address_that_is_none_of_this_machine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        listen_at(text)


def test_relays_are_written_as_seeds_are_with_a_port_of_their_own() -> None:
    assert split_relays(" a.org, 10.0.0.1:9 ,[fd00::1] ") == ("a.org", "10.0.0.1:9", "[fd00::1]")
    assert parse_relay("a.org") == ("a.org", 47690)
    assert parse_relay("[fd00::1]") == ("fd00::1", 47690)
    assert split_relays("") == ()
    with pytest.raises(ConfigError, match=r"^relay 'a b': .*Relays are host, host:port .* like 192.168.1.5:47690"):
        split_relays("a b")


def test_a_line_says_what_a_relay_does() -> None:
    assert describe(RelayCounts(1, 2, 1, 7, 12_345_678, 0)) == (
        "2 nodes of 1 cluster, 1 pipe now; since the start 7 pipes, 12.3 MB passed on, 0 connections refused"
    )


def test_a_machine_is_a_relay_only_if_its_owner_says_how_much_it_passes_on() -> None:
    assert [parse_relay_limit(text) for text in (None, "off", "0", "20M", "2.5MB")] == [0.0, 0.0, 0.0, 2.5e6, 2.5e6]
    with pytest.raises(ConfigError, match="--relay-limit='much' is not a rate"):
        parse_relay_limit("much")
