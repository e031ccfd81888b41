"""Tools to test programs that use covey: groups in one process, nodes without a network, a device without hardware."""

from covey.testing.calls import LinkedNodes
from covey.testing.device import FakeArray, FakeDevice
from covey.testing.threads import run_threads

__all__ = ["FakeArray", "FakeDevice", "LinkedNodes", "run_threads"]
