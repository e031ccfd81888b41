"""Ports of the router that are mapped to this machine, with PCP, NAT-PMP or UPnP.

Imports `net/host`. Used by `runtime/mesh` with `--map-port`, and by `covey doctor`.
"""
