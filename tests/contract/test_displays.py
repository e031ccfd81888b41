"""What notebooks show of groups, works and networks."""

from __future__ import annotations

from typing import Any

import numpy as np

import covey
from covey.base.html import MARK_COLOURS
from covey.runtime.group.topology import Topology, TopologyHost, TopologyLink, TopologyNode
from covey.testing import run_threads


def shown(value: Any) -> str:
    return str(value._repr_html_())


def test_a_group_shows_its_ranks_with_their_state_and_lane() -> None:
    def body(group: covey.Group) -> tuple[str, str]:
        group.all_reduce(np.ones(4))
        open_now = shown(group)
        group.barrier()
        group.close()
        return open_now, shown(group)

    for rank, (now, closed) in enumerate(run_threads(3, body)):
        assert f"rank {rank} of 3" in now
        assert now.count("<tr>") == 4
        assert f"{rank} (this one)" in now
        assert now.count(MARK_COLOURS["good"]) == 3
        assert now.count("<td") == 3 * 7
        assert "closed" in closed


def test_a_group_of_one_is_shown_too() -> None:
    with covey.join() as group:
        assert "rank 0 of 1" in shown(group)
        assert "0 (this one)" in shown(group)
        assert "have not measured" in shown(group.node.topology())


def test_a_work_shows_how_it_is_and_what_it_raised() -> None:
    def body(group: covey.Group) -> None:
        other = 1 - group.rank
        waiting = group.recv(other, async_op=True)
        assert MARK_COLOURS["busy"] in shown(waiting)
        group.barrier()
        group.send(np.ones(2), other)
        waiting.wait()
        assert MARK_COLOURS["good"] in shown(waiting)
        failed = group.recv(other, 9, out=np.ones(3), async_op=True)
        group.send(np.ones(2), other, 9)
        assert isinstance(failed.exception(), covey.MismatchError)
        assert MARK_COLOURS["bad"] in shown(failed)
        assert "MismatchError" in shown(failed)

    run_threads(2, body)


def test_a_network_shows_machines_and_the_speed_between_ranks() -> None:
    names = ("north", "<south>")
    network = Topology(
        tuple(TopologyNode(rank, name, name, rank) for rank, name in enumerate(names)),
        tuple(TopologyHost(name, (rank,), rank, 125e6, 12.5e6) for rank, name in enumerate(names)),
        ((0,), (1,)),
        (TopologyLink(0, 1, "wired", 12.5e6, 0.01), TopologyLink(1, 0, "wired", None, 0.01)),
        {(0, 1): 12.5e6},
        1e9,
    )
    html = shown(network)
    assert "&lt;south&gt;" in html
    assert "<south>" not in html
    assert "site 0 to site 1: 100 Mbit/s" in html
    assert "1 Gbit/s" in html
    assert html.count("rgba(") == 1, "the one speed that is known"

    class Printer:
        def text(self, text: str) -> None:
            self.printed = text

    network._repr_pretty_(printer := Printer(), False)
    assert printer.printed == str(network)
