"""QUIC connections that carry one byte stream each, behind ordinary sockets: qh3's core on a UDP socket of covey.

Needs the extra `quic`. Imports `net/host` and `net/keys`; `runtime.links` and `runtime.lanes` call it.
"""
