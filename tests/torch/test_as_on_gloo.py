"""Programs that are written for gloo, in the way in which others write them, have the same bits on covey.

Each makes the calls of a program that docs/guides/pytorch.md names, in the same way.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from covey.torch import ProcessGroupCovey, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WORDS, LENGTH, WIDTH = 17, 6, 8


class Layer(nn.Module):
    """Attention-like: a norm, and two layers around a function, beside what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))

    def reset_parameters(self) -> None:
        for each in self.children():
            each.reset_parameters()


class Language(nn.Module):
    """Guesses the next word; the first and the last layer may share their weights."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.words.weight = self.output.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))

    def reset_parameters(self) -> None:
        for each in (self.words, *self.layers, self.norm, self.output):
            each.reset_parameters()


def _loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def _own(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of what this rank holds of these tensors."""
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


def accumulated(rank: int, _size: int, _folder: Path) -> list[torch.Tensor]:
    """As nanoGPT does: DDP sends the gradients of every second micro-batch, and they are clipped."""
    torch.manual_seed(1337 + rank)
    model = DistributedDataParallel(Language(is_tied=True))
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in model.parameters() if each.dim() >= 2], "weight_decay": 0.1},
            {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    seen = []
    for _ in range(3):
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            loss = _loss(model, torch.randint(WORDS, (4, LENGTH))) / 2
            scaler.scale(loss).backward()
            seen.append(loss.detach())
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return seen + _own(model.parameters())


def resumed(rank: int, _size: int, folder: Path) -> list[torch.Tensor]:
    """As minGPT and the DDP tutorial do: an epoch of a sampler, rank 0 saves, and all continue from that file."""
    torch.manual_seed(rank)
    data = TensorDataset(torch.randn(21, WIDTH, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    seen = []
    for epoch in range(2):
        layer = Layer()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        if (folder / "snapshot").exists():
            kept = torch.load(folder / "snapshot")
            layer.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        model = DistributedDataParallel(layer)
        loader.sampler.set_epoch(epoch)
        for (inputs,) in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        dist.barrier()
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "snapshot")
        dist.barrier()
    return seen + _own(model.parameters())


def sharded(rank: int, _size: int, _folder: Path) -> list[torch.Tensor]:
    """As PyTorch's example of FSDP2 does: prefetching, two precisions, and both ways to save and load a whole model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen: list[torch.Tensor] = []
    kept: dict[str, Any] = {}
    for turn in ("new", "mixed", "loaded by torch", "loaded by parts"):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Language()
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy if turn == "mixed" else MixedPrecisionPolicy())
        fully_shard(model, mp_policy=policy if turn == "mixed" else MixedPrecisionPolicy())
        for before, after in zip(model.layers[:-1], model.layers[1:], strict=True):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        model.to_empty(device="cpu")
        model.reset_parameters()
        whole = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        if turn == "loaded by torch":
            state_dict.set_model_state_dict(model, kept["model"] if rank == 0 else {}, options=whole)
        elif turn == "loaded by parts":
            parts = {
                name: distribute_tensor(kept["by hand"][name], each.device_mesh, each.placements)
                for name, each in model.state_dict().items()
            }
            model.load_state_dict(parts, assign=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if turn == "loaded by torch":
            state_dict.set_optimizer_state_dict(model, optimizer, kept["optimizer"] if rank == 0 else {}, options=whole)
        for _ in range(2):
            model.unshard()
            loss = _loss(model, torch.randint(WORDS, (4, LENGTH)))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm]
        seen += _own(model.parameters())
        if turn == "new":
            full = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
            kept["model"] = state_dict.get_model_state_dict(model, options=full)
            kept["optimizer"] = state_dict.get_optimizer_state_dict(model, optimizer, options=full)
            kept["by hand"] = {name: each.full_tensor() for name, each in model.state_dict().items()}
            seen += kept["by hand"].values()
            if rank == 0:
                assert all(kept["model"][name].equal(each) for name, each in kept["by hand"].items())
    return seen


def split(_rank: int, size: int, _folder: Path) -> list[torch.Tensor]:
    """As PyTorch's examples of tensor and sequence parallel do, alone and below FSDP2."""
    seen = []
    line = init_device_mesh("cpu", (size,))
    for layouts in ({}, {"input_layouts": Shard(0)}):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
        output = {"output_layouts": Shard(0)} if layouts else {}
        plan = {"0": ColwiseParallel(**layouts), "2": RowwiseParallel(**output)}
        model = parallelize_module(model, line, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.rand(20, 10)).sum().backward()
            optimizer.step()
        seen += _own(model.parameters())
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    language = parallelize_module(
        Language(),
        mesh["tp"],
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in language.layers:
        parallelize_module(
            layer,
            mesh["tp"],
            {
                "norm": SequenceParallel(),
                "widen": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "narrow": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        parallelize_module(layer, mesh["tp"], {"widen": ColwiseParallel()})
    model = fully_shard(language, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    for step in range(2):
        torch.manual_seed(step + mesh["dp"].get_local_rank())
        loss = model(torch.randint(WORDS, (4, LENGTH))).square().sum()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return seen + _own(model.parameters())


def gathered(rank: int, size: int, _folder: Path) -> list[torch.Tensor]:
    """As Accelerate, Trainer and Lightning do with results, random states and flags of all ranks."""
    seen = []
    turned = torch.arange(12.0).view(4, 3).t() + rank
    rows = torch.empty(size * len(turned), 4)
    dist.all_gather_into_tensor(rows, turned.contiguous())
    seen.append(rows)
    uneven = torch.arange(float((rank + 1) * (size - rank))).view(rank + 1, size - rank) + rank
    shape = torch.tensor(uneven.shape)
    shapes = [torch.zeros_like(shape) for _ in range(size)]
    dist.all_gather(shapes, shape)
    largest = torch.stack(shapes).max(0).values
    padded = torch.zeros(*largest.tolist())
    padded[: uneven.shape[0], : uneven.shape[1]] = uneven
    together = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(together, padded)
    seen += [each[:height, :width] for each, (height, width) in zip(together, shapes, strict=True)]
    for dtype in (torch.long, torch.int, torch.float, torch.half):
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM):
            scalar = torch.tensor(rank + 1, dtype=dtype)
            dist.all_reduce(scalar, op)
            seen.append(scalar)
    largest_at_0 = torch.tensor(rank + 1)
    dist.reduce(largest_at_0, 0, dist.ReduceOp.MAX)
    seen.append(largest_at_0 if rank == 0 else torch.tensor(0))
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    dist.broadcast(state, 0)
    torch.set_rng_state(state)
    seen += [state, torch.rand(3)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "shape": list(uneven.shape)})
    assert [each["rank"] for each in objects] == list(range(size))
    told: list[Any] = [{"stop": False, "batch": list(range(5))}, 7] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    assert told == [{"stop": False, "batch": list(range(5))}, 7]
    own: list[Any] = [None]
    dist.scatter_object_list(own, [f"part {other}" for other in range(size)] if rank == 0 else None, src=0)
    assert own == [f"part {rank}"]
    everything: list[Any] | None = [None] * size if rank == size - 1 else None
    dist.gather_object(rank, everything, dst=size - 1)
    assert everything in (None, list(range(size)))
    groups = [dist.new_group([left, left + 1], backend="gloo") for left in range(size - 1)]
    for left, group in enumerate(groups):
        if rank in (left, left + 1):
            number = torch.tensor(rank)
            dist.all_reduce(number, group=group)
            seen.append(number)
            dist.monitored_barrier(group)
            assert dist.get_backend(group) == "gloo"
    return seen


def partitioned(rank: int, size: int, _folder: Path) -> list[torch.Tensor]:
    """As DeepSpeed's ZeRO does: one flat buffer, parts of which ranks own, reduced to them and gathered in place."""
    torch.manual_seed(rank)
    model = Layer()
    for each in model.parameters():
        dist.broadcast(each.data, 0)
    count = sum(each.numel() for each in model.parameters())
    part = -(-count // size)
    flat = torch.zeros(part * size)
    at = 0
    for each in model.parameters():
        flat[at : at + each.numel()].copy_(each.detach().view(-1))
        each.data = flat[at : at + each.numel()].view_as(each)
        at += each.numel()
    own = flat.narrow(0, rank * part, part)
    master = own.clone().requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=1e-2)
    seen = []
    for step in range(3):
        model(torch.randn(5, WIDTH)).square().mean().backward()
        gradients = torch.cat([*(each.grad.view(-1) for each in model.parameters()), torch.zeros(len(flat) - count)])
        gradients.div_(size)
        if step == 1:
            dist.all_reduce(gradients)
        else:
            works = [
                dist.reduce(gradients.narrow(0, other * part, part), other, async_op=True) for other in range(size)
            ]
            for work in works:
                work.wait()
        master.grad = gradients.narrow(0, rank * part, part).clone()
        norm = master.grad.square().sum()
        dist.all_reduce(norm)
        overflow = torch.tensor([float(not norm.isfinite())])
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
        master.grad.mul_(0.5 / (norm.sqrt() + 1e-6))
        optimizer.step()
        own.copy_(master.detach())
        if step == 2:
            dist.all_gather_into_tensor(flat, own)
        else:
            dist.all_gather([flat.narrow(0, other * part, part) for other in range(size)], own)
        model.zero_grad()
        seen += [norm, overflow, flat.clone()]
    return seen


PROGRAMS: tuple[Callable[[int, int, Path], list[torch.Tensor]], ...] = (
    accumulated,
    resumed,
    sharded,
    split,
    gathered,
    partitioned,
)


def both(rank: int, size: int, store: str, folder: str) -> dict[str, int]:
    """Run all programs on gloo, then unchanged on covey; return how many tensors of each were compared.

    Two ranks have the same bits. Of more, the sums of gloo and covey are rounded in different orders.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    seen: dict[str, dict[str, list[torch.Tensor]]] = {}
    for turn in ("gloo", "covey"):
        if turn == "covey":
            replace("gloo")
        dist.init_process_group("gloo", init_method=f"file://{store}-{turn}", rank=rank, world_size=size)
        assert isinstance(dist.group.WORLD, ProcessGroupCovey) == (turn == "covey")
        assert dist.get_backend() == "gloo"
        seen[turn] = {}
        for program in PROGRAMS:
            own = Path(folder, turn, program.__name__)
            own.mkdir(parents=True, exist_ok=True)
            seen[turn][program.__name__] = program(rank, size, own)
        dist.barrier()
        dist.destroy_process_group()
    for name, expected in seen["gloo"].items():
        got = seen["covey"][name]
        assert len(got) == len(expected), name
        for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert ours.dtype == theirs.dtype, (name, index)
            assert ours.isfinite().all(), (name, index)
            is_same = ours.equal(theirs) if size == 2 else torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
            assert is_same, (name, index, ours, theirs)
    return {name: len(tensors) for name, tensors in seen["gloo"].items()}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_programs_written_for_gloo_compute_the_same_on_covey(size: int, tmp_path: Path) -> None:
    counts = run_torch_ranks(size, both, str(tmp_path))
    assert all(set(each) == {program.__name__ for program in PROGRAMS} for each in counts)
    assert all(number > 5 for each in counts for number in each.values())
