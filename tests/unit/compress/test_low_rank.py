"""PowerSGD's parts, and that together they approximate a sum of matrices."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.compress.arrays import normal

from covey.base.errors import ConfigError
from covey.compress.low_rank import PowerSGD


def test_a_matrix_is_the_first_axis_by_the_others() -> None:
    codec = PowerSGD(4)
    assert codec.shape_of((64, 3, 7, 7)) == (64, 147)
    assert codec.shape_of((100, 50)) == (100, 50)


def test_arrays_that_gain_nothing_are_sent_as_they_are() -> None:
    for shape in ((), (1000,), (8, 8), (1, 1000), (0, 5), (5, 0), (4, 4096)):
        assert PowerSGD(4).shape_of(shape) is None
    assert PowerSGD(4).shape_of((9, 9)) == (9, 9), "72 numbers instead of 81"


def test_all_ranks_start_with_the_same_numbers_of_mean_0_and_variance_1() -> None:
    q = PowerSGD(4, seed=7).start(10, 5000, salt=(1 << 64) - 1)
    assert q.shape == (5000, 4)
    assert q.dtype == np.float32
    assert abs(q.mean()) < 4 / np.sqrt(q.size)
    assert abs(q.var() - 1) < 0.03
    assert q.tobytes() == PowerSGD(4, seed=7).start(10, 5000, salt=(1 << 64) - 1).tobytes()
    others = [PowerSGD(4, seed).start(10, 5, salt).tobytes() for seed in (0, 1) for salt in (0, 1)]
    assert len(set(others)) == 4


def test_the_start_has_these_bits_in_every_version_of_numpy() -> None:
    bits = [[0xBF060476, 0xBE0A287A], [0xBF5A1376, 0x3C356EAD]]
    assert PowerSGD(2, seed=1).start(3, 2, salt=2).view(np.uint32).tolist() == bits


@pytest.mark.parametrize(("rows", "rank"), [(5, 1), (50, 4), (1000, 32), (3, 3)])
def test_orthogonalised_columns_are_orthonormal_and_span_the_same(rows: int, rank: int) -> None:
    p = normal(rows * rank, rows).reshape(rows, rank)
    original = p.astype(np.float64)
    PowerSGD.orthogonalise(p)
    q = p.astype(np.float64)
    assert np.abs(q.T @ q - np.eye(rank)).max() < 1e-5
    assert np.abs(q @ (q.T @ original) - original).max() < 1e-4


def test_columns_of_zeros_and_dependent_columns_become_zero() -> None:
    p = normal(60, 1).reshape(12, 5)
    p[:, 1] = 0
    p[:, 3] = 2 * p[:, 0] - p[:, 2]
    PowerSGD.orthogonalise(p)
    assert (p[:, [1, 3]] == 0).all()
    assert np.allclose(np.abs(p).max(axis=0) > 0, [True, False, True, False, True])


def test_tiny_and_huge_columns_are_orthonormal_too() -> None:
    p = normal(300, 2).reshape(100, 3) * np.array([1e-38, 1e37, 1], np.float32)
    PowerSGD.orthogonalise(p)
    assert np.allclose(p.T @ p, np.eye(3), atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_the_product(value: float) -> None:
    p, q = normal(60, 3).reshape(20, 3), normal(30, 4).reshape(10, 3)
    p[4, 1] = value
    PowerSGD.orthogonalise(p)
    assert np.isnan(p[:, 1:]).all()
    out = np.zeros((20, 10), np.float32)
    PowerSGD.rebuild(p, q, out)
    assert np.isnan(out).all()


@pytest.mark.parametrize(("rows", "columns", "rank"), [(20, 10, 3), (1, 7, 1), (3, 100_000, 2), (5000, 11, 4)])
def test_rebuild_multiplies_in_the_order_of_ranks(rows: int, columns: int, rank: int) -> None:
    p, q = normal(rows * rank, 5).reshape(rows, rank), normal(columns * rank, 6).reshape(columns, rank)
    out = np.full((rows, columns), 9.0, np.float32)
    PowerSGD.rebuild(p, q, out)
    expected = p[:, :1] * q[:, 0]
    for i in range(1, rank):
        expected = expected + p[:, i : i + 1] * q[:, i]
    assert out.tobytes() == expected.tobytes()


def test_one_step_finds_a_sum_of_matrices_of_low_rank() -> None:
    codec = PowerSGD(4)
    matrices = [normal(60 * 2, seed).reshape(60, 2) @ normal(40 * 2, seed + 9).reshape(2, 40) for seed in (0, 1)]
    p = (matrices[0] @ codec.start(60, 40) + matrices[1] @ codec.start(60, 40)).astype(np.float32)
    codec.orthogonalise(p)
    q = (matrices[0].T @ p + matrices[1].T @ p).astype(np.float32)
    out = np.zeros((60, 40), np.float32)
    codec.rebuild(p, q, out)
    assert np.abs(out - (matrices[0] + matrices[1])).max() < 1e-4


@pytest.mark.parametrize("rank", [0, -1, 1025, 2.0, "4", True])
def test_a_rank_must_be_an_integer_within_limits(rank: object) -> None:
    with pytest.raises(ConfigError, match="give an integer from 1 to 1024, like 4"):
        PowerSGD(rank)  # type: ignore[arg-type]
