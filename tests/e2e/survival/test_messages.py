"""Messages in a run that goes on: those between survivors are not disturbed by lost ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.sets import only
from tests.support.survivors import (
    DEADLINE,
    LANES,
    Members,
    attempt,
    await_go,
    break_all_connections,
    contextlib,
    covey,
    np,
    say,
    threading,
    values,
)


def exchange(victim: int, sizes: list[int]) -> Any:
    """Ranks 0 and 2 exchange numbered messages all the time; the victim has sent some that were not received yet."""
    with covey.join(on_loss="continue") as group:
        if group.rank == victim:
            for number in range(5):
                group.send(values(number, 100 + number), dst=0, tag=number % 2)
            group.send_object({"last": 5}, dst=2, tag=7)
            group.barrier()
            say("ready")
            threading.Event().wait()
        group.barrier()
        peer, stopping, counts = 2 - group.rank, threading.Event(), {}

        def talk() -> None:
            with_peer, number = 0, 0
            while number < 10 or with_peer < 2:
                data = values(group.rank, sizes[number % len(sizes)]) + number % 7
                sent = group.send(data, dst=peer, tag=100, async_op=True)
                got = group.recv(src=peer, tag=100)
                sent.wait()
                assert np.array_equal(got, values(peer, sizes[number % len(sizes)]) + number % 7), number
                number += 1
                is_over = stopping.is_set()  # asked once: both ranks decide by the same two words
                group.send_object(is_over, dst=peer, tag=101)
                with_peer = with_peer + 1 if group.recv_object(src=peer, tag=101) and is_over else 0
            counts["exchanged"] = number

        talking = threading.Thread(target=lambda: counts.update(attempt(talk)))
        talking.start()
        say("ready")
        group.barrier()  # the victim never enters it: it returns once the others know
        if group.rank == 0:
            queued = [group.recv(src=victim, tag=0), group.recv(tag=0), group.recv(src=victim)]
            queued += [group.recv(src=victim, out=np.empty(103, np.float32)), group.recv(src=victim, tag=0)]
            right = [np.array_equal(got, values(n, 100 + n)) for got, n in zip(queued, (0, 2, 1, 3, 4), strict=True)]
        else:
            right = [group.recv_object(src=victim, tag=7) == {"last": 5}]
        reports = {
            "recv": attempt(lambda: group.recv(src=victim)),
            "recv tag": attempt(lambda: group.recv(src=victim, tag=3)),
            "send": attempt(lambda: group.send(values(0, 10), dst=victim)),
            "large send": attempt(lambda: group.send(values(0, 100_000), dst=victim)),
            "async recv": attempt(lambda: group.recv(src=victim, async_op=True).wait()),
        }
        stopping.set()
        talking.join(DEADLINE)
        group.barrier()
        for tag in (5, 6):
            group.send(values(group.rank, 9) + tag, dst=peer, tag=tag)
        sixth = group.recv(src=peer, tag=6)
        any_rank = attempt(lambda: np.array_equal(group.recv() + 1, sixth))  # has come before
        return {"right": right, "reports": reports, "counts": counts, "any": any_rank}


@pytest.mark.parametrize("lanes", only(["shm", "tcp"], LANES))
def test_messages_between_survivors_go_on_and_those_of_the_lost_are_delivered_first(lanes: str) -> None:
    victim = 1
    with Members(3, exchange, victim, [10, 1_000, 300_000, 0, 20_000], lanes=lanes) as ranks:
        ranks.hear("ready")
        ranks.kill(victim)
        for rank, report in zip((0, 2), ranks.results((0, 2)), strict=True):
            assert all(report["right"]), (rank, report)
            for name, what in report["reports"].items():
                assert (what["error"], what.get("rank")) == ("PeerLostError", victim), (rank, name, what)
            assert report["counts"]["error"] is None, report["counts"]
            assert report["counts"]["exchanged"] >= 10
            assert report["any"]["result"] is True, report["any"]
        ranks.await_exit((0, 2))


def wait_for_anybody(victim: int) -> Any:
    """Rank 0 waits for a message of any rank while one is lost, and then in a group without lanes yet."""
    with covey.join(on_loss="continue") as group:
        other = group.split(0)
        group.barrier()
        if group.rank == 0:
            work = group.recv(async_op=True)
            say("ready")
            first = attempt(work.wait)
            group.barrier()
            second = group.recv(src=2, tag=4).tolist()
            third = attempt(other.recv)
            group.barrier()
            return first, second, third, other.recv().tolist()
        if group.rank == victim:
            threading.Event().wait()
        group.barrier()
        group.send(values(2, 3), dst=0, tag=4)
        group.barrier()
        other.send(values(2, 2), dst=0)
        return None


def test_a_rank_that_waits_for_any_other_hears_of_a_loss() -> None:
    with Members(3, wait_for_anybody, 1) as ranks:
        ranks.hear("ready", [0])
        ranks.kill(1)
        first, second, third, fourth = ranks.results((0, 2))[0]
        assert (first["error"], first["rank"]) == ("PeerLostError", 1), first
        assert second == [16.0, 32.0, 48.0]
        assert (third["error"], third["rank"]) == ("PeerLostError", 1), third  # once, and then the remaining ranks
        assert fourth == [16.0, 32.0]
        ranks.await_exit((0, 2))


def talk_over_broken_connections(on_loss: covey.OnLoss, sizes: list[int], cuts: int, cuts_own: bool) -> Any:
    """Every rank sends numbered messages to every other; connections break until the test, or this rank, has enough."""
    with covey.join(on_loss=on_loss) as group:
        others = [rank for rank in range(group.size) if rank != group.rank]
        enough, failures, counts = threading.Event(), [], dict.fromkeys(others, 0)
        group.barrier()

        def guarded(body: Any, peer: int) -> Any:
            def run() -> None:
                try:
                    body(peer)
                except BaseException as error:
                    failures.append(repr(error))
                    enough.set()

            return run

        def content(source: int, peer: int, number: int) -> Any:
            return values(source, sizes[number % len(sizes)]) * (1 + number % 5) + peer

        def send(peer: int) -> None:
            number = 0
            while not enough.is_set() or number < 2 * len(sizes):
                data = content(group.rank, peer, number)
                group.send(data, dst=peer, tag=7, timeout=DEADLINE)
                data[:] = 0  # it may be used again
                number += 1
            group.send(np.array([number]), dst=peer, tag=8, timeout=DEADLINE)

        def receive(peer: int) -> None:
            # The number of messages comes with another tag, and may overtake them.
            total = group.recv(src=peer, tag=8, async_op=True, timeout=DEADLINE)
            number = 0
            while not total.done() or number < int(total.wait()[0]):
                try:
                    got = group.recv(src=peer, tag=7, timeout=0.2)
                except covey.DeadlineError:
                    continue
                assert np.array_equal(got, content(peer, group.rank, number)), (peer, number, got[:3])
                number += 1
                counts[peer] = number
            assert attempt(lambda: group.recv(src=peer, tag=7, timeout=0.01))["error"] == "DeadlineError"

        threads = [threading.Thread(target=guarded(body, peer)) for body in (send, receive) for peer in others]
        for thread in threads:
            thread.start()
        if cuts_own:
            from covey.runtime.group.internals import engine_of

            messenger = engine_of(group).routing.messenger()
            for _ in range(cuts):
                enough.wait(0.02)
                for lane in list(messenger._lanes.by_rank.values()):
                    with contextlib.suppress(OSError):
                        lane.sock.shutdown(2)
        else:
            say("talking")
            await_go()
        enough.set()
        for thread in threads:
            thread.join(DEADLINE)
        group.barrier()
        return {"failures": failures, "counts": counts, "hangs": any(thread.is_alive() for thread in threads)}


BREAKS = 6
"""How often all connections of a rank break, one rank after the other."""
SIZES = [3, 500, 0, 16_384, 16_385, 10, 300_000, 1, 2_000_000]


def check_talk(reports: list[Any]) -> None:
    for rank, report in enumerate(reports):
        assert report["failures"] == [], (rank, report)
        assert not report["hangs"], (rank, report)
        assert all(count >= 2 * len(SIZES) for count in report["counts"].values()), (rank, report)


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", LANES)
def test_messages_between_live_ranks_survive_broken_connections(lanes: str) -> None:
    """All connections of one rank after the other break, links and lanes; no rank is lost, and no message either."""
    with Members(3, talk_over_broken_connections, "continue", SIZES, 0, False, lanes=lanes) as ranks:
        ranks.hear("talking")
        broken = 0
        for number in range(BREAKS):
            broken += break_all_connections(ranks.pid(number % 3), str(ranks.folder / "keeper.sock"))
            time.sleep(0.05 if number % 3 else 0.4)
        for rank in range(3):
            ranks.go(rank)
        check_talk(ranks.results())
        ranks.await_exit()
        assert broken > BREAKS


@pytest.mark.parametrize("lanes", only(["unix"], LANES))
def test_messages_survive_broken_lanes_in_a_group_that_ends_with_its_first_loss(lanes: str) -> None:
    with Members(3, talk_over_broken_connections, "raise", SIZES, 15, True, lanes=lanes) as ranks:
        check_talk(ranks.results())
        ranks.await_exit()


def receive_from_anyone() -> Any:
    with covey.join(on_loss="continue") as group:
        group.barrier()
        if group.rank:
            group.send(values(group.rank, 3), dst=0)
            say("ready")
            threading.Event().wait()
        say("ready")
        await_go()
        group.barrier()
        came = [group.recv().tolist() for _ in range(2)]
        return sorted(came), [attempt(lambda: group.recv()) for _ in range(4)]


def test_a_receive_from_anyone_hears_of_each_loss_once_and_then_that_no_rank_is_left() -> None:
    with Members(3, receive_from_anyone) as ranks:
        ranks.hear("ready")
        ranks.kill(1)
        ranks.kill(2)
        ranks.go(0)
        [(came, told)] = ranks.results([0])
        assert came == [values(1, 3).tolist(), values(2, 3).tolist()]
        assert [each["error"] for each in told] == ["PeerLostError"] * 4
        assert sorted(each["rank"] for each in told[:2]) == [1, 2]
        assert [each["rank"] for each in told[2:]] == [-1, -1]
        assert "no other rank" in told[2]["text"]
        ranks.await_exit([0])


def restore_over_broken_connections(count: int) -> Any:
    with covey.join(on_loss="continue") as group:
        state = {name: values(group.rank, count) + at for at, name in enumerate("abcd")}
        state["step"] = group.rank
        group.barrier()
        say("restoring")
        report = group.restore(state, timeout=DEADLINE)
        say("restored")
        right = all(np.array_equal(state[name], values(0, count) + at) for at, name in enumerate("abcd"))
        group.barrier()
        return {"right": right and state["step"] == 0, "received": report.bytes_received, "donors": report.donors}


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", ["unix", "tcp", "secure"])
def test_a_restore_goes_on_over_connections_that_break(lanes: str) -> None:
    count = 6_000_000
    with Members(3, restore_over_broken_connections, count, lanes=lanes) as ranks:
        ranks.hear("restoring")
        broken, number = 0, 0
        while not all(ranks.all_said(rank, "restored") for rank in (1, 2)) and number < 25:
            time.sleep(0.03)
            broken += break_all_connections(ranks.pid(number % 3), str(ranks.folder / "keeper.sock"))
            number += 1
        for rank, report in enumerate(ranks.results()):
            assert report["right"], (rank, report)
            assert report["donors"] == [0], (rank, report)
            assert (report["received"] >= 4 * 4 * count) == (rank > 0)
            assert report["received"] < 4 * 4 * count + 1000  # nothing came twice
        ranks.await_exit()
        assert broken > 0
