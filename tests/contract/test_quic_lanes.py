"""Lanes by QUIC: the collectives, messages and calls are those of every other lane."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("qh3")

from tests.support.compiled import EXECUTORS, use_executors
from tests.support.values import all_values, combined, same, values

from covey.base.errors import ConfigError
from covey.testing import run_threads

if TYPE_CHECKING:
    import covey


def several_operations(group: covey.Group) -> None:
    rank, size = group.rank, group.size
    assert set(group.lanes().values()) <= {"quic"}
    for count in (1, 1000, 70_000):
        x = values(rank, count, np.float32)
        group.all_reduce(x)
        same(x, combined("sum", all_values(size, count, np.float32)))
    parts = group.all_gather(values(rank, 300 + rank, np.int64))
    for other, part in enumerate(parts):
        same(part, values(other, 300 + other, np.int64))
    y = values(rank, 5000, np.float64)
    group.broadcast(y, root=size - 1)
    same(y, values(size - 1, 5000, np.float64))
    sent = group.send(values(rank, 90_000, np.uint8), dst=(rank + 1) % size, async_op=True)
    before = (rank - 1) % size
    same(group.recv(src=before), values(before, 90_000, np.uint8))
    sent.wait()
    group.barrier()
    assert set(group.lanes().values()) == {"quic"}


@pytest.mark.parametrize(("size", "executors"), [(2, EXECUTORS[0]), (3, EXECUTORS[1]), (2, EXECUTORS[2])])
def test_operations_give_the_same_numbers(size: int, executors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_executors(monkeypatch, executors)
    run_threads(size, several_operations, lanes="quic")


def test_without_the_extra_joining_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qh3.quic.connection", None)
    with pytest.raises(ExceptionGroup) as caught:
        run_threads(2, several_operations, lanes="quic")
    assert all(isinstance(each, ConfigError) for each in caught.value.exceptions)
    assert "install covey[quic], or use lanes='auto'" in str(caught.value.exceptions[0])


def test_links_tell_the_kind_of_lane() -> None:
    def body(group: covey.Group) -> list[str]:
        group.all_reduce(values(group.rank, 10))
        kinds = [link.lane for link in group.node.links()]
        group.barrier()  # no rank leaves before the other has looked
        return kinds

    assert run_threads(2, body, lanes="quic") == [["quic"]] * 2
