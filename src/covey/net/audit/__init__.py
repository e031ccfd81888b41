"""The audit log of this machine: what nodes and commands write into it, and how it is read and checked.

Imports `net/host`. Used by `runtime` and commands.
"""
