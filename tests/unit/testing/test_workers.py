"""The workers that run the tests of this project: every test runs once, and what goes wrong in one of them is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEADLINE = 60.0
FILES = {
    "test_shared.py": """
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
    "test_other.py": """
import os, signal, time

def test_it_waits_for_a_test_of_another_file():
    until = time.monotonic() + 30
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
    "test_another.py": """
import random, sys, time

def test_it_is_skipped():
    import pytest
    pytest.skip("a reason")
""",
}


def test_every_test_runs_once_and_whatever_goes_wrong_is_told(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.support.workers",
            "--workers",
            "2",
            "-ra",
            "-p",
            "no:cacheprovider",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    out = ended.stdout
    assert ended.returncode == 1, out + ended.stderr
    assert "collected 10 items" in out
    assert out.splitlines()[-1].strip("= ").startswith("2 failed, 7 passed, 1 skipped"), out
    assert "FAILED test_other.py::test_it_fails - assert" in out, out
    assert "some words" in out
    assert "FAILED test_other.py::test_it_ends_its_process" in out, out
    assert "the test ended its process, with -9" in out
    assert "a reason" in out
    (made,) = (tmp_path / "made.txt").read_text().splitlines()
    assert made.split()[2] == "5", "one worker has made what the tests of a file share, and used it for all"


def test_it_stops_after_as_many_failures_as_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    text = "import time\ndef test_it_fails():\n    raise AssertionError\ndef test_it_waits():\n    time.sleep(100)\n"
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.support.workers", "--workers", "2", "-q", "--maxfail", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "stopping after 2 failures" in ended.stdout
