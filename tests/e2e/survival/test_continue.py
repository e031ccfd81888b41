"""on_loss="continue": operations are all or nothing, and finish among the remaining ranks."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from tests.support.sets import first
from tests.support.survivors import (
    LANES,
    Members,
    Visible,
    attempt,
    await_go,
    break_connections,
    covey,
    kill_in_the_middle,
    np,
    say,
    tell_changes,
    threading,
    total,
    values,
)
from tests.support.waiting import DEADLINE


def add_up(victim: int, count: int) -> Any:
    """Add large arrays up until the victim is lost and twice more; what the victim does can be watched."""
    with covey.join(on_loss="continue") as group:
        x, visible, ones = np.empty(count, np.float32), None, values(0, count)
        if group.rank == victim:
            visible = Visible(victim, count)
            x = visible.array
            say("visible", descriptor=visible.descriptor)
        rounds: list[Any] = []
        wrong: list[Any] = []
        lanes: dict[int, str] = {}
        while len(rounds) < 3 or victim in rounds[-3][1]:
            lanes = group.lanes()
            scale = 1 + len(rounds) % 3
            np.multiply(ones, scale * 4**group.rank, out=x)
            if visible is not None:
                with visible.in_operation(scale if len(rounds) > 1 else 0):  # the first one also opens the lanes
                    group.all_reduce(x)
            else:
                group.all_reduce(x)
            rounds.append((group.sequence, group.contributors))
            if not np.array_equal(x, ones * (scale * sum(4**rank for rank in group.contributors))):
                wrong.append((rounds[-1], x[:: count // 50].tolist()))
        events = [(event.kind, event.ranks, event.phases) for event in group.events()]
    return {
        "rounds": rounds[-3:],
        "wrong": wrong,
        "lanes": sorted(set(lanes.values())),
        "events": [
            event for event in events if victim in event[1] and event[0] not in ("lane", "suspected", "recovered")
        ],
    }


@pytest.mark.parametrize(
    ("lanes", "count"),
    [
        *(pytest.param(lanes, 2 << 20) for lanes in ("shm", "tcp")),
        *(pytest.param(lanes, 16 << 20, marks=pytest.mark.thorough) for lanes in LANES),
        pytest.param("quic", 1 << 20, marks=pytest.mark.thorough),
    ],
)
def test_survivors_finish_the_very_all_reduce_in_which_a_rank_is_killed(lanes: str, count: int) -> None:
    victim, others = 1, (0, 2)
    with Members(3, add_up, victim, count, lanes=lanes) as ranks:
        [visible] = ranks.hear("visible", [victim])
        kill_in_the_middle(ranks.pid(victim), visible["descriptor"])
        reports = ranks.results(others)
        for rank, report in zip(others, reports, strict=True):
            assert report["wrong"] == []
            (first, contributors), *_ = report["rounds"]
            assert contributors == list(others), (rank, report)
            assert report["lanes"] == [lanes]
            assert [event[:2] for event in report["events"]] == [["lost", [victim]]], report["events"]
            phases = report["events"][0][2]
            assert list(phases) == ["detect", "freeze", "agree", "reconnect", "redo"]
            assert sorted(phases.values()) == list(phases.values())
            assert first == reports[0]["rounds"][0][0]
        ranks.await_exit(others)
        for rank in others:
            assert len(lines := ranks.errors(rank).splitlines()) == 1, lines
            assert "rank 1 (" in lines[0]
            assert "ranks 0 and 2 continue" in lines[0]


def do_everything(victim: int, hangs: int, names: list[str]) -> Any:
    """Do every operation in a group and a thread of its own, until each has lost the victim and twice more."""
    count = 30_011

    def check(is_right: Any) -> None:
        assert np.all(is_right)

    def weight_of(rank: int) -> float:
        return (1.0, 2.0, 8.0, 5.0)[rank]

    def perform(name: str, group: Any, number: int, x: Any) -> None:
        """Do it once, with this rank's values in `x`, and look at every number of the result."""
        rank, size = group.rank, group.size
        double = 60 * values(rank, 1001, dtype=np.float64)

        def given() -> tuple[int, ...]:
            assert rank in group.contributors
            return group.contributors

        def share(of: int) -> slice:
            ends = np.cumsum([len(piece) for piece in np.array_split(np.arange(count), size)])
            return slice(0 if of == 0 else ends[of - 1], ends[of])

        match name:
            case "all_reduce":
                check(group.all_reduce(x) == total(given(), count))
            case "all_reduce by ring":
                check(group.all_reduce(x, algorithm="ring") == total(given(), count))
            case "all_reduce max":
                check(group.all_reduce(x, "max") == values(max(given()), count))
            case "all_reduce mean":
                group.all_reduce(double, "mean")
                check(double == total(given(), 1001, dtype=np.float64) * 60 / len(given()))
            case "all_reduce weighted":
                group.all_reduce(double, "mean", weight=weight_of(rank))
                heavy = sum(weight_of(r) * 60 * values(r, 1001, dtype=np.float64) for r in given())
                check(np.isclose(double, heavy / sum(map(weight_of, given())), rtol=1e-12))
            case "all_reduce strided":
                wide = np.zeros((1000, 6), np.float32)
                wide[:, ::2] = values(rank, 3000).reshape(1000, 3)
                group.all_reduce(wide[:, ::2])
                check(wide[:, ::2].ravel() == total(given(), 3000))
                check(wide[:, 1::2] == 0)
            case "all_reduce of a number":
                check(group.all_reduce(4**rank) == sum(4**r for r in given()))
            case "async all_reduce":
                more = values(rank, 500)
                works = [group.all_reduce(x, async_op=True), group.all_reduce(more, async_op=True)]
                for work, array in zip(works, (x, more), strict=True):
                    work.wait()
                    check(array == total(work.contributors, len(array)))
                check(set(works[1].contributors) <= set(works[0].contributors))
            case "reduce" | "reduce to the victim":
                root = victim if "victim" in name else 3
                group.reduce(x, root=root)
                check(x == (total(given(), count) if rank == root else values(rank, count)))
            case "reduce_scatter":
                part = group.reduce_scatter(x)
                check(part == total(given(), count)[share(rank)])
                check(x == values(rank, count))
            case "reduce_scatter out":
                out = np.full(share(rank).stop - share(rank).start, -number - 1, np.float32)
                check(group.reduce_scatter(x, out=out) is out)
                check(out == total(given(), count)[share(rank)])
                check(x == values(rank, count))
            case "scan":
                result = group.scan(x)
                check(result == total([r for r in given() if r <= rank], count))
            case "exscan":
                result = group.exscan(x)
                check(result == total([r for r in given() if r < rank], count))
            case "sync_gradients":
                grads = {f"g{i}": 60 * values(rank, 500 + i, dtype=np.float64) for i in range(9)}
                group.sync_gradients(grads, bucket_bytes=8000)
                found = set()
                for grad in grads.values():  # every bucket tells by itself which ranks are in it
                    fits = [ranks for ranks in (range(4), [0, 2, 3]) if (
                        grad == total(ranks, len(grad), dtype=np.float64) * 60 / len(ranks)).all()]  # fmt: skip
                    check(len(fits) == 1)
                    found.add(len(fits[0]))
                check(len(given()) == min(found))
            case "broadcast" | "broadcast from the victim":
                root = victim if "victim" in name else 0
                group.broadcast(x, root=root)
                check(x == values(root, count))
            case "all_gather" | "all_gather_object" | "gather" | "gather_object" | "gather to the victim":
                root = {"gather to the victim": victim, "gather": 2, "gather_object": 0}.get(name, rank)
                mine = x[: 1000 + rank] if "object" not in name else {"rank": rank, "array": x[: 10 + rank]}
                if "all" in name:
                    got = group.all_gather_object(mine) if "object" in name else group.all_gather(mine)
                else:
                    got = group.gather_object(mine, root) if "object" in name else group.gather(mine, root)
                if rank != root:
                    check(got is None)
                    return
                check([item is not None for item in got] == [r in given() for r in range(size)])
                for r in given():
                    array = got[r]["array"] if "object" in name else got[r]
                    check(np.array_equal(array, values(r, (10 if "object" in name else 1000) + r)))
            case "all_gather out":
                out = np.full((size, 777), -number - 1, np.float32)
                group.all_gather(x[:777], out=out)
                for r in range(size):
                    check(out[r] == (values(r, 777) if r in given() else -number - 1))
            case "scatter" | "scatter from the victim" | "scatter_object":
                root = victim if "victim" in name else 3
                xs = [values(r, 100 + r) + 1 for r in range(size)] if rank == root else None
                got = group.scatter_object(xs, root) if "object" in name else group.scatter(xs, root)
                check(np.array_equal(got, values(rank, 100 + rank) + 1))
            case "all_to_all":
                got = group.all_to_all([values(rank, 50 + 7 * r) + r for r in range(size)])
                check([item is not None for item in got] == [r in given() for r in range(size)])
                for r in given():
                    check(np.array_equal(got[r], values(r, 50 + 7 * rank) + rank))
            case "all_to_all out":
                rows, out = x[: size * 900].reshape(size, 900), np.full((size, 900), -number - 1, np.float32)
                group.all_to_all(rows, out=out)
                for r in range(size):
                    sent = values(r, count)[: size * 900].reshape(size, 900)
                    check(out[r] == (sent[rank] if r in given() else -number - 1))
            case "barrier":
                group.barrier()
            case "broadcast_object":
                got = group.broadcast_object({"number": number, "array": x[:5]} if rank == 0 else None)
                check(got["number"] == number)
                check(got["array"] == values(0, 5))
            case "split":
                part = group.split(rank % 2, key=-rank)
                with part:
                    before = [r for r in (3, 2, 1, 0) if r % 2 == rank % 2 and r in given()]
                    check(part.rank == before.index(rank))
                    y = part.all_reduce(values(rank, 100))
                    check(y == total([before[r] for r in part.contributors], 100))
            case _:
                raise ValueError(name)

    def loop(name: str, group: Any) -> Any:
        is_hanging = group.rank == victim and names.index(name) % 2 == hangs
        story: list[Any] = []
        number = 0
        while len(story) < 3:
            if is_hanging and number == 2:
                rounds[name] = number
                threading.Event().wait()  # never comes
            x = values(group.rank, count)
            try:
                perform(name, group, number, x)
                words: Any = list(group.contributors)
            except covey.PeerLostError as error:
                check("victim" in name and error.rank == victim and victim not in group.live)
                check(x == values(group.rank, count))
                words = "lost"
            number += 1
            rounds[name] = number
            if words == "lost" or victim not in words:
                story.append((group.sequence, words))
        return story

    with covey.join(on_loss="continue") as group:
        groups = {name: group.split(0) for name in names}
        rounds, stories = dict.fromkeys(names, 0), {}
        threads = [
            threading.Thread(
                target=lambda name=name: stories.update({name: attempt(lambda: loop(name, groups[name]))}), daemon=True
            )
            for name in names
        ]
        for thread in threads:
            thread.start()
        while min(rounds.values()) < 2:
            time.sleep(0.001)
        say("working")
        for thread in threads:
            thread.join(DEADLINE)
        after = attempt(lambda: group.all_reduce(values(group.rank, 10)).tolist())
        return {"stories": stories, "after": after, "stuck": [name for name in names if name not in stories]}


