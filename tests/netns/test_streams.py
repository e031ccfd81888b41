"""Lanes between distant machines get more streams where these are faster, and go back where they are not."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.thorough, pytest.mark.alone]  # what is kept depends on what a trial measures

WINDOW = 131072
"""What the kernel of a host keeps for a connection: it acknowledges about half of that in each round trip."""
PROGRAM = """
import json, sys, time
import numpy as np
import covey
options = json.loads(sys.argv[1])
wanted, most, count = (options.pop(name) for name in ("wanted", "most", "count"))
places = (np.arange(count) % 251).astype(np.float32)
end, step, speeds = time.monotonic() + most, 0, {}
with covey.join("streams", **options) as group:
    is_over = False
    while not is_over:
        x = places * 4**group.rank + step
        began = time.perf_counter()
        group.all_reduce(x)
        streams = group.lanes().streams[1 - group.rank]
        speeds.setdefault(streams, []).append(x.nbytes / (time.perf_counter() - began))
        assert np.array_equal(x, places * 5 + 2 * step), "the sum is wrong"
        step += 1
        is_done = wanted in "".join(event.text for event in group.events())
        if step % 4 == 0:
            is_over = group.all_reduce(float(is_done or time.monotonic() > end), "max") > 0
    events = [[event.kind, event.text] for event in group.events() if event.kind in ("lane", "moved")]
    told = group.node.links()[0].streams
print(json.dumps({"events": events, "streams": streams, "told": told,
                  "speeds": {count: max(each) for count, each in speeds.items()}}))
"""


@pytest.fixture
def lan() -> Iterator[Lan]:
    with Lan(hosts=2, kind="switch", prefix="covey-streams") as lan:
        yield lan


def run(lan: Lan, **options: Any) -> list[dict[str, Any]]:
    """Add arrays up on two hosts until an event has the text `wanted`; return what each rank says at the end."""
    given = {
        "secret": "0" * 64,
        "size": 2,
        "timeout": 30,
        "seeds": [f"{lan.hosts[0].ip4}:47700"],
        "most": 25,
        **options,
    }
    processes = [host.popen([sys.executable, "-c", PROGRAM, json.dumps(given)]) for host in lan.hosts]
    return pipes.reports(processes, DEADLINE)


def test_streams_that_wait_for_acknowledgements_are_multiplied_and_kept(lan: Lan) -> None:
    for host in lan.hosts:
        host.run(["sysctl", "-qw", f"net.ipv4.tcp_rmem=4096 {WINDOW} {WINDOW}"])
    lan.switch.shape(delay=0.025)
    said = run(lan, wanted="lane keeps", count=1 << 19)
    texts = [text for each in said for _, text in each["events"] if "streams" in text]
    assert any("instead of" in text and "to find out whether more than" in text for text in texts), texts
    assert any("lane keeps" in text for text in texts), texts
    for each in said:
        assert each["streams"] == each["told"] >= 8
        first, *_, last = sorted(each["speeds"].items(), key=lambda item: int(item[0]))
        assert last[1] > 1.5 * first[1], said


def test_streams_that_share_a_narrow_link_are_given_up(lan: Lan) -> None:
    lan.switch.shape(delay=0.005, bytes_per_second=2e6)
    said = run(lan, wanted="not faster", count=1 << 18)
    texts = [text for each in said for _, text in each["events"] if "streams" in text]
    assert any("were not faster" in text for text in texts), texts
    assert not any("lane keeps" in text for text in texts), texts
    assert said[0]["streams"] == said[1]["streams"] <= 2
