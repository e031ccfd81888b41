"""A job whose programs start an engine."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.support.jobs import Job, new_job

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        made.popen = subprocess.Popen  # the engine imports the program in processes of its own
        yield made
