"""Time for members to link again in tests that end their links: a busy machine may take longer than a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.waiting import DEADLINE

from covey.proto.membership import Membership

if TYPE_CHECKING:
    import pytest


def wait_for_links(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Let no view of this process exclude a member because its link has ended: from now on, or until the test ends."""
    defaults = Membership.__init__.__kwdefaults__
    assert defaults is not None
    if monkeypatch is None:
        defaults["relink"] = DEADLINE
    else:
        monkeypatch.setitem(defaults, "relink", DEADLINE)
