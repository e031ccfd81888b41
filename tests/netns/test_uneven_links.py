"""Machines whose links differ: the ranks measure them, choose the same plan, and that one is faster."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PREFIX = "covey-uneven"
MBIT = 1e6 / 8
PROGRAM = """
import json, os, pathlib, sys, time, zlib
import numpy as np
import covey
options = json.loads(sys.argv[1])
count, number, kept = options.pop("count"), options.pop("number"), options.pop("kept", False)
places = (np.arange(count) % 251).astype(np.float32)
with covey.join(**options) as group:
    bits, times, known, sent = [], [], [], []
    counter = pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes")
    for step in range(number):
        x = places * 4**group.rank + step
        group.barrier()
        before = int(counter.read_text())
        began = time.perf_counter()
        group.all_reduce(x)
        taken = time.perf_counter() - began
        sent.append(int(counter.read_text()) - before)
        assert np.array_equal(x, places * sum(4**rank for rank in range(group.size)) + group.size * step)
        bits.append(zlib.crc32(x))
        times.append(group.all_reduce(taken, "max"))
        known.append([group.node.topology().is_earlier, group.explain(4 * count).predicted_seconds])
    report = group.explain(4 * count)
    top = group.node.topology()
    events = [event.text for event in group.events() if event.kind == "plan"]
    until = time.monotonic() + 500
    while kept and not pathlib.Path(os.environ["COVEY_HOME"], "links").exists() and time.monotonic() < until:
        time.sleep(0.01)
    group.barrier()
