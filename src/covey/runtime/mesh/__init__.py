"""The nodes of a cluster that this process is linked with, before it is in a run and while it is in one.

Imports `members` and `links`. Used by `joining`, `keeper` and commands that visit a cluster. On the control loop.
"""
