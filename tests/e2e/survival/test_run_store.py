"""The key-value store of a run survives the member that ordered its changes, and reaches members that come later."""

from __future__ import annotations

import random
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from tests.support.attackers import call_on_loop, new_cluster
from tests.support.attackers import until as waits_until
from tests.support.launched import count_and_die
from tests.support.runs import SURVIVING, ThreadRun, node_of
from tests.support.survivors import DEADLINE, Members, attempt, say

import covey
from covey.net.host.store_file import StoreFile
from covey.proto import store_copy
from covey.runtime.group.internals import engine_of
from covey.runtime.state.store import Stores
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from covey import Group


def test_entries_are_shared_and_every_sum_is_given_once() -> None:
    def body(group: Group) -> list[int]:
        store = group.node.store
        if group.rank == 0:
            store.set("text", "grüße")
            assert store.compare_set("text", "no", "other") == (False, "grüße".encode())
            assert store.compare_set("new", "", b"\x00") == (True, b"\x00")
            assert store.compare_set("own", "what was expected", "other") == (False, None)
            assert store.compare_set("own", None, "once")
            assert not store.compare_set("own", None, "twice")
            assert store.delete("own")
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


def test_entries_are_set_and_read_together_and_a_prefix_is_watched_until_its_entries_end() -> None:
    def body(group: Group) -> list[dict[str, bytes]]:
        store = group.node.store
        store.set_all({f"of {group.rank}/{name}": f"{group.rank}{name}" for name in "ab"})
        group.barrier()
        assert store.get_all("of 0/b", "missing", "of 1/a") == {"of 0/b": b"0b", "of 1/a": b"1a"}
        assert store.items("of 1/") == {"of 1/a": b"1a", "of 1/b": b"1b"}
        assert store.keys("of 0") == ["of 0/a", "of 0/b"]
        group.barrier()
        if group.rank == 1:
            store.set("leased/1", "1", ttl=0.3)
            assert store.compare_set("leased/2", None, "2", ttl=0.2, until="member").won
            store.wait("seen", timeout=DEADLINE)
            return []
        seen: list[dict[str, bytes]] = []
        for entries in store.watch_prefix("leased/", timeout=DEADLINE):
            seen.append(entries)
            if len(seen) > 1 and not entries:
                store.set("seen", "")
                break
        for bad in (lambda: store.set("k", "", ttl=0), lambda: store.set("k", "", until="rank")):  # type: ignore[arg-type]
            with pytest.raises(covey.ConfigError, match="must be"):
                bad()
        with pytest.raises(covey.DeadlineError, match=r"scan\(leased/\)"):
            list(store.watch_prefix("leased/", timeout=0.05))
        return seen

    seen = run_threads(2, body)[0]
    assert {"leased/1": b"1", "leased/2": b"2"} in seen
    assert seen[-1] == {}


def test_values_of_16_mib_are_set_compared_and_read_and_the_setting_bounds_all_of_them() -> None:
    def body(group: Group) -> None:
        store, mine, other = group.node.store, large(group.rank), large(1 - group.rank)
        for round in range(2):
            store.set(f"of {group.rank}", mine, timeout=DEADLINE)
            group.barrier()
            assert store.wait(f"of {1 - group.rank}", timeout=DEADLINE) == [other]
            group.barrier()
            assert not store.compare_set(f"of {group.rank}", other, b"", timeout=DEADLINE).won
            assert store.compare_set(f"of {group.rank}", mine, f"{round}", timeout=DEADLINE).won
            group.barrier()
        with pytest.raises(covey.ConfigError, match="16777216 bytes"):
            store.set("too large", mine + b"x")
        group.barrier()
        if group.rank == 0:
            store.set_all({f"half {number}": mine[: 8 << 20] for number in range(2)}, timeout=DEADLINE)
            store.set("half 2", mine[: 8 << 20], timeout=DEADLINE)
            with pytest.raises(covey.ConfigError, match=r"full.*of 41943040 \(the setting store_bytes\)"):
                store.set("too much", mine, timeout=DEADLINE)
        group.barrier()

    def large(rank: int) -> bytes:
        return random.Random(rank).randbytes(16 << 20)

    run_threads(2, body, settings={"store_bytes": 40 << 20})


