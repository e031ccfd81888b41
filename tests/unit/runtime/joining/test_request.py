"""A process that is placed by arguments of `join`: its rank, and where the ranks meet."""

from __future__ import annotations

from typing import Any

import pytest

from covey.base.errors import ConfigError
from covey.runtime.joining.request import JoinRequest, find_placed_rank

PEERS = ["198.51.100.1:29400", "127.0.0.1:29400", "198.51.100.3:29400"]


def test_without_arguments_nothing_is_placed() -> None:
    assert find_placed_rank({}) is None
    assert find_placed_rank({"size": 3, "rank": None, "run": "a run"}) is None


def test_an_address_of_another_machine_is_where_rank_0_listens() -> None:
    placed = find_placed_rank({"rank": 2, "size": 4, "address": "198.51.100.1:29400"})
    assert placed is not None
    assert (placed.rank, placed.size, placed.local_rank, placed.folder) == (2, 4, None, "")
    assert placed.addresses == (("198.51.100.1", 29400),), "the very port: it is not torch's"
    other = find_placed_rank({"rank": 0, "size": 4, "address": "[2001:db8::1]:5"})
    assert other is not None
    assert other.addresses == (("2001:db8::1", 5),)


def test_ranks_at_a_loopback_address_meet_in_a_folder() -> None:
    first, second = (find_placed_rank({"rank": rank, "size": 2, "address": "localhost:4000"}) for rank in (0, 1))
    other = find_placed_rank({"rank": 0, "size": 2, "address": "localhost:4001"})
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.folder == second.folder != other.folder
    assert (second.local_rank, second.addresses) == (1, ())


def test_the_position_of_the_own_address_is_the_rank() -> None:
    placed = find_placed_rank({"peers": PEERS})
    assert placed is not None
    assert (placed.rank, placed.size) == (1, 3)
    assert placed.addresses == (("198.51.100.1", 29400), ("127.0.0.1", 29400), ("198.51.100.3", 29400))
    given = find_placed_rank({"peers": PEERS, "rank": 2, "size": 3})
    assert given is not None
    assert given.rank == 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rank": 1}, "address= is missing"),
        ({"rank": 1, "size": 2}, "address= is missing"),
        ({"size": 2, "address": "198.51.100.1:1"}, "rank= is missing"),
        ({"rank": 1, "address": "198.51.100.1:1"}, "size= is missing"),
        ({"rank": 2, "size": 2, "address": "198.51.100.1:1"}, "rank 2 is not one of the 2 ranks"),
        ({"rank": -1, "size": 2, "address": "198.51.100.1:1"}, "rank=-1 must be"),
        ({"rank": True, "size": 2, "address": "198.51.100.1:1"}, "rank=True must be"),
        ({"rank": 0, "size": 0, "address": "198.51.100.1:1"}, "size=0 must be"),
        ({"rank": 0, "size": "2", "address": "198.51.100.1:1"}, "size='2' must be"),
        ({"rank": 0, "size": 2, "address": "198.51.100.1"}, "is not an address; write host:port"),
        ({"rank": 0, "size": 2, "address": "198.51.100.1:0"}, "is not an address"),
        ({"rank": 0, "size": 2, "address": "2001:db8::1:29400"}, "is not an address"),
        ({"rank": 0, "size": 2, "address": "tcp://198.51.100.1:5"}, "is not an address"),
        ({"rank": 0, "size": 2, "address": ("198.51.100.1", 5)}, "is not an address"),
        ({"peers": "198.51.100.1:1,198.51.100.2:1"}, "is a list of addresses"),
        ({"peers": []}, "needs the address of every rank"),
        ({"peers": ["198.51.100.1:1", "198.51.100.1:1"]}, "each once"),
        ({"peers": PEERS, "size": 2}, "contradict each other"),
        ({"peers": PEERS, "address": "198.51.100.1:1"}, "give one of them"),
        ({"peers": ["198.51.100.1:1", "198.51.100.2:1"]}, "none of them is of this machine; give rank="),
        ({"peers": ["127.0.0.1:1", "127.0.0.1:2"]}, "2 of them are of this machine; give rank="),
        ({"rank": 0, "size": 2, "address": "198.51.100.1:1", "run": "x"}, "run= is for runs of a cluster"),
        ({"peers": PEERS, "min_size": 1}, "min_size= is for runs of a cluster"),
    ],
)  # fmt: skip
def test_arguments_that_contradict_themselves_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_placed_rank(asked)
    assert words in str(caught.value)


def test_arguments_beat_the_variables_of_a_launcher() -> None:
    request = JoinRequest.of({"rank": 1, "size": 3, "address": "127.0.0.1:4000"})
    target = request.resolve({"RANK": "0", "WORLD_SIZE": "2", "COVEY_RUN": "a run"})
    assert target.run is None
    assert target.launched is not None
    assert (target.launched.rank, target.launched.size) == (1, 3)
