"""Generations: the killed come back, spares step in, ranks that are asked to leave go, and the numbers stay right."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from tests.support.survivors import (
    DEADLINE,
    STOPS,
    CoveyRun,
    Members,
    attempt,
    await_go,
    await_stop,
    covey,
    np,
    say,
    state_of,
    stop,
    stop_in_restore,
    tell_changes,
    threading,
    total,
    values,
)


def train(steps: int, sizes: list[int | None], count: int, leaver: int = -1) -> Any:
    """Add exact numbers up, step by step, through all generations; tell every change, and every wrong number.

    What is added in a step depends on the step and its contributors, and every rank writes these down: a state that
    went another way than its history says cannot stay unnoticed.
    """
    slot = int(os.environ["COVEY_RANK"])
    state: dict[str, Any] = {"total": np.zeros(count), "step": 0, "history": []}
    lowest, highest = sizes
    for group in covey.generations(min_size=lowest, max_size=highest):
        try:
            report = group.restore(state)
            expected = sum((step % 5 + 1) * weight for step, weight in state["history"])
            if not (state["total"] == expected * (1 + np.arange(count) % 251)).all():
                say("wrong", what="state", generation=group.generation, step=state["step"])
            say("generation", number=group.generation, rank=group.rank, size=group.size, step=state["step"],
                receivers=report.receivers, restart=os.environ.get("COVEY_RESTART", "0"),
                earlier=[each.kind for each in group.events() if each.is_earlier and each.kind != "lane"])  # fmt: skip
            while state["step"] < steps and not group.change_pending:
                step = state["step"]
                x = (step % 5 + 1) * values(group.rank, count, dtype=np.float64)
                group.all_reduce(x)
                if not (x == (step % 5 + 1) * total(group.contributors, count, dtype=np.float64)).all():
                    say("wrong", what="sum", generation=group.generation, step=step)
                weight = sum(4**rank for rank in group.contributors)
                state["total"] += x
                state["history"].append((step, weight))
                state["step"] += 1
                if slot == leaver and state["step"] == 50:
                    say("left", step=state["step"])
                    group.leave()
                    return None
                if state["step"] % 20 == 0:
                    time.sleep(0.001)  # others want to run too
            say("pending", generation=group.generation, sequence=group.sequence, contributors=group.contributors)
        except covey.GroupChangedError:
            say("excluded", generation=group.generation)
            continue
        if state["step"] == steps:
            break
    return {"step": state["step"], "history": hash(tuple(map(tuple, state["history"]))), "sum": state["total"].sum()}


def check(run: CoveyRun) -> None:
    """All numbers were right, and every generation ended after the same operation on all of its ranks."""
    assert run.said("wrong") == [], run.story("wrong numbers")
    ended: dict[int, set[Any]] = {}
    for said in run.said("pending"):
        ended.setdefault(said["generation"], set()).add((said["sequence"], tuple(said["contributors"])))
    assert all(len(ends) == 1 for ends in ended.values()), ended


def await_generation(run: CoveyRun, members: dict[int, str], after: int = -1) -> tuple[int, dict[int, Any]]:
    """Return the number of a later generation in which these are, by slot and restart, and what each said of it."""
    deadline = time.monotonic() + DEADLINE
    while True:
        found: dict[int, dict[int, Any]] = {}
        for said in run.said("generation"):
            found.setdefault(said["number"], {})[said["slot"]] = said
        for number, lines in found.items():
            if number > after and {slot: line["restart"] for slot, line in lines.items()} == members:
                assert sorted(line["rank"] for line in lines.values()) == list(range(len(members)))
                assert {line["size"] for line in lines.values()} == {len(members)}
                assert len({line["step"] for line in lines.values()}) == 1
                return number, lines
        assert time.monotonic() < deadline, run.story(f"no generation of {members}")
        time.sleep(0.01)


def pid(run: CoveyRun, slot: int) -> int:
    """Return the latest process of a slot."""
    return int(run.said("begun", slot)[-1]["pid"])


def test_killed_ranks_come_back_with_the_state_and_sigterm_takes_one_or_all_out() -> None:
    endless = 1_000_000_000
    with CoveyRun("-n", "3", "--restarts", "3", function=train, args=(endless, [1, None], 3000)) as run:
        first, _ = await_generation(run, {0: "0", 1: "0", 2: "0"})
        os.kill(pid(run, 1), signal.SIGKILL)
        second, lines = await_generation(run, {0: "0", 1: "1", 2: "0"}, first)
        assert lines[1]["step"] > 0
        assert lines[0]["receivers"] == [lines[1]["rank"]]
        assert lines[0]["earlier"] == []
        assert lines[1]["earlier"][0] == "generation"
        assert "lost" in lines[1]["earlier"], "a newcomer knows of the loss that made room for it"
        os.kill(pid(run, 0), signal.SIGKILL)  # was the first of all
        third, lines = await_generation(run, {0: "1", 1: "1", 2: "0"}, second)
        assert lines[0]["step"] > lines[1]["step"] or lines[0]["step"] == lines[2]["step"]
        assert [kind for kind in lines[0]["earlier"] if kind in ("lost", "restored")] == ["lost", "restored", "lost"]
        os.kill(pid(run, 2), signal.SIGTERM)  # a planned leave: it ends well, and is not started again
        await_generation(run, {0: "1", 1: "1"}, third)
        assert run.await_said("returned", 2)["result"]["step"] > 0
        while state_of(pid(run, 2)) != "X":
            time.sleep(0.01)  # a second SIGTERM would find it after its loop
        run.signal(signal.SIGTERM)
        assert run.await_end() == 0, run.story("not drained")
        check(run)
        notes = [note for note in run.notes if note.startswith("covey: ")]
        assert notes == [
            "covey: rank 1 was killed by SIGKILL; starting it again (1 of 3)",
            "covey: rank 0 was killed by SIGKILL; starting it again (1 of 3)",
            "covey: SIGTERM: stopping…",
        ]


def test_a_rank_leaves_by_itself_and_the_others_finish() -> None:
    with CoveyRun("-n", "3", function=train, args=(400, [1, None], 3000, 1)) as run:
        assert run.await_end() == 0, run.story("failed")
        assert [said["step"] for said in run.said("left")] == [50]
        results = [said["result"] for said in run.said("returned")]
        assert sorted(result is None for result in results) == [False, False, True]
        ends = [result for result in results if result is not None]
        assert ends[0] == ends[1]
        assert ends[0]["step"] == 400
        check(run)
        assert [note for note in run.notes if "WARNING" in note or "covey:" in note] == []


def test_a_generation_waits_for_its_least_size_and_spares_step_in() -> None:
    endless = 1_000_000_000
    with (
        CoveyRun("-n", "3", "--restarts", "2", function=train, args=(endless, [3, None], 500)) as least,
        CoveyRun("-n", "4", function=train, args=(endless, [1, 3], 500)) as most,
    ):
        first, _ = await_generation(least, {0: "0", 1: "0", 2: "0"})
        os.kill(pid(least, 2), signal.SIGKILL)
        second, lines = await_generation(least, {0: "0", 1: "0", 2: "1"}, first)
        assert all(said["size"] == 3 for said in least.said("generation"))
        assert second == first + 1
        assert lines[0]["step"] > 0
        check(least)

        deadline = time.monotonic() + DEADLINE
        while len(inside := {said["slot"]: "0" for said in most.said("generation")}) < 3:
            assert time.monotonic() < deadline, most.story("no first generation")
            time.sleep(0.01)
        spare = next(slot for slot in range(4) if slot not in inside)
        first, _ = await_generation(most, inside)
        victim = min(inside)
        os.kill(pid(most, victim), signal.SIGKILL)
        _, lines = await_generation(most, {slot: "0" for slot in range(4) if slot != victim}, first)
        assert lines[spare]["step"] > 0
        check(most)
        for run in (least, most):
            run.signal(signal.SIGTERM)
        assert [run.await_end() for run in (least, most)] == [0, 0]


def stop_and_go(count: int) -> Any:
    """Add up for ever, telling the contributors of each step; a rank that was given up comes back as a newcomer."""
    state: dict[str, Any] = {"step": 0}
    stopping = threading.Event()

    def stop_when_told() -> None:
        await_go()
        stopping.set()

    threading.Thread(target=stop_when_told, daemon=True).start()
    for group in covey.generations(min_size=2):
        try:
            tell_changes(group)
            mine = values(group.rank, count)
            group.restore(state)
            say("generation", number=group.generation, size=group.size)
            history: dict[int, Any] = {}
            while not group.change_pending:
                x = mine * (1 + state["step"] % 3)
                group.all_reduce(x)
                if not (x == (1 + state["step"] % 3) * total(group.contributors, count)).all():
                    say("wrong", generation=group.generation, sequence=group.sequence)
                if group.contributors not in history.values():
                    history[group.sequence] = group.contributors
                    say("contributors", generation=group.generation, sequence=group.sequence, ranks=group.contributors)
                state["step"] += 1
                if group.all_reduce(stopping.is_set(), "or"):
                    return state["step"]
        except covey.GroupChangedError as error:
            say("excluded", generation=group.generation, text=str(error))
    return None


@pytest.mark.parametrize("stops", [4, pytest.param(STOPS, marks=pytest.mark.thorough)])
def test_stopped_and_given_up_and_continued_ranks_never_make_a_wrong_number(stops: int) -> None:
    size, at_once = 4, 2
    with Members(size, stop_and_go, 30_000) as ranks:
        for rank in range(size):
            ranks.await_said(rank, "contributors")
        for number in range(stops // at_once):
            victims = [(number + i) % size for i in range(at_once)]
            before = {rank: len(ranks.all_said(rank, "excluded")) for rank in victims}
            for rank in victims:
                stop(ranks.pid(rank))
                time.sleep(0.003 * (number % 5))
            others = [rank for rank in range(size) if rank not in victims]
            known = {rank: len(ranks.all_said(rank, "contributors")) for rank in others}
            for rank in others:
                while len(ranks.await_said(rank, "contributors", known[rank] + 1)["ranks"]) > len(others):
                    known[rank] += 1
            for rank in victims:
                ranks.signal(rank, signal.SIGCONT)
            for rank in victims:
                assert "join the run again" in ranks.await_said(rank, "excluded", before[rank] + 1)["text"]
            for rank in range(size):
                count = 1
                while ranks.await_said(rank, "generation", count)["size"] < size or (
                    rank in victims and ranks.await_said(rank, "generation", count)["at"]
                    < ranks.all_said(rank, "excluded")[-1]["at"]
                ):  # fmt: skip
                    count += 1
        ranks.go(0)
        assert len(set(ranks.results())) == 1
        ranks.await_exit()
        agreed: dict[Any, Any] = {}
        for rank in range(size):
            assert ranks.all_said(rank, "wrong") == []
            for said in ranks.all_said(rank, "contributors"):
                key = said["generation"], said["sequence"]
                assert agreed.setdefault(key, said["ranks"]) == said["ranks"], (rank, said)


def hold_the_state(count: int, catcher: int) -> Any:
    """Bring a large state to newcomers, and do small steps in between; each that is `catcher` stops half-way."""
    slot, restart = int(os.environ["COVEY_RANK"]), int(os.environ.get("COVEY_RESTART", "0"))
    right = 7 * values(5, count)
    state: dict[str, Any] = {"w": 2 * values(slot, count) if restart else right.copy(), "step": 0}
    if restart and slot == catcher:
        stop_in_restore(3, lambda: say("stops", done=int((state["w"] == right).sum()), of=count))
    for group in covey.generations():
        report = group.restore(state)
        is_right = bool((state["w"] == right).all())
        say("restored", size=group.size, step=state["step"], received=report.bytes_received, right=is_right)
        while not group.change_pending:
            x = group.all_reduce(values(group.rank, 100))
            assert (x == total(group.contributors, 100)).all()
            state["step"] += 1
            time.sleep(0.002)
    return state["step"]


@pytest.mark.thorough
def test_donors_and_newcomers_may_die_while_the_state_is_restored() -> None:
    with Members(3, hold_the_state, 16 << 20, 2) as ranks:
        for rank in range(3):
            ranks.await_said(rank, "restored")

        def come_half_way(number: int) -> None:
            ranks.begin_again(2, number)
            said = ranks.await_said(2, "stops", number)
            assert 0 < said["done"] < said["of"]
            await_stop(ranks.pid(2))

        ranks.kill(2)
        come_half_way(1)
        ranks.kill(2)  # the newcomer dies
        for rank in (0, 1):
            said = ranks.await_said(rank, "restored", 2)
            assert (said["size"], said["right"], said["received"]) == (3, True, 0)
        come_half_way(2)
        ranks.kill(1)  # one of its donors dies
        ranks.signal(2, signal.SIGCONT)
        for rank, count in ((0, 3), (2, 2)):
            said = ranks.await_said(rank, "restored", count)
            assert said["right"], said
            assert said["step"] > 0
        ranks.begin_again(1, 1)
        said = ranks.await_said(1, "restored", 3)
        assert said["right"]
        assert said["size"] == 3
        steps = ranks.await_said(0, "restored", 4)["step"]
        ranks.kill(0)  # the last that was there from the beginning
        ranks.begin_again(0, 1)
        said = ranks.await_said(0, "restored", 5)
        assert said["right"]
        assert said["step"] > steps
        for rank in range(3):
            ranks.signal(rank, signal.SIGTERM)
        assert min(ranks.results()) > steps  # the rank that is asked last may go on for some steps without the others
        ranks.await_exit()


def come_back_late(late: int) -> Any:
    """One rank does not come back for the second generation."""
    state = {"step": 0}
    for group in covey.generations():
        group.restore(state)
        say(
            "generation", number=group.generation, size=group.size, rank=group.rank, live=group.live, step=state["step"]
        )
        while not group.change_pending:
            x = group.all_reduce(values(group.rank, 100))
            assert (x == total(group.contributors, 100)).all()
            state["step"] += 1
            time.sleep(0.002)
        say("pending", number=group.generation, sequence=group.sequence)
        if group.rank == late:
            threading.Event().wait()
    return state["step"]


def test_a_rank_is_lost_while_the_run_grows_and_one_comes_back_before_its_death_is_known() -> None:
    late = 1
    with Members(4, come_back_late, late) as ranks:
        for rank in range(4):
            ranks.await_said(rank, "generation")
        ranks.kill(3)
        ranks.begin_again(3, 1)  # at once
        for rank in (0, 1, 2):
            ranks.await_said(rank, "pending")
        ranks.kill(late)  # the others wait for it to begin the next generation
        said = [ranks.await_said(rank, "generation", 2) for rank in (0, 2, 3)]
        assert len({(line["number"], line["step"]) for line in said}) == 1
        assert [line["size"] for line in said] == [3, 3, 3]
        assert sorted(line["rank"] for line in said) == [0, 1, 2]
        assert said[0]["step"] > 0


def wait_for_a_quorum(victims: list[int]) -> Any:
    """Go on for ever, without a keeper, until too few are left."""
    with covey.join(on_loss="continue", patience=1.5) as group:
        group.barrier()
        say("ready")

        def work() -> None:
            while True:
                group.all_reduce(values(group.rank, 1000))

        if group.rank in victims:
            threading.Event().wait()
        reports = attempt(work), attempt(group.barrier)
        say("gave up")
        await_go()
        return reports


def test_a_minority_without_a_keeper_says_which_ranks_are_missing_and_what_to_do() -> None:
    victims, others = (0, 2, 4), (1, 3)
    with Members(5, wait_for_a_quorum, victims, is_kept=False) as ranks:
        ranks.hear("ready")
        for rank in others:  # else four might have agreed to go on before the others of them are killed
            ranks.signal(rank, signal.SIGSTOP)
        for victim in victims:
            ranks.kill(victim)
        for rank in others:
            ranks.signal(rank, signal.SIGCONT)
        ranks.hear("gave up", others)
        for rank in others:
            ranks.go(rank)
        for first, further in ranks.results(others):
            assert first["error"] == "QuorumLostError", first
            text = first["text"]
            assert "2 of the 5 members" in text
            for victim in victims:
                assert f"rank {victim} (" in text
            assert "the tie-breaker, rank 0" in text
            for option in ("within 1.5 s", "patience=", "quorum='any'", "Start the missing ones"):
                assert option in text
            assert (further["error"], further["text"]) == ("QuorumLostError", text)
        ranks.await_exit(others)
