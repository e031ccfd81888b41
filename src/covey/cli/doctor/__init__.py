"""`covey doctor`: why machines do not find or reach each other, in plain words."""

from covey.cli.doctor.command import app

__all__ = ["app"]
