"""Torch tensors as arguments and results of calls: as raw memory, in every dtype, and as annotations want them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import covey
from covey.testing import LinkedNodes


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (200, 300), (0, 4)])
def test_tensors_arrive_as_tensors_of_their_own(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(int(np.prod(shape))) % 2).reshape(shape).to(dtype)
    with LinkedNodes(2) as nodes:
        nodes[1].register("same", lambda value: value)
        for sent in (tensor, tensor.T.contiguous().T if len(shape) == 2 else tensor):
            got = nodes[0].call(1, "same", {"x": [sent]})["x"][0]
            assert isinstance(got, torch.Tensor)
            assert (got.dtype, got.shape) == (dtype, tensor.shape)
            assert torch.equal(got, tensor)
            assert got.numel() == 0 or got.data_ptr() != sent.data_ptr()


def test_annotations_decide_between_tensors_and_arrays() -> None:
    with LinkedNodes(2) as nodes:

        @nodes[1].rpc
        def kinds(a: torch.Tensor, b: np.ndarray[Any, Any]) -> list[str]:
            return [type(a).__name__, type(b).__name__]

        assert nodes[0].call(1, "kinds", torch.ones(2), np.ones(2)) == ["Tensor", "ndarray"]
        assert nodes[0].call(1, "kinds", np.ones(2), torch.ones(2)) == ["Tensor", "ndarray"]
        parameter = torch.nn.Parameter(torch.ones(3))
        assert nodes[0].call(1, "kinds", parameter, parameter) == ["Tensor", "ndarray"]
        with pytest.raises(covey.CallRefusedError, match="Tensor"):
            nodes[0].call(1, "kinds", 1, np.ones(2))
