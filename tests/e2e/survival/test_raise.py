"""on_loss="raise": every live rank hears of a loss at once, and the remaining ranks can go on in their own group."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.sets import first
from tests.support.survivors import Members, attempt, await_go, covey, say, tell_changes, threading, total, values


def lose_and_shrink(victims: list[int]) -> Any:
    """Ranks are at different operations when one dies, and more die while the others make a new group."""
    with covey.join() as group:
        tell_changes(group)
        old = group.split(0)
        apart = group.split(group.rank in (0, 3, 5, 6))  # a group of those that are not lost, and one of the others
        old.barrier()
        x = values(group.rank, 30)
        if group.rank == 0:
            old.broadcast(x, root=0)  # which returns when it has left: here only
        say("ready", sequence=old.sequence)
        first = attempt(lambda: old.recv(src=victims[0]))
        agreed = attempt(lambda: old.agree(True))
        differed = attempt(lambda: old.agree(group.rank != 3))
        say("shrinking")
        if group.rank in victims[1:]:
            threading.Event().wait()  # is needed, and never comes
        untouched = apart.all_reduce(values(group.rank, 10))
        new, last = old.shrink()
        with new:
            y = new.all_reduce(values(group.rank, 1000))
            again = attempt(old.barrier)
            smaller, second_last = new.shrink()
            with smaller:
                z = smaller.all_reduce(values(group.rank, 10))
        return {
            "first": first,
            "untouched": untouched[:4].tolist(),
            "agreed": agreed["result"],
            "differed": differed["result"],
            "last": last,
            "new": [new.rank, new.size, y[:4].tolist()],
            "again": again,
            "second": [second_last, z[:4].tolist()],
            "on_loss": new.on_loss,
            "lost": sorted(rank for event in group.events() if event.kind == "lost" for rank in event.ranks),
        }


@pytest.mark.parametrize("is_kept", first(1, [True, False]))
def test_the_remaining_ranks_agree_and_shrink_to_a_group_of_their_own(is_kept: bool) -> None:
    victims, others = (1, 2, 4), (0, 3, 5, 6)
    with Members(7, lose_and_shrink, victims, is_kept=is_kept) as ranks:
        said = ranks.hear("ready")
        assert [line["sequence"] for line in said] == [2, 1, 1, 1, 1, 1, 1]
        ranks.kill(victims[0])
        ranks.hear("shrinking", (2, 4, *others))
        ranks.kill(2)
        ranks.kill(4)
        for new_rank, (rank, report) in enumerate(zip(others, ranks.results(others), strict=True)):
            assert (report["first"]["error"], report["first"]["rank"]) == ("PeerLostError", 1), (rank, report)
            assert report["untouched"] == total(others, 4).tolist(), "a group that never had a lost rank has ended"
            assert (report["agreed"], report["differed"]) == (True, False)
            assert report["last"] == 1, "rank 0 returned operation 2, the others only the first"
            assert report["new"] == [new_rank, 4, total(others, 4).tolist()]
            assert (report["again"]["error"], report["again"]["rank"]) == ("PeerLostError", 1)
            assert report["second"] == [1, total(others, 4).tolist()]
            assert report["on_loss"] == "raise"
        for rank in others:
            told = [
                lost for event in ranks.all_said(rank, "change") if event["kind"] == "lost" for lost in event["ranks"]
            ]
            assert sorted(told)[:3] == [1, 2, 4]
        ranks.await_exit(others)


def wait_until_revoked() -> Any:
    """Every rank waits in another way; rank 1 revokes from another thread."""
    with covey.join() as group:
        other, mine = group.split(0), group.split(0)
        group.barrier()
        waits = [
            lambda: mine.recv(src=1),
            lambda: mine.all_reduce(values(1, 100)),
            lambda: mine.all_reduce(values(2, 100), async_op=True).wait(),
            lambda: mine.send(values(3, 100_000), dst=0),
        ]

        def revoke_when_told() -> None:
            await_go()
            mine.revoke()

        if group.rank == 1:
            threading.Thread(target=revoke_when_told, daemon=True).start()
        say("waits")
        first = attempt(waits[group.rank])
        return {
            "first": first,
            "again": attempt(mine.barrier),
            "other": other.all_reduce(values(group.rank, 10)).tolist(),
        }


def test_revoke_ends_everything_pending_on_all_ranks_and_nothing_else() -> None:
    with Members(4, wait_until_revoked) as ranks:
        ranks.hear("waits")
        ranks.go(1)
        for rank, report in enumerate(ranks.results()):
            assert report["first"]["error"] == "ClosedError", (rank, report)
            assert "rank 1 revoked" in report["first"]["text"]
            assert report["again"]["error"] == "ClosedError"
            assert report["other"] == total(range(4), 10).tolist()
        ranks.await_exit()
        assert [ranks.errors(rank) for rank in range(4)] == [""] * 4
