"""What a process finds on its machine: folders, locks, descriptors, hardware, TCP connections, and this user's runs.

Imports no other room of `covey.net`, which all build on it. Used by `runtime` and commands.
"""
