"""Structures as plain lists, and back."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from covey.base.errors import ConfigError
from covey.torch.training.structure import TensorKey, from_plain, put_together, take_apart, to_plain
from covey.wire import objects

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
