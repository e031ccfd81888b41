"""Values other than arrays, between all ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.sets import pairs
from tests.support.values import LANES, same, values
from tests.support.waiting import DEADLINE

from covey import ConfigError, MismatchError
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group


@dataclass
class Report:
    rank: int
    loss: float
    notes: list[str]


@dataclass
class Other:
    title: str


class Stranger:
    """Something that only pickle can take."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stranger) and other.rank == self.rank

    __hash__ = None  # type: ignore[assignment]


def value(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "é" * rank, "raw": bytes(rank), "nested": [None, True, 1.5 * rank, {"a": [rank]}]}


@pytest.mark.parametrize(("size", "lanes"), pairs([1, 2, 3, 5], LANES))
def test_values_reach_the_ranks_they_are_for(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        me = group.rank
        for root in range(size):
            assert group.broadcast_object(value(me) if me == root else None, root) == value(root)
            assert group.gather_object(value(me), root) == ([value(r) for r in range(size)] if me == root else None)
            mine = group.scatter_object([value(10 + r) for r in range(size)] if me == root else None, root)
            assert mine == value(10 + me)
        assert group.all_gather_object(value(me)) == [value(rank) for rank in range(size)]
        assert group.all_gather_object(value(me), async_op=True).wait(DEADLINE) == [value(rank) for rank in range(size)]
        large = "x" * (300_000 + me)
        assert [len(text) for text in group.all_gather_object(large)] == [300_000 + rank for rank in range(size)]
        assert group.broadcast_object(large, size - 1) == "x" * (300_000 + size - 1)

    run_threads(size, body, lanes=lanes)


def test_arrays_inside_values_arrive_as_writable_arrays() -> None:
    def body(group: Group) -> None:
        got = group.all_gather_object({"w": values(group.rank, (3, 4), np.float32), "n": np.int16(group.rank)})
        for rank, each in enumerate(got):
            same(each["w"], values(rank, (3, 4), np.float32))
            each["w"] += 1
            assert each["n"] == rank
            assert type(each["n"]) is np.int16

    run_threads(3, body)


def test_a_dataclass_arrives_as_a_dict_or_as_the_type_the_receiver_names() -> None:
    def body(group: Group) -> None:
        report = Report(group.rank, 0.5, ["a", "b"])
        assert group.all_gather_object(report)[2] == {"rank": 2, "loss": 0.5, "notes": ["a", "b"]}
        assert group.all_gather_object(report, type=Report) == [Report(rank, 0.5, ["a", "b"]) for rank in range(3)]
        assert group.broadcast_object(report, 1, type=Report) == Report(1, 0.5, ["a", "b"])
        assert group.scatter_object([report] * 3 if group.rank == 0 else None, type=Report).rank == 0
        with pytest.raises(MismatchError):
            group.broadcast_object(report, 1, type=Other)
        assert group.all_reduce(1) == 3, "a value of another type must not close the group"

    run_threads(3, body)


def test_typed_values_need_no_pickle_in_messages_and_between_all_ranks() -> None:
    wanted = dict[str, set[int]]

    def body(group: Group) -> None:
        me, mine = group.rank, {"seen": {group.rank, 7}}
        assert group.all_gather_object(mine, type=wanted) == [{"seen": {rank, 7}} for rank in range(3)]
        send = group.send_object(mine, (me + 1) % 3, type=wanted, async_op=True)
        assert group.recv_object((me - 1) % 3, type=wanted) == {"seen": {(me - 1) % 3, 7}}
        send.wait()
        with pytest.raises(ConfigError, match="must be True or False"):
            group.recv_object(0, allow_pickle=[Report])  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="must be True or False"):
            group.broadcast_object(mine, allow_pickle=[Report])  # type: ignore[call-overload]
        assert group.all_reduce(1) == 3

    run_threads(3, body)


def test_a_value_that_cannot_be_sent_is_a_type_error_on_every_rank_and_the_group_lives_on() -> None:
    def body(group: Group) -> None:
        me = group.rank
        for _ in range(3):
            with pytest.raises(TypeError, match="allow_pickle=True"):
                group.broadcast_object(Stranger(1) if me == 1 else None, 1)
            with pytest.raises(TypeError, match="Stranger"):
                group.all_gather_object(Stranger(me) if me == 2 else me)
            with pytest.raises(TypeError, match="Stranger"):
                group.all_gather_object({"deep": [Stranger(me) if me == 0 else me]}, async_op=True).wait(DEADLINE)
            if me in (0, 1):  # the rank that receives it, and the rank that passed it
                with pytest.raises(TypeError, match="set"):
                    group.gather_object({1, 2} if me == 1 else me)
            else:
                group.gather_object(me)
            if me in (0, 2):
                with pytest.raises(TypeError, match="Stranger"):
                    group.scatter_object([0, 1, Stranger(2)] if me == 0 else None)
            else:
                assert group.scatter_object(None) == me
            assert group.all_reduce(1) == 3

    run_threads(3, body)


def test_pickles_are_opened_only_where_the_receiver_allows_it() -> None:
    def body(group: Group) -> None:
        me = group.rank
        gathered = group.all_gather_object(Stranger(me), allow_pickle=True)
        assert gathered == [Stranger(rank) for rank in range(3)]
        assert group.broadcast_object(Stranger(7), allow_pickle=True) == Stranger(7)
        if me == 0:
            assert group.broadcast_object(Stranger(7), 0, allow_pickle=True) == Stranger(7)
        else:
            with pytest.raises(TypeError, match="allow_pickle=True"):
                group.broadcast_object(None, 0)
        with pytest.raises(TypeError):
            group.broadcast_object(lambda: None, 1, allow_pickle=True)
        assert group.all_gather_object({"plain": me}, allow_pickle=True) == [{"plain": rank} for rank in range(3)]

    run_threads(3, body)
