"""`covey doctor`: explains why a run waits, or why machines do not find or reach each other."""

from covey.cli.doctor.command import app

__all__ = ["app"]
