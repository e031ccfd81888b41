"""Compressed collectives: the bits that the codec's own arithmetic gives, on all ranks, within its error bounds."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from tests.support.compiled import EXECUTORS, use_executors
from tests.support.sets import pairs
from tests.support.waiting import DEADLINE

import covey
from covey import BF16, FP8, FP16, Codec, ConfigError, ErrorFeedback, Int4, Int8, MismatchError, OneBit, TopK
from covey.compress.policy import make_policy
from covey.plan.moves import part
from covey.runtime.buffers import Part
from covey.runtime.compressed import dense
from covey.runtime.group.internals import gradients_of
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey import Group, Op

    Array = np.ndarray[Any, np.dtype[Any]]

QUANTISERS: list[Codec] = [Int8(), Int8(block=64), Int4(), FP8(), FP16(), BF16(), OneBit()]


@dataclass(frozen=True)
class Raw(Codec):
    """Loses nothing, so that results can be compared bit by bit with those of a plain operation."""

    block: int = 1

    name: ClassVar[str] = "raw"
    is_lossy: ClassVar[bool] = False

    @property
    def unit(self) -> int:
        return self.block

    def wire_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, x: Array, wire: Array, salt: int = 0) -> None:
        wire[...] = x.view(np.uint8)

    def decode(self, wire: Array, out: Array) -> None:
        out[...] = np.frombuffer(wire.tobytes(), np.float32)

    def error_bound(self, x: Array) -> Array:
        return np.zeros_like(x)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transfers be so short that an array has many of them."""
    plans = (dense._all_reduce_plan, dense._reduce_scatter_plan, dense._broadcast_plan, dense._all_gather_plan)
    monkeypatch.setattr(dense, "SEGMENT_BYTES", 700)
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


def gradient(rank: int, count: int, kind: str = "random", seed: int = 0) -> Array:
    """Return a float32 array that differs by rank; in the kind `cancelling`, the ranks' arrays nearly add up to 0."""
    rng = np.random.default_rng([rank, seed])
    x = rng.standard_normal(count) * np.exp(rng.standard_normal(count))  # a few elements are much larger
    if kind == "cancelling":
        common = np.random.default_rng(seed).standard_normal(count) * 1000
        x = x * 0.01 + (common if rank % 2 else -common)
    return x.astype(np.float32)