print(json.dumps({
    "bits": bits, "times": times, "predicted": report.predicted_seconds, "measured": report.measured_seconds,
    "plan": [report.algorithm, report.order, report.shares, report.groups, report.why], "events": events,
    "rates": [[link.source, link.target, link.bytes_per_second] for link in top.links],
    "hosts": [[host.up, host.down] for host in top.hosts], "sites": top.sites,
    "sent": sent,
    "mediums": sorted({link.medium for link in top.links}), "known": known,
    "ages": [time.time() - link.measured_at for link in top.links if link.measured_at],
}))
"""


def run(lan: Lan, count: int, number: int, **options: Any) -> list[dict[str, Any]]:
    """Add arrays up on all hosts; return what each rank has seen."""
    place = {"size": len(lan.hosts), "address": f"{lan.hosts[0].ip4}:47900", "count": count, "number": number}
    processes = [
        host.popen([sys.executable, "-c", PROGRAM, json.dumps({"rank": rank, **place, **options})])
        for rank, host in enumerate(lan.hosts)
    ]
    return pipes.reports(processes, DEADLINE)


def same(said: Sequence[dict[str, Any]], *names: str) -> None:
    for name in names:
        assert all(each[name] == said[0][name] for each in said), name


def test_measuring_a_slow_line_that_allows_bursts_holds_up_no_sum_for_long(promised: Callable[[float], float]) -> None:
    with Lan(hosts=3, rate="10mbit", prefix=PREFIX) as lan:
        said = run(lan, 1 << 18, 8, insecure=True)
    same(said, "bits", "plan", "rates", "hosts", "times")
    assert said[0]["predicted"] is not None, "the links are measured"
    plain = 1.06 * 4 / 3 * (1 << 20)  # with headers, and a few packets that are sent again
    for each in said:
        assert max(each["sent"]) < 1.8 * plain, "a sum has more than a part of the probes"
        assert sum(each["sent"]) < (len(each["sent"]) + 1) * plain, "probes have more bytes than a sum"
    times = said[0]["times"]
    assert max(times[1:]) - min(times) < promised(1.0)
    if promised(1.0) == 1.0:
        assert max(up for up, _ in said[0]["hosts"]) < 15 * MBIT, "what a burst lets pass is no speed"


@pytest.mark.thorough
@pytest.mark.alone
def test_ranks_measure_uneven_links_and_choose_alike_with_encrypted_lanes() -> None:
    with Lan(hosts=4, rates=["640mbit", "640mbit", "192mbit", "64mbit/192mbit"], prefix=PREFIX) as lan:
        said = run(lan, 1 << 20, 10, secret="0" * 64)
    same(said, "bits", "plan", "rates", "hosts", "sites", "predicted", "measured", "events")
    assert said[0]["plan"][-1].startswith("ring: ")
    up = [host[0] / MBIT for host in said[0]["hosts"]]
    down = [host[1] / MBIT for host in said[0]["hosts"]]
    assert up == pytest.approx([640, 640, 192, 64], rel=0.5)
    assert down == pytest.approx([640, 640, 192, 192], rel=0.5)
    assert len(said[0]["events"]) == 1
    assert said[0]["predicted"] is not None
    assert "local" not in said[0]["mediums"]


@pytest.mark.thorough
@pytest.mark.alone
def test_between_two_sites_the_fitted_plan_is_much_faster_than_the_plain_one() -> None:
    rates = ["640mbit"] * 4
    with Lan(hosts=4, rates=rates, sites=[0, 1, 0, 1], trunk="128mbit", prefix=PREFIX) as lan:
        said = run(lan, 1 << 20, 10, insecure=True)
    same(said, "bits", "plan", "sites", "times")
    assert said[0]["sites"] == [[0, 2], [1, 3]]
    plain, fitted = min(said[0]["times"][:2]), min(said[0]["times"][-3:])
    assert fitted < 0.67 * plain


@pytest.mark.thorough
def test_the_next_run_plans_from_what_the_last_one_measured_unless_a_rank_has_nothing() -> None:
    with Lan(hosts=3, rates=["400mbit", "400mbit", "50mbit"], prefix=PREFIX) as lan:
        first = run(lan, 1 << 18, 10, secret="0" * 64, kept=True)
        same(first, "bits", "plan", "rates", "known")
        assert [known for known, _ in first[0]["known"]] == [False] * 10
        assert [predicted for _, predicted in first[0]["known"]][:2] == [None, None]
        second = run(lan, 1 << 18, 2, secret="0" * 64)
        same(second, "bits", "plan", "rates", "hosts", "sites", "known")
        assert [known for known, _ in second[0]["known"]] == [True, True], "no rank has measured"
        assert None not in [predicted for _, predicted in second[0]["known"]], "the first sum has a plan"
        assert second[0]["plan"][:4] == first[0]["plan"][:4]
        assert second[0]["bits"] == first[0]["bits"][:2]
        for each in ("rates", "hosts", "sites"):
            assert second[0][each] == first[0][each]
        assert max(second[0]["ages"]) > max(first[0]["ages"])
        (lan.hosts[1].home / "links").unlink()
        (lan.hosts[2].home / "links").write_bytes(b"damaged")
        metered = run(lan, 1 << 18, 3, secret="0" * 64, settings={"metered": "eth*"})
        assert "metered" in metered[0]["plan"][-1]
        assert [predicted for _, predicted in metered[0]["known"]] == [None] * 3, "nothing is sent to measure"
        third = run(lan, 1 << 18, 10, secret="0" * 64)
        same(third, "bits", "plan", "known")
        assert [known for known, _ in third[0]["known"]] == [False] * 10
        assert [predicted is None for _, predicted in third[0]["known"]][:2] == [True, True]
        assert third[0]["predicted"] is not None


CHANGED = """
import json, sys, zlib
import numpy as np
import covey
from covey.runtime.collectives import size_class
size_class.DRIFT_CALLS = 3
options = json.loads(sys.argv[1])
places = (np.arange(1 << 18) % 251).astype(np.float32)
with covey.join(**options) as group:
    bits, told = [], []
    def add(number):
        for step in range(number):
            x = places * 4**group.rank + step
            group.all_reduce(x)
            assert np.array_equal(x, places * sum(4**rank for rank in range(group.size)) + group.size * step)
            bits.append(zlib.crc32(x))
        top, report = group.node.topology(), group.explain(places.nbytes)
        told.append([[host.up for host in top.hosts], report.predicted_seconds, report.why, len(bits)])
    add(18)
    print("steady", flush=True)
    sys.stdin.readline()
    add(16)
print(json.dumps({"bits": bits, "told": told}))
"""


@pytest.mark.thorough
@pytest.mark.alone
def test_a_link_that_becomes_slower_while_a_run_goes_on_is_measured_again_and_planned_for() -> None:
    with Lan(hosts=3, rates=["400mbit"] * 3, prefix=PREFIX) as lan:
        place = {"size": 3, "address": f"{lan.hosts[0].ip4}:47900", "insecure": True}
        processes = [
            host.popen([sys.executable, "-c", CHANGED, json.dumps({"rank": rank, **place})])
            for rank, host in enumerate(lan.hosts)
        ]
        for process in processes:
            assert pipes.stdout(process).readline() == "steady\n"
        lan.shape(lan.hosts[2], "25mbit")
        for process in processes:
            pipes.stdin(process).write("\n")
            pipes.stdin(process).flush()
        said = []
        for process in processes:
            out, err = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, err
            said.append(json.loads(out))
    same(said, "bits", "told")
    (before, *_), (after, *_) = said[0]["told"]
    # A sixteenth of what it was; but bursts pass at once, and a busy machine measures less than there is.
    assert before[2] > 2 * after[2], "what the third host sends was measured anew"
