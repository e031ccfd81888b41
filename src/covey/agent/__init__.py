"""Starts programs on several machines from one terminal: the resident agent (`covey up`), its callers, and ssh.

Imports `runtime` and what is below it. Used by commands. An agent is a node of the cluster that is in no run.
"""
