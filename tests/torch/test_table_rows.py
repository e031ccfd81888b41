"""Gradients of embeddings: what is sent of them, and that it is the exact mean whatever is sent."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.in_turn import in_turn
from tests.support.waiting import DEADLINE
from tests.torch.party import Party, await_newcomer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import covey.torch.training.table_rows as rows_module
from covey.base.errors import MismatchError
from covey.compress.feedback import ErrorFeedback
from covey.compress.policy import make_policy
from covey.testing.threads import run_threads
from covey.torch import Elastic, ElasticSampler, train_together
from covey.torch.training.gradient_buckets import GradientBuckets
from covey.torch.training.table_rows import TableRows, tables_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey import Group

ROWS, WIDTH = 50, 6


class Words(nn.Module):
    """A table with sparse gradients, one with dense ones, and another layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.sparse = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.dense = nn.Embedding(ROWS, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.sparse(words) * self.dense(words).sum(1)))[:, 0]


def test_only_large_tables_of_embeddings_are_sent_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Words()
    assert tables_of(model, dict(model.named_parameters())) == {"sparse.weight": True}
    monkeypatch.setattr(rows_module, "LEAST_BYTES", 4 * ROWS * WIDTH)
    assert tables_of(model, dict(model.named_parameters())) == {"sparse.weight": True, "dense.weight": False}
    tied = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False), nn.Embedding(ROWS, WIDTH))
    tied[1].weight = tied[0].weight
    assert tables_of(tied, dict(tied.named_parameters())) == {"2.weight": False}


@in_turn(touched=[3, ROWS], codec=["none", "int8"], parts=[1, 2])
def test_the_sum_is_that_of_dense_gradients_and_has_the_same_bits_on_all_ranks(
    touched: int, codec: str, parts: int
) -> None:
    """Rank 2 of three has no samples; ranks share some rows, and have others of their own."""

    def body(group: Group) -> Any:
        model = Words()
        parameters = dict(model.named_parameters())
        optimizer = torch.optim.SGD(parameters.values())
        tables = {"sparse.weight": True, "dense.weight": False}
        sums = GradientBuckets(
            group, parameters, optimizer, make_policy(codec, smallest=0), ErrorFeedback(), is_overlapped=True,
            tables=tables,
        )  # fmt: skip
        samples = [4, 2, 0][group.rank]
        for part in range(parts):
            words = (torch.arange(4 * touched).view(4, touched) % touched + 2 * group.rank + part) % ROWS
            model(words[: samples or 1]).sum().backward()
            if part + 1 < parts:
                sums.hold(samples)
        own = {name: each.grad.to_dense() for name, each in parameters.items() if each.grad is not None}
        assert sums.sum(samples, 12) == (0, 1, 2)
        figures = sums.figures.rows.tolist()
        held = {name: each.to_dense() for name, each in sums._held.items()}
        mine = {name: (own[name] * samples + held.get(name, 0)) / 12 for name in tables}
        sums.store(2.0)
        sums.close()
        return mine, {name: parameters[name].grad for name in tables}, figures

    made = run_threads(3, body)
    for name, is_sparse in {"sparse.weight": True, "dense.weight": False}.items():
        expected = 2 * sum(mine[name] for mine, *_ in made[:2])
        for _, found, figures in made:
            assert found[name].is_sparse == is_sparse
            assert torch.equal(found[name].to_dense(), made[0][1][name].to_dense())
            as_rows = figures[0] * (4 * WIDTH + 8) < 2 * ROWS * 4 * WIDTH * (1 if codec == "none" else 0.25)
            assert as_rows == (touched == 3)
            largest = float(expected.abs().max())
            error = 1e-6 if as_rows or codec == "none" else largest / 40
            torch.testing.assert_close(found[name].to_dense(), expected, rtol=0, atol=error)


def test_of_a_large_table_only_the_rows_of_a_batch_are_sent() -> None:
    length, width = 20_000, 16

    def body(group: Group) -> tuple[float, int]:
        table = nn.Embedding(length, width)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        sampler = ElasticSampler(40, shuffle=False)
        parameters = dict(table.named_parameters())
        sums = GradientBuckets(
            group, parameters, optimizer, None, ErrorFeedback(), is_overlapped=True, tables=tables_of(table, parameters)
        )
        before = sum(peer.sent_bytes for peer in group.metrics().peers)
        table(torch.tensor(sampler.take(10, rank=group.rank, size=group.size)) * 400).sum().backward()
        sums.sum(10, 20)
        sums.store(1.0)
        sent = sum(peer.sent_bytes for peer in group.metrics().peers) - before
        return float(table.weight.grad.sum()), sent

    for total, sent in run_threads(2, body):
        assert total == pytest.approx(20 * width * 0.5)
        assert 10 * width * 4 < sent < 20 * (width * 4 + 8) + 8_000 < length * width * 4 / 100