OPERATIONS = [
    "all_reduce", "all_reduce by ring", "all_reduce max", "all_reduce mean", "all_reduce weighted",
    "all_reduce strided", "all_reduce of a number", "async all_reduce", "reduce", "reduce to the victim",
    "reduce_scatter", "reduce_scatter out", "scan", "exscan", "sync_gradients", "broadcast",
    "broadcast from the victim", "all_gather", "all_gather out", "all_gather_object", "gather", "gather_object",
    "gather to the victim", "scatter", "scatter from the victim", "scatter_object", "all_to_all", "all_to_all out",
    "barrier", "broadcast_object", "split",
]  # fmt: skip


@pytest.mark.parametrize(
    "lanes",
    [lanes if lanes == "secure" else pytest.param(lanes, marks=pytest.mark.thorough) for lanes in LANES],
)
def test_every_collective_goes_on_without_a_killed_rank(lanes: str) -> None:
    victim, others = 1, (0, 2, 3)
    with Members(
        4, do_everything, victim, LANES.index(lanes) % 2, OPERATIONS, lanes=lanes, env={"COVEY_TIMEOUT": str(DEADLINE)}
    ) as ranks:
        ranks.hear("working")
        ranks.kill(victim)
        reports = ranks.results(others)
        for rank, report in zip(others, reports, strict=True):
            assert report["stuck"] == [], rank
            for name, story in report["stories"].items():
                assert story["error"] is None, (rank, name, story)
                assert story["result"] == reports[0]["stories"][name]["result"], (rank, name)
            assert report["after"]["result"] == total(others, 10).tolist()
        ranks.await_exit(others)


