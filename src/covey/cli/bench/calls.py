"""`covey bench calls`: measures calls between two processes: their latency, their rate, and large payloads.

In each round, the payload is also broadcast over a lane of collectives, which is the fastest way to move it.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import ConfigError
from covey.cli.bench.sweep import LANES, format_bytes
from covey.cli.layout import Column
from covey.cli.terminal import Fitted
from covey.runtime.keeper.launch import launch

if TYPE_CHECKING:
    from covey.runtime.group.group import Group
    from covey.runtime.work import Work

ONE_BY_ONE: Final = 1000
"""Small calls of a round, one after the other."""
AT_ONCE: Final = 4000
"""Small calls of a round that are made while others are under way."""


@dataclass(frozen=True, kw_only=True)
class CallTrial:
    """What is measured; checked when built."""

    lanes: str = "secure"
    in_flight: int = 32
    nbytes: int = 64 << 20
    rounds: int = 5

    def __post_init__(self) -> None:
        if self.lanes not in LANES:
            raise ConfigError(f"unknown lane {self.lanes!r}; choose from {', '.join(LANES)}")
        if self.in_flight < 1 or self.rounds < 1 or self.nbytes < 1:
            raise ConfigError("at least one call in flight, one round and one byte are needed")


@dataclass(frozen=True)
class CallFigures:
    """What was measured; each list has one number for each round."""

    p50_us: list[float]
    p99_us: list[float]
    calls_per_second: list[float]
    call_bytes_per_second: list[float]
    """Of a payload as the argument of a call."""
    lane_bytes_per_second: list[float]
    """Of the same payload in a broadcast."""

    @property
    def share_of_lane(self) -> float:
        """The speed of a payload in a call, by that of the lane in the same round; the median of all rounds."""
        pairs = zip(self.call_bytes_per_second, self.lane_bytes_per_second, strict=True)
        return statistics.median(call / lane for call, lane in pairs)


def measure(trial: CallTrial) -> CallFigures:
    """Measure calls from one process to another."""
    os.environ["COVEY_LANES"] = trial.lanes  # the ranks inherit it
    return CallFigures(**launch(_rank, 2, trial, timeout=120 + 30 * trial.rounds)[0])


def _rank(group: Group, trial: CallTrial) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {name: [] for name in CallFigures.__dataclass_fields__}
    payload = np.arange(trial.nbytes, dtype=np.uint8)
    node = group.node

    @node.rpc
    def add(a: int, b: int) -> int:
        return a + b

    @node.rpc
    def check(data: np.ndarray[Any, Any]) -> bool:
        return data.nbytes == trial.nbytes and bool((data[:: 1 << 16] == payload[:: 1 << 16]).all())

    for turn in range(trial.rounds + 1):  # the first one warms up
        found = dict[str, float]()
        group.barrier()
        if group.rank == 0:
            taken = sorted(_timed(lambda: _expect(node.call(1, "add", 1, 2), 3)) for _ in range(ONE_BY_ONE))
            found["p50_us"], found["p99_us"] = 1e6 * taken[ONE_BY_ONE // 2], 1e6 * taken[ONE_BY_ONE * 99 // 100]
            found["calls_per_second"] = AT_ONCE / _timed(lambda: _call_at_once(group, trial.in_flight))
            took = _timed(lambda: _expect(node.call(1, "check", payload), True))
            found["call_bytes_per_second"] = trial.nbytes / took
        group.barrier()
        found["lane_bytes_per_second"] = trial.nbytes / _timed(lambda: group.broadcast(payload, root=0))
        group.barrier()
        if group.rank == 0 and turn:
            for name, value in found.items():
                figures[name].append(value)
    return figures


def _timed(function: Any) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _expect(value: object, wanted: object) -> None:
    if value != wanted:
        raise ArithmeticError(f"a call returned {value}, not {wanted}")


def _call_at_once(group: Group, in_flight: int) -> None:
    """Make calls, so many at a time, and check their results."""
    room, wrong = threading.Semaphore(in_flight), list[object]()

    def ended(work: Work[int], wanted: int) -> None:
        if work.exception() is not None or work.wait() != wanted:
            wrong.append(work)
        room.release()

    for number in range(AT_ONCE):
        room.acquire()
        work = group.node.call_async(1, "add", number, 1)
        work.add_done_callback(lambda work, wanted=number + 1: ended(work, wanted))  # type: ignore[misc]
    for _ in range(in_flight):
        room.acquire()
    _expect(wrong, [])


def table(trial: CallTrial, figures: CallFigures) -> Fitted:
    """Return what was measured as a table."""
    mebibytes = [f"{statistics.median(each) / 2**20:.0f} MiB/s" for each in (
        figures.call_bytes_per_second, figures.lane_bytes_per_second)]  # fmt: skip
    size = format_bytes(trial.nbytes)
    rows = [
        ("small call, p50", f"{statistics.median(figures.p50_us):.0f} us"),
        ("small call, p99", f"{statistics.median(figures.p99_us):.0f} us"),
        (f"small calls, {trial.in_flight} in flight", f"{statistics.median(figures.calls_per_second):.0f} /s"),
        (f"call with {size}", mebibytes[0]),
        (f"broadcast of {size}", mebibytes[1]),
        ("call against broadcast", f"{figures.share_of_lane:.2f}x"),
    ]
    titles, cells = (f"calls, {trial.lanes}", "median"), zip(*rows, strict=True)
    return Fitted([Column(*each, is_right=each[0] == "median") for each in zip(titles, cells, strict=True)])


def as_json(trial: CallTrial, figures: CallFigures, facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything as plain values."""
    numbers = {**asdict(figures), "share_of_lane": figures.share_of_lane}
    return {"machine": facts, "trial": asdict(trial), "figures": numbers}
