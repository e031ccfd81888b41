"""Calls between nodes, without I/O: which calls are open, which handler runs next, and when each of them ends.

`core.Calling` is the whole of one node: `outgoing` has the calls that it makes, `incoming` those that it serves. What
they want done are the effects of `effects`.
"""
