"""`python -m covey.lab.fuzz` fuzzes everything that reads foreign bytes; `make fuzz` calls it.

With atheris, inputs are guided by the code that they reach. Without it, they are random, with a new seed each time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import subprocess
import sys
import time
from pathlib import Path

from covey.lab.fuzz.contract import BrokenContractError, check, inputs
from covey.lab.fuzz.targets import Target, all_targets

INPUT_SECONDS = 10
"""Seconds for one input; libFuzzer reports a longer one as endless."""
MEMORY_MIB = 2048
GUIDED_INPUT_BYTES = 1 << 16
INPUTS_AT_ONCE = 2000


def main() -> int:
    """Fuzz all targets, some of them, or repeat one input."""
    targets = all_targets()
    parser = argparse.ArgumentParser(prog="python -m covey.lab.fuzz", description=main.__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(targets)} (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="for inputs that were found")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="read this input once, as the one target does")
    asked = parser.parse_args()
    chosen = [targets[name] for name in asked.targets or targets]
    if asked.repeat is not None:
        return _repeat(chosen[0], asked.repeat)
    is_guided = importlib.util.find_spec("atheris") is not None
    print(f"{len(chosen)} targets, {asked.seconds:g} s in all, {'guided by atheris' if is_guided else 'by chance'}")
    broken = 0
    for target in chosen:
        seconds = asked.seconds / len(chosen)
        broken += not (_guided if is_guided else _by_chance)(target, seconds, asked.folder.resolve() / target.name)
    print(f"{broken} of {len(chosen)} targets are broken")
    return 1 if broken else 0


def _guided(target: Target, seconds: float, folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-artifact_prefix={folder}/",
        f"-timeout={INPUT_SECONDS}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-max_len={GUIDED_INPUT_BYTES}",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    command = [sys.executable, "-m", "covey.lab.fuzz.guided", target.name, str(folder / "corpus"), *options]
    before = set(folder.iterdir())
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    output = ended.stdout + ended.stderr
    executed = next((line.split()[-1] for line in output.splitlines() if "number_of_executed_units" in line), "no")
    print(f"{target.name}: {executed} inputs, {len(list((folder / 'corpus').iterdir()))} kept", flush=True)
    for found in sorted(set(folder.iterdir()) - before):
        if found.is_file():
            _tell(target, found)
    if ended.returncode:
        print("\n".join(output.splitlines()[-40:]))
    return ended.returncode == 0


def _by_chance(target: Target, seconds: float, folder: Path) -> bool:
    count, end_at = 0, time.monotonic() + seconds
    for seed in itertools.count(1):
        for data in inputs(target, INPUTS_AT_ONCE, seed):
            count += 1
            try:
                check(target, data, is_measured=count % 10 == 0)
            except BrokenContractError as error:
                folder.mkdir(parents=True, exist_ok=True)
                found = folder / f"crash-{seed}-{count}"
                found.write_bytes(data)
                print(error)
                _tell(target, found)
                return False
            if time.monotonic() > end_at:
                print(f"{target.name}: {count} inputs", flush=True)
                return True
    return True


def _tell(target: Target, found: Path) -> None:
    print(f"{target.name} breaks its contract. Repeat it with:")
    print(f"    python -m covey.lab.fuzz {target.name} --repeat {found}")


def _repeat(target: Target, path: Path) -> int:
    data = path.read_bytes()
    print(f"{target.name}, {len(data)} bytes: {data[:200]!r}")
    print("a value" if check(target, data, is_measured=True) else "refused, as promised")
    return 0


if __name__ == "__main__":
    sys.exit(main())