def test_the_entries_of_a_run_are_in_a_file_from_which_the_next_run_has_them(tmp_path: Path) -> None:
    path = tmp_path / "store"
    large = random.Random(1).randbytes(2 << 20)

    def first(group: Group) -> None:
        store = group.node.store
        assert store.keys() == []
        group.barrier()
        store.set_all({f"of {group.rank}": f"{group.rank}", f"large {group.rank}": large})
        store.set(f"leased {group.rank}", "", ttl=600)
        store.set(f"alive {group.rank}", "", until="member")
        group.barrier()
        if group.rank == 1:
            waits_until(path.exists)  # it is written while the run goes on, too
        group.barrier()

    def second(group: Group) -> None:
        store = group.node.store
        expected = {f"{name} {rank}": value for name, value in (("large", large), ("of", None)) for rank in range(2)}
        assert store.items() == {key: value or key[-1:].encode() for key, value in expected.items()}
        group.barrier()
        if group.rank == 1:
            for key in expected:
                store.delete(key)
            store.set("last", "change")
        group.barrier()

    run_threads(2, first, settings={"store_file": str(path)})
    run_threads(2, second, settings={"store_file": str(path)})
    assert StoreFile(path).read() == (("last", b"change"),)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert run_threads(1, lambda group: group.node.store.get("last"), settings={"store_file": str(path)}) == [b"change"]
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


