"""Asks the router whether it maps ports, on a thread: the examination of the network goes on meanwhile."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Final, NamedTuple, Self

from covey.base.errors import ConnectError
from covey.net.router import port_mapping
from covey.net.router.upnp import UpnpPort
from covey.wire.port_mapping import NONCE_BYTES

UNUSED_PORT: Final = 9
"""The port of the discard service."""
ENOUGH_SECONDS: Final = 8.0
"""From the first question: the whole examination has little more."""


class RouterFacts(NamedTuple):
    """With which protocol the router maps ports and its address outside if that is private, or why it does not."""

    protocol: str = ""
    private_ip: str = ""
    problem: str = ""


class RouterQuestion:
    """A question that is asked from `__enter__` until `__exit__`, at most.

    The router is asked to end the mapping of a port that covey never maps or, with UPnP, for its address outside. So
    nothing is mapped, and none of a run's mappings ends.
    """

    def __init__(self) -> None:
        self._facts = RouterFacts(problem="the router has not answered in time")
        self._until, self._ending = time.monotonic() + ENOUGH_SECONDS, threading.Event()
        self._thread = threading.Thread(target=self._ask, name="covey-doctor-router", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()

    def answer(self) -> RouterFacts:
        """Wait for the answer, until it is too late for one."""
        self._thread.join(max(0.0, self._until - time.monotonic()))
        return self._facts

    def _ask(self) -> None:
        nonce, upnp = secrets.token_bytes(NONCE_BYTES), UpnpPort(UNUSED_PORT, self._ending)
        try:
            gateway = port_mapping.default_gateway()
            said = port_mapping.ask_gateway(gateway, UNUSED_PORT, nonce, 0, port_mapping.TRIES[:2], upnp)
        except (ConnectError, OSError) as error:
            self._facts = RouterFacts(problem=str(error))
        else:
            self._facts = RouterFacts(said.protocol, said.ip if said.is_private else "")
