"""What the others find when a rank closes a group or leaves it."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import ClosedError, PeerLostError
from covey.testing import run_threads

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


@pytest.mark.parametrize("closer", [0, 1])
def test_a_group_that_another_rank_has_closed_is_lost_at_once(closer: int) -> None:
    def body(group: Group) -> None:
        child = group.split(0)
        assert child is not None
        if group.rank == closer:
            child.close()
        group.barrier()
        if group.rank != closer:
            with pytest.raises(PeerLostError):  # and no DeadlineError
                child.barrier(timeout=DEADLINE)
        group.barrier()

    run_threads(2, body)


def test_closing_the_run_ends_messages_of_split_groups() -> None:
    def body(group: Group) -> None:
        child = group.split(0)
        assert child is not None
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                child.recv(1 - child.rank, timeout=DEADLINE)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        group.barrier()
        group.close()
        thread.join(DEADLINE)
        assert isinstance(ended[0], ClosedError | PeerLostError)

    run_threads(2, body)


def leave_after(group: Group, x: Any) -> None:
    with group:
        group.broadcast(x)
        sys.exit(0)


def test_leaving_by_sys_exit_zero_is_an_orderly_end() -> None:
    has_left = threading.Event()

    def body(group: Group) -> float | None:
        x = np.array([3.0 if group.rank == 0 else 0.0])
        if group.rank == 0:
            with pytest.raises(SystemExit):
                leave_after(group, x)
            has_left.set()
            return None
        assert has_left.wait(DEADLINE)
        group.broadcast(x)
        return float(x[0])

    assert run_threads(2, body) == [None, 3.0]
