"""The members of a run: one process in it (`Node`), its peers, generations, views, health, and lanes.

Imports `links`. Used by all rooms above. State changes on the control loop only.
"""
