"""What a hostile rank claims about its part of a sparse tensor is checked before it is used."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import CoveyError, RemoteProtocolError
from covey.runtime.group.internals import engine_of, home_of
from covey.testing import run_threads
from covey.torch.backend.exchange import TensorGroup

if TYPE_CHECKING:
    from covey.runtime.group.group import Group

HOSTILE, SIZE = 1, 3


@pytest.mark.parametrize(
    ("indices", "values"),
    [
        (np.array([[0, 5]]), np.ones(2)),
        (np.array([[0, -1]]), np.ones(2)),
        (np.array([[0, 2**62]]), np.ones(2)),
        (np.array([[0, 1]]), np.ones(3)),
        (np.array([[0, 1, 2]]), np.ones(2)),
    ],
    ids=["beyond", "below", "far beyond", "too many values", "too few values"],
)
def test_indices_and_values_of_no_sparse_tensor_name_their_rank(indices: Any, values: Any) -> None:
    together = threading.Barrier(SIZE, timeout=DEADLINE)

    def body(group: Group) -> None:
        tensors = TensorGroup(engine_of(group), home_of(group), local_rank=group.local_rank)
        group.barrier()
        together.wait()
        if group.rank == HOSTILE:
            with contextlib.suppress(CoveyError):
                tensors.gather_pairs(indices, values, (5,), lambda _: None)
        else:
            with pytest.raises(RemoteProtocolError, match=f"rank {HOSTILE}"):
                tensors.gather_pairs(np.array([[0, 4]]), np.ones(2), (5,), lambda _: None)
        together.wait()

    run_threads(SIZE, body, timeout=DEADLINE)