def count_losses(count: int) -> Any:
    """Add up until the test has seen enough, tell every change of the contributors and every wrong number."""
    with covey.join(on_loss="continue") as group:
        tell_changes(group)
        before: tuple[int, ...] = ()
        told_at = 0.0
        mine, x = values(group.rank, count), np.empty(count, np.float32)
        stopping = threading.Event()

        def stop_when_told() -> None:
            await_go()
            stopping.set()

        threading.Thread(target=stop_when_told, daemon=True).start()
        while not before or not group.all_reduce(stopping.is_set(), "or"):
            x[:] = mine
            group.all_reduce(x)
            if not np.array_equal(x, total(group.contributors, count)):
                say("wrong", sequence=group.sequence, contributors=group.contributors)
            if time.monotonic() > told_at + 0.05:
                told_at = time.monotonic()
                say("step", sequence=group.sequence)
            if group.contributors != before:
                before = group.contributors
                say("contributors", sequence=group.sequence, ranks=before)
    return {"live": group.live, "sequence": group.sequence}


@pytest.mark.parametrize("is_kept", first(1, [False, True]))
def test_ranks_are_lost_in_a_row_and_at_once_and_during_recovery_until_one_is_left(is_kept: bool) -> None:
    size, last = 7, 1
    with Members(size, count_losses, 50_000, is_kept=is_kept) as ranks:
        alive = list(range(size))

        def lose(*victims: int) -> None:
            for victim in victims:
                ranks.kill(victim)
                alive.remove(victim)

        def await_loss() -> None:
            """Until all remaining ranks know that they are."""
            for rank in alive:
                number = 1
                while len(ranks.await_said(rank, "contributors", number)["ranks"]) > len(alive):
                    number += 1

        await_loss()
        lose(0)  # the first rank and tie-breaker; and one more as soon as any rank knows
        until = time.monotonic() + DEADLINE
        while not any(event["ranks"] == [0] for rank in alive for event in ranks.all_said(rank, "change")):
            assert time.monotonic() < until
        lose(3)
        await_loss()
        lose(4, 5)  # at once
        await_loss()
        lose(6)
        await_loss()
        lose(2)
        await_loss()
        ranks.go(last)
        [report] = ranks.results([last])
        assert report["live"] == [last]
        ranks.await_exit([last])
        agreed: dict[int, list[int]] = {}
        for rank in range(size):
            assert ranks.all_said(rank, "wrong") == []
            for said in ranks.all_said(rank, "contributors"):
                assert agreed.setdefault(said["sequence"], said["ranks"]) == said["ranks"], (rank, said)
                assert rank in said["ranks"]
        changes = ranks.all_said(last, "change")
        assert sorted(rank for change in changes for rank in change["ranks"] if change["kind"] == "lost") == [
            rank for rank in range(size) if rank != last
        ]


