"""Pairs of ranks that measure each other: what they find, and what they refuse of a partner that breaks the rules."""

from __future__ import annotations

from typing import Any

from tests.support.ranks import covey, np, run_ranks


def measure() -> dict[str, Any]:
    import dataclasses

    from covey.lab.bench.network.pairs import measure_pair

    with covey.join() as group:
        # Ranks of the pair in the other order than in the group: rank 2 sends first.
        color = None if group.rank == 1 else 7
        there, back = group.split(color, -group.rank), group.split(color, -group.rank)
        found = {} if there is None or back is None else dataclasses.asdict(measure_pair(there, back, 0.1))
        group.barrier()
        return found


def test_each_rank_of_a_pair_measures_what_it_sends() -> None:
    first, waiting, last = run_ranks(3, measure, lanes="tcp")
    assert waiting == {}
    for figures, sender, receiver in ((first, 0, 2), (last, 2, 0)):
        assert (figures["sender"], figures["receiver"], figures["lane"]) == (sender, receiver, "tcp")
        assert 0 < figures["round_trip"] < 5
        assert min(figures["bytes_per_second"], figures["both_bytes_per_second"]) > 1e5


def break_rules() -> list[str]:
    from covey.lab.bench.network import pairs

    errors = []
    with covey.join() as group:
        for order in ([pairs.TRY, 1 << 40], [pairs.STREAM, 0], [pairs.STREAM, -1], [9, 64]):
            pair = group.split(0)
            if group.rank == 0:
                pair.broadcast(np.array(order))
            else:
                try:
                    pairs.follow(pair)
                except covey.RemoteProtocolError as error:
                    errors.append(str(error))
            group.barrier()
        pair = group.split(0)
        if group.rank == 0:
            sender = pairs.Sender(pair)
            try:
                sender.ping()
            except covey.RemoteProtocolError as error:
                errors.append(str(error))
        else:
            pair.broadcast(np.zeros(2, np.int64))
            pair.broadcast(np.array([5]), root=1)
        group.barrier()
        return errors


def test_orders_and_answers_of_the_other_rank_are_checked() -> None:
    sender, receiver = run_ranks(2, break_rules, lanes="shm")
    assert sender == ["the receiver of 0 bytes says that it has got 5"]
    assert receiver == [
        f"the other rank of a pair gave the order {order} for {nbytes} bytes"
        for order, nbytes in ((1, 1 << 40), (2, 0), (2, -1), (9, 64))
    ]