def expected(codec: Codec, xs: list[Array], algorithm: str, op: str) -> tuple[Array, Array]:
    """Return the result that the codec's arithmetic gives, hop by hop, and the bound of its error."""
    size, count = len(xs), xs[0].size
    result, bound = np.zeros(count, np.float32), np.zeros(count, np.float64)
    units = -(-count // codec.unit)

    def passed(x: Array, errors: Array) -> Array:
        wire, out = np.zeros(codec.wire_bytes(x.size), np.uint8), np.empty_like(x)
        codec.encode(x, wire)
        codec.decode(wire, out)
        errors += codec.error_bound(x)
        return out

    for owner in range(size):
        first, last = part(units, size, owner)
        start, stop = first * codec.unit, min(last * codec.unit, count)
        errors = np.zeros(stop - start, np.float64)
        parts = [x[start:stop].copy() for x in xs]
        if algorithm == "ring":  # part p begins at rank p and goes round to rank p - 1
            total = parts[owner]
            for step in range(1, size):
                total = parts[(owner + step) % size] + passed(total, errors)
        else:
            total = parts[owner]
            for step in range(1, size):
                total = total + passed(parts[(owner - step) % size], errors)
        if op == "mean":
            total, errors = total / np.float32(size), errors / size
        result[start:stop] = passed(total, errors)
        bound[start:stop] = errors
    return result, bound


@pytest.mark.parametrize(
    ("group", "executors"), pairs([(2, "tcp"), (3, "memory"), (5, "unix"), (8, "memory")], EXECUTORS), ids=str
)
def test_results_are_those_of_the_codec_hop_by_hop_and_equal_on_all_ranks(
    group: tuple[int, str], executors: str, short_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_executors(monkeypatch, executors)
    size, lanes = group
    count = 4099
    cases: list[tuple[Codec, str, Any, str]] = [
        (codec, algorithm, op, kind)
        for number, codec in enumerate(QUANTISERS)
        for algorithm, op, kind in [
            ("ring", ("sum", "mean")[number % 2], ("random", "cancelling")[number // 2 % 2]),
            ("direct", ("mean", "sum")[number % 2], ("cancelling", "random")[number // 2 % 2]),
        ]
    ]

    def body(group: Group) -> list[Array]:
        return [
            group.all_reduce(gradient(group.rank, count, kind), op, compress=codec, algorithm=algorithm)
            for codec, algorithm, op, kind in cases
        ]

    by_rank = run_threads(size, body, lanes=lanes)
    for number, (codec, algorithm, op, kind) in enumerate(cases):
        xs = [gradient(rank, count, kind) for rank in range(size)]
        wanted, bound = expected(codec, xs, algorithm, op)
        for rank in range(size):
            assert by_rank[rank][number].tobytes() == wanted.tobytes(), (codec, algorithm, rank)
        exact = np.sum(np.stack(xs).astype(np.float64), axis=0) / (size if op == "mean" else 1)
        rounding = 4 * size * 2.0**-24 * np.abs(np.stack(xs)).sum(axis=0)
        assert (np.abs(wanted - exact) <= bound + rounding).all(), (codec, algorithm)


@pytest.mark.parametrize(("count", "executors"), pairs([257, 3000, 1, 0, 5], EXECUTORS))
def test_a_codec_that_loses_nothing_gives_the_bits_of_the_plain_operation(
    count: int, executors: str, short_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_executors(monkeypatch, executors)

    def body(group: Group) -> None:
        for algorithm in ("ring", "direct"):
            for op in ("sum", "mean"):
                plain = group.all_reduce(gradient(group.rank, count), op, algorithm=algorithm)
                raw = group.all_reduce(gradient(group.rank, count), op, algorithm=algorithm, compress=Raw())
                assert raw.tobytes() == plain.tobytes()
        for codec in (Raw(), Raw(7)):
            x = gradient(group.rank, count)
            parts = group.reduce_scatter(x, "mean", compress=codec)
            assert parts.tobytes() == group.reduce_scatter(x, "mean").tobytes()
            assert x.tobytes() == gradient(group.rank, count).tobytes()
            sent = group.broadcast(gradient(group.rank, count), 1, compress=codec)
            assert sent.tobytes() == gradient(1, count).tobytes()
            rows = group.all_gather(gradient(group.rank, count), compress=codec)
            assert [row.tobytes() for row in rows] == [gradient(r, count).tobytes() for r in range(group.size)]
            out = np.empty((group.size, count), np.float32)
            assert group.all_gather(gradient(group.rank, count), out=out, compress=codec) is out
            assert out.tobytes() == np.stack(rows).tobytes()

    run_threads(3, body, lanes="unix")


@pytest.mark.parametrize("size", [2, 4])
def test_broadcast_and_all_gather_give_all_ranks_the_decoded_array_the_owner_as_well(size: int) -> None:
    def body(group: Group) -> tuple[bytes, bytes]:
        x = group.broadcast(gradient(group.rank, 1000), size - 1, compress="int8")
        return x.tobytes(), np.stack(group.all_gather(gradient(group.rank, 1000), compress="int4")).tobytes()

    sent, gathered = zip(*run_threads(size, body), strict=True)
    assert set(sent) == {_decoded(Int8(), gradient(size - 1, 1000)).tobytes()}
    assert set(gathered) == {np.stack([_decoded(Int4(), gradient(rank, 1000)) for rank in range(size)]).tobytes()}


def _decoded(codec: Codec, x: Array) -> Array:
    wire, out = np.empty(codec.wire_bytes(x.size), np.uint8), np.empty_like(x)
    codec.encode(x, wire)
    codec.decode(wire, out)
    return out


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_floats_are_reduced_in_float32_and_come_back_in_their_own_dtype(dtype: Any) -> None:
    def body(group: Group) -> Array:
        x = gradient(group.rank, 600).astype(dtype).reshape(20, 30).T  # neither contiguous nor float32
        assert group.all_reduce(x, "mean", compress="int8") is x
        return np.ascontiguousarray(x)

    results = run_threads(3, body)
    assert len({x.tobytes() for x in results}) == 1
    exact = np.mean([gradient(rank, 600).astype(dtype).astype(np.float64) for rank in range(3)], axis=0)
    found = results[0].T.reshape(-1).astype(np.float64)
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("codec", ["int8", "int4", "fp16", "bf16", "fp8", "onebit", "topk(0.1)", "randomk(0.2)"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_all_ranks(codec: str, bad: float) -> None:
    def body(group: Group) -> bytes:
        x = gradient(group.rank, 1000)
        if group.rank == 1:
            x[777] = bad
        group.all_reduce(x, compress=codec)
        assert not np.isfinite(x).all()
        assert bad == np.inf or np.isnan(x).any()
        return x.tobytes()

    assert len(set(run_threads(3, body))) == 1


def test_a_scalar_array_and_a_group_of_one_work() -> None:
    def body(group: Group) -> float:
        return float(group.all_reduce(np.array(group.rank + 1.0, np.float32), compress="int8"))

    assert run_threads(2, body) == [3.0, 3.0]
    assert run_threads(1, body) == [1.0]


# Sparse codecs and low rank


@pytest.mark.parametrize("size", [2, 3, 5])
def test_selected_elements_add_up_and_a_full_part_travels_whole(size: int) -> None:
    count = 2000

    def body(group: Group) -> tuple[bytes, bytes, bytes]:
        few = group.all_reduce(gradient(group.rank, count), compress="topk(0.01)")
        many = group.all_reduce(gradient(group.rank, count), "mean", compress="topk(0.6)")
        above = group.all_reduce(gradient(group.rank, count), compress="threshold(1.5)")
        return few.tobytes(), many.tobytes(), above.tobytes()

    few, many, above = zip(*run_threads(size, body), strict=True)

    def total(select: Any) -> Array:
        sums = np.zeros(count, np.float32)
        for rank in range(size):
            x = gradient(rank, count)
            chosen = select(x)
            sums[chosen] += x[chosen]
        return sums

    assert set(few) == {total(lambda x: TopK(0.01).select(x, 0)).tobytes()}
    assert set(many) == {(total(lambda x: TopK(0.6).select(x, 0)) / np.float32(size)).tobytes()}
    assert set(above) == {total(lambda x: np.flatnonzero(np.abs(x) >= 1.5)).tobytes()}


def test_random_elements_are_the_same_on_all_ranks_and_others_in_each_call() -> None:
    def body(group: Group) -> list[Array]:
        return [group.all_reduce(gradient(group.rank, 500), compress="randomk(0.1)") for _ in range(2)]

    results = run_threads(3, body)
    exact = np.sum([gradient(rank, 500) for rank in range(3)], axis=0)
    chosen = [set(np.flatnonzero(x).tolist()) for x in results[0]]
    assert all(len(each) == 50 for each in chosen)
    assert chosen[0] != chosen[1]
    for x in results[0]:
        assert np.allclose(x[x != 0], exact[x != 0], atol=1e-5)
    assert len({np.stack(x).tobytes() for x in results}) == 1


def test_matrices_of_low_rank_arrive_exactly_and_others_as_their_best_part() -> None:
    def matrix(rank: int) -> Array:
        rng = np.random.default_rng(rank)
        left = np.random.default_rng(99).standard_normal((40, 2))  # common: the sum has rank 2 as well
        return (left @ rng.standard_normal((2, 30))).astype(np.float32)

    def body(group: Group) -> Array:
        x = matrix(group.rank).reshape(40, 5, 6)
        feedback = ErrorFeedback()
        for _ in range(3):  # each operation starts from the basis of the last one
            x = matrix(group.rank).reshape(40, 5, 6)
            group.all_reduce(x, "mean", compress="powersgd(2)", feedback=feedback, name="w")
        vector = group.all_reduce(np.ones(10, np.float32), compress="powersgd(2)")
        assert (vector == group.size).all()
        return x

    results = run_threads(3, body)
    exact = np.mean([matrix(rank) for rank in range(3)], axis=0)
    assert len({x.tobytes() for x in results}) == 1
    assert np.abs(results[0].reshape(40, 30) - exact).max() < 1e-4


# Feedback


@pytest.mark.parametrize(
    ("codec", "op"),
    pairs(
        ["int8", "int4", "onebit", "fp8", "bf16", "topk(0.05)", "randomk(0.1)", "powersgd(2)", "int4(stochastic=True)"],
        ["sum", "mean"],
    ),
)
def test_with_feedback_what_a_step_loses_comes_later(codec: str, op: Op) -> None:
    """What the results of all steps miss of the exact sum is exactly what the ranks hold back."""
    size, shape, steps = 3, (30, 40), 25

    def body(group: Group) -> tuple[Array, Array, Array]:
        feedback = ErrorFeedback()
        received, given = np.zeros(shape), np.zeros(shape)
        for step in range(steps):
            x = gradient(group.rank, 1200, "cancelling", step).reshape(shape)
            given += x
            received += group.all_reduce(x, op, compress=codec, feedback=feedback, name="w")
        return received, given, feedback.state_dict()["residuals"]["w"].reshape(shape)

    received, given, held = zip(*run_threads(size, body), strict=True)
    factor = size if op == "mean" else 1
    missing = sum(given) - factor * received[0] - sum(each.astype(np.float64) for each in held)
    assert np.abs(missing).max() < 1e-4 * np.abs(np.stack(given)).max() * size
    assert np.abs(sum(held)).max() < 20 * np.abs(gradient(0, 1200, "cancelling")).max() * size


def test_the_sum_over_many_steps_converges_to_the_exact_sum() -> None:
    def body(group: Group) -> tuple[float, float]:
        errors = []
        for feedback in (None, ErrorFeedback()):
            received = np.zeros(2000)
            for _ in range(100):
                x = gradient(group.rank, 2000)
                received += group.all_reduce(x, "mean", compress="int4", feedback=feedback, name="w")
            exact = np.mean([gradient(rank, 2000) for rank in range(group.size)], axis=0)
            errors.append(float(np.abs(received / 100 - exact).mean()))
        return errors[0], errors[1]

    without, with_feedback = run_threads(4, body)[0]
    assert with_feedback < without / 20


def test_steps_of_the_warm_up_are_exact_and_a_rank_that_came_later_follows() -> None:
    def body(group: Group) -> list[bool]:
        feedback = ErrorFeedback(warmup=3)
        exact = []
        for step in range(5):
            if step == 1 and group.rank == 2:
                feedback = ErrorFeedback(warmup=3)  # as a newcomer has it
            x = group.all_reduce(gradient(group.rank, 800), compress="onebit", feedback=feedback, name="w")
            plain = group.all_reduce(gradient(group.rank, 800))
            exact.append(bool((x == plain).all()))
        return exact

    assert run_threads(3, body) == [[True, True, True, False, False]] * 3


def test_gradients_are_compressed_by_name_with_the_feedback_of_the_group() -> None:
    shapes = {"embed.weight": (300, 100), "layer.weight": (200, 200), "layer.bias": (200,), "head": (50, 400)}
    policy = {"embed.*": "topk(0.5)", "head": "powersgd(4)", "*": "int8"}

    def grads(rank: int, step: int) -> dict[str, Array]:
        return {
            name: gradient(rank, int(np.prod(shape)), seed=step * 10 + at).reshape(shape)
            for at, (name, shape) in enumerate(shapes.items())
        }

    def body(group: Group) -> dict[str, bytes]:
        mine = grads(group.rank, 0)
        group.sync_gradients(mine, compress=policy)
        assert set(group.feedback.names()) == {"embed.weight", "layer.weight", "head"}
        exact = {name: np.mean([grads(rank, 0)[name] for rank in range(group.size)], axis=0) for name in shapes}
        assert np.allclose(mine["layer.bias"], exact["layer.bias"], atol=1e-6)
        assert 0 < np.abs(mine["layer.weight"] - exact["layer.weight"]).max() < 0.5
        again = grads(group.rank, 0)
        group.sync_gradients(again, compress="none")
        assert np.allclose(again["embed.weight"], exact["embed.weight"], atol=1e-6)
        return {name: x.tobytes() for name, x in mine.items()}

    results = run_threads(3, body)
    assert results[0] == results[1] == results[2]


# Errors


def test_ranks_with_different_codecs_get_a_mismatch() -> None:
    def body(group: Group) -> None:
        with pytest.raises(MismatchError, match=r"compress=int4|compress=int8"):
            group.all_reduce(gradient(group.rank, 300), compress="int4" if group.rank else "int8")

    run_threads(2, body)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"compress": "int9"}, ConfigError, "int8"),
        ({"compress": "int8", "op": "max"}, ConfigError, "op='max'"),
        ({"compress": "int8", "algorithm": "doubling"}, ConfigError, "direct, ring"),
        ({"compress": "topk(0.1)", "algorithm": "ring"}, ConfigError, "leave algorithm out"),
        ({"compress": "int8", "x": np.arange(5)}, TypeError, "int64"),
        ({"compress": "int8", "x": np.ones(5, np.complex64)}, TypeError, "complex64"),
        ({"compress": "int8", "x": 0.5}, TypeError, "a number is sent as it is"),
        ({"compress": OneBit(), "x": 5}, TypeError, "onebit compresses arrays"),
    ],
)
def test_what_cannot_be_compressed_is_a_clear_error_and_nothing_is_sent(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    def body(group: Group) -> None:
        given = dict(arguments)
        x = given.pop("x", np.ones(5, np.float32))
        with pytest.raises(error, match=text):
            group.all_reduce(copy.copy(x), **given)
        for operation in (group.broadcast, group.all_gather):
            with pytest.raises(ConfigError, match="for all_reduce"):
                operation(np.ones(4, np.float32), compress="topk(0.5)")
        assert (group.all_reduce(np.ones(3)) == 2).all()

    run_threads(2, body)


def compressing(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Let the groups of `run_threads` be told to compress."""
    config = covey.base.config.GroupConfig(lanes="memory", timeout=DEADLINE, compress=policy)
    monkeypatch.setattr("covey.testing.threads.GroupConfig", lambda **_: config)


def test_a_group_compresses_gradients_and_every_other_sum_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    compressing(monkeypatch, "int4")
    large = 1 << 15
    exact = np.sum([gradient(rank, large).astype(np.float64) for rank in range(3)], axis=0)

    def body(group: Group) -> None:
        for each in (group, group.split(0)):
            for x in (each.all_reduce(gradient(each.rank, large)), each.all_reduce(gradient(each.rank, large) / 3)):
                assert x.dtype == np.float32
            np.testing.assert_allclose(each.all_reduce(gradient(each.rank, large)), exact, rtol=1e-5, atol=1e-5)
            mean = each.all_reduce(gradient(each.rank, large), "mean", weight=2.0, async_op=True).wait()
            np.testing.assert_allclose(mean, exact / 3, rtol=1e-5, atol=1e-5)
            assert each.all_reduce(0.1 * each.rank) == pytest.approx(0.3)
            assert each.compression.operations == 0
            grads = {"large": gradient(each.rank, large), "small": gradient(each.rank, 100)}
            each.sync_gradients(grads, "sum")
            assert each.compression.operations == 1
            assert each.compression.codec == "int4"
            assert each.feedback.names() == ("large",)
            assert not np.allclose(grads["large"], exact, rtol=1e-5, atol=1e-5)
            small = np.sum([gradient(rank, 100).astype(np.float64) for rank in range(3)], axis=0)
            np.testing.assert_allclose(grads["small"], small, rtol=1e-5, atol=1e-5)
        with pytest.raises(ConfigError, match="name the codec with compress="):
            group.all_reduce(gradient(group.rank, large), feedback=ErrorFeedback(), name="w")

    run_threads(3, body)


KINDS = ("int8", "int4", "onebit", "fp8", "fp16", "bf16", "topk(0.3)", "randomk(0.3)", "threshold(0.5)", "powersgd(2)")


def test_figures_beside_gradients_stay_exact_with_any_mixture_of_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, weights and digests in one operation with gradients, in random numbers, orders and magnitudes."""
    size, seeds = 3, range(40)

    def body(group: Group) -> None:
        feedback = ErrorFeedback()
        for seed in seeds:
            rng = np.random.default_rng(seed)
            shapes = [tuple(rng.integers(1, 24, rng.integers(1, 3)).tolist()) for _ in range(rng.integers(1, 7))]
            ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)]).tolist()
            parts = [
                Part(f"{seed}.{number}", ends[number], ends[number + 1], shape) for number, shape in enumerate(shapes)
            ]
            chosen = [str(rng.choice([*KINDS, "none"])) for _ in parts]
            policy = make_policy({place.name: codec for place, codec in zip(parts, chosen, strict=True)}, smallest=0)
            figures, dtype = int(rng.integers(0, 40)), np.dtype(str(rng.choice(["f4", "f8"])))
            rows = []
            for rank in range(size):
                own = np.random.default_rng([seed, rank])
                grads = own.standard_normal(ends[-1]) * 10.0 ** own.integers(-6, 7)
                exact = own.integers(0, 100_000, figures) * own.integers(0, 2, figures)
                rows.append(np.concatenate([grads, exact]).astype(dtype))
            row = rows[group.rank].copy()
            gradients_of(group).sum_row(row, parts, policy, feedback)
            right = np.sum([each.astype(np.float64) for each in rows], axis=0)
            assert np.array_equal(row[ends[-1] :], right[ends[-1] :]), f"seed {seed}: figures were rounded"
            for place, codec in zip(parts, chosen, strict=True):
                if codec == "none":
                    largest = sum(np.abs(each[place.start : place.stop]).max() for each in rows)
                    assert np.allclose(
                        row[place.start : place.stop], right[place.start : place.stop], atol=1e-6 * largest
                    ), f"seed {seed}: {place.name}"
            digests = group.all_gather(np.frombuffer(hashlib.sha256(row.tobytes()).digest(), np.uint8))
            assert len({digest.tobytes() for digest in digests}) == 1, f"seed {seed}: ranks hold different bits"

    run_threads(size, body)
