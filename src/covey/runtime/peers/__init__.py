"""Other processes that this one is linked with: `RemoteProcess`, the mesh, and how processes are found and dialled.

Imports `links`, `state` and `metrics`. Used by all rooms above. On the control loop.
"""