def test_a_file_that_is_none_of_a_store_or_too_large_is_an_error_and_one_that_cannot_be_written_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    path.touch(0o600)
    path.write_bytes(b"\x91\x01")
    with pytest.raises(covey.ConfigError, match="is not the file of a store"):
        StoreFile(path).read()
    path.unlink()
    StoreFile(path).write(0, (("key", bytes(1 << 20)),))
    with pytest.raises(covey.ConfigError, match="the setting store_bytes is 1048576"):
        Stores(bytes_limit=1 << 20, file=StoreFile(path))
    lost = StoreFile(tmp_path / "missing" / "store")
    for number in range(2):
        lost.write(number, ())
    assert [record.message for record in caplog.records if "not saved" in record.message] == [
        f"the entries of the store are not saved: cannot write {tmp_path}/missing/store: No such file or directory; "
        "make room, or set store_file to another path"
    ]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Let several threads work, and raise what one of them raised."""
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result(DEADLINE)


@pytest.mark.thorough
def test_threads_with_values_of_many_megabytes_ask_beside_threads_that_wait_all_the_time() -> None:
    """A link holds 1 MiB, and the answers of a process that does not acknowledge them are 4,096 at most."""
    large, most = bytes(200_000), store_copy.UNACKNOWLEDGED_LIMIT

    def body(group: Group) -> int:
        store = group.node.store

        def work(number: int) -> None:
            if number == 0:
                store.wait("at the end", timeout=DEADLINE)
                return
            for _ in range(4):
                store.set(f"{group.rank}.{number}", large, timeout=DEADLINE)
            for _ in range(most // 10):
                store.add("count", timeout=DEADLINE)
            if store.add("done", timeout=DEADLINE) == 9:
                store.set("at the end", b"", timeout=DEADLINE)

        in_threads(4, work)
        group.barrier()
        found = store.wait(*(f"{rank}.{number}" for rank in range(3) for number in (1, 2, 3)), timeout=DEADLINE)
        assert found == [large] * 9  # 1.8 MB
        total = store.add("count", 0)
        group.barrier()
        return total

    with mock.patch.object(store_copy, "UNACKNOWLEDGED_LIMIT", most // 20):
        assert run_threads(3, body) == [9 * (most // 10)] * 3


def test_a_newcomer_gets_a_store_of_64_mib_which_no_link_holds() -> None:
    parts = {f"part {number}": bytes([number]) * 262_000 for number in range(255)}  # of 64 MiB
    arrived = threading.Event()

    def first(groups: Iterator[Group]) -> None:
        for group in groups:
            store = group.node.store
            if group.size == 2 and group.rank == 0:
                for key, value in parts.items():
                    store.set(key, value, timeout=DEADLINE)
            group.barrier()
            arrived.set()
            if group.size == 3:
                store.wait("read", timeout=DEADLINE)
                return
            while not group.change_pending:
                group.all_reduce(np.zeros(1))
                time.sleep(0.005)

    def newcomer(groups: Iterator[Group]) -> list[bytes]:
        for group in groups:
            group.barrier()
            found = group.node.store.wait(*parts, timeout=DEADLINE)
            assert node_of(group).stores._replica.has_copy
            group.node.store.set("read", b"", timeout=DEADLINE)
            return found
        raise AssertionError

    with ThreadRun(new_cluster(), SURVIVING, min_size=2) as thread_run:
        members = [thread_run.start(first, elastic=True) for _ in range(2)]
        assert arrived.wait(DEADLINE)
        late = thread_run.start(newcomer, elastic=True)
        assert late.result() == list(parts.values())
        for member in members:
            member.result()


def test_text_that_cannot_be_encoded_is_an_error_and_nothing_is_lost() -> None:
    def body(group: Group) -> None:
        store, bad = group.node.store, "x\ud800"
        for call in (
            lambda: store.set(bad, b""), lambda: store.set("k", bad), lambda: store.get(bad),
            lambda: store.wait("k", bad),
            lambda: store.add(bad), lambda: store.delete(bad), lambda: next(store.watch(bad)),
            lambda: store.compare_set(bad, "", ""), lambda: store.compare_set("k", bad, ""),
            lambda: store.compare_set("k", "", bad),
        ):  # fmt: skip
            with pytest.raises(covey.ConfigError, match="lone surrogate"):
                call()
        assert store.add("n") in (1, 2)
        assert store.keys() == ["n"]
        group.barrier()

    run_threads(2, body)


def test_a_watch_with_a_timeout_says_that_nothing_has_changed_and_one_without_goes_on() -> None:
    def body(group: Group) -> list[bytes | None]:
        store = group.node.store
        with pytest.raises(covey.DeadlineError, match=r"observe\(quiet\)"):
            for _ in store.watch("quiet", timeout=0.05):
                pass
        asked: list[int] = []
        ask = store._client.ask

        def noting(question: Any, timeout: float) -> Any:
            asked.append(getattr(question, "version", 0))
            if len(asked) == 5:  # it has waited in vain, looked, and waits again
                store.set("quiet", "changed", timeout=DEADLINE)
            return ask(question, timeout)

        with mock.patch.object(store, "_seconds", 0.3), mock.patch.object(store._client, "ask", noting):
            watched = store.watch("quiet")
            return [next(watched).value, next(watched).value]

    assert run_threads(1, body) == [[None, b"changed"]]


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
    assert [each["alive"] for each in found] == [["alive/2", "alive/3"]] * 2
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


def described(call: Callable[[], Any]) -> str:
    with pytest.raises(covey.CoveyError) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_the_store_and_the_calls_of_an_excluded_process_fail_at_once_each_time() -> None:
    stop = threading.Event()

    def work(group: Group) -> list[str]:
        node, generation = group.node, engine_of(group).generation
        assert generation is not None
        node.register("never", stop.wait)
        group.barrier()
        together()
        errors: list[str] = []
        if group.rank == 2:
            waiting = node.call_async(0, "never", 1000.0)
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(node.store.wait, "never")
                waits_until(lambda: bool(node_of(group).stores._outcomes))
                call_on_loop(generation.withdraw)
                for failed in (asked.exception(DEADLINE), waiting.exception()):
                    errors.append(f"{type(failed).__name__}: {failed}")
            for _ in range(2):
                errors += [described(lambda: node.store.get("key"))]
                errors += [described(lambda rank=rank: node.call(rank, "never")) for rank in (0, 1)]  # type: ignore[misc]
            node.register("double", lambda number: 2 * number)
            assert node.call(2, "double", 4) == 8
        together()
        stop.set()
        return errors

    with ThreadRun(new_cluster(), SURVIVING, size=3) as thread_run:
        together = thread_run.steps(3)
        results = [node.result() for node in [thread_run.start(work) for _ in range(3)]]
    errors = next(errors for errors in results if errors)
    assert len(errors) == 8
    assert all(error.startswith("GroupChangedError: ") for error in errors), errors
    assert all("without this process" in error and "join the run again" in error for error in errors), errors
    assert "the store of the run cannot be asked" in errors[0]
    assert "call of 'never' on rank 0" in errors[1]
