"""Python's executor and the compiled one work together, and the tests choose between them as they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.contract.test_random_programs import OPERATIONS, Step, call, verify
from tests.support.compiled import EXECUTORS, needs_native, takes_native, use_executors
from tests.support.sets import in_part
from tests.support.values import LANES, same, values

from covey.runtime.lanes import kinds
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group


@needs_native
@in_part("lanes", LANES)
@pytest.mark.parametrize("chosen", EXECUTORS)
def test_a_group_uses_the_executors_that_were_chosen(chosen: str, lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_executors(monkeypatch, chosen)

    def body(group: Group) -> tuple[str, list[float]]:
        x = np.arange(5.0) + group.rank
        return group.lanes().executor, list(group.all_reduce(x))

    uses, sums = zip(*run_threads(3, body, lanes=lanes), strict=True)
    assert uses == tuple("compiled" if takes_native(chosen, rank) else "Python" for rank in range(3))
    assert all(each == [3.0, 6.0, 9.0, 12.0, 15.0] for each in sums)


@needs_native
@pytest.mark.parametrize("chosen", EXECUTORS)
def test_a_pair_has_as_many_connections_as_both_executors_can_have(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever end dials. The executor in Python has one for each lane."""
    use_executors(monkeypatch, chosen)
    monkeypatch.setattr(kinds, "streams_for", lambda *_: 3)

    def body(group: Group) -> dict[int, int]:
        same(group.all_reduce(np.ones(300_000), algorithm="direct"), np.full(300_000, 4.0))
        return dict(group.lanes().streams)

    for rank, streams in enumerate(run_threads(4, body, lanes="secure")):
        for peer, count in streams.items():
            both = takes_native(chosen, rank) and takes_native(chosen, peer)
            assert count == (3 if both else 1), (rank, peer)


@in_part("lanes", LANES, 3)
@pytest.mark.parametrize("chosen", ["python", *(pytest.param(each, marks=needs_native) for each in EXECUTORS[1:])])
def test_every_operation_works_with_every_executor(chosen: str, lanes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all other tests show of Python's executor in `make test-all`, in short: it is there without a compiler."""
    use_executors(monkeypatch, chosen)
    kind = np.dtype(np.float32)
    steps = [
        Step(name, seed, kind, shape, root=seed % 3, op="sum", algorithm=None)
        for seed, name in enumerate(OPERATIONS)
        for shape in ((7, 2), (40_000,))
    ]

    def body(group: Group) -> None:
        assert group.lanes().executor == ("compiled" if takes_native(chosen, group.rank) else "Python")
        for step in steps:
            verify(step, group.rank, group.size, call(group, step, async_op=False))
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        for count in (3, 50_000):
            same(group.sendrecv(values(group.rank, count), right, left), values(left, count))
        group.barrier()

    run_threads(3, body, lanes=lanes)
