"""Code that can block: the threads and the one asyncio loop of a process, and what runs on them.

This folder itself holds what all its packages use: the control loop, tasks, child processes, wake-up descriptors,
events, faults, handles.
"""
