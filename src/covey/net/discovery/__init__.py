"""How processes find each other: multicast DNS, files on this host, and the network interfaces of this host.

Imports only `covey.net` itself. Used by `runtime` and commands.
"""
