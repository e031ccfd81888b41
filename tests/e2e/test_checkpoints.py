"""Checkpoints of a run of real processes: requested by ranks and by a signal, seen after the same operation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support import forked
from tests.support.jobs import SOURCE
from tests.support.survivors import Members, covey, np, say
from tests.support.waiting import DEADLINE, wait_until


def train(on_loss: covey.OnLoss) -> dict[str, Any]:
    with covey.join(on_loss=on_loss, timeout=DEADLINE) as group:
        seen: list[list[Any]] = []
        group.node.on_event(lambda event: say(event.text.partition(":")[0]), ["checkpoint"])
        x, step = np.arange(4.0), 0
        while len(seen) < 3:
            step += 1
            works = [group.all_reduce(x + group.rank, async_op=True) for _ in range(step % 3)]
            if not works:
                group.all_reduce(x)
            pending = group.checkpoint_pending
            for work in works:
                work.wait()
            if step == 40 and group.rank == 1:
                assert group.request_checkpoint("/data/é", id="first") == "first"
                assert group.request_checkpoint("/other") == "first"
            if pending:
                seen.append([pending.id, pending.path, pending.since, step])
                say(f"seen {len(seen)}")
                if len(seen) == 3 and group.rank == 2 and on_loss == "continue":
                    threading.Event().wait()  # until it is killed
                group.end_checkpoint("disk full" if pending.id == "first" and group.rank == 1 else "")
                assert group.checkpoint_pending is None or group.checkpoint_pending.id != pending.id
                say(f"saved {len(seen)}")
            if len(seen) == 2 and group.rank == 2 and step % 10 == 0:
                group.request_checkpoint(id="third")

        def events() -> list[list[Any]]:
            return [[event.text, list(event.ranks)] for event in group.events() if event.kind == "checkpoint"]

        while len(events()) < 6:
            time.sleep(0.01)
        assert group.request_checkpoint(id="third") == "third"  # it is over, so nothing happens
        return {"seen": seen, "events": events()}


@pytest.mark.parametrize("on_loss", ["raise", "continue"])
def test_all_ranks_see_a_checkpoint_after_the_same_operation(on_loss: str) -> None:
    with Members(3, train, on_loss) as members:
        members.hear("failed first", [0])  # until it is over, a request is for this one
        members.signal(0, signal.SIGUSR2)
        members.hear("seen 3")
        remaining = [0, 1, 2]
        if on_loss == "continue":
            members.hear("saved 3", [0, 1])  # and wait for rank 2
            members.kill(2)
            remaining = [0, 1]
        results = members.results(remaining)
    seen, events = results[0]["seen"], results[0]["events"]
    assert [result["seen"] for result in results] == [seen] * len(remaining)
    assert [(name, path) for name, path, _, _ in seen][::2] == [("first", "/data/é"), ("third", "")]
    second = seen[1][0]
    assert all(result["events"] == events for result in results)
    assert events == [
        ["begun first", [0, 1, 2]],
        ["failed first: rank 1: disk full", [1]],
        [f"begun {second}", [0, 1, 2]],
        [f"ended {second}", [0, 1, 2]],
        ["begun third", [0, 1, 2]],
        ["ended third", remaining],
    ]


def test_a_process_that_is_alone_has_checkpoints() -> None:
    with covey.join() as group:
        assert group.checkpoint_pending is None
        name = group.request_checkpoint("/somewhere")
        assert group.checkpoint_pending is None  # until the next operation
        group.barrier()
        pending = group.checkpoint_pending
        assert pending == covey.Checkpoint(name, "/somewhere", 1)
        group.end_checkpoint()
        assert group.checkpoint_pending is None
        with pytest.raises(covey.ConfigError, match="no checkpoint is pending"):
            group.end_checkpoint()
        with pytest.raises(covey.ConfigError, match=r"covey\.join"):
            group.split(0).request_checkpoint()
        for path, name in (("a\nb", ""), ("x" * 1001, ""), ("", "two words"), ("", "x" * 101)):
            with pytest.raises(covey.ConfigError, match="printable"):
                group.request_checkpoint(path, id=name)


SCRIPT = """
import covey, os, sys, time
with covey.join() as group:
    print("ready", flush=True)
    while True:
        group.barrier()
        time.sleep(0.005)
        if checkpoint := group.checkpoint_pending:
            with open(f"{sys.argv[1]}-{group.rank}", "a") as file:
                print(checkpoint.path, checkpoint.since, file=file)
            group.end_checkpoint("disk full" if checkpoint.path == "full" and group.rank == 1 else "")
        done = group.all_reduce(os.path.exists(sys.argv[1]), "or")
        if done:
            break
"""


def test_a_command_and_a_signal_to_covey_run_ask_a_run_of_this_machine(tmp_path: Path) -> None:
    name = f"job{os.getpid()}"
    script, stop = tmp_path / f"{name}.py", tmp_path / "stop"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "COVEY_HOME": str(tmp_path / "home")}
    covey_command = [sys.executable, "-m", "covey"]
    job = forked.Popen(
        [*covey_command, "run", "-n", "2", str(script), str(stop)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def ask(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*covey_command, "checkpoint", *options]
        return forked.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)

    try:
        assert job.stdout is not None
        for _ in range(2):
            assert job.stdout.readline().endswith("ready\n")
        saved = ask(name, "--path", "/a b", "--wait", "--json")
        assert saved.returncode == 0, saved.stderr
        facts = json.loads(saved.stdout)
        assert (facts["run"], facts["state"], facts["failed"]) == (name, "over", "")
        failed = ask(name, "--path", "full", "--wait")
        assert failed.returncode == 1, failed.stderr
        assert failed.stdout.endswith(" failed: rank 1: disk full\n")
        refused = ask(name, "--path", "x" * 1001)
        assert refused.returncode == 2
        assert "1000 printable characters" in refused.stderr
        job.send_signal(signal.SIGUSR2)
        files = [Path(f"{stop}-{rank}") for rank in range(2)]
        wait_until(lambda: all(path.read_text().count("\n") == 3 for path in files))
        assert files[0].read_text() == files[1].read_text()
        lines = files[0].read_text().splitlines()
        assert [line.rpartition(" ")[0] for line in lines] == ["/a b", "full", ""]
        stop.touch()
        _, errors = job.communicate(timeout=DEADLINE)
        assert job.returncode == 0, errors
        assert "covey: SIGUSR2: the ranks are asked for a checkpoint\n" in errors
        gone = ask(name)
        assert gone.returncode == 2
        assert f"no run '{name}' is running here" in gone.stderr
    finally:
        job.kill()
        job.wait(DEADLINE)
