"""A coordinator and its workers, as people start them: in any order, with losses, and with a coordinator that dies."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.coordinators import ask, coordinate, free_port, status, until, work
from tests.support.machines import end, heard
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from tests.support.machines import Lab

ROOT = Path(__file__).parents[2]
SUM = [111.0 + 3 * position for position in range(5)]
"""The sum over three ranks of 10 ** rank plus the position."""


def test_training_goes_on_while_the_coordinator_is_killed_and_started_again(lab: Lab) -> None:
    machine, address = lab.machine(), f"127.0.0.1:{(port := free_port())}"
    started = {}
    order = random.sample(["w0", "w1", "w2", "coordinator"], 4)
    print("started in this order:", *order)
    for name in order:
        if name == "coordinator":
            coordinator, _ = coordinate(machine, "--size", "3", port=port)
        else:
            started[name] = work(machine, address, name, run="train")
    workers = [started[name] for name in ("w0", "w1", "w2")]
    assert [heard(worker) for worker in workers] == [["before", -1, 0, 0, False, False, True]] * 3
    assert [heard(worker) for worker in workers] == [["started", rank, 3, 1, True, True, ""] for rank in range(3)]
    assert ask(workers, "step") == [[SUM]] * 3
    assert ask(workers[:1], "fork") == [[0, 3, 1, True, True]]  # the worker is the parent, and still registered

    coordinator.kill()
    coordinator.wait(DEADLINE)
    assert ask(workers, "step") == [[SUM]] * 3
    until(lambda: not any(told[4] for told in ask(workers, "tell")))
    assert all(told[3] and "cannot be reached" in told[5] for told in ask(workers, "tell"))
    assert ask(workers, "step") == [[SUM]] * 3

    coordinator, _ = coordinate(machine, "--size", "3", port=port)
    until(lambda: all(told[4] for told in ask(workers, "tell")))
    run: Any = {}

    def is_reported() -> bool:
        run.update(status(machine, address)[0])
        return bool(run["view"]) and run["view"]["sequence"] > 0

    until(is_reported)
    assert (run["run"], run["round"], run["view"]["members"]) == ("train", 1, [0, 1, 2])
    assert [(each["rank"], each["worker_id"], each["state"]) for each in run["workers"]] == [
        (rank, f"w{rank}", "active") for rank in range(3)
    ]
    for worker in workers:
        code, out, err = end(worker)
        assert code == 0, err
        assert all("cannot be reached" in line for line in err.splitlines()), err
        assert out == '["after", -1, 0, 1, false, false]\n'
    assert {each["state"] for each in status(machine, address)[0]["workers"]} == {"left"}
    coordinator.send_signal(signal.SIGTERM)
    assert end(coordinator) == (0, "", "")
    assert lab.left_behind() == []


@pytest.mark.thorough
def test_a_worker_that_died_returns_with_its_rank(lab: Lab) -> None:
    machine = lab.machine()
    coordinator, address = coordinate(machine)
    workers = [work(machine, address, f"w{number}", size=3) for number in range(3)]
    for worker in workers:
        assert heard(worker)[0] == "before"
        assert heard(worker)[0] == "started"
    assert ask(workers, "step") == [[SUM]] * 3
    workers[1].kill()
    survivors = [workers[0], workers[2]]
    assert ask(survivors, "step") == [["lost", 1, False]] * 2
    workers[1] = work(machine, address, "w1", size=3)
    assert heard(workers[1])[0] == "before"
    assert ask(survivors, "again") == [["started", rank, 3, 2, True, True, ""] for rank in (0, 2)]
    assert heard(workers[1]) == ["started", 1, 3, 2, True, True, ""]
    assert ask(workers, "step") == [[SUM]] * 3
    for worker in workers:
        assert end(worker)[0] == 0
    coordinator.send_signal(signal.SIGINT)
    assert end(coordinator)[0] == 0


def test_functions_stay_registered_from_round_to_round(lab: Lab) -> None:
    """Of two workers, and of one that is alone in its run."""
    machine = lab.machine()
    coordinator, address = coordinate(machine)
    pair = [work(machine, address, f"w{number}", size=2) for number in range(2)]
    alone = [work(machine, address, "alone", run="alone", size=1)]
    for worker in (*pair, *alone):
        assert heard(worker)[0] == "before"
    for worker in (*pair, *alone):
        assert heard(worker)[0] == "started"
    assert ask([*pair, *alone], "register") == [["registered"]] * 3
    for number in (1, 2):
        assert ask(pair, "call") == [[[0, number], [1, number]]] * 2
        assert ask(alone, "call") == [[[0, number]]]
        if number == 1:
            assert [said[3] for said in ask([*pair, *alone], "again")] == [2] * 3
    for worker in (*pair, *alone):
        assert end(worker)[0] == 0
    coordinator.send_signal(signal.SIGINT)
    assert end(coordinator)[0] == 0


def test_the_workers_of_the_guide_meet_again_after_a_loss(lab: Lab) -> None:
    guide = (ROOT / "docs" / "guides" / "coordinator.md").read_text()
    example = ROOT / "examples" / "coordinated.py"
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert code is not None
    assert example.read_text().endswith(code[1])
    machine = lab.machine()
    _, address = coordinate(machine, "--size", "2")
    south, north = (machine.start(str(example), address, name) for name in ("south", "north"))
    assert pipes.stdout(south).readline() == "south is rank 1 of 2 in round 1\n"
    north.kill()
    north = machine.start(str(example), address, "north")
    for worker, rank in ((north, 0), (south, 1)):
        code_, out, err = end(worker)
        name = ("north", "south")[rank]
        assert code_ == 0, err
        assert f"{name} is rank {rank} of 2 in round 2\n" in out
        assert out.endswith(f"{name} found [1. 2. 3. 4. 5.] in 50 steps\n")


def test_the_coordinator_shows_the_view_of_the_run_and_its_members_save_checkpoints(lab: Lab) -> None:
    machine = lab.machine()
    _, address = coordinate(machine)
    workers = [work(machine, address, f"w{number}", size=3, on_loss="continue") for number in range(3)]
    for worker in workers:
        assert [heard(worker)[0] for _ in range(2)] == ["before", "started"]
    workers[2].kill()
    survivors = workers[:2]
    assert ask(survivors, "step") == [[[11.0 + 2 * position for position in range(5)]]] * 2
    run: Any = {}

    def has_changed() -> bool:
        run.update(status(machine, address)[0])
        return run["view"]["number"] > 0

    until(has_changed)
    assert run["view"]["members"] == [0, 1]
    assert [each["state"] for each in run["workers"]] == ["active", "active", "lost"]
    for path, code in (("model-7", 0), ("full", 1)):
        asking = machine.start("-m", "covey", "coordinator", "checkpoint", address, "run", path, "--wait", "500")
        (first, *_), second = saved = ask(survivors, "save")
        assert first == path
        assert second == saved[0]  # after the same operation
        assert end(asking)[0] == code
    last = status(machine, address)[0]["checkpoint"]
    assert (last["phase"], sorted(last["ended"]), last["error"]) == ("failed", ["w0", "w1"], "rank 1: no room")
    for worker in survivors:
        assert end(worker)[0] == 0


def test_what_cannot_work_is_an_error_that_says_what_to_do(lab: Lab) -> None:
    machine = lab.machine()
    for words, expected in (
        ((), "say where to listen"),
        (("--listen", "0.0.0.0:0"), "does not talk beyond this machine in clear text"),
        (("--listen", "here"), "is not an address"),
        (("--listen", "127.0.0.1:0", "--tls-ca", "ca.pem"), "tls-cert is missing"),
        (("--listen", "127.0.0.1:0", "--size", "2", "--max-size", "3"), "--size says exactly how many"),
        (("status", "127.0.0.1"), "is not an address"),
    ):
        done = machine.covey("coordinator", *words)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert expected in done.stderr
    silence = machine.covey("coordinator", "status", f"127.0.0.1:{free_port()}")
    assert silence.returncode == 1
    assert "cannot be reached: no program listens there" in silence.stderr


UNCHANGED = """
import os, signal, sys
import numpy as np
import covey

