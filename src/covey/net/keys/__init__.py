"""Keys and what is signed with them: clusters, node identities, TLS contexts, charters, new secrets.

Imports only `net/host`. Used by `runtime` and commands.
"""
