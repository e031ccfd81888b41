"""The key-value store of a run survives the member that ordered its changes, and reaches members that come later."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.launched import count_and_die
from tests.support.survivors import DEADLINE, Members, attempt, say

import covey
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group


def test_entries_are_shared_and_every_sum_is_given_once() -> None:
    def body(group: Group) -> list[int]:
        store = group.node.store
        if group.rank == 0:
            store.set("text", "grüße")
            assert store.compare_set("text", "no", "other") == "grüße".encode()
            assert store.compare_set("new", "", b"\x00") == b"\x00"
        assert store.wait("text", "new", timeout=DEADLINE) == ["grüße".encode(), b"\x00"]
        assert store.get("missing") is None
        assert store.get("missing", b"default") == b"default"
        sums = [store.add("count") for _ in range(10)]
        group.barrier()
        assert store.keys() == ["count", "new", "text"]
        group.barrier()
        if group.rank == 1:
            assert store.delete("text")
            assert not store.delete("text")
        group.barrier()
        assert store.get("text") is None
        with pytest.raises(covey.DeadlineError, match=r"get\(never\): no answer within the timeout of 0\.01 s"):
            store.wait("never", timeout=0.01)
        with pytest.raises(covey.ConfigError, match="bytes and text, not int"):
            store.set("x", 3)  # type: ignore[arg-type]
        with pytest.raises(covey.ConfigError, match="1000 characters"):
            store.get("k" * 1001)
        group.barrier()  # before a rank leaves
        return sums

    results = run_threads(3, body)
    assert sorted(number for sums in results for number in sums) == list(range(1, 31))


def test_a_watched_entry_is_seen_when_it_changes_and_when_it_is_deleted() -> None:
    def body(group: Group) -> list[bytes | None]:
        store = group.node.store
        if group.rank == 1:
            seen = []
            for watched in store.watch("key", timeout=DEADLINE):
                seen.append(watched.value)
                store.set(f"seen {len(seen)}", b"")
                if len(seen) == 4:
                    break
            return seen
        store.wait("seen 1")
        store.set("key", "one")
        store.wait("seen 2")
        store.delete("key")
        store.wait("seen 3")
        store.set("key", "one")
        store.wait("seen 4")
        return []

    assert run_threads(2, body)[1] == [None, b"one", None, b"one"]


def test_a_process_alone_has_a_store() -> None:
    def body(group: Group) -> int:
        store = group.node.store
        store.set("a", "b")
        assert store.wait("a") == [b"b"]
        return store.add("n", 5) + group.node.store.add("n")

    assert run_threads(1, body) == [11]


def test_the_store_survives_the_members_that_ordered_its_changes() -> None:
    results = covey.launch(count_and_die, 4, on_loss="continue", timeout=DEADLINE)
    assert results[:2] == [None, None]
    found: list[dict[str, Any]] = [each for each in results[2:] if each is not None]
    sums = [number for each in found for number in each["sums"]]
    assert len(set(sums)) == len(sums) == 120
    assert max(sums) == 120 + 30 + 50  # rank 0 counted 30 times and rank 1 50 times
    assert all(each["own"] == str(each["sums"][-1]).encode() for each in found)
    assert len({each["first"] for each in found}) == 1
    assert found[0]["first"] is not None


def lose_the_first() -> Any:
    """Rank 0, which orders the changes, is killed; the others shrink and go on with the entries."""
    with covey.join() as group:
        group.node.store.set(f"host of {group.rank}", str(group.rank))
        group.barrier()
        say("ready")
        lost = attempt(lambda: group.recv(src=0))
        smaller, _ = group.shrink()
        with smaller:
            store = smaller.node.store
            found = store.wait("host of 0", "host of 1", "host of 2", timeout=DEADLINE)
            sums = [store.add("count", timeout=DEADLINE) for _ in range(5)]
            smaller.barrier()
        why = [event.text for event in group.events() if event.kind == "lost"]
        return {"lost": lost["error"], "found": [value.decode() for value in found], "sums": sums, "why": why}


def test_in_a_run_that_ends_with_a_loss_the_store_is_that_of_the_shrunken_group() -> None:
    with Members(3, lose_the_first) as ranks:
        ranks.hear("ready")
        ranks.kill(0)
        reports = ranks.results((1, 2))
        assert [(report["lost"], report["found"]) for report in reports] == [("PeerLostError", ["0", "1", "2"])] * 2
        assert sorted(number for report in reports for number in report["sums"]) == list(range(1, 11))
        assert all(len(report["why"]) == 1 and report["why"][0] for report in reports), reports
        ranks.await_exit((1, 2))


def test_a_split_group_of_one_is_still_in_the_run() -> None:
    def body(group: Group) -> int:
        with group.split(group.rank) as alone:
            assert (alone.size, alone.to_run(0), alone.to_parent(0)) == (1, group.rank, group.rank)
            assert alone.node.members[0] == replace(group.members[group.rank], rank=0)
            assert alone.events()[0] == group.events()[0]
            assert alone.node.leader == (0 if group.node.leader == group.rank else None)
            group.node.register("double", lambda number: 2 * number)
            assert alone.call(0, "double", 4) == 8
            x = np.arange(5.0) + group.rank
            assert (alone.all_reduce(x.copy()) == x).all()
            assert (alone.all_gather(x)[0] == x).all()
            alone.barrier()
            number = alone.node.store.add("count")
            group.barrier()
            assert group.node.store.add("count", 0) == 3
        group.barrier()  # before a rank leaves
        return number

    assert sorted(run_threads(3, body)) == [1, 2, 3]