@pytest.mark.parametrize("lanes", ["tcp", pytest.param("secure", marks=pytest.mark.thorough)])
def test_a_broken_lane_is_nobodys_loss(lanes: str) -> None:
    size = 3
    with Members(size, count_losses, 1 << 20, lanes=lanes) as ranks:
        for rank in range(size):
            ranks.await_said(rank, "contributors")
        for number in range(4):
            views = [len(ranks.all_said(rank, "change")) for rank in range(size)]
            while any(len(ranks.all_said(rank, "change")) == views[rank] for rank in range(size)):
                # It may be a lane that is being closed anyway, and no view follows; but all must go on each time.
                break_connections(ranks.pid(number % size), most=1 + number % 2)
                broken_at = time.monotonic()
                for rank in range(size):
                    steps = len(ranks.all_said(rank, "step"))
                    while ranks.await_said(rank, "step", steps)["at"] < broken_at + 0.1:
                        steps += 1
        ranks.go(1)
        ranks.results()
        ranks.await_exit()
        for rank in range(size):
            assert ranks.all_said(rank, "wrong") == []
            assert [said["ranks"] for said in ranks.all_said(rank, "contributors")] == [[0, 1, 2]]
            assert {said["kind"] for said in ranks.all_said(rank, "change")} - {"left"} == {"view"}
            assert ranks.errors(rank) == ""


