"""Links: one authenticated connection between two processes, and how it comes about.

Handshakes, listening sockets with their limits, measurements. On the control loop. Imports no other room.
"""
