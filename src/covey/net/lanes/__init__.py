"""Lanes: byte pipes between two ranks, through shared memory, stream sockets, and encrypted TCP.

Imports only `net/host`. Used by `runtime`. Runs on the thread that executes an operation.
"""