def give_up_in_many_ways() -> Any:
    """Four ranks disagree, are late, revoke, are interrupted and fail, each time in a group of its own."""
    reports: dict[str, Any] = {}
    with covey.join(on_loss="continue") as group:
        rank, names = group.rank, ("late", "different", "shapes", "revoked")
        groups = {name: group.split(0) for name in names}
        x = values(rank, 40_000)
        # Rank 2 comes when the others have waited in vain.
        with group.split(rank == 2) as punctual:
            punctual.barrier()
            if rank == 2:
                for other in (0, 1, 3):
                    group.recv(src=other)
            reports["late"] = attempt(lambda: groups["late"].all_reduce(x, timeout=2))
            if rank != 2:
                group.send(x[:1], dst=2)
        reports["restored"] = bool((x == values(rank, 40_000)).all())
        reports["late again"] = attempt(groups["late"].barrier)
        # Rank 1 calls something else, and then rank 3 another shape.
        call = (lambda: groups["different"].broadcast(x, root=1)) if rank == 1 else (
            lambda: groups["different"].all_reduce(x))  # fmt: skip
        reports["different"] = attempt(call)
        reports["shapes"] = attempt(lambda: groups["shapes"].all_reduce(x[: 100 if rank == 3 else 200]))
        say("mismatched")
        # Rank 1 revokes, from another thread, what waits for rank 0.
        group.barrier()
        if rank == 1:
            threading.Timer(0.1, groups["revoked"].revoke).start()
        if rank == 0:
            reports["revoked"] = attempt(lambda: groups["revoked"].recv(src=3))
        else:
            reports["revoked"] = attempt(lambda: groups["revoked"].all_reduce(x))
        reports["restored"] &= bool((x == values(rank, 40_000)).all())
        reports["whole"] = group.all_reduce(values(rank, 3)).tolist()
        # Rank 2 is interrupted, in what it says or in what it waits for, and then rank 1 fails.
        try:
            say("whole")
            if rank == 2:
                group.recv(src=0)
            reports["interrupted"] = group.all_reduce(values(rank, 3)).tolist()
            reports["live"] = group.live
            group.barrier()
            if rank == 1:
                raise ValueError("cannot divide the cake")
            reports["failed"] = group.all_reduce(values(rank, 3)).tolist()
        except BaseException as error:
            say("report", reports=reports, error=type(error).__name__)
            raise
    say("report", reports=reports, error=None)
    return None


