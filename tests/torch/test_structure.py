"""Structures as plain lists, and back."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from covey.base.errors import ConfigError
from covey.testing.threads import run_threads
from covey.torch.training.structure import TensorKey, from_plain, hand_over, put_together, take_apart, to_plain
from covey.wire import objects

if TYPE_CHECKING:
    from covey import Group

STATE: dict[str, Any] = {
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "buffer": None}}, "groups": [{"betas": (0.9, 0.999)}]},
    "scheduler": {"milestones": Counter([3, 5, 5]), "rates": [1, 1.0, True], "name": b"x"},
    "random": random.Random(4).getstate(),
    "big": 1 << 127,
    "empty": [(), {}, OrderedDict(), "slot", ["slot", "x"], ["int", 5]],
}


def test_what_travels_is_what_it_was() -> None:
    structure, tensors = take_apart(STATE)
    assert list(tensors) == ["optimizer.state.0.step"]
    plain = objects.decode(objects.encode(to_plain(structure)))
    assert put_together(from_plain(plain), tensors) == STATE
    back = put_together(from_plain(plain, structure), tensors)
    assert back == STATE
    assert type(back["scheduler"]["milestones"]) is Counter
    assert [type(rate) for rate in back["scheduler"]["rates"]] == [int, float, bool]
    assert back["optimizer"]["state"][0]["step"] is tensors["optimizer.state.0.step"]


def test_what_cannot_travel_is_named() -> None:
    assert from_plain(to_plain(TensorKey("a.b"))) == TensorKey("a.b")
    with pytest.raises(ConfigError, match=r"the state\.scheduler\.1 is a function"):
        to_plain({"scheduler": [1, lambda: 0]})


def test_sparse_moments_become_dense_on_all_ranks_so_that_they_stay_equal() -> None:
    def body(group: Group) -> Any:
        torch.manual_seed(group.rank)
        table = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)

        def step(*rows: int) -> None:
            (table(torch.tensor(rows)).sum(1) * torch.arange(1.1, len(rows) + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        if group.rank == 1:
            step(1, 4, 1)
            step(4, 5)
        hand_over(group, table, {"optimizer": optimizer}, fresh=group.rank != 1)
        step(0, 4, 4)
        return table.weight.detach(), optimizer.state_dict()["state"][0]["momentum_buffer"]

    made = run_threads(3, body)
    assert float(made[0][1].abs().sum()) > 1
    for weight, moments in made:
        assert torch.equal(weight, made[1][0])
        assert torch.equal(moments, made[1][1])
        assert not moments.is_sparse
