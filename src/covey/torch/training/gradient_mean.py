"""Means of gradients whose parts have names, sent in fewer bytes; on covey's process groups and on others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.compress.codec import Codec, encode_with_residual
from covey.compress.feedback import ErrorFeedback
from covey.compress.policy import make_policy
from covey.runtime.buffers import Part, as_array
from covey.runtime.group.compression import codec_for_part
from covey.runtime.group.gradients import scale
from covey.runtime.group.internals import policy_of
from covey.torch.backend.below import covey_group_of, gather_rows, there

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.compress.parsing import Compression
    from covey.compress.policy import CompressValue, Policy


class GradientMean:
    """Averages gradients over the ranks of a process group, compressed; keeps what was lost for the next time.

    `compress` None is what covey's group below the process group was told to compress: nothing on another backend.
    """

    def __init__(self, compress: CompressValue, feedback: ErrorFeedback | bool) -> None:
        self._policy = None if compress is None else make_policy(compress, smallest=0)
        self.feedback = ErrorFeedback() if feedback is True else feedback or None
        """What was lost so far, by name; None if it is not kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was held back, as tensors; each rank has its own."""
        if self.feedback is None:
            return {}
        state = self.feedback.state_dict()
        return {
            part: {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in of_part.items()}
            for part, of_part in state.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` returned."""
        if self.feedback is not None and state:
            self.feedback.load_state_dict(
                {
                    part: {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in of_part.items()}
                    for part, of_part in state.items()
                }
            )

    def is_compressed(self, group: Any) -> bool:
        """Tell whether some gradients of a process group may be compressed."""
        policy = self.policy(group)
        return policy is not None and any(codec is not None for _, codec in policy.rules)

    def policy(self, group: Any) -> Policy | None:
        """Return how gradients in a process group are compressed; None for not at all."""
        if self._policy is not None:
            return self._policy
        below = covey_group_of(group)
        return None if below is None else policy_of(below)

    def start(
        self, tensor: torch.Tensor, parts: Sequence[Part], group: Any, weight: float | None = None
    ) -> tuple[Any, Callable[[], torch.Tensor]]:
        """Start to replace a flat tensor by its mean over all ranks, or over those that remain.

        With `weight`, this rank's tensor counts that many times; if no rank has a weight, the mean is 0. Return the
        work, and a function to call once it is done, which returns the tensor.
        """
        pieces = self._pieces(tensor, parts, self.policy(group))
        covey_group = covey_group_of(group)
        if covey_group is None:
            return self._start_elsewhere(tensor, parts, pieces, group, weight)
        work = (group or dist.group.WORLD).average_gradients(pieces, self.feedback, weight)

        def finish() -> torch.Tensor:
            for piece, of_piece, _ in pieces:
                if piece is not tensor:
                    _unpack(piece, of_piece, tensor, parts)
            return tensor

        return work, finish

    @staticmethod
    def _pieces(
        tensor: torch.Tensor, parts: Sequence[Part], policy: Policy | None
    ) -> list[tuple[torch.Tensor, list[Part], Compression | None]]:
        """Return the parts packed by codec: each piece with its parts, in places of the piece.

        The size of the whole tensor counts, not that of a part: all parts travel together.
        """
        by_codec: dict[Compression | None, list[Part]] = {}
        nbytes, dtype = tensor.numel() * tensor.element_size(), as_array(tensor[:0].cpu()).dtype
        for part in parts:
            codec = None if policy is None else codec_for_part(policy, part, nbytes, dtype)
            by_codec.setdefault(codec, []).append(part)
        if len(by_codec) == 1:
            ((codec, _),) = by_codec.items()
            return [(tensor, list(parts), codec)]
        pieces = []
        for codec, chosen in by_codec.items():
            packed = torch.cat([tensor[part.start : part.stop] for part in chosen])
            places, at = [], 0
            for part in chosen:
                places.append(part._replace(start=at, stop=at + part.stop - part.start))
                at += part.stop - part.start
            pieces.append((packed, places, codec))
        return pieces

    def _start_elsewhere(
        self,
        tensor: torch.Tensor,
        parts: Sequence[Part],
        pieces: list[tuple[torch.Tensor, list[Part], Compression | None]],
        group: Any,
        weight: float | None,
    ) -> tuple[Any, Callable[[], torch.Tensor]]:
        """Do it with the collectives of another backend: every rank sends its encoded tensor to every other rank."""
        codec = pieces[0][2]
        if len(pieces) > 1 or not (codec is None or isinstance(codec, Codec)):
            raise ConfigError(
                "this process group is not covey's, which can use one codec of casts and quantisers, like int8, for "
                'all; call init_process_group("covey") for others'
            )
        share = None if weight is None else _share(weight, tensor.device, group)
        if codec is None:
            if share is not None:
                tensor.mul_(share) if share else tensor.zero_()
            work = dist.all_reduce(tensor, group=group, async_op=True)
            return work, lambda: tensor.div_(there(work, group)) if share is None else tensor
        x = tensor.detach().to("cpu", torch.float32, copy=True).numpy()
        if share is not None:
            scale(x, share)
        steps = [] if self.feedback is None else [
            self.feedback.begin(part.name, x[part.start : part.stop].reshape(part.shape)) for part in parts
        ]  # fmt: skip
        for step, part in zip(steps, parts, strict=False):
            step.add_to(x[part.start : part.stop])
        wire, residual = np.empty(codec.wire_bytes(x.size), np.uint8), np.empty_like(x)
        encode_with_residual(codec, x, wire, residual)
        rows, work = gather_rows(torch.from_numpy(wire).to(tensor.device), group)

        def finish() -> torch.Tensor:
            total = np.zeros_like(x)
            for row in rows.cpu().numpy():
                codec.decode_add(np.ascontiguousarray(row), total)
            for step, part in zip(steps, parts, strict=False):
                step.commit(residual[part.start : part.stop])
            mean = torch.from_numpy(total)
            return tensor.copy_(mean.div_(there(work, group)) if share is None else mean)

        return work, finish


def _share(weight: float, device: torch.device, group: Any) -> float:
    """Return this rank's share of the total weight; 0 if there is none."""
    total = torch.tensor([weight], dtype=torch.float32, device=device)
    dist.all_reduce(total, group=group)
    return weight / float(total) if float(total) > 0 else 0.0


def _unpack(piece: torch.Tensor, places: Sequence[Part], tensor: torch.Tensor, parts: Sequence[Part]) -> None:
    by_name = {part.name: part for part in parts}
    for place in places:
        part = by_name[place.name]
        tensor[part.start : part.stop].copy_(piece[place.start : place.stop])


def consecutive(named: Sequence[tuple[str, torch.Size]]) -> list[Part]:
    """Return the parts of a flat tensor that holds tensors of these names and shapes, one after the other."""
    parts, at = [], 0
    for name, shape in named:
        count = shape.numel()
        parts.append(Part(name, at, at + count, tuple(shape)))
        at += count
    return parts
