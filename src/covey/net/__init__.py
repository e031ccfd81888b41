"""Sockets, shared memory, files and keys: lanes between ranks, discovery of nodes, secrets and identities."""
