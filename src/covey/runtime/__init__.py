"""Code that can block: the threads and the one asyncio loop of a process, and what runs on them.

This folder itself holds what all rooms below use: the control loop, wake-up descriptors, events, faults, handles.
"""
