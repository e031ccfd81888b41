"""Metrics: reads what was counted, when it is asked for.

The table of metrics and their collector, and the last operations as `covey trace` shows them. Counting itself is in
`runtime/counters.py` and `runtime/recorder.py`. On any thread. Imports no other room; called by joining, peers, group
and keeper.
"""
