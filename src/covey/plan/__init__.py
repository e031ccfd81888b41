"""Collectives as data: which rank sends which range to which rank, in which order. Pure, and proved by `check`."""
