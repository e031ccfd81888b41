"""`compress="auto"`: all ranks choose alike, from what they measure, and say why."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from tests.support.compiled import EXECUTORS, use_executors

import covey
from covey import ConfigError, ErrorFeedback
from covey.runtime.compressed import automatic
from covey.runtime.joining.node import node_of
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group

    Array = np.ndarray[Any, np.dtype[Any]]

SLOW = 600_000
"""Bytes per second: an array takes so long that no moment in which the machine stands still decides the choice."""
COUNT = 1 << 17


def values(rank: int, number: int = 0, count: int = COUNT) -> Array:
    return np.random.default_rng([rank, number]).standard_normal(count, np.float32)


def slow(group: Group) -> Group:
    """Return a group whose lanes are slow."""
    node = node_of(group)
    assert node is not None
    node.lanes.factory.bytes_per_second = SLOW
    return group.split(0)


def told(group: Group) -> list[str]:
    return [event.text for event in group.events() if event.kind == "codec"]


@pytest.mark.parametrize("lanes", ["memory", "shm"])
def test_on_shared_memory_nothing_is_compressed_and_all_say_so(lanes: str) -> None:
    reason = "none: the ranks share memory"

    def body(group: Group) -> None:
        for number in range(4):
            x, y, z = (values(group.rank, number) for _ in range(3))
            exact = group.all_reduce(values(group.rank, number))
            group.all_reduce(x, compress="auto")
            work = group.all_reduce(y, compress="auto", async_op=True)
            work.wait()
            group.all_reduce(z, compress="auto", feedback=ErrorFeedback(), name="z")
            assert x.tobytes() == y.tobytes() == z.tobytes() == exact.tobytes()
            plain = x.nbytes * 2 * (group.size - 1) // group.size
            assert work.info == {"codec": "none", "reason": reason, "sent_bytes": plain, "plain_bytes": plain}
            assert group.compression == (3 * (number + 1), *2 * (3 * (number + 1) * plain,), "none", reason)
        assert told(group) == [f"{group.name}: {reason}"]

    run_threads(3, body, lanes=lanes)


def test_a_rank_may_wait_or_not_and_keep_residuals_or_not() -> None:
    """Where "auto" has nothing to choose, calls are those of an all_reduce without `compress`, on every rank."""

    def body(group: Group) -> bytes:
        x = values(group.rank)
        if group.rank == 0:
            group.all_reduce(x, compress="auto", async_op=True).wait()
        elif group.rank == 1:
            group.all_reduce(x, compress="auto", feedback=ErrorFeedback(warmup=3), name="x")
        else:
            group.all_reduce(x, compress="auto")
        return x.tobytes()

    assert len(set(run_threads(3, body))) == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("lanes", ["memory", "unix"])
def test_what_is_not_compressed_keeps_its_dtype_on_the_way(dtype: Any, lanes: str) -> None:
    def body(group: Group) -> None:
        x = values(group.rank).astype(dtype)
        plain = group.all_reduce(x.copy(), "mean")
        work = group.all_reduce(x.copy(), "mean", compress="auto(max_error=1e-9)", async_op=True)
        assert work.wait().tobytes() == plain.tobytes()
        assert work.info["sent_bytes"] == work.info["plain_bytes"] == x.nbytes * 2 * (group.size - 1) // group.size
        feedback = ErrorFeedback(warmup=1)
        first = group.all_reduce(x.copy(), "mean", compress="int8", feedback=feedback, name="x")  # the warm-up
        if dtype != np.float64:  # which is rounded to float32 when a residual is added to it
            assert first.tobytes() == plain.tobytes()
        feedback = ErrorFeedback(
            warmup=2, momentum=0.5
        )  # which gathers: in the second step, half of the first is added
        for factor in (1.0, 1.5):
            mean = group.all_reduce(x.copy(), "mean", compress="topk(0.1)", feedback=feedback, name="x")
            assert np.abs(mean.astype(np.float64) - factor * plain.astype(np.float64)).max() < 0.1
        weighted = group.all_reduce(x.copy(), "mean", weight=1 + group.rank, compress="auto")
        exact = group.all_reduce(x.astype(np.float64), "mean", weight=1 + group.rank)
        assert np.abs(weighted.astype(np.float64) - exact).max() < 0.05

    run_threads(3, body, lanes=lanes)


@pytest.mark.parametrize("executors", EXECUTORS)
def test_on_a_slow_link_all_choose_the_codec_of_the_budget_and_say_why(
    executors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_executors(monkeypatch, executors)

    def body(group: Group) -> tuple[list[tuple[str, str]], list[bytes]]:
        with slow(group) as part:
            said, results = [], []
            for number, budget in enumerate(["auto"] * 4 + ["auto(max_error=0.15)"] * 3):
                work = part.all_reduce(values(part.rank, number), "mean", compress=budget, async_op=True)
                results.append(work.wait().tobytes())
                said.append((work.info["codec"], work.info["reason"]))
                assert (work.info["codec"], work.info["reason"]) == part.compression[3:]
                assert (work.info["sent_bytes"] < work.info["plain_bytes"] / 3) == (work.info["codec"] != "none")
            texts = [text for text in told(group) if text.startswith(part.name)]
            assert texts == [f"{part.name}: {said[at][1]}" for at in (0, 2, 4, 6)], "an event for each change"
            return said, results

    (said, bits), other = run_threads(2, body, lanes="tcp")
    assert (said, bits) == other
    assert [codec for codec, _ in said] == ["none", "none", "int8", "int8", "none", "none", "int4"]
    reasons = [reason for _, reason in said]
    assert reasons[0] == reasons[1] == reasons[4] == reasons[5] == "none: the time without a codec is measured first"
    assert reasons[2] == reasons[3]
    assert reasons[2].startswith("int8: ")
    assert "ms without, at " in reasons[2]


@dataclass(frozen=True)
class Sleepy(covey.Int8):
    """Takes longer than any measurement of it says, and than calls without it have taken."""

    slowest: ClassVar[float] = 0.0

    def encode(self, x: Array, wire: Array, salt: int = 0) -> None:
        time.sleep(0.2 + Sleepy.slowest)
        super().encode(x, wire, salt)


def test_a_codec_that_turns_out_to_be_slower_is_given_up_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "choose", lambda *_, **__: (Sleepy(), "int8: so it seemed"))

    def body(group: Group) -> list[tuple[str, str]]:
        said = []
        for number in range(5):
            began = time.monotonic()
            group.all_reduce(values(group.rank, number), compress="auto")
            said.append(group.compression[3:])
            if said[-1][0] == "none":
                Sleepy.slowest = max(Sleepy.slowest, time.monotonic() - began)
            group.barrier()  # both have told how long they took
        return said

    monkeypatch.setattr(Sleepy, "slowest", 0.0)
    first, second = run_threads(2, body, lanes="unix")
    assert first == second
    assert [codec for codec, _ in first] == ["none", "none", "int8", "none", "none"]
    assert "ms with int8" in first[3][1]


def test_links_are_measured_again_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "REVIEW", 5)
    chosen = iter([covey.Int8(), covey.Int8(), covey.FP16(), covey.FP16()])  # one for each rank, each time
    monkeypatch.setattr(automatic, "choose", lambda *_, **__: (next(chosen), "as the test says"))

    def body(group: Group) -> list[str]:
        with slow(group) as part:
            said = []
            for number in range(9):
                part.all_reduce(values(part.rank, number), compress="auto")
                said.append(part.compression.codec)
            return said

    first, second = run_threads(2, body, lanes="tcp")
    assert first == second == ["none", "none", "int8", "int8", "int8", "none", "none", "fp16", "fp16"]


def test_where_no_codec_helps_calls_are_as_those_without_compression_until_links_are_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(automatic, "REVIEW", 10)
    asked: list[int] = []

    def none(*_: Any, **__: Any) -> tuple[None, str]:
        asked.append(1)
        return None, "none: as the test says"

    monkeypatch.setattr(automatic, "choose", none)

    def body(group: Group) -> tuple[list[str], list[bytes]]:
        said, bits = [], []
        for number in range(40):
            x, exact = values(group.rank, number), group.all_reduce(values(group.rank, number))
            issued = group.sequence
            if number == 19:  # in the middle of calls that are known to be plain
                group.all_reduce(x, compress="auto", async_op=True).wait()
            else:
                group.all_reduce(x, compress="auto")
            assert group.sequence == issued + 1
            assert x.tobytes() == exact.tobytes()
            bits.append(x.tobytes())
            said.append(group.compression.reason)
        return said, bits

    first, second = run_threads(2, body, lanes="unix")
    assert first == second
    measured, plain = "none: the time without a codec is measured first", "none: as the test says"
    # The 11th call begins anew, and 20 calls count until the next review. The 20th, which is asynchronous, is the first
    # of 40; the 11 calls of its shape that were to be as they are come first.
    again = [measured] * 2 + [plain] * 6
    assert first[0] == again + [plain] * 2 + again + [plain, measured] + [plain] * 11 + [measured] + [plain] * 8
    assert len(asked) == 2 * (4 + 4 + 4)  # for each rank, at each review


def test_arrays_that_are_too_small_are_sent_as_they_are() -> None:
    def body(group: Group) -> None:
        x = values(group.rank, count=100)
        exact = group.all_reduce(x.copy())
        assert group.all_reduce(x, compress="auto").tobytes() == exact.tobytes()
        assert group.compression.reason == "none: the array has less than 64 KiB"
        for operation in (group.broadcast, group.all_gather, group.reduce_scatter):
            with pytest.raises(ConfigError, match="auto is for all_reduce"):
                operation(x, compress="auto")
        with pytest.raises(ConfigError, match="leave algorithm out"):
            group.all_reduce(x, compress="auto", algorithm="ring")
        with pytest.raises(ConfigError, match="op='max'"):
            group.all_reduce(x, "max", compress="auto")

    run_threads(2, body, lanes="unix")
