"""How the tests of this project are run: each once, in any order, and what goes wrong in one of them is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import DEADLINE

ROOT = Path(__file__).parents[3]
FILES = {
    "test_shared": """
import os, pytest

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = tmp_path_factory.mktemp("shared")
    yield path
    with open("made.txt", "a") as file:
        print(path, os.getpid(), len(list(path.iterdir())), file=file)

@pytest.mark.parametrize("number", range(5))
def test_number(shared, number, capfd):
    (shared / str(number)).touch()
    os.write(1, b"%d from %d" % (number, os.getpid()))
    assert capfd.readouterr().out == f"{number} from {os.getpid()}"
""",
    "test_other": """
import os, signal, time

def test_it_waits_for_a_test_of_another_file():
    until = time.monotonic() + 500
    while not os.path.exists("made.txt"):
        assert time.monotonic() < until
        time.sleep(0.01)

def test_it_fails():
    print("some words")
    assert os.getpid() == 0

def test_it_ends_its_process():
    os.kill(os.getpid(), signal.SIGKILL)

def test_it_comes_after_that():
    assert os.environ["PYTEST_XDIST_WORKER"] in ("gw0", "gw1")
""",
    "test_another": """
import os, signal, time

def test_it_is_skipped():
    import pytest
    pytest.skip("a reason")

def test_it_is_interrupted():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(500)

def test_it_fails_in_the_next_process():
    raise AssertionError
""",
}


def run_tests(folder: Path, *words: str, **files: str) -> tuple[int, str]:
    """Run the tests of a folder as those of this project are; return the exit code, and what was printed."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone\n    thorough\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return ended.returncode, ended.stdout + ended.stderr


WITH_WORKERS = ("-p", "tests.support.workers", "--workers", "2")


def test_every_test_runs_once_and_whatever_goes_wrong_is_told(tmp_path: Path) -> None:
    code, out = run_tests(tmp_path, *WITH_WORKERS, "-ra", **FILES)
    assert code == 1, out
    assert "collected 12 items" in out
    assert out.splitlines()[-1].strip("= ").startswith("4 failed, 7 passed, 1 skipped"), out
    assert "FAILED test_other.py::test_it_fails - assert" in out, out
    assert "some words" in out
    assert "FAILED test_other.py::test_it_ends_its_process" in out, out
    assert "the test ended its process, with -9" in out
    assert "the test ended its process, with 1" in out
    assert re.search(r"in test_it_is_interrupted\n.*\nKeyboardInterrupt", out), "a worker says what ended it"
    assert "ConnectionResetError" not in out, "a failure is not told as a consequence of another worker's end"
    assert "a reason" in out
    (made,) = (tmp_path / "made.txt").read_text().splitlines()
    assert made.split()[2] == "5", "one worker has made what the tests of a file share, and used it for all"


SHARED = """
import os, pytest, time

@pytest.mark.parametrize("number", range(12))
def test_number(number):
    with open("ran.txt", "a") as file:
        print(number, os.getpid(), file=file)
    until = time.monotonic() + 500
    while number == 0 and len({line.split()[1] for line in open("ran.txt")}) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
"""


def test_a_worker_that_is_done_takes_half_of_a_long_file(tmp_path: Path) -> None:
    code, out = run_tests(tmp_path, *WITH_WORKERS, "-q", test_a=SHARED, test_b="def test_b(): ...")
    assert code == 0, out
    ran = [line.split() for line in (tmp_path / "ran.txt").read_text().splitlines()]
    assert sorted(int(number) for number, _ in ran) == list(range(12))
    assert len({pid for _, pid in ran}) == 2


def test_it_stops_after_as_many_failures_as_are_allowed(tmp_path: Path) -> None:
    text = "import time\ndef test_it_fails():\n    raise AssertionError\ndef test_it_waits():\n    time.sleep(100)\n"
    code, out = run_tests(tmp_path, *WITH_WORKERS, "-q", "--maxfail", "2", test_a=text, test_b=text)
    assert code == 1, out
    assert "stopping after 2 failures" in out


