"""A rank of `covey bench train`: trains a model in one way, and prints how its loss on held-out text fell.

Copies of the parameters are kept while it trains, and judged afterwards, so that looking costs no training time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import covey.torch
from covey.lab.bench.train import OTHER_PACKAGES, TrainOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TEXT_BYTES: Final = 6_000_000
HELD_OUT: Final = 300_000
"""Bytes at the end of the text that no rank trains on."""
CONTEXT_BYTES: Final = 32
VOCABULARY: Final = 256
PERCEPTRON_WIDTH: Final = 1260
ADAPTER: Final = 8
COPIES: Final = 40
"""Copies of the parameters that a run keeps."""
RATE: Final = 1e-3
BENCH_RUN: Final = "covey-bench-train"


class Perceptron(nn.Module):  # type: ignore[misc]
    """Guesses the next byte from the last ones: 3.2 million parameters."""

    def __init__(self, *, is_adapted: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, CONTEXT_BYTES)
        width = CONTEXT_BYTES * CONTEXT_BYTES
        self.inner, self.middle = nn.Linear(width, PERCEPTRON_WIDTH), nn.Linear(PERCEPTRON_WIDTH, PERCEPTRON_WIDTH)
        self.outer = nn.Linear(PERCEPTRON_WIDTH, VOCABULARY)
        self.down, self.up = (
            nn.Linear(PERCEPTRON_WIDTH, ADAPTER, bias=False),
            nn.Linear(ADAPTER, PERCEPTRON_WIDTH, bias=False),
        )
        self.is_adapted = is_adapted
        for part in (self.down, self.up):
            part.requires_grad_(is_adapted)
        if is_adapted:
            for frozen in (self.embed, self.inner, self.middle, self.outer):
                frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.inner(self.embed(x).flatten(1)))
        added = self.up(self.down(hidden)) if self.is_adapted else 0.0
        result: torch.Tensor = self.outer(torch.relu(self.middle(hidden) + added))
        return result


class Transformer(nn.Module):  # type: ignore[misc]
    """Guesses every next byte by attention: four layers."""

    def __init__(self, width: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT_BYTES, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.outer = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.embed(x) + self.place.weight[: x.shape[1]]
        result: torch.Tensor = self.outer(self.layers(hidden, mask=mask, is_causal=True))
        return result


MODELS: Final[dict[str, Any]] = {
    "mlp": Perceptron,
    "attention": Transformer,
    "lora": lambda: Perceptron(is_adapted=True),
}


class Windows(Dataset[Any]):  # type: ignore[misc]
    """Pieces of the text, and what follows: the next byte, or every next byte."""

    def __init__(self, text: torch.Tensor, *, is_every: bool) -> None:
        self._text, self._is_every = text, is_every

    def __len__(self) -> int:
        return len(self._text) - CONTEXT_BYTES - 1

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.tensor(indices)[:, None] + torch.arange(CONTEXT_BYTES + 1)
        rows = self._text[places].long()
        return rows[:, :-1], rows[:, 1:] if self._is_every else rows[:, -1]


def library_text() -> torch.Tensor:
    """Return the sources of Python's own library as bytes, the same on every machine with this Python."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")) + sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("[a-l]*/*.py")
    )
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Copies:
    """What the lowest rank keeps of a run: when, after how many samples, and the parameters."""

    def __init__(self, order: TrainOrder) -> None:
        self._every, self._seconds = order.seconds / COPIES, order.seconds
        self._begun = time.monotonic()
        self._looked = 0.0
        self.kept: list[tuple[float, int, list[torch.Tensor]]] = []

    @property
    def is_over(self) -> bool:
        return self.is_past(self._seconds)

    def is_past(self, seconds: float) -> bool:
        """Tell whether the training has lasted so long; 0 is never over."""
        return 0 < seconds <= time.monotonic() - self._begun - self._looked

    def look(self, samples: int, model: nn.Module, agreed: Any) -> None:
        """Keep a copy if it is time for one; the time that this takes does not count."""
        now = time.monotonic()
        at = now - self._begun - self._looked
        if at >= self._every * (len(self.kept) + 1):
            with agreed():
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                self.kept.append((at, samples, [parameter.detach().clone() for parameter in trained]))
            self._looked += time.monotonic() - now

    def losses(self, model: nn.Module, held_out: Windows) -> list[tuple[float, int, float]]:
        """Return seconds, samples and loss of each copy."""
        places = torch.randint(len(held_out), (512,), generator=torch.Generator().manual_seed(7)).tolist()
        inputs, targets = held_out.__getitems__(places)
        found = []
        model.eval()
        with torch.no_grad():
            for at, samples, copies in self.kept:
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                for parameter, copy in zip(trained, copies, strict=True):
                    parameter.copy_(copy)
                found.append((at, samples, float(loss_of(model(inputs), targets))))
        return found


