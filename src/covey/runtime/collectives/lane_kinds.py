"""The kinds of lanes that a group uses."""

from __future__ import annotations


class LaneKinds(dict[int, str]):
    """The kind of lane to each other rank, by rank."""

    executor = "Python"
    """What moves the data: "compiled", or "Python". `covey --version` says why."""
