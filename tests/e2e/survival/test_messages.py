"""Messages in a run that goes on: those between survivors are not disturbed by who is lost."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.e2e.survival.jobs import LANES, Members, attempt, covey, np, say, threading, values

pytestmark = pytest.mark.slow


def exchange(victim: int, sizes: list[int]) -> Any:
    """Ranks 0 and 2 exchange numbered messages all the time; the victim has sent some that nobody received yet."""
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
                group.send_object(stopping.is_set(), dst=peer, tag=101)
                with_peer = with_peer + 1 if group.recv_object(src=peer, tag=101) and stopping.is_set() else 0
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
        began = time.monotonic()
        reports = {
            "recv": attempt(lambda: group.recv(src=victim)),
            "recv tag": attempt(lambda: group.recv(src=victim, tag=3)),
            "send": attempt(lambda: group.send(values(0, 10), dst=victim)),
            "large send": attempt(lambda: group.send(values(0, 100_000), dst=victim)),
            "async recv": attempt(lambda: group.recv(src=victim, async_op=True).wait()),
        }
        took = time.monotonic() - began
        stopping.set()
        talking.join(20)
        group.barrier()
        for tag in (5, 6):
            group.send(values(group.rank, 9) + tag, dst=peer, tag=tag)
        sixth = group.recv(src=peer, tag=6)
        any_rank = attempt(lambda: np.array_equal(group.recv() + 1, sixth))  # has come before
        return {"right": right, "reports": reports, "took": took, "counts": counts, "any": any_rank}


@pytest.mark.parametrize("lanes", LANES)
def test_messages_between_survivors_go_on_and_those_of_the_lost_are_delivered_first(lanes: str) -> None:
    victim = 1
    with Members(3, exchange, victim, [10, 1_000, 300_000, 0, 20_000], lanes=lanes) as ranks:
        ranks.hear("ready")
        ranks.kill(victim)
        for rank, report in zip((0, 2), ranks.results((0, 2)), strict=True):
            assert all(report["right"]), (rank, report)
            for name, what in report["reports"].items():
                assert (what["error"], what.get("rank")) == ("PeerLostError", victim), (rank, name, what)
            assert report["took"] < 2.0
            assert report["counts"]["error"] is None, report["counts"]
            assert report["counts"]["exchanged"] >= 10
            assert report["any"]["result"] is True, report["any"]
        ranks.await_exit((0, 2))


def wait_for_anybody(victim: int) -> Any:
    """Rank 0 waits for a message of whoever sends one while somebody is lost, and then in a group without lanes yet."""
    with covey.join(on_loss="continue") as group:
        other = group.split(0)
        group.barrier()
        if group.rank == 0:
            work = group.recv(async_op=True)
            say("ready")
            first = attempt(work.wait)
            group.barrier()
            second = group.recv(src=2, tag=4, timeout=5).tolist()
            third = attempt(lambda: other.recv(timeout=5))
            group.barrier()
            return first, second, third, other.recv(timeout=5).tolist()
        if group.rank == victim:
            threading.Event().wait()
        group.barrier()
        group.send(values(2, 3), dst=0, tag=4)
        group.barrier()
        other.send(values(2, 2), dst=0)
        return None


@pytest.mark.alone
def test_who_waits_for_anybody_hears_of_a_loss() -> None:
    with Members(3, wait_for_anybody, 1) as ranks:
        ranks.hear("ready", [0])
        killed_at = ranks.kill(1)
        first, second, third, fourth = ranks.results((0, 2))[0]
        assert (first["error"], first["rank"]) == ("PeerLostError", 1), first
        assert first["at"] - killed_at < 1.0
        assert second == [16.0, 32.0, 48.0]
        assert (third["error"], third["rank"]) == ("PeerLostError", 1), third  # once, and then those who are left
        assert fourth == [16.0, 32.0]
        ranks.await_exit((0, 2))
