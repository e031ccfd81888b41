"""Named arrays, combined over all ranks in buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.values import all_values, combined, same, values

from covey import ClosedError, ConfigError, MismatchError
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group

SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "embed.weight": ((50, 8), np.float32),
    "layers.0.bias": ((7,), np.float64),
    "layers.0.weight": ((7, 8), np.float32),
    "layers.1.scale": ((), np.float32),
    "layers.1.weight": ((300, 100), np.float32),
    "layers.1.half": ((33, 3), np.float16),
    "head.brain": ((2, 64), ml_dtypes.bfloat16),
    "nothing": ((0, 4), np.float64),
}


def gradients(rank: int) -> dict[str, Any]:
    return {name: values(rank, shape, dtype, seed) for seed, (name, (shape, dtype)) in enumerate(SHAPES.items())}


def check(grads: dict[str, Any], size: int, op: str) -> None:
    for seed, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        same(grads[name], combined(op, all_values(size, shape, dtype, seed)))


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 25 << 20])
@pytest.mark.parametrize(("size", "lanes"), [(1, "memory"), (2, "unix"), (3, "memory"), (4, "tcp")])
def test_all_arrays_are_combined_in_place_whatever_the_buckets(size: int, lanes: str, bucket_bytes: int) -> None:
    def body(group: Group) -> None:
        for op in ("sum", "mean", "max"):
            grads = gradients(group.rank)
            kept = dict(grads)
            group.sync_gradients(grads, op, bucket_bytes=bucket_bytes)
            assert all(grads[name] is kept[name] for name in kept)
            check(grads, size, op)
        grads = gradients(group.rank)
        group.sync_gradients(grads, bucket_bytes=bucket_bytes)
        check(grads, size, "mean")
        group.sync_gradients({})

    run_threads(size, body, lanes=lanes)


def test_the_order_of_the_mapping_does_not_matter() -> None:
    def body(group: Group) -> None:
        grads = gradients(group.rank)
        names = np.random.default_rng(group.rank).permutation(list(grads)).tolist()
        shuffled = {name: grads[name] for name in names}
        group.sync_gradients(shuffled, "sum", bucket_bytes=500)
        check(grads, 4, "sum")

    run_threads(4, body)


def test_strided_arrays_and_torch_tensors_may_be_among_them() -> None:
    torch = pytest.importorskip("torch")

    def body(group: Group) -> None:
        wide = np.zeros((4, 6))
        wide[:, ::2] = group.rank + 1
        tensor = torch.full((3, 2), float(group.rank))
        group.sync_gradients({"strided": wide[:, ::2], "tensor": tensor, "turned": tensor.t().clone().t()}, "sum")
        assert (wide[:, ::2] == 6).all()
        assert (wide[:, 1::2] == 0).all()
        assert (tensor == 3).all()

    run_threads(3, body)


def _without(name: str) -> dict[str, Any]:
    return {key: array for key, array in gradients(0).items() if key != name}


@pytest.mark.parametrize(
    ("odd", "difference"),
    [
        (
            _without("head.brain"),
            "rank 1 has layers.0.bias.*rank 0 has|rank 0 has head.brain.*rank 1 has layers.0.bias",
        ),
        (gradients(1) | {"embed.weight": values(1, (50, 9), np.float32)}, r"embed.weight: float32\[50, 9\]"),
        (gradients(1) | {"layers.0.bias": values(1, 7, np.float32)}, r"layers.0.bias: float32\[7\]"),
        (gradients(1) | {"zzz": values(1, 7)}, r"rank 0 has nothing; rank 1 has zzz: float64\[7\]"),
        ({}, r"rank 0 has embed.weight: float32\[50, 8\]; rank 1 has nothing"),
    ],
    ids=["a name is missing", "another shape", "another dtype", "a name too many", "nothing at all"],
)
def test_ranks_that_pass_other_arrays_all_learn_the_first_difference(odd: dict[str, Any], difference: str) -> None:
    def body(group: Group) -> None:
        with pytest.raises(MismatchError, match=difference):
            group.sync_gradients(odd if group.rank == 1 else gradients(group.rank))
        with pytest.raises(ClosedError) as refused:
            group.all_reduce(1)
        assert isinstance(refused.value.__cause__, MismatchError)

    run_threads(3, body)


def test_a_call_that_cannot_work_is_refused_before_anything_is_sent() -> None:
    def body(group: Group) -> None:
        frozen = np.broadcast_to(1.0, 5)
        op: Any
        for grads, op, kind in (
            ({"counts": np.ones(3, np.int64)}, "mean", TypeError),
            ({"frozen": frozen}, "sum", TypeError),
            ({"none": None}, "sum", TypeError),
            ({"x": np.ones(3)}, "average", ConfigError),
        ):
            with pytest.raises(kind):
                group.sync_gradients(grads, op)
        with pytest.raises(ConfigError, match="bucket_bytes"):
            group.sync_gradients({"x": np.ones(3)}, bucket_bytes=0)
        group.sync_gradients({"counts": np.ones(3, np.int64)}, "sum")
        assert group.all_reduce(1) == 3

    run_threads(3, body)


def test_one_array_under_two_names_is_refused() -> None:
    def body(group: Group) -> None:
        x = np.ones(4)
        with pytest.raises(ConfigError, match="'a' and 'b' share memory"):
            group.sync_gradients({"a": x, "b": x[1:]})
        group.sync_gradients({"even": x[::2], "odd": x[1::2]}, op="sum")
        assert (x == 2).all()

    run_threads(2, body)
