"""`covey bench` between machines: links show the speed that they have."""

from __future__ import annotations

import json
import sys

import pytest
from tests.support.jobs import finish
from tests.support.nodes import SOURCE, Cluster
from tests.support.waiting import DEADLINE

from covey.testing.netns import Host, Lan

PREFIX = "covey-bench"
SLOW_BITS = 50e6
TOLERANCE = 0.25


def limit(host: Host, rate: str, burst: str) -> None:
    """Let a host send no faster than this; the bucket is small, so that a short stream is limited as well."""
    shaper = f"tc qdisc add dev eth0 root tbf rate {rate} burst {burst} latency 20ms"
    host.run(shaper.split())


@pytest.mark.thorough
@pytest.mark.alone
def test_a_slow_link_is_found_in_its_direction_and_the_others_are_fast() -> None:
    with Lan(hosts=3, prefix=PREFIX) as lan:
        for host in lan.hosts[:2]:  # unlimited ones would take all of the processor
            limit(host, "500mbit", "256kb")
        limit(lan.hosts[2], "50mbit", "32kb")
        # Six streams in each direction: a machine that stands still does not spoil all of them.
        cluster, words = Cluster(), ["bench", "--run", "net", "--size", "3", "--pair-seconds", "1.8"]
        env = {"PYTHONPATH": str(SOURCE), "COVEY_SECRET": cluster.secret}
        files = [host.home / "out.json" for host in lan.hosts]
        words += ["--sizes", "1M", "--reps", "3", "--quick", "--json"]
        started = [
            host.popen([sys.executable, "-m", "covey", *words, str(path)], env=env)
            for host, path in zip(lan.hosts, files, strict=True)
        ]
        ended = [finish(process, DEADLINE) for process in started]
        assert [each.code for each in ended] == [0, 0, 0], ended
        (first,) = (number for number, each in enumerate(ended) if "slowest link: " in each.out)
        document = json.loads(files[first].read_text())
        assert sum(path.exists() for path in files) == 1, "rank 0 writes the file, and no other"
        # Each rank prints its number, or is rank 0.
        ranks = [0 if "slowest link: " in each.out else int(each.out.split()[1]) for each in ended]
        for link in document["links"]:
            assert link["lane"] == "secure"
            bits = 8 * link["bytes_per_second"]
            if link["from"] == ranks[2]:
                assert (1 - TOLERANCE) * SLOW_BITS < bits < (1 + TOLERANCE) * SLOW_BITS, ended[first].out
            else:
                assert bits > 4 * SLOW_BITS, ended[first].out
        (result,) = document["results"]
        assert 0.1 < result["share_of_slowest_link"] < 1.4, ended[first].out
        assert f"slowest link: {ranks[2]} " in ended[first].out
