"""`covey status --graph` shows what the ranks of a run have measured."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

from tests.support import pipes
from tests.support.waiting import DEADLINE

PROGRAM = """
import json, sys
import numpy as np
import covey
with covey.join("measured", size=3, plan="always") as group:
    for number in range(10_000):  # links that seem slow are measured in parts, over more operations
        group.all_reduce(np.ones(1 << 18, np.float32))
        is_measured = group.all_reduce(group.node.topology().measured_at is not None, "and")
        if number >= 3 and (is_measured or group.size == 2):
            break
    print(json.dumps(group.node.topology().measured_at), flush=True)
    sys.stdin.readline()
"""
PLAIN = PROGRAM.replace('"measured"', '"plain"').replace("size=3", "size=2")


def test_status_draws_the_links_that_ranks_have_measured(lab) -> None:
    machine = lab.machine("one", "home")
    nodes = [machine.start("-c", PROGRAM) for _ in range(3)] + [machine.start("-c", PLAIN) for _ in range(2)]
    said = [json.loads(pipes.stdout(node).readline()) for node in nodes]
    assert [at is not None for at in said] == [True] * 3 + [False] * 2
    drawn = machine.covey("status", "--graph", "--svg", "links.svg", COLUMNS="80")
    assert drawn.returncode == 0, drawn.stderr
    assert "run measured: 3 machines at" in drawn.stdout
    assert "bit/s" in drawn.stdout
    assert "run plain: its links are not measured" in " ".join(drawn.stdout.split())
    assert all(len(line) <= 80 for line in drawn.stdout.splitlines())
    assert "run measured" in "".join(ET.parse(machine.folder / "links.svg").getroot().itertext())
    for node in nodes:
        pipes.stdin(node).write("\n")
        pipes.stdin(node).flush()
    assert [node.wait(DEADLINE) for node in nodes] == [0] * 5
