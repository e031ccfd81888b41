"""`covey bench --run` and under a launcher: measures the pairs of ranks of a run, then the collectives among all.

Every rank runs `session.measure` with its group; `command` joins it and prints on rank 0. `schedule`, `report` and
`matrix` are pure.
"""
