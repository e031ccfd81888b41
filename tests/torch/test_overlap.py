"""Communication overlaps with backward: what DDP hands over early is done early."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks
from tests.support.waiting import DEADLINE
from tests.torch.equality import batch, share, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def overlapped(rank: int, size: int, store: str) -> list[str]:
    """Make backward of the first layer wait for the buckets of the others; return what happened, in order.

    A backend that begins when backward has ended would let it wait in vain.
    """
    start(rank, size, store)
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    model = DistributedDataParallel(layers, bucket_cap_mb=0.0001)  # a bucket for each layer, or for less
    story: list[str] = []
    finished: dict[int, threading.Event] = {}

    def reduce(_state, bucket):  # torch reads annotations, and not as text
        index = bucket.index()
        story.append(f"{index} issued")
        finished[index] = threading.Event()

        def end(ended: Any) -> Any:
            story.append(f"{index} finished")
            finished[index].set()
            return ended.value()[0] / size

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(end)

    def hold(_gradient: Any) -> None:
        for event in finished.values():
            assert event.wait(DEADLINE)
        story.append("backward of the first layer")

    model.register_comm_hook(None, reduce)
    model(batch(0)[share(rank, size)]).square().mean().backward()  # DDP makes its buckets anew after the first time
    story.clear()
    finished.clear()
    layers[0].register_forward_hook(lambda _module, _given, out: out.register_hook(hold) and None)
    model(batch(1)[share(rank, size)]).square().mean().backward()
    return story


def test_buckets_are_reduced_while_backward_is_still_at_work() -> None:
    for story in run_torch_ranks(2, overlapped):
        middle = story.index("backward of the first layer")
        early, late = story[:middle], story[middle:]
        assert sum(line.endswith("finished") for line in early) >= 3
        assert sum(line.endswith("finished") for line in late) >= 1
