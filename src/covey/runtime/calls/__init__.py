"""Calls between nodes: registered functions and exported objects, the handlers that run them, and the calls under way.

Imports `messages` and `lanes`. Used by `group` and `joining`. Runs on the threads that call, on the threads that
drive its two messengers, and on handler threads of its own.
"""
