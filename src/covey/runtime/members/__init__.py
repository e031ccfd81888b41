"""The members of a run: this process (`Node`), its peers, generations, views and health.

Imports `links` and `lanes`. Used by all rooms above. State changes on the control loop only.
"""
