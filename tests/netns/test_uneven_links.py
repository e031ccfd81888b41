"""Machines whose links differ: the ranks measure them, choose the same plan, and that one is faster."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.slow

PREFIX = "covey-uneven"
DEADLINE = 60.0
MBIT = 1e6 / 8
PROGRAM = """
import json, sys, time, zlib
import numpy as np
import covey
options = json.loads(sys.argv[1])
count, number = options.pop("count"), options.pop("number")
places = (np.arange(count) % 251).astype(np.float32)
with covey.join(**options) as group:
    bits, times = [], []
    for step in range(number):
        x = places * 4**group.rank + step
        group.barrier()
        began = time.perf_counter()
        group.all_reduce(x)
        taken = time.perf_counter() - began
        assert np.array_equal(x, places * sum(4**rank for rank in range(group.size)) + group.size * step)
        bits.append(zlib.crc32(x))
        times.append(group.all_reduce(taken, "max"))
    report = group.explain(4 * count)
    top = group.node.topology()
    events = [event.text for event in group.events() if event.kind == "plan"]
    group.barrier()
print(json.dumps({
    "bits": bits, "times": times, "predicted": report.predicted_seconds, "measured": report.measured_seconds,
    "plan": [report.algorithm, report.order, report.shares, report.groups, report.why], "events": events,
    "rates": [[link.source, link.target, link.bytes_per_second] for link in top.links],
    "hosts": [[host.up, host.down] for host in top.hosts], "sites": top.sites,
    "mediums": sorted({link.medium for link in top.links}),
}))
"""


def run(lan: Lan, count: int, number: int, **options: Any) -> list[dict[str, Any]]:
    """Add arrays up on all hosts; return what each rank has seen."""
    place = {"size": len(lan.hosts), "address": f"{lan.hosts[0].ip4}:47900", "count": count, "number": number}
    processes = [
        host.popen([sys.executable, "-c", PROGRAM, json.dumps({"rank": rank, **place, **options})])
        for rank, host in enumerate(lan.hosts)
    ]
    said = []
    for process in processes:
        out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err
        said.append(json.loads(out))
    return said


def same(said: Sequence[dict[str, Any]], *names: str) -> None:
    for name in names:
        assert all(each[name] == said[0][name] for each in said), name


@pytest.mark.alone
def test_ranks_measure_uneven_links_and_choose_alike_with_encrypted_lanes() -> None:
    with Lan(hosts=4, rates=["640mbit", "640mbit", "192mbit", "64mbit/192mbit"], prefix=PREFIX) as lan:
        said = run(lan, 1 << 20, 6, secret="0" * 64)
    same(said, "bits", "plan", "rates", "hosts", "sites", "predicted", "measured", "events")
    assert said[0]["plan"][-1].startswith("ring: ")
    up = [host[0] / MBIT for host in said[0]["hosts"]]
    down = [host[1] / MBIT for host in said[0]["hosts"]]
    assert up == pytest.approx([640, 640, 192, 64], rel=0.5)
    assert down == pytest.approx([640, 640, 192, 192], rel=0.5)
    assert len(said[0]["events"]) == 1
    assert said[0]["predicted"] is not None
    assert "local" not in said[0]["mediums"]


@pytest.mark.alone
def test_between_two_sites_the_fitted_plan_is_much_faster_than_the_plain_one() -> None:
    rates = ["640mbit"] * 4
    with Lan(hosts=4, rates=rates, sites=[0, 1, 0, 1], trunk="128mbit", prefix=PREFIX) as lan:
        said = run(lan, 1 << 20, 6, insecure=True)
    same(said, "bits", "plan", "sites", "times")
    assert said[0]["sites"] == [[0, 2], [1, 3]]
    plain, fitted = min(said[0]["times"][:2]), min(said[0]["times"][3:])
    assert fitted < 0.67 * plain
