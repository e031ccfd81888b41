"""Whatever callers send is refused, or is what the cores take."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from covey.coordinator import coordinator_pb2 as pb
from covey.coordinator import requests
from covey.coordinator.records import RunRecord, Sizes
from covey.coordinator.refusal import RefusalError
from covey.coordinator.run import CoordinatedRun

NUMBERS = st.integers(0, 2**32 - 1) | st.integers(0, 5)
LARGE = st.integers(0, 2**64 - 1) | st.integers(0, 5)
NAMES = st.text(max_size=120) | st.sampled_from(["w0", "w1"])
VIEWS = st.builds(
    lambda members, *numbers: pb.View(
        members=members, round=numbers[0], generation=numbers[1], number=numbers[2], sequence=numbers[3]
    ),
    st.lists(NUMBERS, max_size=6),
    LARGE,
    LARGE,
    LARGE,
    LARGE,
)
REQUESTS = st.builds(
    pb.RegisterWorkerRequest,
    run=NAMES,
    worker_id=NAMES,
    life=st.binary(max_size=20) | st.just(bytes(16)),
    name=NAMES,
    address=st.sampled_from(["127.0.0.1:1", "[::1]:65535", "[::1", ":", "a:99999", "10.0.0.1:7", "x" * 200]) | NAMES,
    sizes=st.builds(pb.Sizes, min_size=NUMBERS, max_size=NUMBERS, settle_seconds=st.floats()),
    assignment=st.none()
    | st.builds(pb.Assignment, round=LARGE, rank=NUMBERS, size=NUMBERS, address=st.text(max_size=20)),
)


@given(st.lists(st.tuples(REQUESTS, VIEWS), max_size=4))
def test_no_request_and_no_view_breaks_a_run(calls: list[tuple[pb.RegisterWorkerRequest, pb.View]]) -> None:
    run = CoordinatedRun(RunRecord("run", Sizes(1, 1, 0.0)), now=0.0)
    for now, (request, view) in enumerate(calls):
        with contextlib.suppress(RefusalError):
            asked = requests.registration(request, "identity", Sizes(1, 1, 0.0))
            assert 1 <= asked.sizes.least <= asked.sizes.most <= 1024
            run.register(asked, now=float(now))
            run.outlook(asked.worker_id, asked.life, now=float(now))
            beat = pb.HeartbeatRequest(worker_id=asked.worker_id, life=asked.life, view=view)
            run.hear(asked.worker_id, "identity", asked.life, requests.view(beat), view.sequence, now=float(now))
        ranks = [each.rank for each in run.record.workers.values() if each.state.value == "seated"]
        assert len(set(ranks)) == len(ranks)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_that_is_checked_or_none(data: bytes) -> None:
    with contextlib.suppress(DecodeError, RefusalError):
        requests.registration(pb.RegisterWorkerRequest.FromString(data), "identity", None)


def test_a_worker_that_declares_no_size_needs_a_coordinator_that_does() -> None:
    request = pb.RegisterWorkerRequest(run="r", worker_id="w", life=bytes(16), address="127.0.0.1:1")
    assert requests.registration(request, "identity", Sizes(2, 3, 1.0)).sizes == Sizes(2, 3, 1.0)
    with pytest.raises(RefusalError, match="declare how many workers"):
        requests.registration(request, "identity", None)
