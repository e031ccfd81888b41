"""Losses in the middle of compressed operations: the same bits on all remaining ranks, and no gradient lost or doubled.

In every step, what the contributors gave, with what they had held back before, is what they received and what they hold
back now. That is no longer so if a residual is added twice, or kept from an attempt that was given up.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from tests.support.sets import only
from tests.support.survivors import CoveyRun, Members, attempt, covey, np, say

PLACES = {"int8": (3, 2), "int4(stochastic=True)": (2, 3), "topk(0.05)": (2, 4), "powersgd(2)": (3, 4)}
"""By codec, where the first and the second rank die: when they begin their n-th plan or decoding of an operation."""


def reduce_and_die(on_loss: covey.OnLoss, codec: str, deaths: list[list[int]]) -> Any:
    """Take steps with the others. `deaths` are rank, step and place: there a rank kills itself."""
    import functools
    import hashlib

    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.compressed.dense import PlanCoder

    with covey.join(on_loss=on_loss) as group:
        mine = {step: place for rank, step, place in deaths if rank == group.rank}
        feedback = covey.ErrorFeedback()
        names = {"v": (50, 60), "w": (60, 80)}
        done = {"step": -1, "operation": 0, "count": 0}

        def counted(method: Any) -> Any:
            def call(self: Any, *given: Any, **options: Any) -> Any:
                if done["operation"] != group.sequence:
                    done.update(operation=group.sequence, count=0)
                done["count"] += 1
                if mine.get(done["step"]) == done["count"]:
                    say("dying", step=done["step"])
                    os.kill(os.getpid(), signal.SIGKILL)
                return method(self, *given, **options)

            return call

        for kind, name in ((Attempt, "execute"), (PlanCoder, "decode")):
            setattr(kind, name, counted(getattr(kind, name)))

        def held_back() -> dict[str, Any]:
            residuals = feedback.state_dict()["residuals"]
            return {name: residuals.get(name, np.zeros(shape, np.float32)) for name, shape in names.items()}

        def reduce(x: dict[str, Any], step: int) -> None:
            if step % 2:
                group.sync_gradients(x, compress=f"{codec}, smallest=0", feedback=feedback)
            else:
                for name in x:
                    group.all_reduce(x[name], "mean", compress=codec, feedback=feedback, name=name)

        records = []
        for step in range(8):
            rng = np.random.default_rng([group.rank, step])
            given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()}
            before, received = held_back(), {name: x.copy() for name, x in given.items()}
            done["step"] = step
            outcome = attempt(functools.partial(reduce, received, step))
            done["step"] = -1
            after, contributors = held_back(), group.contributors
            if outcome["error"] is not None:
                is_kept = all(after[name].tobytes() == before[name].tobytes() for name in names)
                return {"error": outcome["error"], "rank": outcome["rank"], "is_kept": is_kept, "step": step}
            worst, digest = 0.0, hashlib.sha256()
            for name, x in given.items():
                balance = x.astype(np.float64) + before[name] - after[name]
                group.all_reduce(balance, compress="none")
                worst = max(worst, float(np.abs(balance - len(group.contributors) * received[name]).max()))
                digest.update(received[name].tobytes())
            holds = float(np.mean([np.abs(residual).mean() for residual in after.values()]))
            records.append([contributors, digest.hexdigest(), worst, holds])
        return records


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.thorough)], ids=["compiled", "python"])
@pytest.mark.parametrize("codec", only(["int8", "powersgd(2)"], PLACES))
def test_survivors_finish_with_the_same_bits_and_the_residuals_of_the_last_attempt(codec: str, native: str) -> None:
    first, second = PLACES[codec]
    deaths, others = [[3, 2, first], [1, 5, second]], (0, 2)
    lanes = {"int8": "secure", "topk(0.05)": "secure"}.get(codec, "tcp") if native == "1" else "shm"
    with Members(4, reduce_and_die, "continue", codec, deaths, lanes=lanes, env={"COVEY_NATIVE": native}) as ranks:
        ranks.hear("dying", (1, 3))
        reports = ranks.results(others)
        ranks.await_exit(others)
    for step, records in enumerate(zip(*reports, strict=True)):
        assert len({digest for _, digest, _, _ in records}) == 1, step
        for contributors, _, worst, holds in records:
            # The first of two operations of step 2 has lost rank 3; of step 5, the only one has lost rank 1.
            assert contributors == [
                rank for rank in range(4) if not ((rank == 3 and step >= 2) or (rank == 1 and step >= 5))
            ]
            assert worst < 1e-4, (step, worst)
            assert holds > 1e-4, "nothing was held back, so nothing is tested"


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(codec, marks=pytest.mark.thorough) for codec in ("topk(0.05)", "powersgd(2)"))]
)
def test_where_losses_raise_all_are_told_of_the_rank_and_residuals_stay_as_they_were(codec: str) -> None:
    victim, others, step = 2, (0, 1, 3), 2
    with Members(4, reduce_and_die, "raise", codec, [[victim, step, PLACES[codec][0]]], lanes="tcp") as ranks:
        for report in ranks.results(others):
            assert report == {"error": "PeerLostError", "rank": victim, "is_kept": True, "step": step}
        ranks.await_exit(others)


def choose_and_die(deaths: list[list[int]]) -> Any:
    """Let "auto" choose by a clock that says that codecs help. `deaths` are rank, call and phase: there a rank dies."""
    import hashlib
    from types import SimpleNamespace

    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.compressed import automatic

    execute, reduce = Attempt.execute, automatic.Tuner.reduce
    done = {"call": -1, "phase": 0}
    clock = SimpleNamespace(now=0.0)

    def timed(tuner: Any, attempt: Any, auto: Any, size: Any, perform: Any) -> Any:
        def performed(codec: Any) -> None:
            perform(codec)
            clock.now += 0.2 if codec is None else 0.06

        return reduce(tuner, attempt, auto, size, performed)

    setattr(automatic, "time", SimpleNamespace(perf_counter=lambda: clock.now))  # noqa: B010
    setattr(automatic.Tuner, "reduce", timed)  # noqa: B010
    with covey.join(on_loss="continue") as whole:
        mine = {call: phase for rank, call, phase in deaths if rank == whole.rank}
        group = whole.split(0)

        def counted(self: Any, *given: Any, **options: Any) -> Any:
            done["phase"] += 1
            if mine.get(done["call"]) == done["phase"]:
                say("dying", call=done["call"])
                os.kill(os.getpid(), signal.SIGKILL)
            return execute(self, *given, **options)

        setattr(Attempt, "execute", counted)  # noqa: B010  # mypy knows it as a method
        records = []
        for call in range(6):
            x = np.random.default_rng([group.rank, call]).standard_normal(40_000).astype(np.float32)
            balance = x.astype(np.float64)
            done.update(call=call, phase=0)
            group.all_reduce(x, compress="auto")
            done.update(call=-1)
            group.all_reduce(balance, compress="none")
            error = float(np.abs(balance - x).max() / np.abs(balance).max())
            digest = hashlib.sha256(x.tobytes()).hexdigest()
            records.append([group.contributors, digest, error, group.compression.codec, group.compression.reason])
        group.close()
        return records


def test_ranks_choose_alike_also_if_others_die_while_they_compare_what_they_have_measured() -> None:
    deaths, others = [[1, 2, 1], [3, 3, 2], [4, 5, 1]], (0, 2)
    with Members(5, choose_and_die, deaths, lanes="tcp") as ranks:
        ranks.hear("dying", (1, 3, 4))
        first, second = ranks.results(others)
        ranks.await_exit(others)
    assert [record[:2] + record[3:] for record in first] == [record[:2] + record[3:] for record in second]
    assert [record[0] for record in first] == [[0, 1, 2, 3, 4]] * 2 + [[0, 2, 3, 4], [0, 2, 4], [0, 2, 4], [0, 2]]
    assert [record[3] for record in first] == ["none"] * 2 + ["int8"] * 4
    assert all(record[2] < 0.02 for record in first + second)


def train(codec: str, warmup: int) -> Any:
    """Take steps through all generations, with one feedback for all of them, until a newcomer has taken ten."""
    import hashlib

    feedback = covey.ErrorFeedback(warmup=warmup)
    state: dict[str, Any] = {"w": np.zeros((30, 40)), "step": 0}
    for group in covey.generations(min_size=2):
        group.restore(state)
        say("generation", number=group.generation, rank=group.rank, step=state["step"], held=list(feedback.names()))
        taken = 0
        while not group.change_pending and not (group.generation and taken == 10):
            given = np.random.default_rng([group.rank, state["step"]]).standard_normal((30, 40)).astype(np.float32)
            before = feedback.state_dict()["residuals"].get("w", np.zeros_like(given))
            received = group.all_reduce(given.copy(), "mean", compress=codec, feedback=feedback, name="w")
            contributors, used = group.contributors, group.compression.codec
            balance = given.astype(np.float64) + before - feedback.state_dict()["residuals"]["w"]
            group.all_reduce(balance, compress="none")
            error = float(np.abs(balance - len(contributors) * received).max())
            if group.contributors == contributors and error > 1e-4:
                say("wrong", what="balance", step=state["step"], error=error)
            if used != (codec if state["step"] >= warmup else "none") and len(contributors) > 1:
                say("wrong", what="codec", step=state["step"], used=used)
            state["w"] += received
            state["step"] += 1
            taken += 1
            say("step", number=state["step"], generation=group.generation)
            time.sleep(0.002)
        if group.generation and taken == 10:
            return {"w": hashlib.sha256(state["w"].tobytes()).hexdigest(), "step": state["step"]}
    return None


@pytest.mark.parametrize("codec", [pytest.param("int4", marks=pytest.mark.thorough), "powersgd(2)"])
def test_a_rank_that_comes_back_starts_with_zeros_and_all_go_on_alike(codec: str) -> None:
    with CoveyRun("-n", "3", "--restarts", "1", function=train, args=(codec, 5)) as run:
        run.await_said("step", 1, count=8)
        os.kill(run.said("begun", 1)[-1]["pid"], signal.SIGKILL)
        assert run.await_end() == 0, run.story("failed")
        assert run.said("wrong") == []
        assert len({line["result"]["w"] for line in run.said("returned")}) == 1
        later = {line["slot"]: line["held"] for line in run.said("generation") if line["number"] > 0}
        assert later == {0: ["w"], 1: [], 2: ["w"]}
