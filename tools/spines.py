"""Print the spines of a join and of a loss: the functions through which each leads from its cause to its end.

    python -m tools.spines [--list]

In a spine each function calls, awaits or wakes the next one; where the process waits for another one, the spine
continues with what that sends. Both walks are performed by real processes, one of which is traced. If a function of a
spine does not run in its turn, it is named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

TRACED: Final = """
import json, os, sys, threading
entered, before = [], {}
def see(frame, event, _):
    module = frame.f_globals.get("__name__") or ""
    if event == "call" and module.startswith("covey."):
        name = f"{module[6:]}:{frame.f_code.co_qualname}"
        if name in before:
            before[name]()
        entered.append(name)
def begin():
    threading.setprofile(see)
    sys.setprofile(see)
def end():
    threading.setprofile(None)
    sys.setprofile(None)
    with open(os.environ["SPINES_FILE"], "w") as file:
        json.dump(entered, file)
"""
JOIN: Final = """
import covey
is_traced = "SPINES_FILE" in os.environ
if is_traced:
    begin()
group = covey.join(run="spines", size=2)
if is_traced:
    end()
group.barrier()
group.close()
"""
LOSS: Final = """
import signal
import numpy as np
import covey
rank = os.environ["COVEY_RANK"]
is_traced = rank == "0"
if is_traced:  # from the start: the control loop is a thread of its own
    begin()
group = covey.join()
values = np.ones(1 << 20, np.float32)
for _ in range(3):
    group.all_reduce(values)
_, other, victim = (int(pid[0]) for pid in group.all_gather(np.array([os.getpid()])))
if rank == "2":
    signal.pause()
if is_traced:
    # The loss comes in the operation, and rank 1 stands still until the keeper has voted: so rank 0 notices it first.
    execute = "runtime.collectives.attempt:Attempt.execute"
    def lose():
        del before[execute]
        os.kill(other, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
    before[execute] = lose
    before["runtime.views.generation_table:GenerationTable.keeper_voted"] = lambda: os.kill(other, signal.SIGCONT)
    entered.clear()
group.all_reduce(values)
if is_traced:
    end()
group.close()
"""
SPINES: Final = {
    "a join between two nodes": (
        *("runtime.joining.bootstrap:join", "runtime.joining.bootstrap:join_with"),
        *("runtime.joining.cluster_join:join_run", "runtime.joining.cluster_join:join_run.<locals>.become_a_node"),
        *("runtime.peers.cluster_mesh:ClusterMesh.open", "runtime.peers.search:Search.run"),
        *("runtime.peers.hints:HintFollower.found", "runtime.peers.hints:HintFollower._follow"),
        *("runtime.peers.hints:HintFollower._try", "runtime.peers.dialer:Dialer.dial"),
        "runtime.links.address_race:first_of",
        *("runtime.links.handshake:dial", "runtime.links.handshake:_dial"),
        *("runtime.peers.cluster_mesh:ClusterMesh._linked", "runtime.joining.joiner:Joiner.linked"),
        *("proto.joining:Joining.link_up", "proto.formation.core:Formation.link_up"),
        *("runtime.tasks:CoreDriver.settle", "runtime.joining.joiner:Joiner.perform"),
        *("runtime.links.link:Link._deliver", "runtime.peers.mesh:LinkMesh._received"),
        *("runtime.peers.cluster_mesh:ClusterMesh.heard", "runtime.joining.joiner:Joiner.heard"),
        *("proto.joining:Joining.heard", "proto.formation.core:Formation.received"),
        *("runtime.joining.joiner:Joiner.take_seat", "runtime.joining.node:NodeParts.__init__"),
        *("runtime.views.views:Views.begin", "runtime.joining.bootstrap:group_of"),
        *("runtime.collectives.engine:Engine.__init__", "runtime.group.group:Group.__init__"),
    ),
    "a loss under a keeper": (
        *("runtime.collectives.atomic:AtomicOperations.disturbed", "runtime.views.generation:Generation.disturbed"),
        *("runtime.views.view_driver:ViewDriver.disturbed", "proto.membership.core:Membership.disturbed"),
        *("runtime.tasks:CoreDriver.settle", "runtime.views.view_driver:ViewDriver.perform"),
        *("runtime.views.generation:Generation.send", "runtime.views.generation_table:GenerationTable.keeper_voted"),
        *("runtime.views.view_driver:ViewDriver.received", "proto.membership.core:Membership.received"),
        *("runtime.views.generation:Generation.freeze", "runtime.collectives.atomic:AtomicOperations.halt"),
        "proto.membership.core:Membership.frozen",
        *("proto.membership.installer:Installer.install", "runtime.views.generation:Generation.installed"),
        *("runtime.collectives.atomic:AtomicOperations.install", "runtime.collectives.attempt:Attempt.__init__"),
        *(
            "runtime.collectives.native_executor:NativeUndoBuffer.restore",
            "runtime.collectives.attempt:Attempt.execute",
        ),
    ),
}
SECONDS: Final = 120.0
"""A guard against hangs."""


def missing(spine: tuple[str, ...], entered: list[str]) -> str | None:
    """Return the first function of a spine that did not run after the one before it; None if all did."""
    at = 0
    for function in spine:
        try:
            at = entered.index(function, at) + 1
        except ValueError:
            return function
    return None


def walk(name: str) -> list[str]:
    """Perform one of `SPINES`, and return the functions that one of its processes entered, in order."""
    with tempfile.TemporaryDirectory(prefix="spines-") as text:
        folder = Path(text)
        os.chmod(folder, 0o700)
        out = folder / "entered.json"
        program = folder / "program.py"
        env = {**os.environ, "COVEY_HOME": text, "HOME": text}
        traced = {**env, "SPINES_FILE": str(out)}
        if name.startswith("a loss"):
            program.write_text(TRACED + LOSS)
            command = [sys.executable, "-m", "covey", "run", "-n", "3", "--on-loss", "continue", str(program)]
            subprocess.run(command, env=traced, capture_output=True, timeout=SECONDS)
        else:
            program.write_text(TRACED + JOIN)
            subprocess.run([sys.executable, "-m", "covey", "init"], env=env, capture_output=True, timeout=SECONDS)
            with subprocess.Popen([sys.executable, str(program)], env=env, stderr=subprocess.PIPE, text=True) as first:
                assert first.stderr is not None
                first.stderr.readline()  # it says that it waits
                subprocess.run([sys.executable, str(program)], env=traced, timeout=SECONDS, check=True)
                first.wait(SECONDS)
        found: list[str] = json.loads(out.read_text())
        return found


def main(arguments: list[str] | None = None) -> int:
    """Perform both walks, and print their spines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the functions too")
    asked = parser.parse_args(arguments)
    is_whole = True
    for name, spine in SPINES.items():
        gone = missing(spine, walk(name))
        modules = {function.partition(":")[0] for function in spine}
        print(f"{name}: {len(spine) - 1} hops, {len(modules)} modules" + (f"; not entered: {gone}" if gone else ""))
        is_whole &= gone is None
        if asked.list:
            print(*(f"  {function}" for function in spine), sep="\n")
    return int(not is_whole)


if __name__ == "__main__":
    sys.exit(main())
