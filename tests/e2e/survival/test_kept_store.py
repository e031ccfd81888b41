"""The store of a run on one host, whose changes its keeper orders: no member holds it up, and no loss takes it away."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a keeper sees only that a process exists"),
]
SOURCE = Path(__file__).parents[3] / "src"


def run(folder: Path, size: int, body: str, *options: str) -> tuple[dict[int, dict[str, object]], str]:
    """Return the last line of every rank of a run, which is JSON, and all errors."""
    (folder / "job.py").write_text(textwrap.dedent(body))
    words = [sys.executable, "-m", "covey", "run", "-n", str(size), *options, "job.py"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = forked.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE)
    said = (re.fullmatch(r"\[(\d+)\] ({.*)", line) for line in ended.stdout.splitlines())
    return {int(line[1]): json.loads(line[2]) for line in said if line is not None}, ended.stdout + ended.stderr


def test_a_rank_that_hears_nothing_holds_up_no_other_rank_although_it_stays_a_member(tmp_path: Path) -> None:
    """A long call of C keeps the interpreter's lock. The keeper sees that the process lives: it stays in the view."""
    body = """
        import ctypes, json, os
        import covey

        os.mkfifo("gate") if os.environ["RANK"] == "1" else None
        with covey.join(on_loss="continue") as group:
            store = group.node.store
            group.barrier()
            if group.rank == 1:
                gate = os.open("gate", os.O_RDWR)
                store.set("busy", "")
                ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), 1)  # keeps the interpreter's lock
            else:
                store.wait("busy")
                sums = [store.add("count") for _ in range(50)]
                for number in range(50):
                    store.set(f"of {group.rank}", str(number))
                    assert store.get(f"of {group.rank}") == str(number).encode()
                if store.add("done") == 2:
                    gate = os.open("gate", os.O_WRONLY)
                    os.write(gate, b"x")
            store.wait("done")
            group.barrier()
            lost = [event.kind for event in group.events() if event.kind in ("lost", "view")]
            print(json.dumps({"count": store.add("count", 0), "size": group.size, "lost": lost}), flush=True)
            group.barrier()
    """
    said, text = run(tmp_path, 3, body)
    assert said == {key: {"count": 100, "size": 3, "lost": []} for key in range(3)}, text


def test_the_ranks_beside_a_stopped_one_go_on_and_it_learns_that_it_is_in_the_run_no_more(tmp_path: Path) -> None:
    body = """
        import json, os, signal
        import covey

        with covey.join(on_loss="continue") as group:
            store = group.node.store
            store.set(f"alive/{group.rank}", "", until="member")
            group.barrier()
            if group.rank == 0:  # the member that is longest in the run
                store.set("stopped", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
                try:
                    while True:
                        store.add("count")
                except covey.GroupChangedError:
                    print(json.dumps({"ended": True}), flush=True)
                os._exit(0)
            (pid,) = store.wait("stopped")
            sums = [store.add("count") for _ in range(50)]
            for alive in store.watch_prefix("alive/"):
                if sorted(alive) == ["alive/1", "alive/2"]:
                    break
            if store.add("done") == 2:
                os.kill(int(pid), signal.SIGCONT)
            print(json.dumps({"sums": sums}), flush=True)
            group.barrier()
    """
    said, text = run(tmp_path, 3, body)
    assert said[0] == {"ended": True}, text
    sums = [number for rank in (1, 2) for number in said[rank]["sums"]]  # type: ignore[attr-defined]
    assert sorted(sums) == list(range(1, 101)), text


def test_entries_outlive_all_members_if_the_run_begins_anew(tmp_path: Path) -> None:
    body = """
        import json, os, signal
        import covey

        with covey.join(on_loss="continue") as group:
            store = group.node.store
            if os.environ.get("COVEY_RESTART", "0") == "0":
                store.set_all({f"of {group.rank}": str(group.rank), "large": b"x" * (2 << 20)})
                store.set(f"alive/{group.rank}", "", until="member")
                store.add("count", group.rank + 1)
                group.barrier()
                if store.add("dying") == 3:
                    store.set("all", "")
                store.wait("all")
                os.kill(os.getpid(), signal.SIGKILL)
            found = {key: len(value) for key, value in store.items().items()}
            print(json.dumps({"found": found, "count": store.add("count", 0)}), flush=True)
            group.barrier()
    """
    said, text = run(tmp_path, 3, body, "--restarts", "1")
    found = {"of 0": 1, "of 1": 1, "of 2": 1, "large": 2 << 20, "count": 1, "dying": 1, "all": 0}
    assert said == {key: {"found": found, "count": 6} for key in range(3)}, text


def test_a_run_that_all_ranks_have_left_and_joined_again_begins_with_an_empty_store(tmp_path: Path) -> None:
    body = """
        import json
        import covey

        for _ in range(2):
            with covey.join(on_loss="continue", timeout=20) as group:
                group.node.store.add("count")
                group.barrier()
                count = group.node.store.add("count", 0)
                group.barrier()
        print(json.dumps({"count": count}), flush=True)
    """
    said, text = run(tmp_path, 2, body)
    assert said == {key: {"count": 2} for key in range(2)}, text
    assert "another generation" not in text


def test_the_file_of_a_store_has_what_every_rank_was_told_is_done(tmp_path: Path) -> None:
    """Its rank writes it, although the keeper orders the changes."""
    body = """
        import json
        import covey

        with covey.join(settings={"store_file": "store"}) as group:
            store = group.node.store
            before = store.keys()
            group.barrier()
            for number in range(20):
                store.set(f"of {group.rank}/{number}", str(number))
            store.set(f"alive/{group.rank}", "", until="member")
            group.barrier()
            print(json.dumps({"before": len(before)}), flush=True)
    """
    assert run(tmp_path, 3, body)[0] == {key: {"before": 0} for key in range(3)}
    said, text = run(tmp_path, 3, body)
    assert said == {key: {"before": 60} for key in range(3)}, text
