"""Commands whose output cannot be written end with one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.support.sets import pairs
from tests.support.waiting import DEADLINE


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
@pytest.mark.parametrize(("words", "unbuffered"), pairs([["--version"], ["bench", "--help"]], ["", "1"]))
def test_a_command_on_a_full_disk_says_so_in_one_line_and_fails(words: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "covey", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (ended.returncode, ended.stderr) == (1, "error: output cannot be written (No space left on device)\n")
