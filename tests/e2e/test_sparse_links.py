"""Runs of processes that keep few links open: members are killed, come back and leave while the other links rest."""

from __future__ import annotations

import functools

import pytest
from tests.e2e.test_cluster_elastic import NodeHome, homes_of
from tests.support.members import ELASTIC, Member, check_same_end, together
from tests.support.waiting import DEADLINE, wait_until

SIZE = 7
SPARSE = ELASTIC.replace(
    """        while not is_over and not""",
    """        node = node_of(group)
        def rest():
            until = time.monotonic() + 500
            while time.monotonic() < until:
                links = [peer.link for peer in list(node.peers.values())]
                if count := sum(link is not None and link.is_resting for link in links):
                    say("resting", count=count, number=node.generation.number)
                    return
                time.sleep(0.02)
        threading.Thread(target=rest, daemon=True).start()
        while not is_over and not""",
).replace(
    "import covey\n",
    """import covey
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.node import node_of
from covey.runtime.peers import resting_links
resting_links.LINK_IDLE_SECONDS, resting_links.IDLE_CHECK_EVERY = 0.3, 0.1
""",
)
"""Says when links have begun to rest, which they do after a moment instead of seconds."""


def await_rest(members: list[Member], number: int) -> None:
    """Wait until links of most members rest in the generation of this number; those of the leader do not."""

    def count() -> int:
        return sum(any(said["number"] == number for said in member.all_said("resting")) for member in members)

    wait_until(lambda: count() > SIZE / 2)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [(0,), (3, 0)], ids=["leader", "both"])
def test_members_of_a_run_whose_links_rest_are_lost_come_back_and_end_together(lab, ranks: tuple[int, ...]) -> None:
    """Rank 0 leads at first."""
    homes = homes_of(lab, SIZE)
    members = [start(home) for home in homes]
    number = together(members)["number"]
    await_rest(members, number)
    for rank in ranks:
        lost = together(members)["hosts"][rank]
        members[lost].kill()
        rest = [member for index, member in enumerate(members) if index != lost]
        wait_until(functools.partial(go_on_without, lost, rest))
        members[lost].process.wait(DEADLINE)
        members[lost] = start(homes[lost])
        number = together(members, number)["number"]
        await_rest(members, number)
    members[2].ask_to_end()
    check_same_end(members)
    for member in members:
        assert sum("is lost" in line for line in member.warnings) <= 2, member.story()  # those that were killed


def go_on_without(host: int, members: list[Member]) -> bool:
    """Tell whether all of these have said that their steps are without a host now."""
    said = [member.all_said("contributors") for member in members]
    return all(each and host not in each[-1]["hosts"] for each in said)


def start(home: NodeHome) -> Member:
    return home.start(SPARSE, min_size=SIZE - 1, topology="hypercube", pause=0.02)
