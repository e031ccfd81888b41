"""Starts the processes of a run on this host and supervises them: `covey run` and `covey.launch`.

Imports the packages below it. Used by commands. Runs in its own process, which takes no part in the run's operations.
"""
