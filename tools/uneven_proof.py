"""Measure sums between hosts with uneven links: the plain plan, the fitted one, and the bound. Linux, as root.

    python -m tools.uneven_proof [--mib 64] [--case NAME ...] [--repeat 3] [--secure] [--compress int8]

Hosts are network namespaces, their links are shaped by `tc tbf`. Prints a table for docs/benchmarks.md. The bound is
what the links allow whatever the plan: every host must send and receive as many bytes as the array has, all of them
together must send 2 (n - 1) times that, and the link between two sites must carry the array once in each direction.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Final, NamedTuple

from covey.compress.codec import Codec
from covey.compress.parsing import parse
from covey.testing.netns import Lan

RANK: Final = """
import json, os, sys, time
import numpy as np
import covey
options = json.loads(sys.argv[1])
with covey.join(**options["join"]) as group:
    results = {}
    x = np.empty(options["count"], np.float32)
    expected = sum(range(1, group.size + 1))
    def once():
        x[:] = group.rank + 1
        group.barrier()
        began = time.perf_counter()
        group.all_reduce(x, compress=options["compress"])
        taken = time.perf_counter() - began
        assert (np.abs(x - expected) <= (0.1 if options["compress"] else 0.0)).all()
        return group.all_reduce(taken, "max")
    times = [once() for _ in range(options["before"] + options["repeat"])]
    plain = [0.0]
    if options["join"]["plan"] == "auto":
        report = group.explain(x.nbytes, compress=options["compress"])
        print(json.dumps([times, str(report), report.predicted_seconds]), flush=True)
    else:
        print(json.dumps([times, "", None]), flush=True)
"""
SECONDS: Final = 600.0


class Case(NamedTuple):
    """A network."""

    name: str
    rates: tuple[str, ...]
    """Mbit/s of each host, or two numbers: what it sends and what it receives."""
    sites: tuple[int, ...] = ()
    trunk: int = 0
    """Mbit/s."""


CASES: Final = (
    Case("1000, 1000, 300, 100", ("1000", "1000", "300", "100")),
    Case("an uplink of 40", ("300", "300", "300", "40/300")),
    Case("two sites, 100 between", ("1000",) * 4, (0, 0, 1, 1), 100),
    Case("two sites, mixed order", ("1000",) * 4, (0, 1, 0, 1), 100),
    Case("equal, 300", ("300",) * 4),
)


def bound(case: Case, nbytes: int) -> float:
    """Return the fewest seconds in which any plan can sum arrays of so many bytes; see `covey.plan.cost`."""
    up, down = ([float(rate.split("/")[at]) for rate in case.rates] for at in (0, -1))
    values = 2 * (len(up) - 1)
    least = [nbytes / min(up), nbytes / min(down), values * nbytes / sum(up), values * nbytes / sum(down)]
    return max(*least, nbytes / case.trunk if case.trunk else 0.0) * 8 / 1e6


def run(
    case: Case, plan: str, count: int, repeat: int, *, secure: bool, compress: str | None = None
) -> tuple[float, str, float | None]:
    """Return the shortest time of a sum, what the plan says of itself, and the time that it predicts."""
    rates = ["/".join(f"{number}mbit" for number in rate.split("/")) for rate in case.rates]
    with Lan(hosts=len(rates), rates=rates, sites=case.sites, trunk=f"{case.trunk}mbit" if case.trunk else "") as lan:
        processes = []
        for rank, host in enumerate(lan.hosts):
            join: dict[str, Any] = {"rank": rank, "size": len(rates), "address": f"{lan.hosts[0].ip4}:47900"}
            join |= {"plan": plan, **({"secret": "0" * 64} if secure else {"insecure": True})}
            options = {"join": join, "count": count, "repeat": repeat, "before": 4 if plan == "auto" else 1}
            options["compress"] = compress
            processes.append(host.popen([sys.executable, "-c", RANK, json.dumps(options)]))
        said = []
        for process in processes:
            out, err = process.communicate(timeout=SECONDS)
            if process.returncode:
                raise RuntimeError(err)
            said.append(json.loads(out))
    times, report, predicted = said[0]
    return min(times[-repeat:]), report, predicted


def main() -> None:
    """Run the cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--case", action="append", help="part of the name of a case; default: all")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--secure", action="store_true", help="with encrypted lanes")
    parser.add_argument("--compress", help="a codec, like int8; the bound is then for what travels")
    parser.add_argument("--verbose", action="store_true", help="print what each fitted plan says of itself")
    given = parser.parse_args()
    nbytes = int(given.mib * (1 << 20))
    print("| links, Mbit/s | bound | plain | fitted | predicted | plain / fitted | bound / fitted |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        if given.case and not any(part in case.name for part in given.case):
            continue
        how: dict[str, Any] = {"secure": given.secure, "compress": given.compress}
        plain, _, _ = run(case, "plain", nbytes // 4, given.repeat, **how)
        fitted, report, predicted = run(case, "auto", nbytes // 4, given.repeat, **how)
        codec = parse(given.compress)
        least = bound(case, codec.wire_bytes(nbytes // 4) if isinstance(codec, Codec) else nbytes)
        shown = "" if predicted is None else f"{predicted:.2f} s"
        row = (f"{least:.2f} s", f"{plain:.2f} s", f"{fitted:.2f} s", shown, f"{plain / fitted:.2f}",
               f"{least / fitted:.2f}")  # fmt: skip
        print("|", case.name, "|", " | ".join(row), "|", flush=True)
        if given.verbose:
            print(report, file=sys.stderr)


if __name__ == "__main__":
    main()
