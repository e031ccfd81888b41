"""Threads, the asyncio loop, the executor: everything that can block."""
