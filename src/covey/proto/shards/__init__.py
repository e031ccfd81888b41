"""Checkpoints that need no shared folder: who writes what, which checkpoint is complete, who fetches what from whom.

All ranks compute the same from what all have told, so that nothing has to be agreed twice. `runtime/group` moves the
bytes, and `runtime/shards` has the files.
"""
