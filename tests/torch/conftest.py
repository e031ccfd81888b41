"""Fixtures of the tests of covey.torch."""

from __future__ import annotations

from tests.support.promptness import promised

__all__ = ["promised"]
