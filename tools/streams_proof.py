"""Measures sums between two distant hosts by the number of streams of their lane: `python -m tools.streams_proof`.

Two network namespaces are joined by the switch of `covey.testing`, which delays packets. A single stream is slow there:
because the kernel keeps little for each connection, or because packets get lost. In the last case the link is full with
one stream. Needs root; prints a table for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from typing import Any, Final

from covey.testing.netns import Lan

COUNTS: Final = (1, 4, 16, 64, "auto")
FIXED_SECONDS: Final = 12.0
AUTO_SECONDS: Final = 45.0
"""How long a run adds up; `auto` needs some time for its trials."""
PROGRAM: Final = """
import json, sys, time
import numpy as np
import covey
options = json.loads(sys.argv[1])
seconds = options.pop("seconds")
x = np.zeros(1 << 21, np.float32)
with covey.join("streams", **options) as group:
    group.barrier()
    began, took = time.perf_counter(), []
    while not x[0]:
        x[:] = 0
        x[0] = time.perf_counter() - began > seconds
        since = time.perf_counter()
        group.all_reduce(x)
        took.append(time.perf_counter() - since)
    last = took[-max(1, len(took) // 3):]
    print(json.dumps([x.nbytes * len(last) / sum(last), group.lanes().streams[1 - group.rank]]))
"""


@dataclass(frozen=True)
class Case:
    """A network between two hosts."""

    name: str
    delay: float
    """Of one way, in seconds."""
    loss: float = 0.0
    window: int = 0
    """Bytes that the kernel keeps for a connection; 0: as many as it likes."""
    bytes_per_second: float = 0.0


CASES: Final = (
    Case("50 ms, 128 KiB a connection", 0.025, window=1 << 17),
    Case("100 ms, 0.1 % loss, Reno", 0.05, loss=0.001),
    Case("50 ms, 5 MB/s for all", 0.025, bytes_per_second=5e6),
)


def measure(case: Case, streams: int | str) -> tuple[float, int]:
    """Return the bytes a second of the last third of the sums, and how many streams the lane had at the end."""
    seconds = AUTO_SECONDS if streams == "auto" else FIXED_SECONDS
    with Lan(hosts=2, kind="switch", prefix="covey-proof") as lan:
        for host in lan.hosts:
            if case.window:
                host.run(["sysctl", "-qw", f"net.ipv4.tcp_rmem=4096 {case.window} {case.window}"])
            if case.loss:
                host.run(["sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"])
        lan.switch.shape(delay=case.delay, loss=case.loss, bytes_per_second=case.bytes_per_second)
        options: dict[str, Any] = {"secret": "0" * 64, "size": 2, "timeout": 60, "streams": streams, "seconds": seconds}
        options["seeds"] = [f"{lan.hosts[0].ip4}:47700"]
        ranks = [host.popen([sys.executable, "-c", PROGRAM, json.dumps(options)]) for host in lan.hosts]
        said = [rank.communicate(timeout=10 * seconds) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(said[0][1] + said[1][1])
    speed, used = json.loads(said[0][0])
    return float(speed), int(used)


def main() -> None:
    """Measure all cases in turns, and print what each number of streams did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    found: dict[tuple[Case, int | str], list[tuple[float, int]]] = {}
    for _ in range(rounds):
        for case in CASES:
            for streams in COUNTS:
                found.setdefault((case, streams), []).append(measure(case, streams))
    print("| network | " + " | ".join(map(str, COUNTS)) + " |\n|" + "---|" * (1 + len(COUNTS)))
    for case in CASES:
        cells = []
        for streams in COUNTS:
            speeds, used = zip(*found[case, streams], strict=True)
            told = f" ({', '.join(map(str, used))} streams)" if streams == "auto" else ""
            cells.append(f"{statistics.mean(speeds) / 1e6:.1f}{told}")
        print(f"| {case.name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
