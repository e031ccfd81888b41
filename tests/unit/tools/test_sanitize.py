"""`make sanitize` names files that exist, and options that this pytest knows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from build_native import ROOT
from tests.support.waiting import DEADLINE
from tools.sanitize import PYTEST, SANITIZERS


@pytest.mark.thorough
def test_the_command_line_of_the_sanitized_tests_is_accepted() -> None:
    for sanitizer in SANITIZERS.values():
        assert all((ROOT / name).exists() for name in sanitizer.tests if name.startswith("tests/"))
    words = [sys.executable, "-m", "pytest", *PYTEST, "--collect-only", "tests/unit/tools/test_sanitize.py"]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, timeout=DEADLINE).returncode == 0