class Slowness:
    """Makes a machine slower than its core: it sleeps after what it has computed."""

    def __init__(self, speed: float) -> None:
        """`speed` is the part of a core that it computes with."""
        self._slower, self._begun = 1 / speed - 1, 0.0

    def begin(self) -> None:
        self._begun = time.thread_time()

    def end(self) -> None:
        if self._slower > 0:
            time.sleep(self._slower * (time.thread_time() - self._begun))


def loss_of(guesses: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(guesses.flatten(0, -2), targets.flatten())


def batches(order: TrainOrder, data: Windows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of this rank: other ranks and seeds have others."""
    generator = torch.Generator().manual_seed(1000 * order.seed + order.rank)
    while True:
        yield data.__getitems__(torch.randint(len(data), (order.batch,), generator=generator).tolist())


def train(order: TrainOrder) -> list[tuple[float, int, float]]:
    """Train as one rank; return the course of the loss."""
    text, is_every = library_text(), order.model == "attention"
    data = Windows(text[:-HELD_OUT], is_every=is_every)
    torch.manual_seed(order.seed)
    model = MODELS[order.model]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    course = _together(order, model, optimizer, data) if order.way == "together" else _apart(
        order, model, optimizer, data
    )  # fmt: skip
    return course.losses(model, Windows(text[-HELD_OUT:], is_every=is_every)) if order.rank == 0 else []


def _together(order: TrainOrder, model: nn.Module, optimizer: torch.optim.Optimizer, data: Windows) -> Copies:
    loader = DataLoader(data, batch_size=order.batch * order.size, shuffle=True, collate_fn=lambda pair: pair)
    together = covey.torch.train_together(
        model, optimizer, loader, epochs=1000, seed=order.seed, exact=order.exact, run=BENCH_RUN, min_size=order.least,
        timeout=120,
    )  # fmt: skip
    course, way, pace = None, "", Slowness(order.speed)
    for inputs, targets in together:
        course = course or Copies(order)  # the start does not count
        if course.is_over and order.rank == 0:
            break
        if course.is_past(order.lost_after):
            os.kill(os.getpid(), signal.SIGKILL)
        pace.begin()
        loss_of(model(inputs), targets).backward()
        pace.end()
        together.step()
        if together.way != way:
            way = together.way
            print(f"{order.rank}: {way}", file=sys.stderr, flush=True)
        if order.rank == 0:
            course.look(together.samples, model, together.outer_parameters)
    assert course is not None
    return course


def _apart(order: TrainOrder, model: nn.Module, optimizer: torch.optim.Optimizer, data: Windows) -> Copies:
    """Train in a way that does not choose."""
    if order.way in OTHER_PACKAGES:
        from covey.lab.bench.train_others import other

        with other(order, model, optimizer) as training:
            return _loop(order, model, training.optimizer, data, agreed=training.agreed)
    trained: nn.Module = model
    diloco = None
    if order.way != "alone":
        kind = "gloo" if order.way == "gloo" else "covey"
        method = (
            f"tcp://{os.environ['BENCH_FIRST']}:29511"
            if kind == "gloo"
            else f"covey://{BENCH_RUN}?size={order.size}&timeout=120"
        )
        place = {"rank": order.rank, "world_size": order.size} if kind == "gloo" else {}
        dist.init_process_group(kind, init_method=method, **place)
    if order.way in ("gloo", "ddp", "ddp int8", "bound"):
        trained = DistributedDataParallel(model)
        if order.way == "ddp int8":
            trained.register_comm_hook(None, covey.torch.compress_hook("int8", model=model))
    if order.way == "diloco":
        fragments = min(4, sum(each.requires_grad for each in model.parameters()))
        diloco = covey.torch.DiLoCo(model, optimizer, every=20, fragments=fragments, overlap=True, compress="int8")
    agreed = contextlib.nullcontext if diloco is None else diloco.outer_parameters
    return _loop(order, trained, optimizer, data, agreed=agreed, after_step=None if diloco is None else diloco.step)


def _loop(
    order: TrainOrder,
    model: nn.Module,
    optimizer: Any,
    data: Windows,
    *,
    agreed: Any,
    after_step: Callable[[], object] | None = None,
) -> Copies:
    """Train until the time of the lowest rank is over."""
    course, of_all = Copies(order), order.batch * (1 if order.way == "alone" else order.size)
    pace = Slowness(order.speed)
    for steps, (inputs, targets) in enumerate(batches(order, data), 1):
        optimizer.zero_grad()
        pace.begin()
        loss_of(model(inputs), targets).backward()
        pace.end()
        optimizer.step()
        if after_step is not None:
            after_step()
        if order.rank == 0:
            course.look(steps * of_all, model, agreed)
            if course.is_over:
                break
    return course


def main() -> None:
    """Train as the order on the command line says, and print the course as JSON."""
    order = TrainOrder(**json.loads(sys.argv[1]))
    cores = sorted(os.sched_getaffinity(0))
    if order.size <= len(cores):  # more machines than cores share all of them
        os.sched_setaffinity(0, [cores[order.rank]])
    torch.set_num_threads(1)
    print(json.dumps(train(order)), flush=True)
    os._exit(0)  # the other ranks still train, and are ended by the parent


if __name__ == "__main__":
    main()
