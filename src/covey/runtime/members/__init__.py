"""The members of a run: this process (`Node`), its peers, generations, views, health, and lanes.

Imports `links`. Used by all rooms above. State changes on the control loop only.
"""
