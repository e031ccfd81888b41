"""Collective operations of one group: executing plans over lanes, all-or-nothing operations, and what went wrong.

Imports `messages` and `lanes`. Used by `group`. Runs on the thread that calls, or on the group's own thread.
"""
