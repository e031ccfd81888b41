"""The examples that need no torch run, and say what the README says they do."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

ROOT = Path(__file__).parent.parent
EXPECTED = {
    "hello.py": r"\[2\] rank 2 of 3: \[ 3\.  6\.  9\. 12\.\] by \{0: '\w+', 1: '\w+'\}",
    "data_parallel.py": r"\[0\] 3 ranks found \[.*\]; off by at most 0\.00\d+",
    "survive.py": r"\[0\] rank 0 of \d found \[1\. 2\. 3\. 4\. 5\.\] in 150 steps",
    "typed.py": r"\[0\] rank 0 of \d: 24 rows, mean 1\.0",
    "relay.py": r"\[2\] item 4 came out as 36",
}
OPTIONS = {"survive.py": ("--restarts", "1")}


def run(*command: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ended = forked.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE, env=env, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("example", EXPECTED)
def test_the_example_runs_on_three_ranks_and_alone(example: str) -> None:
    output = run("-m", "covey", "run", "-n", "3", *OPTIONS.get(example, ()), str(ROOT / "examples" / example))
    assert re.search(EXPECTED[example], output), output
    assert run(str(ROOT / "examples" / example))


def test_the_program_on_the_readmes_first_screen_is_the_hello_example() -> None:
    readme = (ROOT / "README.md").read_text()
    example = (ROOT / "examples" / "hello.py").read_text()
    code = re.search(r"# hello\.py\n(.*?)```", readme, re.DOTALL)
    assert code is not None
    shown = {line.split("  #")[0].strip() for line in code[1].splitlines()}
    assert shown == {line.strip() for line in example.splitlines()[2:]}


def test_the_loop_in_the_guide_is_the_example_that_survives() -> None:
    guide = (ROOT / "docs" / "guides" / "elastic.md").read_text()
    example = (ROOT / "examples" / "survive.py").read_text()
    code = re.search(r"```python\n(import os.*?)```", guide, re.DOTALL)
    assert code is not None
    assert example.endswith(code[1])
