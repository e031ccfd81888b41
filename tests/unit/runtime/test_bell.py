"""A bell: it wakes the thread that polls it, and never touches a descriptor that is not its own."""

from __future__ import annotations

import os
import select

import pytest

from covey.runtime.bell import Bell


def is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def test_a_bell_that_is_rung_is_readable_until_it_is_hushed() -> None:
    bell = Bell()
    bell.ring()
    assert bell.fd == -1
    bell.open()
    assert is_readable(bell.fd)
    bell.hush()
    assert not is_readable(bell.fd)
    bell.ring()
    assert is_readable(bell.fd)
    bell.close()


def test_a_closed_bell_is_opened_by_no_operation_that_still_runs() -> None:
    """Its owner closes it once: a later descriptor would stay open, or be closed while the bell rings it."""
    bell = Bell()
    bell.open()
    owned = bell.fd
    bell.close()
    bell.open()
    reader, writer = os.pipe()  # they have the numbers of the bell
    try:
        assert owned in (reader, writer), "closing a bell frees its descriptor"
        bell.ring()
        bell.hush()
        assert bell.fd == -1
        assert not is_readable(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_bell_that_is_dropped_closes_its_descriptors() -> None:
    bell = Bell()
    bell.open()
    owned = bell.fd
    os.fstat(owned)
    del bell
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(owned)
