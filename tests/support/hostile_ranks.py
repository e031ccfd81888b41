"""A group in one process, one rank of which is hostile: what the honest ranks are told about that rank."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.attackers import resident_bytes
from tests.support.waiting import DEADLINE

from covey.base.errors import CoveyError, MismatchError, RemoteProtocolError
from covey.testing import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.group.group import Group

HOSTILE = 1
SIZE = 3
GROWTH = 200 << 20


def attack(
    honest: Callable[[Group], Any], hostile: Callable[[Group], Any], kinds: tuple[type[CoveyError], ...] = ()
) -> list[str]:
    """Let one rank be hostile; return what the honest ones were told about it, each of them before it leaves."""
    before = resident_bytes()

    def body(group: Group) -> str:
        group.barrier()
        together.wait()
        if group.rank == HOSTILE:
            with contextlib.suppress(CoveyError, ValueError, IndexError, TypeError):
                hostile(group)
            assert over.wait(DEADLINE)  # that it leaves must not be what the others are told
            with contextlib.suppress(MismatchError):  # which it may have to be told at the end
                group.close()
            return ""
        try:
            with pytest.raises(kinds or (RemoteProtocolError, MismatchError)) as caught:
                honest(group)
        finally:
            ended.append(group.rank)
            if len(ended) == SIZE - 1:
                over.set()
        return str(caught.value)

    over, ended, together = threading.Event(), list[int](), threading.Barrier(SIZE, timeout=DEADLINE)
    told = run_threads(SIZE, body, timeout=DEADLINE)
    assert resident_bytes() - before < GROWTH
    del told[HOSTILE]
    for text in told:
        assert f"rank {HOSTILE}" in text
        assert text.isprintable()
        assert len(text) < 4000
    return told
