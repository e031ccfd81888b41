"""The files of checkpoints that need no shared folder: a state in pieces, and what this machine keeps of checkpoints.

Imports no other room. Used by `group`, whose collectives move the pieces, and by `covey checkpoint`.
"""
