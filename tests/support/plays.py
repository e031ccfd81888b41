"""Plays of a simulation in tests: one that breaks an invariant fails the test with its story."""

from __future__ import annotations

from typing import Protocol, TypeVar

import pytest

from covey.lab.invariants import BrokenError

STORY_LIMIT = 20_000
"""Characters of a story that are shown: its end."""


class Play(Protocol):
    """A simulated course of events, which a seed decides."""

    seed: int

    def perform(self) -> None: ...
    def story(self) -> str: ...


PlayT = TypeVar("PlayT", bound=Play)


def performed(play: PlayT) -> PlayT:
    """Perform a play, and return it; fail with its seed and its story if it breaks an invariant."""
    try:
        play.perform()
    except BrokenError as broken:
        pytest.fail(f"{type(play).__name__}, seed {play.seed}: {broken}\n{play.story()[-STORY_LIMIT:]}")
    return play
