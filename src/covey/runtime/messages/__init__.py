"""Point-to-point messages of a group: tags, acknowledged streams, and sockets that are replaced when they break.

Imports `lanes`. Used by `calls`, `collectives` and `group`. Runs on the threads that call, and on one thread per group.
"""
