"""`covey status`: who is in the cluster, in which runs, and how they reach each other."""

from covey.cli.status.command import app

__all__ = ["app"]