with covey.join(on_loss="raise") as group:
    is_first = not os.path.exists(mark := sys.argv[1])
    array = np.arange(5.0) + 10.0 ** group.rank
    group.all_reduce(array)
    print(group.rank, os.environ["RANK"], group.size, array.tolist(), sys.argv[2:], flush=True)
    group.barrier()
    if is_first and group.rank == 1:
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    if "wait" in sys.argv:
        print("waits", flush=True)
        signal.pause()
"""
"""A script that knows nothing of coordinators, and that is killed once as rank 1."""


def test_covey_worker_makes_workers_of_scripts_and_starts_them_again_for_the_next_round(lab: Lab) -> None:
    machine = lab.machine()
    script = machine.folder / "train.py"
    script.write_text(UNCHANGED)
    coordinator, address = coordinate(machine, "--size", "2")
    mark = str(machine.folder / "mark")
    started = [
        machine.start("-m", "covey", "worker", "--coordinator", address, *restarts, *words)
        for restarts, words in (
            (("--id", "w0", "--restarts", "1"), ("train.py", mark, "--flag")),
            (("--id", "w1", "--restarts", "2"), ("train.py", mark)),
        )
    ]
    summed = [11.0 + 2 * position for position in range(5)]
    for rank, worker in enumerate(started):
        code, out, err = end(worker)
        assert code == 0, err
        assert out == f"{rank} {rank} 2 {summed} {['--flag'] if rank == 0 else []}\n" * 2
        how = "was killed by SIGKILL" if rank else "failed with exit code 1"
        assert f"covey: the script {how}; it starts again (1 of {1 + rank})\n" in err
    (run,) = status(machine, address)
    assert (run["run"], run["round"]) == ("train", 2)
    assert lab.left_behind() == []

    # --coordinator behind the script; and a signal that asks for the end reaches the script.
    ended = [
        machine.start("-m", "covey", "worker", "--id", name, "train.py", "--coordinator", address, mark, "wait")
        for name in ("w0", "w1")
    ]
    for worker in ended:
        assert "['wait']" in pipes.stdout(worker).readline()
        assert pipes.stdout(worker).readline() == "waits\n"
    for worker in ended:
        worker.send_signal(signal.SIGTERM)
    assert [end(worker)[0] for worker in ended] == [128 + signal.SIGTERM] * 2
    coordinator.send_signal(signal.SIGTERM)
    assert end(coordinator)[0] == 0

    for words, expected in (
        (("train.py",), "say where the coordinator listens"),
        (("--coordinator", address, "--size", "2", "--max-size", "3", "train.py"), "size= says exactly how many"),
        (("--coordinator", address, "ls"), "is not a Python script"),
        (("--coordinator", "10.0.0.1:29300", "train.py"), "does not talk beyond this machine in clear text"),
    ):
        done = machine.covey("worker", *words)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert expected in done.stderr
    elsewhere = machine.start(str(script), mark, COVEY_WORKER="w0")
    assert "only the process that `covey worker` started" in end(elsewhere)[2]