NOTED = """
import pytest

@pytest.fixture(scope="module", autouse=True)
def _noted():
    with open("order.txt", "a") as file:
        print(__name__, file=file)

@pytest.mark.parametrize("number", range(10))
def test_number(number):
    with open("order.txt", "a") as file:
        print(number, file=file)

@pytest.mark.alone
def test_alone():
    with open("order.txt", "a") as file:
        print("alone", file=file)
"""


def test_tests_that_nothing_may_run_beside_come_last(tmp_path: Path) -> None:
    code, out = run_tests(tmp_path, *WITH_WORKERS, "-q", test_a=NOTED, test_b=NOTED)
    assert code == 0, out
    assert "22 passed" in out
    order = (tmp_path / "order.txt").read_text().split()
    assert order[-4:] == ["test_b", "alone", "test_a", "alone"] or order[-4:] == ["test_a", "alone", "test_b", "alone"]
    assert order.count("alone") == 2


@pytest.mark.thorough
def test_a_shuffled_run_has_every_test_once_and_those_of_a_file_together(tmp_path: Path) -> None:
    orders = []
    for seed in ("1", "2", "2"):
        words = ("-p", "tests.support.workers", "--shuffle", seed, "-q", "-m", "not alone")
        code, out = run_tests(tmp_path, *words, test_a=NOTED, test_b=NOTED, test_c=NOTED)
        assert code == 0, out
        assert "30 passed" in out
        orders.append((tmp_path / "order.txt").read_text().split())
        (tmp_path / "order.txt").unlink()
        files = [word for word in orders[-1] if not word.isdigit()]
        assert sorted(files) == ["test_a", "test_b", "test_c"]
    assert orders[0] != orders[1] == orders[2]


LEFT = """
import pytest

@pytest.mark.parametrize("number", range(3))
@pytest.mark.thorough
def test_a(number): ...

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_b(number): ...

@pytest.mark.thorough
class TestMany:
""" + "".join(f"    def test_{name}(self): ...\n" for name in "cdefghij")


@pytest.mark.thorough
def test_five_commits_in_a_row_run_every_thorough_test_once_and_no_other(tmp_path: Path) -> None:
    ran: list[str] = []
    for number in range(5):
        words = ("-p", "tests.support.sets", "--fifth", f"{0xABCDEF0 + number:040x}", "-v")
        code, out = run_tests(tmp_path, *words, test_left=LEFT)
        assert code in (0, 5), out  # a fifth may be empty
        ran += re.findall(r"::(\S+) PASSED", out)
    assert sorted(ran) == sorted(
        [*(f"test_a[{n}]" for n in range(3)), "test_b[2]", *(f"TestMany::test_{c}" for c in "cdefghij")]
    )


GUARD = """
import pytest
from tests.support.guard import Guard

def pytest_configure(config):
    config.pluginmanager.register(Guard(seconds=1.0))
"""
HANGS = """
import subprocess, sys, time

def test_it_hangs():
    code = "import time\\ndef rest():\\n    time.sleep(1000)\\nrest()"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for_ever()
    finally:
        child.kill()
        child.wait()

def wait_for_ever():
    time.sleep(1000)

def test_it_comes_after_that(): ...
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="looks into other processes")
def test_a_test_that_hangs_fails_and_the_stacks_of_its_processes_are_shown(tmp_path: Path) -> None:
    code, out = run_tests(tmp_path, *WITH_WORKERS, "-q", conftest=GUARD, test_hangs=HANGS)
    assert code == 1, out
    assert "1 failed, 1 passed" in out
    assert "hangs: not done after 1 s" in out
    assert re.search(r"wait_for_ever \(\S*test_hangs.py", out)
    assert "rest (<string>:3)" in out
