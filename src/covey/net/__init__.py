"""Sockets and shared memory: the lanes that carry bytes between two ranks."""
