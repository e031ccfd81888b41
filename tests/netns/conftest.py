"""Everything here runs on networks of namespaces: skipped where they are not permitted, never in CI or as root."""

from __future__ import annotations

import pytest
from tests.support import forked
from tests.support.promptness import promised

from covey.testing import netns, switch

__all__ = ["promised"]


@pytest.fixture(scope="session", autouse=True)
def _namespaces() -> None:
    netns.require_namespaces()


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs on hosts, and switches, are forked where they can be."""
    monkeypatch.setattr(netns, "subprocess", forked)
    monkeypatch.setattr(switch, "subprocess", forked)
