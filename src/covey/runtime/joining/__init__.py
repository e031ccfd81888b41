"""From a process and its settings to the group of its run: `covey.join` and `covey.generations`.

Imports `views`, `peers` and `group`. Used by programs, `keeper` and `covey.torch`. Runs on the thread that calls.
"""
