"""Build the compiled executor with a sanitizer and run its tests with that: `python -m tools.sanitize address`.

`address` finds steps outside of memory, uses after a free and undefined behaviour; `thread` finds accesses of two
threads that nothing orders. Both need gcc. The sources are copied, so the extension of this checkout stays as it is;
Python itself is not sanitized, so what is found is in the extension.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from build_native import ROOT, SOURCES, command


class Sanitizer(NamedTuple):
    """How to build and run with one."""

    flags: tuple[str, ...]
    library: str
    options: dict[str, str]
    tests: tuple[str, ...]


SUPPRESSIONS: Final = ROOT / "tools/thread_suppressions.txt"
LANES: Final = (
    "tests/contract/test_native_lanes.py",
    "tests/contract/test_striped_lanes.py",
    "tests/contract/test_resumable_lanes.py",
    "tests/security/test_native_rings.py",
    "tests/security/test_native_messages.py",
)
GROUPS: Final = (
    "tests/contract/test_random_programs.py",
    "tests/contract/test_executors.py",
    "tests/contract/test_repeated_calls.py",
    "tests/contract/test_short_messages.py",
    "tests/contract/test_long_messages.py",
)
PYTEST: Final = ("-q", "-p", "no:cacheprovider", "-x", "--tb=short", "-s")
"""Its options. Without the last one, a sanitizer's report ends in a buffer of pytest."""
SANITIZERS: Final = {
    "address": Sanitizer(
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        "libasan.so",
        # Python frees little at its end, so leaks are found by a test that counts. That one, those that search memory,
        # and the one in which it runs out, need an ordinary malloc.
        {
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
        },
        (
            "tests/unit/native",
            *LANES,
            "tests/contract/test_kernel_copies.py",
            "tests/security/test_native_fuzz.py",
            *GROUPS,
            "-k",
            "not free_what_they_took and not cannot_be_saved and not left_in_memory",
        ),
    ),
    "thread": Sanitizer(
        ("-fsanitize=thread", "-Wno-tsan"),  # fences, which it does not know, order nothing but wake-ups
        "libtsan.so",
        {
            "TSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:report_signal_unsafe=0:history_size=7"
            f":suppressions={SUPPRESSIONS}"
        },
        # It does not see how Python's end of a ring orders its accesses, so both ends of lanes are compiled ones. Where
        # Python may go on with a message, it needs the history to know the accesses that are suppressed.
        (
            *LANES,
            GROUPS[0],
            *GROUPS[-2:],
            "-k",
            "(True and not False) or random_program or short_messages"
            " or (long_messages and not python and not handler)",
        ),
    ),
}


def build(sanitizer: Sanitizer, folder: Path) -> Path:
    """Copy the package to `folder`, compile the extension there, and return the path for imports."""
    package = folder / "covey"
    shutil.copytree(ROOT / "src/covey", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    output = package / "_native.abi3.so"
    assert SOURCES.is_dir()
    subprocess.run(command(output, "-O1", "-g", "-fno-omit-frame-pointer", *sanitizer.flags), check=True, timeout=600)
    return folder


def run(name: str, seeds: int, pytest_arguments: list[str]) -> int:
    """Run the tests with the sanitizer of that name, and return the exit code."""
    sanitizer = SANITIZERS[name]
    found = subprocess.run(
        ["gcc", f"-print-file-name={sanitizer.library}"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    if not Path(found).is_file():
        print(f"gcc has no {sanitizer.library}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="covey-sanitize-") as folder:
        environment = {
            **os.environ,
            **sanitizer.options,
            "PYTHONPATH": str(build(sanitizer, Path(folder))),
            "PYTHONMALLOC": "malloc",
            "LD_PRELOAD": found,
            "COVEY_FUZZ_SEEDS": str(seeds),
            "TEST_EXECUTORS": "native",
        }
        # A sanitizer keeps fixed addresses for its own tables, which a random layout may take.
        fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
        return subprocess.run(
            [*fixed, sys.executable, "-m", "pytest", *PYTEST, *pytest_arguments, *sanitizer.tests],
            env=environment,
            cwd=ROOT,
        ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizers", nargs="+", choices=sorted(SANITIZERS))
    parser.add_argument("--seeds", type=int, default=2000, help="how many random inputs each fuzz test makes")
    parser.add_argument("--pytest", action="append", default=[], help="an argument for pytest")
    arguments = parser.parse_args()
    codes = [run(name, arguments.seeds, arguments.pytest) for name in arguments.sanitizers]
    return max(map(abs, codes))  # a negative one is that of a signal, with which a sanitizer ends


if __name__ == "__main__":
    sys.exit(main())
