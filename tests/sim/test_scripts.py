"""Protocol stories to read: `tests/sim/scripts/*.txt`, compared with what the cores do now.

`COVEY_REWRITE_SCRIPTS=1 pytest tests/sim/test_scripts.py` writes them anew. Read the difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.sim.transcript import SCRIPTS, text_of

FOLDER = Path(__file__).parent / "scripts"
REWRITE = "COVEY_REWRITE_SCRIPTS"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_cores_tell_the_recorded_story_of(name: str) -> None:
    path, text = FOLDER / f"{name}.txt", text_of(SCRIPTS[name])
    if os.environ.get(REWRITE):
        path.write_text(text)
    assert text == path.read_text(), f"the story has changed; {REWRITE}=1 writes it anew"


def test_every_recorded_story_has_its_script() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SCRIPTS)


def test_a_story_is_told_the_same_way_twice() -> None:
    assert all(text_of(made) == text_of(made) for made in SCRIPTS.values())
