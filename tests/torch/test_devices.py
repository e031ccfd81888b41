"""Tensors that are not in host memory, through a device that lags; on a real GPU where there is one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.support.sets import first
from tests.support.torch_ranks import Lost, run_torch_ranks
from tests.torch import conformance, staging

from covey.arrays import torch_devices
from covey.runtime.buffers import writable
from covey.torch.backend import operands


@pytest.mark.parametrize("piece_bytes", first(1, [16, operands.DEVICE_PIECE_BYTES]))
def test_what_goes_through_a_device_that_lags_is_what_gloo_gives(piece_bytes: int) -> None:
    for said in run_torch_ranks(2, staging.compare_lagging, piece_bytes):
        assert said["different"] == []
        assert said["count"] > 30
        assert said["fetched"] > said["count"]
        assert said["put"] > said["count"]


def test_what_a_device_was_given_before_and_after_stays_before_and_after() -> None:
    want = [[7.0] * 4, [7.0] * 2, [3.0] * 2]
    for seen in run_torch_ranks(2, staging.keep_queued_work_in_order):
        assert seen == [want] * 3


def test_tensors_of_a_device_stay_whole_where_a_run_goes_on_without_the_lost() -> None:
    *survivors, lost = run_torch_ranks(3, staging.lose_one)
    assert lost is Lost
    total = sum(conformance.values((1000,), rank) for rank in (0, 1))
    for found in survivors:
        assert found == [("all_reduce", 1, [0, 1], total.tolist()), ("again", 1, [0, 1], (total / 2).tolist())]


def test_tensors_are_cut_into_pieces_that_together_fill_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "DEVICE_PIECE_BYTES", 16)
    assert operands.piece_length([torch.zeros(5), torch.zeros(5)]) == 4
    assert operands.piece_length([torch.zeros(4)]) == 0
    assert operands.piece_length([torch.zeros(10), torch.zeros(9)]) == 0
    for adapter, tensor in product(
        (None, torch_devices.BlockingAdapter()), (torch.arange(10.0), torch.arange(20.0)[::2])
    ):
        monkeypatch.setitem(torch_devices._adapters, "cpu", adapter)
        pieces = [writable(piece) for piece in operands.operands_of(tensor, 4)]
        want = tensor * 2
        assert [piece.flat.size for piece in pieces] == [4, 4, 2]
        for piece in pieces:
            piece.load()[...] *= 2
            piece.store()
        assert torch.equal(tensor, want)


def test_devices_that_covey_does_not_know_are_refused() -> None:
    with pytest.raises(TypeError, match=r"support tensors on meta, only on cpu, cuda, xpu, mps"):
        operands.operand_of(torch.empty(3, device="meta"))


def test_rows_of_a_mesh_may_talk_by_another_backend() -> None:
    assert run_torch_ranks(4, staging.train_on_hybrid_mesh) == [True] * 4


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_gpu
@pytest.mark.parametrize("piece_bytes", [16, operands.DEVICE_PIECE_BYTES])
def test_a_gpu_gives_what_the_host_gives(piece_bytes: int) -> None:
    for said in run_torch_ranks(2, staging.compare_on_gpu, piece_bytes):
        assert said["different"] == []
        assert said["count"] > 30


@on_gpu
def test_only_what_must_wait_for_the_gpu_waits() -> None:
    for times in run_torch_ranks(2, staging.keep_streams_in_order):
        assert times.pop("other still runs") == 1.0
        assert max(times.values()) < 0.1


@on_gpu
@pytest.mark.parametrize("how", ["ddp", "sync batch norm", "fsdp2", "hybrid"])
def test_training_on_gpus_equals_one_process(how: str) -> None:
    for off in run_torch_ranks(2, staging.train_on_gpu, how):
        assert off < 1e-5
