"""Collectives written as data: who sends which range to whom, in which order. Pure, and proved by `check`."""
