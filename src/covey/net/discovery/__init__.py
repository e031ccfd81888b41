"""How processes find each other: multicast DNS, files on this host, and the network interfaces of this host.

Imports only `net/host`. Used by `runtime` and commands.
"""
