"""The lanes of a node: their kinds, how they are opened, accepted and kept alive, and the table of those that are open.

`tuning` moves lanes to better paths, spreads them and keeps limits. Used by all rooms above.
"""
