"""`covey bench calls` as people run it: right results, and numbers that fit together."""

from __future__ import annotations

import json
import os
import sys

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.lab.bench.calls import CallTrial


def bench(*arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVEY_")}
    command = [sys.executable, "-m", "covey", "bench", "calls", *arguments]
    done = forked.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
def test_a_round_gives_whole_numbers_that_fit_together() -> None:
    report = json.loads(bench("--size=1M", "--rounds=1", "--calls=50", "--against=grpc", "--json"))
    trial = {"lanes": "secure", "in_flight": 32, "nbytes": 1 << 20, "rounds": 1, "calls": 50}
    assert report["trial"] == trial | {"against": ["grpc"]}
    figures = report["figures"]
    assert 0 < figures["p50_us"][0] <= figures["p99_us"][0]
    assert figures["calls_per_second"][0] > 1e6 / figures["p99_us"][0] / 2
    assert 0 < figures["beside_p50_us"][0] <= figures["beside_p99_us"][0]
    assert set(figures["others"]) == {"grpc.aio", "grpc.aio, TLS"}
    for other in figures["others"].values():
        assert 0 < other["p50_us"][0] <= other["p99_us"][0]
        assert other["calls_per_second"][0] > 1e6 / other["p99_us"][0] / 2
    assert figures["share_of_lane"] == pytest.approx(
        figures["call_bytes_per_second"][0] / figures["lane_bytes_per_second"][0]
    )


def test_a_table_names_what_was_measured() -> None:
    text = bench("--size=64K", "--rounds=1", "--lanes=unix", "--in-flight=4", "--calls=50")
    for words in (
        "calls, unix",
        "small call, p50",
        "4 in flight",
        "call with 64 KiB",
        "call against broadcast",
        "beside 64 KiB",
    ):
        assert words in text


def test_an_unknown_rival_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose from grpc"):
        CallTrial(against=("carrier pigeons",))
