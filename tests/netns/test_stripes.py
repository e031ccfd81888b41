"""Machines with two networks between them use both at once, and survive the loss of either in an operation."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.waiting import DEADLINE, wait_until

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from covey.testing.netns import Host

pytestmark = [pytest.mark.thorough, pytest.mark.alone]  # whether a network is used depends on what a trial measures

PREFIX = "covey-stripes"
PROGRAM = """
import json, sys, time
import numpy as np
import covey
options = json.loads(sys.argv[1])
count, dies, least, most = (options.pop(name) for name in ("count", "dies", "least", "most"))
places = (np.arange(count) % 251).astype(np.float32)
times, end = [], time.monotonic() + most
with covey.join("stripes", **options) as group:
    step, told, before, has_lost, is_over = 0, False, 0, False, False
    while not is_over:
        paths = group.lanes().paths[1 - group.rank]
        is_striped = len(paths) > 1
        has_lost |= told and dies != "all" and not (is_striped and all(path.is_used for path in paths))
        if dies and is_striped and not told:
            print(json.dumps(["striped", *(path.remote for path in paths)]), flush=True)
            told, before = True, len(group.events())
        x = places * 4**group.rank + step
        group.barrier()
        began = time.perf_counter()
        group.all_reduce(x)
        if is_striped:
            times.append(time.perf_counter() - began)
        assert np.array_equal(x, places * 5 + 2 * step), "the sum is wrong"
        step += 1
        has_lost |= dies == "all" and any("continues over" in event.text for event in group.events())
        is_done = has_lost if dies else len(times) >= least
        is_over = group.all_reduce(float(is_done or time.monotonic() > end), "min") > 0
    paths = group.lanes().paths[1 - group.rank]
    events = [[event.kind, event.text] for event in group.events()]
    assert has_lost or not dies, "no network was lost"
print(json.dumps({"times": times, "events": events, "contributors": len(group.contributors), "before": before,
                  "paths": [[path.local, path.share, path.is_used] for path in paths]}))
"""


IN_OPERATION = 200_000
"""Bytes that a host sends over one of its networks in an operation, and much more than its control links send."""
OWN_ADDRESSES = "ip -o address | sed 's/.*inet6* //; s/[/].*//'"


def shape(host: Host, device: str, rate: str) -> None:
    host.run(f"tc qdisc add dev {device} root tbf rate {rate} burst 256kb latency 20ms".split())


def is_first(lan: Lan, remote: list[str]) -> bool:
    """Tell whether these are not addresses of the first host."""
    return not set(remote) & set(lan.hosts[0].run(["sh", "-c", OWN_ADDRESSES]).stdout.split())


def sent(host: Host, device: str) -> int:
    return int(host.run(["cat", f"/sys/class/net/{device}/statistics/tx_bytes"]).stdout)


def swallow(host: Host, addresses: list[str]) -> None:
    """Let what a host sends to these addresses reach no machine."""
    for address in addresses:
        for device in ("eth0", "eth1"):
            host.run(f"ip neigh replace {address} lladdr 02:00:00:00:00:99 dev {device} nud permanent".split())


def run(lan: Lan, rates: tuple[str, str], *, dies: str = "", **options: Any) -> list[dict[str, Any]]:
    """Add arrays up on two hosts, with networks of these rates; return what each rank says at the end."""
    for host in lan.hosts:
        for number, rate in enumerate(rates):
            shape(host, f"eth{number}", rate)
    given = {"secret": "0" * 64, "size": 2, "timeout": 30, "seeds": [f"{lan.hosts[0].ip4}:47700"]}
    given |= {"count": 1 << 20, "least": 0, "dies": dies, "most": DEADLINE if dies else 40, **options}
    program = [sys.executable, "-c", PROGRAM, json.dumps(given)]
    processes = [host.popen(program, env={"COVEY_NATIVE": "1"}) for host in lan.hosts]  # only that one has such lanes
    if dies:
        used = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith('["striped"'), process.communicate()[1]
            used.append(json.loads(line)[1:])
        device = "eth0" if dies == "all" else dies
        before = sent(lan.hosts[1], device)
        wait_until(lambda: sent(lan.hosts[1], device) > before + IN_OPERATION)
        if dies == "all":
            for host, addresses in zip(lan.hosts, used if is_first(lan, used[0]) else used[::-1], strict=True):
                swallow(host, addresses)
        else:
            lan.hosts[1].run(["ip", "link", "set", dies, "down"])
    return pipes.reports(processes, DEADLINE)


@pytest.mark.parametrize(
    ("on_loss", "dies"),
    [("raise", "eth0"), ("continue", "eth1")],
)
def test_an_operation_survives_the_loss_of_one_of_its_networks(on_loss: str, dies: str) -> None:
    with Lan(hosts=2, two_networks=True, prefix=PREFIX) as lan:
        said = run(lan, ("80mbit", "60mbit"), on_loss=on_loss, dies=dies)
    for each in said:
        kinds = [kind for kind, _ in each["events"]]
        assert kinds.count("striped") == 1, each["events"]
        assert not {"lost", "view"} & set(kinds[each["before"] :]), each["events"]
        assert each["contributors"] == 2


def test_an_operation_survives_the_loss_of_all_its_networks_if_there_is_another_path() -> None:
    """The addresses that the lane uses can be reached no more, and others of the same machines can."""
    with Lan(hosts=2, two_networks=True, prefix=PREFIX) as lan:
        said = run(lan, ("80mbit", "60mbit"), on_loss="raise", dies="all")
    for each in said:
        kinds = [kind for kind, _ in each["events"]]
        assert not {"lost", "view"} & set(kinds), each["events"]
        assert each["contributors"] == 2


def test_two_networks_together_are_faster_than_the_better_one_could_be() -> None:
    count, alone_seconds = 4 << 20, 16 * (1 << 20) * 8 / 200e6
    with Lan(hosts=2, two_networks=True, prefix=PREFIX) as lan:
        said = run(lan, ("200mbit", "100mbit"), count=count, least=4)
    for each in said:
        assert min(each["times"]) * 1.3 <= alone_seconds, said
        assert len(each["paths"]) == 2
        assert sum(share for _, share, _ in each["paths"]) == pytest.approx(1.0)
        assert all(is_used for *_, is_used in each["paths"])


def test_a_network_that_is_much_slower_is_not_used() -> None:
    with Lan(hosts=2, two_networks=True, prefix=PREFIX) as lan:
        said = run(lan, ("200mbit", "10mbit"), least=1, most=9)
    for each in said:
        assert "striped" not in [kind for kind, _ in each["events"]]
