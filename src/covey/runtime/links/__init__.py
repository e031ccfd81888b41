"""Links: one authenticated connection between two processes, and how it comes about.

Handshakes, the listening sockets with their limits, measuring. On the control loop. Imports nothing of other rooms.
"""
