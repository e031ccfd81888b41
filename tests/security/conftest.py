"""Every test has a home of its own, and secrets that no other test has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.attackers import new_cluster, victim
from tests.support.waiting import DEADLINE

from covey.runtime.peers import cluster_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.attackers import Victim


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("COVEY_HOME", str(folder))
    return folder


@pytest.fixture
def prey(monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    """A node that attackers can reach. It waits for visitors that answer when a test gets to them."""
    monkeypatch.setattr(cluster_mesh, "VISITOR_SECONDS", 2 * DEADLINE)
    with victim(new_cluster()) as node:
        yield node
