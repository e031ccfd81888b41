"""Which processes are in the run: generations, views, health, losses, departures, newcomers.

Imports `peers`, `state` and `links`. Used by `lanes`, `joining` and `keeper`. State changes on the control loop only.
"""