def test_what_is_no_rows_names_its_rank() -> None:
    table = TableRows("words", nn.Parameter(torch.zeros(5, 2)), is_sparse=True)
    place = torch.tensor([5]).numpy().tobytes()
    for sent in (place + bytes(8), place[:7], torch.tensor([-1]).numpy().tobytes() + bytes(8)):
        with pytest.raises(MismatchError, match=r"rank 3 sent .* no rows of words"):
            table._taken(3, torch.frombuffer(bytearray(sent), dtype=torch.uint8).numpy())


def survive(slot: int, tell: Callable[..., None]) -> Any:
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    words = torch.randint(ROWS, (60, 4), generator=torch.Generator().manual_seed(2))
    elastic = Elastic(model=model, optimizer=optimizer, sampler=ElasticSampler(60), batch=6, epochs=4, timeout=DEADLINE)
    losses = []
    for indices in elastic:
        loss = (model(words[indices]) - 1).square()
        losses.append(float(loss.detach().sum()))
        loss.mean().backward()
        if slot == 1 and elastic.samples > 50:
            os.kill(os.getpid(), signal.SIGKILL)
        elastic.step()
        tell("trained", (elastic.epoch, indices))
    with torch.no_grad():
        loss = (model(words) - 1).square().mean()
    return elastic.samples, elastic.lost, [each.tolist() for each in model.parameters()], float(loss)


def test_a_rank_is_lost_and_the_rows_of_a_step_are_those_of_the_same_ranks_as_its_other_gradients() -> None:
    with Party(3, survive) as party:
        for slot in range(3):
            party.start(slot)
        returned = party.await_all()
    assert sorted(returned) == [0, 2]
    assert returned[0] == returned[2]
    samples, lost, _, loss = returned[0]
    assert samples == 240
    assert lost > 0
    assert loss < 0.5


def follow(slot: int, tell: Callable[..., None]) -> Any:
    """Train until a newcomer has followed: moments of a table are sparse, rows are sent beside coded gradients."""
    model, said = Words(), list[str]()

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    logging.getLogger("covey").addFilter(hear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    words = torch.randint(ROWS, (60, 4), generator=torch.Generator().manual_seed(2))
    elastic = Elastic(
        model=model, optimizer=optimizer, sampler=ElasticSampler(60), batch=12, epochs=1 << 30, balance=True,
        micro_batch=2, compress="int8", timeout=DEADLINE,
    )  # fmt: skip
    elastic.shadow_newcomers()
    together = 0
    for indices in elastic:
        for place in range(len(indices)):
            with elastic.no_sync() if place + 1 < len(indices) else contextlib.nullcontext():
                ((model(words[indices[place : place + 1]]) - 1).square().sum() / len(indices)).backward()
        if slot == 1 and elastic.generation == 0 and elastic.samples > 30:
            os.kill(os.getpid(), signal.SIGKILL)
        elastic.step()
        if elastic.generation == 0 and len(elastic.group.contributors) < 2:
            await_newcomer(elastic)
        together += elastic.generation > 0 and elastic._newcomers is None and elastic._out is None
        if together == 8:
            break
    moments = optimizer.state_dict()["state"]
    held = [*model.parameters(), *(moments[place]["momentum_buffer"] for place in range(4))]
    return elastic.samples, [each.detach().to_dense().tolist() for each in held], said


def test_a_newcomer_follows_a_training_with_sparse_gradients_and_has_the_same_bits() -> None:
    with Party(2, follow) as party:
        for slot in range(2):
            party.start(slot)
        party.await_gone(1)
        party.start(1, restart=1)
        returned = party.await_all()
    assert returned[0][:2] == returned[1][:2]
    said = returned[0][2]
    assert any("rank 1 took the state in the background" in line for line in said), said


def together(slot: int, tell: Callable[..., None]) -> Any:
    model = Words()
    words = torch.randint(ROWS, (60, 4), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    training = train_together(
        model, optimizer, DataLoader(TensorDataset(words), batch_size=6), epochs=2, exact=True, timeout=DEADLINE
    )
    for (inputs,) in training:
        (model(inputs) - 1).square().mean().backward()
        training.step()
        assert training.way in ("DDP", "one machine alone")
    return [each.tolist() for each in model.parameters()]


def test_train_together_with_sparse_gradients_computes_what_one_machine_does() -> None:
    with Party(2, together) as party:
        for slot in range(2):
            party.start(slot)
        returned = party.await_all()
    assert returned[0] == returned[1]
    alone = together(0, lambda *_: None)
    for mine, whole in zip(returned[0], alone, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(whole), rtol=1e-4, atol=1e-6)
