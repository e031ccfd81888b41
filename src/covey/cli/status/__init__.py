"""`covey status`: the nodes of the cluster by run, and the links between them."""

from covey.cli.status.command import app

__all__ = ["app"]
