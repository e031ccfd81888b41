"""Everything here runs on networks of namespaces: skipped where they are not permitted, never in CI or as root."""

from __future__ import annotations

import pytest

from covey.testing.netns import require_namespaces


@pytest.fixture(scope="session", autouse=True)
def _namespaces() -> None:
    require_namespaces()
