"""Gradients of embeddings as rows: of a large table, a step touches few, and only these are sent.

Invariant: all ranks send a table in the same way, since the choice follows from the number of rows that all of them
have told in one sum. Rows are added in the order of ranks, so that the result is the same bits everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from covey.base.errors import MismatchError
from covey.runtime.group.internals import gradients_of
from covey.torch.training.gradient_mean import consecutive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.compress.feedback import ErrorFeedback
    from covey.compress.policy import Policy
    from covey.runtime.group.group import Group

PLACE_BYTES: Final = 8
"""The number of a row takes so many beside the row."""
CODED_SHARE: Final = 0.25
"""What a codec leaves of a dense gradient, as far as the choice goes; rows are sent as they are."""
LEAST_BYTES: Final = 1 << 20
"""A smaller table travels with other gradients, unless its gradient is sparse: an operation of its own costs more."""


def tables_of(model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, bool]:
    """Return which parameters are large tables of embeddings, and whether their gradients are sparse.

    One that is tied to the weight of another kind of layer is none: it gets gradients of all rows there.
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    found = {}
    for name, parameter in parameters.items():
        its = owners.get(id(parameter), [])
        tables = [each for each in its if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag)]
        is_sparse = any(each.sparse for each in tables)
        is_worth_it = is_sparse or parameter.numel() * 4 >= LEAST_BYTES
        if tables and len(tables) == len(its) and is_worth_it and not isinstance(parameter, DTensor):
            found[name] = is_sparse
    return found


class TableRows:
    """The sum of one table's gradient over the ranks of one group."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, *, is_sparse: bool) -> None:
        self.name, self.parameter, self._is_sparse = name, parameter, is_sparse
        self._dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        self._width = parameter.shape[1]
        self.contributors: tuple[int, ...] = ()
        """Those of the last sum; none before it."""
        self.load(None)

    def load(self, gradient: torch.Tensor | None) -> int:
        """Take the contribution of this rank, dense or sparse; return how many rows it has."""
        self.contributors = ()
        if gradient is None:
            self._places = torch.zeros(0, dtype=torch.int64)
            self._rows = torch.zeros((0, self._width), dtype=self._dtype)
        elif gradient.is_sparse:
            whole = gradient.detach().coalesce()
            self._places, self._rows = whole.indices()[0].cpu(), whole.values().to("cpu", self._dtype)
        else:
            self._places, self._rows = _rows_of(gradient.detach().to("cpu", self._dtype))
        return len(self._places)

    def sum(
        self, group: Group, rows: float, policy: Policy | None, feedback: ErrorFeedback | None, nbytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the table in the way that sends less: as rows, or whole. `rows` is the number of those of all ranks."""
        length, row_bytes = len(self.parameter), self._width * self._dtype.itemsize
        is_coded = policy is not None and any(codec is not None for _, codec in policy.rules)
        whole = 2 * length * row_bytes * (CODED_SHARE if is_coded else 1.0)
        if rows * (row_bytes + PLACE_BYTES) < whole:
            summed = self._gathered(group)
        else:
            table = torch.zeros((length, self._width), dtype=self._dtype)
            table[self._places] = self._rows
            parts = consecutive([(self.name, table.shape)])
            gradients_of(group).sum_row(table.view(-1).numpy(), parts, policy, feedback, nbytes)
            summed = _rows_of(table)
        self.contributors = tuple(group.contributors)
        return summed

    def _gathered(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the union of the rows of all ranks, and their sums."""
        sent = np.concatenate(
            [part.contiguous().numpy().view(np.uint8).reshape(-1) for part in (self._places, self._rows)]
        )
        by_rank = [self._taken(rank, each) for rank, each in enumerate(group.all_gather(sent)) if each is not None]
        union = torch.unique(torch.cat([places for places, _ in by_rank]))
        total = torch.zeros((len(union), self._width), dtype=self._dtype)
        for places, rows in by_rank:  # each has a place at most once, so this adds in the order of ranks
            total.index_add_(0, torch.searchsorted(union, places), rows)
        return union, total

    def _taken(self, rank: int, sent: Any) -> tuple[torch.Tensor, torch.Tensor]:
        count, rest = divmod(len(sent), PLACE_BYTES + self._width * self._dtype.itemsize)
        places = torch.from_numpy(sent[: count * PLACE_BYTES].copy().view(np.int64))
        if rest or (count and not 0 <= int(places.min()) <= int(places.max()) < len(self.parameter)):
            raise MismatchError(f"rank {rank} sent {len(sent)} bytes that are no rows of {self.name}")
        values = sent[count * PLACE_BYTES :].copy().view(np.float64 if self._dtype == torch.float64 else np.float32)
        return places, torch.from_numpy(values.reshape(count, self._width))

    def store(self, summed: tuple[torch.Tensor, torch.Tensor], factor: float) -> None:
        """Set the gradient of the table to what `sum` returned, times `factor`."""
        table = self.parameter
        places, rows = summed[0].to(table.device), summed[1].mul(factor).to(table.device, table.dtype)
        if self._is_sparse:
            table.grad = torch.sparse_coo_tensor(
                places[None], rows, table.shape, check_invariants=True, is_coalesced=True
            )
            return
        if table.grad is None:
            table.grad = torch.empty_like(table)
        table.grad.zero_()
        table.grad[places] = rows


def _rows_of(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of the rows that are not zero, and these rows."""
    places = (table != 0).any(1).nonzero()[:, 0]
    return places, table[places]
