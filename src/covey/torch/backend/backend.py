"""covey as a backend of torch.distributed: a process group written in Python."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from covey.arrays.torch_devices import tensor_over, writing_to
from covey.base.errors import ConfigError
from covey.base.numbers import ANY
from covey.runtime.buffers import writable
from covey.runtime.group.compression import Piece
from covey.runtime.group.internals import engine_of, policy_of
from covey.torch.backend.description import DescribedProcessGroup
from covey.torch.backend.operands import (
    WholeMean,
    averages_integers,
    blocks_of,
    operand_of,
    operands_of,
    piece_length,
    reduction,
)
from covey.torch.backend.visible import is_waited_for, keep_from_dynamo, visible
from covey.torch.backend.work import TorchIssuer, TorchWork, torchs_errors
from covey.torch.backend.world import World, close_world, world_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.compress.feedback import ErrorFeedback
    from covey.compress.parsing import Compression
    from covey.runtime.buffers import Part
    from covey.torch.backend.exchange import TensorGroup

    Tensors = list[torch.Tensor]


def create(options: Any) -> ProcessGroupCovey:
    """Return the process group that torch asks for. Making the first one waits for the other ranks."""
    ranks, size = list(options.global_ranks_in_group), options.group_size
    world = world_of(options.store, options.group_rank, size, options.timeout.total_seconds(), ranks)
    is_first = world.is_new
    return ProcessGroupCovey(
        world,
        options.store,
        list(range(size)) if is_first else ranks,
        options.group_rank,
        name=str(options.group_id),
        timeout=options.timeout,
        is_first=is_first,
    )


@visible
class ProcessGroupCovey(DescribedProcessGroup):
    """A process group whose operations covey performs. Roots and peers are ranks of the group.

    An operation that torch waits for at once runs on the calling thread; others queue for the thread of the group. Any
    thread may call; the calls are issued one after the other.
    """

    def __init__(
        self,
        world: World,
        store: Any,
        ranks: list[int],
        rank: int,
        *,
        name: str,
        timeout: timedelta,
        is_first: bool = False,
    ) -> None:
        """`ranks` are ranks of the world, in the order of the group's own. The world is closed with its first group."""
        super().__init__(rank, len(ranks), name, store)
        self._world, self._ranks, self._is_first = world, ranks, is_first
        self._group = world.group(name, ranks)
        self._issuer = TorchIssuer(self._group, len(ranks), timeout.total_seconds())
        self.check_every = world.check_every
        """Every how many steps the ranks compare their parameters, 0 for never."""
        self._may_cut = world.has_devices and self._group.on_loss == "raise"
        world.on_close(self._close)

    @property
    def covey_group(self) -> TensorGroup:
        """The covey group that carries out the operations."""
        return self._group

    @property
    def compresses(self) -> bool:
        """Whether the group was told to compress gradients."""
        return policy_of(self._group) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        self._issuer.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        """Return how many operations were issued: torch asks groups for it by this name."""
        return engine_of(self._group).issued

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the ranks of a group count its operations from the first one."""

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.AllreduceOptions() if opts is None else opts
        if averages_integers(opts.reduceOp, tensors[0].dtype):
            return self._issuer.issue(opts, tensors, self._group.all_reduce, [(x, "sum") for x in self._whole(tensors)])
        op, factor = reduction(opts.reduceOp, tensors[0].dtype)
        if tensors[0].layout is torch.sparse_coo:
            return self._allreduce_sparse(tensors, op, opts)
        if factor is not None:
            for tensor in tensors:
                tensor.mul_(factor)
        if self._may_cut:
            calls = [(operand, op) for tensor in tensors for operand in operands_of(tensor, piece_length([tensor]))]
        else:
            calls = [(operand_of(tensor), op) for tensor in tensors]
        return self._issuer.issue(opts, tensors, self._group.all_reduce, calls)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, c10d.AllreduceCoalescedOptions() if opts is None else opts)

    def average_gradients(
        self,
        pieces: Sequence[tuple[torch.Tensor, list[Part], Compression | None]],
        feedback: ErrorFeedback | None,
        weight: float | None = None,
    ) -> TorchWork:
        """Start to replace gradients by their means, in one operation; torch's interface has no such call.

        Each piece is a tensor, its named parts and its codec. With `weight`, this rank's gradients count that many
        times.
        """
        opts = c10d.AllreduceOptions()
        opts.asyncOp = True
        operands = [Piece(writable(operand_of(tensor)), parts, codec) for tensor, parts, codec in pieces]
        filled = [tensor for tensor, _, _ in pieces]
        return self._issuer.issue(opts, filled, self._group.average_gradients, [(operands, feedback, weight)])

    def _allreduce_sparse(self, tensors: Tensors, op: str, opts: Any) -> TorchWork:
        """Gather the entries of all ranks on every rank, and add the ones with equal indices."""
        if op != "sum":
            raise ConfigError(f"op={op!r} has no meaning for sparse tensors; they can be summed")
        calls = []
        for tensor in tensors:
            entries, writing = tensor.detach().coalesce(), writing_to(tensor)

            def combine(pairs: list[tuple[Any, Any]], tensor: torch.Tensor = tensor, writing: Any = writing) -> None:
                indices = torch.cat([tensor_over(where) for where, _ in pairs], dim=1)
                values = torch.cat([tensor_over(what) for _, what in pairs])
                total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=True).coalesce()
                with torch.no_grad(), writing():
                    tensor.copy_(total.to(tensor.device))

            bounds = tuple(tensor.shape[: tensor.sparse_dim()])
            calls.append((operand_of(entries.indices()), operand_of(entries.values()), bounds, combine))
        return self._issuer.issue(opts, tensors, self._group.gather_pairs, calls)

    def reduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.ReduceOptions() if opts is None else opts
        (tensor,) = tensors
        if averages_integers(opts.reduceOp, tensor.dtype):
            call = (self._whole(tensors)[0], opts.rootRank, "sum")
            return self._issuer.issue(opts, tensors, self._group.reduce, [call])
        op, factor = reduction(opts.reduceOp, tensor.dtype)
        if factor is not None:
            tensor = tensor.mul_(factor) if opts.rootRank == self._rank else tensor * factor
        calls = [(operand, opts.rootRank, op) for operand in operands_of(tensor, self._cut([tensor]))]
        return self._issuer.issue(opts, tensors, self._group.reduce, calls)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> TorchWork:
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if averages_integers(opts.reduceOp, outputs[0].dtype):
            return self._scatter_whole_means(outputs, inputs, opts)
        op, factor = reduction(opts.reduceOp, outputs[0].dtype)
        if factor is not None:
            inputs = [[part * factor for part in parts] for parts in inputs]
        return self._scatter_sums(outputs, inputs, op, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        if averages_integers(opts.reduceOp, outputs[0].dtype):
            return self._scatter_whole_means(outputs, [list(whole.chunk(self.size())) for whole in inputs], opts)
        op, factor = reduction(opts.reduceOp, outputs[0].dtype)
        if factor is not None:
            inputs = [whole * factor for whole in inputs]
        return self._scatter_sums(outputs, [self._blocks(whole) for whole in inputs], op, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter_sums(self, outputs: Tensors, inputs: Sequence[Sequence[Any]], op: str, opts: Any) -> TorchWork:
        """Fill every output with this rank's share of the combined inputs."""
        calls = []
        for output, parts in zip(outputs, inputs, strict=True):
            length = self._cut([output, *parts])
            targets = operands_of(output, length, is_read=False)
            shares = zip(*(operands_of(part, length, is_written=False) for part in parts), strict=True)
            calls += [(target, list(share), op) for target, share in zip(targets, shares, strict=True)]
        return self._issuer.issue(opts, outputs, self._group.reduce_scatter_into, calls)

    def _scatter_whole_means(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        pairs = zip(self._whole(outputs), map(self._whole, inputs), strict=True)
        calls = [(target, parts, "sum") for target, parts in pairs]
        return self._issuer.issue(opts, outputs, self._group.reduce_scatter_into, calls)

    def _whole(self, tensors: Tensors) -> list[WholeMean]:
        return [WholeMean.of(tensor, self._rank, self._size) for tensor in tensors]

    # Moving

    def broadcast(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.BroadcastOptions() if opts is None else opts
        root, is_root = opts.rootRank, opts.rootRank == self._rank
        calls = [
            (operand, root)
            for tensor in tensors
            for operand in operands_of(tensor, self._cut([tensor]), is_read=is_root, is_written=not is_root)
        ]
        return self._issuer.issue(opts, tensors, self._group.broadcast, calls)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.AllgatherOptions() if opts is None else opts
        return self._gather_all(outputs, inputs, [out for outs in outputs for out in outs], opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        # The layout is outputs[rank][i] here.
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.AllgatherOptions() if opts is None else opts
        return self._gather_all([self._blocks(out) for out in outputs], inputs, outputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_all(self, rows: Sequence[Sequence[Any]], inputs: Tensors, filled: Tensors, opts: Any) -> TorchWork:
        """Fill every row with the inputs of all ranks."""
        calls = []
        for row, mine in zip(rows, inputs, strict=True):
            length = self._cut([mine, *row])
            outs = zip(*(operands_of(out, length, is_read=False) for out in row), strict=True)
            own = operands_of(mine, length, is_written=False)
            calls += [(list(targets), x) for targets, x in zip(outs, own, strict=True)]
        return self._issuer.issue(opts, filled, self._group.all_gather_into, calls)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        opts = c10d.GatherOptions() if opts is None else opts
        is_root = opts.rootRank == self._rank
        outs = [operand_of(out, is_read=False) for out in outputs[0]] if is_root else None
        call = (outs, operand_of(inputs[0]), opts.rootRank)
        return self._issuer.issue(opts, outputs[0] if is_root else [], self._group.gather_into, [call])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> TorchWork:
        opts = c10d.ScatterOptions() if opts is None else opts
        parts = [operand_of(part) for part in inputs[0]] if opts.rootRank == self._rank else None
        call = (operand_of(outputs[0], is_read=False), parts, opts.rootRank)
        return self._issuer.issue(opts, outputs, self._group.scatter_into, [call])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        return self._exchange(outputs, inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> TorchWork:
        outs, parts = (
            whole.split(list(splits)) if splits else self._blocks(whole, by_rows=True)
            for whole, splits in ((output, output_splits), (input, input_splits))
        )
        return self._exchange(outs, parts, [output], opts)

    alltoall_base = all_to_all_single

    def _exchange(self, outs: Sequence[Any], parts: Sequence[Any], filled: Tensors, opts: Any) -> TorchWork:
        opts = c10d.AllToAllOptions() if opts is None else opts
        targets = [operand_of(out, is_read=False) for out in outs]
        return self._issuer.issue(opts, filled, self._group.all_to_all_into, [(targets, list(map(operand_of, parts)))])

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._issuer.issue(c10d.BarrierOptions() if opts is None else opts, [], self._group.barrier, [()])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; raise an error that names every rank that has not come in time.

        torch calls it for groups whose backend is called gloo. All late ranks are named with or without
        `wait_all_ranks`.
        """
        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts)

    monitoredBarrier = monitored_barrier  # noqa: N815

    # Point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> TorchWork:
        (tensor,) = tensors
        is_async = not is_waited_for(sys._getframe())
        with torchs_errors():
            x: Any = operand_of(tensor)
            work = self._group.send(x, dst, tag, timeout=self._issuer.seconds, async_op=is_async)
        return TorchWork([work] if is_async else [], tensors, self._issuer.notices)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> TorchWork:
        return self._receive(tensors, src, tag, is_async=not is_waited_for(sys._getframe()))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> TorchWork:
        return self._receive(tensors, ANY, tag, is_async=not is_waited_for(sys._getframe()))

    def _receive(self, tensors: Tensors, src: int, tag: int, *, is_async: bool) -> TorchWork:
        (tensor,) = tensors
        target = operand_of(tensor, is_read=False)
        with torchs_errors():
            outcome = self._group.recv_into(target, src, tag, timeout=self._issuer.seconds, async_op=is_async)
        if is_async:
            return TorchWork([outcome], tensors, self._issuer.notices)
        return TorchWork([], tensors, self._issuer.notices, source=outcome)

    # Subgroups

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroupCovey | None:
        """Return a process group of some ranks of this one; None on other ranks. Every rank in `ranks` calls it."""
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}/{'-'.join(map(str, ranks))}"
        made = ProcessGroupCovey(
            self._world,
            dist.PrefixStore(f"{name}/", self._store),
            [self._ranks[rank] for rank in ranks],
            ranks.index(self._rank),
            name=name,
            timeout=timedelta(seconds=self._issuer.seconds) if timeout is None else timeout,
        )
        made.setGroupDesc(group_desc or "")
        return made

    splitGroup = split_group  # noqa: N815

    def merge_remote_group(self, *_args: Any, **_kwargs: Any) -> ProcessGroupCovey:
        raise ConfigError(
            "covey cannot merge process groups; make one of all ranks with init_process_group or new_group"
        )

    mergeRemoteGroup = merge_remote_group  # noqa: N815

    # The end

    def shutdown(self) -> None:
        """Close the group. Closing the first group of a world closes the others and leaves the run."""
        if self._is_first:
            close_world(self._world)
        else:
            self._close()

    def abort(self) -> None:
        """End pending operations on all ranks, and close the group."""
        self._group.revoke()
        self.shutdown()

    def _close(self) -> None:
        try:
            self._group.close()  # ends pending operations, so that threads that wait for them wake up
        finally:
            self._issuer.notices.close()
            self._world.forget(self._close)

    # Tensors as operands

    def _cut(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the length of the pieces that tensors are cut into, if some rank has a device; 0 for no cutting.

        Tensors are not cut in a group that survives losses, where an operation is all or nothing.
        """
        return piece_length(tensors) if self._may_cut else 0

    def _blocks(self, whole: torch.Tensor, *, by_rows: bool = False) -> Sequence[Any]:
        """Return the equal shares of all ranks in a tensor, consecutive in its memory.

        With `by_rows`, the first axis must be divisible by the number of ranks.
        """
        size, rows = self.size(), whole.shape[0] if whole.dim() else 1
        length = whole.numel() if whole.is_contiguous() and not by_rows else rows
        if length % size:
            raise ConfigError(f"a tensor of shape {list(whole.shape)} cannot be divided among {size} ranks")
        if not whole.is_contiguous():
            return list(whole.chunk(size))
        if self._world.has_devices:
            return list(whole.view(size, whole.numel() // size).unbind())
        return blocks_of(whole, size)


keep_from_dynamo(DescribedProcessGroup, ProcessGroupCovey, TorchIssuer, TorchWork)
