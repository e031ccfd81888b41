"""Trainings of other packages in `covey bench train`, where these are installed: torchft and hivemind."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.lab.bench.train import TrainOrder

PERIOD: Final = 20
"""Steps between two outer steps with the same parameter."""
OTHERS_PATIENCE: Final = timedelta(seconds=60)
LIGHTHOUSE_PORT, STORE_PORT, TABLE_PORT = 29512, 29513, 29514


class OtherTraining(NamedTuple):
    """What a training of another package steps, and what its ranks agree on."""

    optimizer: Any
    agreed: Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def other(order: TrainOrder, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[OtherTraining]:
    """Train as `order.way` says inside a with statement."""
    with (_torchft if order.way == "torchft" else _hivemind)(order, model, optimizer) as training:
        yield training


@contextlib.contextmanager
def _torchft(order: TrainOrder, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[OtherTraining]:
    """torchft's streaming DiLoCo with the outer optimizer of its paper; a fragment is a layer."""
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    own, first = os.environ["BENCH_OWN"], os.environ["BENCH_FIRST"]
    lighthouse = None
    if order.rank == 0:
        lighthouse = LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=order.size, join_timeout_ms=60000)
    store = dist.TCPStore(own, STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=OTHERS_PATIENCE), min_replica_size=order.size, use_async_quorum=False,
        load_state_dict=model.load_state_dict, state_dict=model.state_dict, rank=0, world_size=1, store_addr=own,
        store_port=store.port, lighthouse_addr=f"http://{first}:{LIGHTHOUSE_PORT}", replica_id=f"rank{order.rank}",
        hostname=own, init_sync=False, timeout=OTHERS_PATIENCE, quorum_timeout=OTHERS_PATIENCE,
    )  # fmt: skip
    layers = [layer for layer in model.children() if any(each.requires_grad for each in layer.parameters())]
    outer = [torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True) for layer in layers]
    delay = PERIOD // len(layers) - 1
    diloco = DiLoCo(manager, layers, optimizer, outer, sync_every=PERIOD, fragment_sync_delay=delay)

    @contextlib.contextmanager
    def agreed() -> Iterator[None]:
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for fragment, layer in zip(diloco._fragments, layers, strict=True):
                for name, parameter in layer.named_parameters():
                    parameter.copy_(fragment.original_parameters[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, mine in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(mine)

    with diloco:
        try:
            yield OtherTraining(optimizer, agreed)
        finally:
            manager.shutdown(wait=False)
            if lighthouse is not None:
                lighthouse.shutdown()


@contextlib.contextmanager
def _hivemind(order: TrainOrder, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[OtherTraining]:
    """hivemind's optimizer with local updates: parameters are averaged after every PERIOD batches of all."""
    import hivemind  # type: ignore[import-not-found]

    own, first, name = os.environ["BENCH_OWN"], os.environ["BENCH_FIRST"], "/p2p/"
    store = dist.TCPStore(first, TABLE_PORT, order.size, is_master=order.rank == 0, timeout=OTHERS_PATIENCE)
    peers = [] if order.rank == 0 else [store.get("address").decode()]
    table = hivemind.DHT(host_maddrs=[f"/ip4/{own}/tcp/0"], initial_peers=peers, start=True)
    if order.rank == 0:
        store.set("address", next(str(each) for each in table.get_visible_maddrs() if name in str(each)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    averaging = hivemind.Optimizer(
        dht=table, run_id="covey-bench-train", batch_size_per_step=order.batch, params=trained,
        target_batch_size=PERIOD * order.batch * order.size, optimizer=lambda _: optimizer, use_local_updates=True,
        matchmaking_time=3.0, averaging_timeout=10.0,
    )  # fmt: skip
    store.add("ready", 1)
    while store.add("ready", 0) < order.size:
        pass
    try:
        yield OtherTraining(averaging, contextlib.nullcontext)
    finally:
        averaging.shutdown()
        table.shutdown()