def test_deadlines_mistakes_revocations_and_failures_end_what_they_should_and_no_more() -> None:
    with Members(4, give_up_in_many_ways) as ranks:
        ranks.hear("whole")
        ranks.signal(2, signal.SIGINT)
        said = ranks.hear("report")
        ranks.await_exit([0, 3])
        ranks.await_exit([1], code=1)
        ranks.await_exit([2], code=-signal.SIGINT)
        assert [report["error"] for report in said] == [None, "ValueError", "KeyboardInterrupt", None]
        for rank, report in enumerate(line["reports"] for line in said):
            assert report["late"]["error"] == "DeadlineError", (rank, report["late"])
            assert report["late"]["late"] == [2], (rank, report["late"])
            assert "rank 2" in report["late"]["text"]
            assert (report["late again"]["error"], report["late again"]["cause"]) == ("ClosedError", "DeadlineError")
            assert report["different"]["error"] == "MismatchError", (rank, report["different"])
            assert "broadcast(" in report["different"]["text"]
            assert "all_reduce(" in report["different"]["text"]
            assert report["shapes"]["error"] == "MismatchError", (rank, report["shapes"])
            assert report["revoked"]["error"] == "ClosedError", (rank, report["revoked"])
            assert "rank 1 revoked" in report["revoked"]["text"]
            assert report["restored"], rank
            assert report["whole"] == total(range(4), 3).tolist()
            if rank != 2:
                assert report["interrupted"] == total([0, 1, 3], 3).tolist()
                assert report["live"] == [0, 1, 3]
            if rank in (0, 3):
                assert report["failed"] == total([0, 3], 3).tolist()


def add_up_small_arrays(losses: int) -> Any:
    """Add small arrays up until so many ranks are lost and a while longer; all remaining ranks stop after the same."""
    from covey.runtime.group.internals import engine_of

    with covey.join(on_loss="continue") as group:
        changes: list[Any] = []
        watched: list[Any] = []
        outcomes = {"long way": 0, "returned": 0, "handed over": 0}

        def watch(shortcut: Any) -> None:
            run = shortcut.run

            def watched_run(*args: Any) -> Any:
                outcome = run(*args)
                name = "long way" if outcome is False else "returned" if outcome is True else "handed over"
                outcomes[name] += 1
                return outcome

            shortcut.run = watched_run
            watched.append(shortcut)

        x, alone = np.empty(3), 0
        while True:
            shortcut = engine_of(group).all_reduce_shortcut
            if shortcut is not None and shortcut not in watched:
                watch(shortcut)
            number = group.sequence + 1
            x[:] = (1 + number % 5) * 4**group.rank, number, alone >= 200
            group.all_reduce(x)
            given = group.contributors
            assert group.sequence == number
            assert x[:2].tolist() == [(1 + number % 5) * sum(4**rank for rank in given), number * len(given)]
            if not changes or changes[-1][1] != given:
                if changes:
                    say("lost")
                changes.append((number, given))
            if number == 50:
                say("running")
            alone += len(given) == group.size - losses
            if x[2]:
                break
        return {"changes": changes, "last": group.sequence, "native": bool(watched), "outcomes": outcomes}


def test_repeated_small_sums_lose_ranks_at_the_same_operation_everywhere() -> None:
    with Members(4, add_up_small_arrays, 2, lanes="shm" if "shm" in LANES else "unix") as ranks:
        ranks.hear("running")
        for number, victim in enumerate((3, 1), start=1):
            ranks.kill(victim)
            for rank in (0, 2):
                ranks.await_said(rank, "lost", number)
        first, second = ranks.results((0, 2))
        assert (first["changes"], first["last"]) == (second["changes"], second["last"])
        assert [given for _, given in first["changes"]] == [[0, 1, 2, 3], [0, 1, 2], [0, 2]]
        for report in (first, second):
            taken = report["outcomes"]["returned"] + report["outcomes"]["handed over"]
            assert not report["native"] or taken > 150, report
        ranks.await_exit((0, 2))
