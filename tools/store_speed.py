"""How fast the store of a run answers, beside torch's TCPStore: `python -m tools.store_speed --ranks 2 16`.

The ranks are processes of one host under a keeper. The last rank asks while the others wait in a barrier, then all ask
at the same time. Rounds of both stores take turns, so that what else the machine does concerns both. TCPStore is
measured if torch is installed; it is neither encrypted nor authenticated, and ends with rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import time
from typing import TYPE_CHECKING, Any, Final

import covey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey import Group

TURNS: Final = 4
VALUE: Final = b"0123456789abcdef"
Times = dict[str, list[float]]
"""By what was measured: how long each call took, in seconds."""


def main() -> None:
    """Measure what the command line asks for, and print a line for each number of ranks, store and call."""
    parser = argparse.ArgumentParser(prog="tools.store_speed", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--calls", type=int, default=1000, help="of each rank in each of the 4 rounds")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; microseconds")
    print("ranks  call                        p50     p99")
    for ranks in options.ranks:
        for name, (half, most) in measure(ranks, options.calls).items():
            print(f"{ranks:5}  {name:24} {1e6 * half:6.0f}  {1e6 * most:6.0f}", flush=True)


def measure(ranks: int, calls: int) -> dict[str, tuple[float, float]]:
    """Return the median and the 99th percentile of each call, in seconds, as the last of so many ranks sees them."""
    found: Times = covey.launch(ask, ranks, calls, timeout=600)[-1]
    ordered = {name: sorted(times) for name, times in found.items()}
    return {name: (times[len(times) // 2], times[len(times) * 99 // 100]) for name, times in ordered.items()}


def ask(group: Group, calls: int) -> Times:
    """Ask both stores in turn; return how long the calls of this rank took."""
    found: Times = {}
    with _stores(group) as stores:
        for number in range(TURNS * len(stores)):
            store, (get, put) = list(stores.items())[number % len(stores)]
            key = f"speed/{group.rank}"
            put(key, VALUE)
            calls_of = {"get": functools.partial(get, key), "set": functools.partial(put, key, VALUE)}
            for who, (name, call) in itertools.product(("one", "all"), calls_of.items()):
                group.barrier()
                if who == "all" or group.rank == group.size - 1:
                    times = [_timed(call) for _ in range(calls)]
                    found.setdefault(f"{store} {name}, {who} asking", []).extend(times)
                group.barrier()
    return found


@contextlib.contextmanager
def _stores(group: Group) -> Iterator[dict[str, tuple[Callable[[str], Any], Callable[[str, bytes], Any]]]]:
    """Yield how to get and set an entry of each store."""
    own = group.node.store
    stores: dict[str, tuple[Callable[[str], Any], Callable[[str, bytes], Any]]] = {"covey": (own.get, own.set)}
    try:
        from torch.distributed import TCPStore
    except ImportError:
        pass
    else:
        is_first = group.rank == 0
        port = 0 if is_first else int(own.wait("speed/port")[0])
        theirs = TCPStore("127.0.0.1", port, is_master=is_first, wait_for_workers=False)
        if is_first:
            own.set("speed/port", str(theirs.port))
        stores["TCPStore"] = theirs.get, theirs.set
    yield stores
    group.barrier()  # TCPStore ends with rank 0


def _timed(call: Callable[[], Any]) -> float:
    since = time.perf_counter()
    call()
    return time.perf_counter() - since


if __name__ == "__main__":
    main()
