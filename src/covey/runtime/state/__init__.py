"""What a run keeps besides its members: the store, the checkpoints, and the audit log.

Imports `links`. Used by `peers`, `views` and `joining`. On the control loop.
"""
