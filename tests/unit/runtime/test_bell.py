"""A bell: it wakes the thread that polls it, and never touches a descriptor that is not its own."""

from __future__ import annotations

import os
import select

from covey.runtime.bell import Bell


def is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def test_a_bell_that_is_rung_is_readable_until_it_is_hushed() -> None:
    descriptors: list[int] = []
    bell = Bell(descriptors)
    bell.ring()
    assert (bell.fd, descriptors) == (-1, [])
    bell.open()
    assert is_readable(bell.fd)
    bell.hush()
    assert not is_readable(bell.fd)
    bell.ring()
    assert is_readable(bell.fd)
    bell.close()
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_closed_bell_is_opened_by_no_operation_that_still_runs() -> None:
    """Its owner closes the descriptors once: a later one would stay open, or be closed while the bell rings it."""
    descriptors: list[int] = []
    bell = Bell(descriptors)
    bell.open()
    owned = [*descriptors]
    bell.close()
    bell.open()
    for descriptor in owned:
        os.close(descriptor)
    reader, writer = os.pipe()  # they have the numbers of the bell
    try:
        bell.ring()
        bell.hush()
        assert (bell.fd, descriptors) == (-1, owned)
        assert not is_readable(reader)
    finally:
        os.close(reader)
        os.close(writer)
