"""The ranks that nodes tell visitors, such as `covey status`: those of the current generation."""

from __future__ import annotations

import time
from typing import Any

from tests.support.attackers import call_on_loop, new_cluster
from tests.support.runs import SURVIVING, ThreadRun, ids_of


def test_a_node_tells_the_ranks_of_its_generation_after_the_first_process_has_left() -> None:
    def work(groups: Any) -> None:
        joiner = None
        for group in groups:
            if group.generation == 0 and group.rank == 0:
                return
            joiner = joiner or thread_run.local.participant.joiner
            while group.generation == 0 and not group.change_pending:
                group.barrier()
                time.sleep(0.02)
            if group.generation > 0:
                group.barrier()  # all have taken their seats
                told = call_on_loop(joiner.describe)
                group.barrier()
                ranks = {peer.card.id: peer.rank for peer in told.peers if peer.rank >= 0} | {joiner.card.id: told.rank}
                assert ranks == {id: rank for rank, id in enumerate(ids_of(group))}
                return

    with ThreadRun(new_cluster(), SURVIVING, min_size=3) as thread_run:
        founders = [thread_run.start(work, elastic=True) for _ in range(3)]
        while all(founder.is_alive for founder in founders):
            time.sleep(0.02)
        thread_run.start(work, elastic=True)
