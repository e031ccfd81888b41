"""Many concurrent calls of all sizes between processes, with cancellations: `python -m covey.lab.call_stress`.

Every node calls every other one. Each result is checked, no call may run twice or stay without an end, and the memory
of no process may grow from one round to the next.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import threading
import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import CallCancelledError
from covey.runtime.joining.node import node_of
from covey.runtime.keeper.launch import launch

if TYPE_CHECKING:
    from covey.runtime.group.group import Group

STRESS_SECONDS: Final = 600.0
"""How long a call may take when thousands of them share two cores."""
GROWTH_BYTES: Final = 4 << 20
"""How much more Python and numpy may hold after the last round than after the first: lists of calls that have run."""


@dataclass(frozen=True, kw_only=True)
class CallStress:
    """What is done."""

    nodes: int = 4
    calls: int = 10_000
    """Calls that are under way at the same time, of all nodes together."""
    total_bytes: int = 2 << 30
    """Bytes of all arguments together, approximately."""
    largest_bytes: int = 32 << 20
    cancelled: float = 0.1
    """The share of calls that is cancelled at a random moment."""
    rounds: int = 2
    seed: int = 0


def main() -> None:
    """Run the stress that the command line describes, and print what each node did."""
    parser = argparse.ArgumentParser(prog="covey.lab.call_stress", description=__doc__)
    for name, kind in (("nodes", int), ("calls", int), ("rounds", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(CallStress, name))
    parser.add_argument("--megabytes", type=int, default=CallStress.total_bytes >> 20, help="of all arguments together")
    parser.add_argument("--lanes", default="secure")
    options = parser.parse_args()
    os.environ["COVEY_LANES"] = options.lanes
    stress = CallStress(
        nodes=options.nodes,
        calls=options.calls,
        rounds=options.rounds,
        seed=options.seed,
        total_bytes=options.megabytes << 20,
    )
    began = time.monotonic()
    for rank, report in enumerate(run(stress)):
        print(f"node {rank}: {report}")
    print(f"{stress.rounds} rounds of {stress.calls} calls in {time.monotonic() - began:.0f} s, seed {stress.seed}")


def run(stress: CallStress) -> list[dict[str, int]]:
    """Run the nodes as processes; return what each of them counted. AssertionError: something went wrong."""
    return launch(take_part, stress.nodes, stress, timeout=2 * STRESS_SECONDS * stress.rounds)


def take_part(group: Group, stress: CallStress) -> dict[str, int]:
    """Call the other nodes and serve them."""
    node, chance = group.node, random.Random(f"{stress.seed}/{group.rank}")
    tracemalloc.start(1)  # not what the process occupies: malloc keeps freed memory for each thread
    ran: set[tuple[int, int]] = set()
    lock = threading.Lock()

    @node.rpc
    def mirror(caller: int, number: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
        with lock:
            assert (caller, number) not in ran, f"call {number} of node {caller} ran twice"
            ran.add((caller, number))
        assert is_right(data, caller, number)
        return data[::-1]

    report = {"answered": 0, "cancelled": 0, "ran": 0, "memory_growth": 0}
    memory = list[int]()
    for turn in range(stress.rounds):
        group.barrier()
        works = []
        for index in range(stress.calls // stress.nodes):
            number = turn * stress.calls + index
            data = contents(size_of(chance, stress), group.rank, number)
            peer = chance.choice([rank for rank in range(group.size) if rank != group.rank])
            work = node.call_async(peer, "mirror", group.rank, number, data, timeout=STRESS_SECONDS)
            if chance.random() < stress.cancelled:
                threading.Timer(chance.uniform(0, 2), work.cancel).start() if index % 50 == 0 else work.cancel()
            works.append((number, data, work))
        for number, data, work in works:
            try:
                result = work.wait(STRESS_SECONDS)
            except CallCancelledError:
                report["cancelled"] += 1
                continue
            assert np.array_equal(result, data[::-1]), f"call {number} of node {group.rank} has a wrong result"
            report["answered"] += 1
        del works, work, data, result  # a work has its result
        _await_silence(group)
        group.barrier()
        gc.collect()
        memory.append(tracemalloc.get_traced_memory()[0])
    assert report["answered"] + report["cancelled"] == stress.rounds * (stress.calls // stress.nodes)
    report["ran"], report["memory_growth"] = len(ran), memory[-1] - memory[0]
    assert report["memory_growth"] < GROWTH_BYTES, f"memory grew: {memory}"
    return report


def _await_silence(group: Group) -> None:
    """Wait until no call is open here, in either direction."""
    node = node_of(group)
    assert node is not None
    assert node.calls is not None
    core, deadline = node.calls.service()._core, time.monotonic() + STRESS_SECONDS
    while len(core.outgoing) or len(core.incoming) or core.incoming.running:
        assert time.monotonic() < deadline, "calls are left without an end"
        time.sleep(0.01)


def size_of(chance: random.Random, stress: CallStress) -> int:
    """Return a size, log-uniform up to the largest, such that all together have about the total."""
    most = np.log2(stress.largest_bytes)
    mean = stress.largest_bytes / (most * np.log(2))
    rare = stress.total_bytes / stress.calls / mean
    return int(2 ** (chance.uniform(0, most) if chance.random() < rare else chance.uniform(0, most / 2)))


def contents(size: int, caller: int, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that differ by caller, call and position."""
    return (np.arange(size, dtype=np.uint32) * 7 + (caller * 31 + number) % 251).astype(np.uint8)


def is_right(data: np.ndarray[Any, np.dtype[np.uint8]], caller: int, number: int) -> bool:
    """Tell whether an array is what `contents` makes."""
    return np.array_equal(data, contents(data.size, caller, number))


if __name__ == "__main__":
    main()
