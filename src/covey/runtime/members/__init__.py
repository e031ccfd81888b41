"""This process as a member of a run: `Node` wires its peers, views, lanes, state and groups.

Imports `views`, `lanes`, `peers`, `state` and `links`. Used by all rooms above. State changes on the control loop only.
"""
