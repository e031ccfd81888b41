from __future__ import annotations

import array
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.in_turn import in_turn

from covey.base.arithmetic import DTYPES, dtype_code
from covey.runtime.buffers import as_array, readable, writable


@in_turn(dtype=DTYPES)
@in_turn(shape=[(), (0,), (5,), (2, 3), (2, 0, 3), (1, 1, 4)])
def test_a_contiguous_array_is_used_where_it_stands(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, dtype)
    for operand in (writable(x), readable(x)):
        assert operand.flat.ndim == 1
        assert operand.flat.size == x.size
        assert operand.shape == shape
        assert operand.code == dtype_code(dtype)
        assert not x.size or np.shares_memory(operand.flat, x)
        operand.flat[...] = 1
        operand.store()
        assert (x == 1).all()


@in_turn(dtype=[dtype for dtype in DTYPES if dtype.itemsize > 1])
def test_an_array_that_is_not_aligned_is_copied_in_and_out(dtype: np.dtype[Any]) -> None:
    room = np.zeros(1 + 5 * dtype.itemsize, np.uint8)
    x = room[1:].view(dtype)
    x[...] = np.arange(5)
    operand = writable(x)
    assert operand.load().flags.aligned
    assert np.array_equal(operand.flat, np.arange(5).astype(dtype))
    operand.flat[...] = 7
    operand.store()
    assert np.all(x == dtype.type(7))


@pytest.mark.parametrize(
    "view",
    [lambda x: x.T, lambda x: x[::-1], lambda x: x[:, ::3], lambda x: x[1:3, 2:4], lambda x: x[:, None, 1]],
    ids=["transposed", "reversed", "strided", "window", "column"],
)
def test_a_strided_array_is_copied_in_and_out(view: Any) -> None:
    whole = np.arange(24.0).reshape(4, 6)
    part = view(whole)
    operand = writable(part)
    assert operand.load().flags.c_contiguous
    assert np.array_equal(operand.flat.reshape(operand.shape), part)
    before = whole.copy()
    operand.flat[...] += 100
    assert np.array_equal(whole, before)
    operand.store()
    expected = before.copy()
    view(expected)[...] += 100
    assert np.array_equal(whole, expected)


def test_buffers_of_other_types_are_seen_in_place() -> None:
    raw, numbers = bytearray(6), array.array("h", [1, 2, 3])
    writable(raw).flat[2] = 9
    writable(numbers).flat[1] = -5
    assert raw[2] == 9
    assert numbers[1] == -5
    assert writable(memoryview(bytearray(12)).cast("i", (3, 1))).shape == (3, 1)


@pytest.mark.parametrize("x", [b"abc", memoryview(b"abc"), np.broadcast_to(1.0, 3)], ids=["bytes", "view", "array"])
def test_what_cannot_be_written_may_only_be_read(x: Any) -> None:
    assert readable(x).flat.size == 3
    with pytest.raises(TypeError, match=r"read-only; pass a copy: x = x\.copy\(\)"):
        writable(x)


@pytest.mark.parametrize(
    "x", [[1, 2], (1.5,), 3, 2.5, 1j, True, np.float32(1), np.int64(2), ml_dtypes.bfloat16(1)], ids=repr
)
def test_numbers_and_lists_can_be_read_but_not_changed_in_place(x: Any) -> None:
    operand = readable(x)
    assert np.array_equal(operand.load().reshape(operand.shape), np.asarray(x))
    with pytest.raises(TypeError, match=f"cannot work on a {type(x).__name__} in place"):
        writable(x)


@pytest.mark.parametrize("x", [None, {}, object(), "text", len], ids=lambda x: type(x).__name__)
def test_other_things_are_refused_by_name(x: Any) -> None:
    for see in (readable, writable):
        with pytest.raises(TypeError, match=type(x).__name__):
            see(x)


def test_an_array_of_another_library_is_seen_through_dlpack() -> None:
    class Foreign:
        def __init__(self) -> None:
            self.memory = np.arange(4.0)

        def __dlpack__(self, **options: Any) -> Any:
            return self.memory.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.memory.__dlpack_device__()

    foreign = Foreign()
    assert np.shares_memory(as_array(foreign), foreign.memory)


def test_a_tensor_lives_as_long_as_the_array_over_its_memory() -> None:
    torch = pytest.importorskip("torch")
    flat = writable(torch.full((1 << 20,), 3.0)).flat
    gc.collect()
    other = torch.zeros(1 << 20)
    assert (flat == 3).all()
    assert (other == 0).all()


def test_tensors_of_every_dtype_and_layout_are_seen_in_place() -> None:
    torch = pytest.importorskip("torch")
    for dtype in DTYPES:
        tensor = torch.zeros(3, 4, dtype=getattr(torch, dtype.name))
        operand = writable(tensor)
        assert operand.flat.dtype == dtype
        operand.flat[5] = 1
        assert tensor[1, 1] == 1
    tensor = torch.arange(12.0).reshape(3, 4)
    for view in (tensor.t(), tensor[:, 1::2], tensor[1:, 0], tensor[2, 3]):
        assert np.array_equal(as_array(view), view.numpy())
    spread = torch.zeros(3, 1).expand(3, 4)
    assert readable(spread).load().tolist() == [0.0] * 12
    weight = torch.ones(3, requires_grad=True)
    writable(weight).flat[0] = 5
    assert weight.tolist() == [5, 1, 1]


def test_a_tensor_that_was_moved_can_still_be_resized() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(4, requires_grad=True)
    as_array(tensor)
    tensor.untyped_storage().resize_(0)  # FSDP frees parameters so
    assert tensor.untyped_storage().size() == 0
