"""Newcomers of an elastic training get its state in the background, while the others train.

`proto.shadowing` decides; here the snapshot is copied, sent, received and loaded, and the steps since are taken. A
donor copies its part of the state while the next gradients are computed, and waits for the copy before its optimizer
changes the state. A newcomer receives into memory of its own: before the snapshot is complete, it changes nothing that
the program sees.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from covey.base.errors import CoveyError, PeerLostError, RemoteProtocolError
from covey.proto.shadowing import AdmissionOrder, ShadowAdmission, ShadowPhase, ShadowReplay, ShadowReport
from covey.runtime.group.internals import tell_of_training
from covey.torch.training.outer import cuts
from covey.torch.training.structure import (
    from_plain,
    hand_over,
    holder_of,
    make_dense,
    put_together,
    state_of,
    take_apart,
    to_plain,
)
from covey.wire.manifest import Tagger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.runtime.group.group import Group
    from covey.runtime.work import Work

logger = logging.getLogger("covey")

SHADOW_KEPT_BYTES: Final = 4 << 30
"""How much of averaged gradients a newcomer keeps by default."""
COMPARED_BYTES: Final = 128 << 20
"""How much of the state is compared after a step: it takes some 30 ms."""
SNAPSHOT_MESSAGE_BYTES: Final = 8 << 20
SNAPSHOT_ALIGNMENT: Final = 64
"""Alignment, in bytes, of tensors in a snapshot: an optimizer uses this memory afterwards."""
SNAPSHOT_SECONDS: Final = 3600.0
"""How long a snapshot may take; the bound of what is kept ends most that take too long."""
FEWEST_REPLAYED: Final = 2
"""Steps that a newcomer takes after each step of the others, if it has so many: with one it would not catch up."""
POSITION: Final = "elastic"
"""The part with the position of the training, which a newcomer follows from the beginning."""

Average = list[tuple[torch.nn.Parameter, torch.Tensor]]


class _PlacedTensor(NamedTuple):
    """A tensor of the state in a snapshot."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Its first byte in the part of its donor."""

    @property
    def nbytes(self) -> int:
        elements: int = math.prod(self.shape)
        return elements * int(self.dtype.itemsize)

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return this tensor in the memory of a part."""
        return memory[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class _Snapshot:
    """One snapshot on its way from some donors to some receivers, in a group of its own."""

    def __init__(self, group: Group, parts: Mapping[int, list[_PlacedTensor]], receivers: Sequence[int]) -> None:
        """`parts` is what each donor gives, by its rank."""
        self._rank, self._parts, self._receivers = group.rank, parts, receivers
        side = group.split(0, group.rank, priority="bulk")
        assert side is not None
        self._side = side
        self._place = {rank: place for rank in (*parts, *receivers) if (place := side.to_local(rank)) is not None}
        """Rank → rank in the group of the stream; a rank that was lost just now has none."""
        self.memory: dict[int, torch.Tensor] = {}
        self._works: list[Work[Any]] = []
        self._thread: threading.Thread | None = None
        self.has_failed = False
        """Whether this rank, a donor, could not give its part."""

    def give(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of the state, and send it; return at once."""
        slots = self._parts.get(self._rank, [])
        if slots:
            self._thread = threading.Thread(
                target=self._copy_and_send, args=(slots, tensors), name="covey-snapshot", daemon=True
            )
            self._thread.start()

    def _copy_and_send(self, slots: Sequence[_PlacedTensor], tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            memory = self.memory[self._rank] = _memory_for(slots)
            with torch.no_grad():
                for slot in slots:
                    slot.within(memory).copy_(tensors[slot.name])
            for number, piece in _pieces(memory):
                for place in (self._place[rank] for rank in self._receivers if rank in self._place):
                    with contextlib.suppress(PeerLostError):
                        self._works.append(
                            self._side.send(piece, place, tag=number, timeout=SNAPSHOT_SECONDS, async_op=True)
                        )
        except (CoveyError, RuntimeError, ValueError, LookupError, MemoryError) as error:
            self.has_failed = True
            logger.warning("a part of the state was not sent in the background: %r", error)

    def settle(self) -> None:
        """Wait until this rank's part is copied, so that the state may change."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def take(self) -> None:
        """Begin to receive all parts."""
        if not self._place.keys() >= self._parts.keys():
            return  # the next exchange lacks this donor
        for donor, slots in self._parts.items():
            memory = self.memory[donor] = _memory_for(slots)
            for number, piece in _pieces(memory):
                work = self._side.recv(self._place[donor], number, out=piece, timeout=SNAPSHOT_SECONDS, async_op=True)
                self._works.append(work)

    def has_come(self) -> bool:
        """Tell whether all parts have come.

        Raises:
            CoveyError: one will not come.
        """
        if not (self._works and all(work.done() for work in self._works)):
            return False
        for work in self._works:
            if (error := work.exception()) is not None:
                raise CoveyError(f"a part of the state did not come: {error}")
        return True

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that have come, which use the memory of the stream."""
        return {slot.name: slot.within(self.memory[donor]) for donor, slots in self._parts.items() for slot in slots}

    def close(self) -> None:
        """End what is under way; afterwards nothing touches the memory."""
        self.settle()
        self._side.close()
        self._works, self.memory = [], {}


class NewcomerSupport:
    """Lets newcomers of one generation in while the others train, as one of its ranks sees it."""

    def __init__(
        self,
        group: Group,
        model: torch.nn.Module,
        parts: Mapping[str, Any],
        take_step: Callable[[], None],
        most_bytes: int,
        admission: ShadowAdmission,
    ) -> None:
        """`parts` are objects with `state_dict`; `take_step` steps the optimizer with the gradients that are set."""
        self._group, self._model, self._parts, self._take_step = group, model, parts, take_step
        self._admission = admission
        self._followed: dict[str, Any] = {name: part for name, part in parts.items() if name != POSITION}
        self._stream: _Snapshot | None = None
        self._structure: Any = None
        self._follower: ShadowReplay[Average] | None = None
        """What this rank has, if it is a shadow."""
        if group.rank in admission.shadows:
            self._follower = ShadowReplay(most_bytes)
        self._initial = parts[POSITION].state_dict()
        self._tagger = Tagger([b"covey/shadow"])
        self._began = time.perf_counter()
        self._left_at, self._pause = 0.0, 0.0
        self.steps = 0
        """The steps since the admission began."""

    @classmethod
    def begin(
        cls,
        group: Group,
        model: torch.nn.Module,
        parts: Mapping[str, Any],
        take_step: Callable[[], None],
        most_bytes: int,
        *,
        has_state: bool,
    ) -> NewcomerSupport | None:
        """Begin to let ranks in that do not have the state; None if all have it, or none has. Every rank calls it."""
        told = group.all_gather(np.array([has_state]))
        there = {rank: bool(row[0]) for rank, row in enumerate(told) if row is not None}
        holders, shadows = ([rank for rank, has in there.items() if has is wanted] for wanted in (True, False))
        if not (holders and shadows):
            return None
        made = cls(group, model, parts, take_step, most_bytes, ShadowAdmission(holders, shadows))
        try:
            made._start_snapshot(shadows)
        except BaseException:
            made.leave()
            raise
        return made

    @property
    def is_shadow(self) -> bool:
        """Whether this rank does not have the state yet."""
        return self._group.rank in self._admission.shadows

    def trainers(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of some ranks that get shares; all if no holder is left, until the next exchange."""
        return [rank for rank in ranks if rank in self._admission.holders] or ranks

    def keeps_step(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Keep the gradients that are set for later if this rank cannot take the step yet; tell whether it did.

        Call it before each step of the optimizer: a donor waits here until its state is copied.
        """
        if self._stream is not None:
            self._stream.settle()
        follower = self._follower
        if follower is None or follower.phase is ShadowPhase.READY:
            return False
        average = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in average:
            parameter.grad = None
        follower.keep(average, sum(_bytes_of(gradient) for _, gradient in average))
        return True

    # After each step

    def settle(self) -> bool:
        """Exchange how far the ranks are, after a step; return whether the admission goes on.

        If it does not, all ranks that are left have the state.
        """
        self.steps += 1
        self._pause = time.perf_counter() - self._left_at if self._left_at else 0.0
        own = self._report()
        told = self._group.all_gather(np.array(own, np.int64))
        reports = {rank: ShadowReport(*map(int, row)) for rank, row in enumerate(told) if row is not None}
        order, admission = self._admission.settle(reports), self._admission
        if admission.entered:
            self._tell(
                f"rank {', '.join(map(str, admission.entered))} took the state in the background, and trains after "
                f"{self.steps} steps in {time.perf_counter() - self._began:.1f} s"
            )
        if order is AdmissionOrder.SNAPSHOT:
            self._start_snapshot([rank for rank in admission.shadows if admission.receives(reports[rank].phase)])
        elif order is AdmissionOrder.WAIT:
            self._tell(f"all ranks wait until newcomers have the state: {admission.reason}")
            self.wait()
        elif order is AdmissionOrder.ALONE:
            self._continue_alone()
        elif not any(admission.receives(reports[rank].phase) for rank in admission.shadows):
            self.close()
        self._left_at = time.perf_counter()
        return order in (AdmissionOrder.TRAIN, AdmissionOrder.SNAPSHOT)

    def wait(self) -> None:
        """Give all ranks the state before they continue."""
        self.close()
        hand_over(self._group, self._model, self._parts, fresh=self.is_shadow)

    def end(self, *, leaves: bool) -> bool:
        """Give all ranks the state if only ranks without it stay; return whether it did. `leaves`: this rank does not.

        Every rank calls it at the end of the generation.
        """
        told = self._group.all_gather(np.array([leaves]))
        leaving = {rank: bool(row[0]) for rank, row in enumerate(told) if row is not None}
        holders = [rank for rank in self._admission.holders if rank in leaving]
        if all(leaving.values()):
            return False
        if not holders:
            self._continue_alone()
        elif all(leaving[rank] for rank in holders):
            self._tell("all ranks wait until newcomers have the state: the ranks that have it leave")
            self.wait()
        else:
            return False
        return True

    def close(self) -> None:
        """End the snapshot that is under way."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def leave(self) -> None:
        """Forget what this rank has followed: the generation ends before it had the state."""
        self.close()
        if self.is_shadow:
            self._parts[POSITION].load_state_dict(self._initial)

    def _report(self) -> ShadowReport:
        follower = self._follower
        if follower is not None and follower.phase is not ShadowPhase.READY:
            self._catch_up(follower)
        phase = ShadowPhase.HOLDS if follower is None else follower.phase
        if self._stream is not None and self._stream.has_failed:
            phase = ShadowPhase.FULL
        piece = self._admission.piece_of(self._group.rank)
        if piece is None:
            return ShadowReport(phase)
        pieces, found = self._digest(piece)
        return ShadowReport(phase, pieces, found)

    def _catch_up(self, follower: ShadowReplay[Average]) -> None:
        stream = self._stream
        if follower.phase is ShadowPhase.RECEIVES and stream is not None:
            try:
                if stream.has_come():
                    self._load(stream)
                    follower.complete()
            except CoveyError as error:
                logger.warning("%s", error)
                if set(self._admission.donors) <= set(self._group.contributors):
                    follower.give_up()
        # The others compute meanwhile, and wait for this rank in the next sum.
        until = time.perf_counter() + self._pause / 2
        taken = 0
        while (taken < FEWEST_REPLAYED or time.perf_counter() < until) and self._replay_one(follower):
            taken += 1

    def _replay_one(self, follower: ShadowReplay[Average]) -> bool:
        average = follower.next()
        if average is None:
            return False
        for parameter, gradient in average:
            parameter.grad = gradient
        self._take_step()
        for parameter, _ in average:
            parameter.grad = None
        return True

    def _continue_alone(self) -> None:
        """Continue without those that had the state: with what was followed if it is complete."""
        follower, is_behind = self._follower, True
        assert follower is not None
        if follower.phase is ShadowPhase.RECEIVES:
            self._catch_up(follower)
        if follower.is_complete:
            while self._replay_one(follower):
                pass
            is_behind = False
        else:
            self._parts[POSITION].load_state_dict(self._initial)
        self.close()
        self._tell("no rank that had the state is left: the newcomers continue with what they have")
        hand_over(self._group, self._model, self._parts, fresh=is_behind)

    # The snapshot

    def _start_snapshot(self, receivers: Sequence[int]) -> None:
        """Give or take a snapshot of the state as it is now. Every rank calls it after the same step."""
        self.close()
        group, admission = self._group, self._admission
        is_donor, follower = group.rank in admission.donors, self._follower
        plan, tensors = None, dict[str, torch.Tensor]()
        if is_donor:
            make_dense(self._followed)
            structure, tensors = self._state()
            table = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
                     for name, tensor in tensors.items()]  # fmt: skip
            plan = [to_plain(self._parts[POSITION].state_dict()), to_plain(structure), table]
        if group.rank in receivers and follower is not None:
            follower.begin()
        try:
            plan = group.broadcast_object(plan, admission.donors[0])
        except PeerLostError:
            return  # the next exchange lacks this donor, and asks the others
        try:
            position, structure, table = plan
        except (TypeError, ValueError) as error:
            raise RemoteProtocolError(f"a rank sent a plan of its state that makes no sense: {error}") from error
        self._stream = _Snapshot(group, _parts_of(table, admission.donors), receivers)
        if is_donor:
            self._stream.give(tensors)
        elif group.rank in receivers:
            self._parts[POSITION].load_state_dict(from_plain(position))
            self._structure = structure
            self._stream.take()

    def _state(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the structure of the state that is followed, and its tensors by name."""
        structure, tensors = take_apart({name: state_of(part) for name, part in self._followed.items()})
        parameters = {f"model.{name}": each.detach() for name, each in holder_of(self._model).named_parameters()}
        return structure, dict(sorted({**tensors, **parameters}.items()))

    def _load(self, stream: _Snapshot) -> None:
        tensors = stream.tensors()
        with torch.no_grad():
            for name, parameter in holder_of(self._model).named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        own, _ = take_apart({name: state_of(part) for name, part in self._followed.items()})
        states = put_together(from_plain(self._structure, own), tensors)
        for name, part in self._followed.items():
            holder_of(part).load_state_dict(states[name])

    # Comparison

    def _digest(self, piece: int) -> tuple[int, int]:
        """Return how many pieces the state has, and the digest of one; what is no tensor belongs to each."""
        structure, tensors = self._state()
        total = sum(tensor.nbytes for tensor in tensors.values())
        start, stop = piece * COMPARED_BYTES, (piece + 1) * COMPARED_BYTES
        found = [repr(to_plain(structure)).encode()]
        at = 0
        for name, tensor in tensors.items():
            low, high = max(start - at, 0), min(stop - at, tensor.nbytes)
            if low < high or not tensor.nbytes:
                row = tensor.detach().contiguous().view(-1).view(torch.uint8)
                found.append(f"{name} {tensor.dtype} {tensor.numel()} {low}".encode())
                found.append(self._tagger.tag(row[low:high].cpu().numpy()))
            at += tensor.nbytes
        whole = np.frombuffer(b"\n".join(found), np.uint8)
        return max(1, -(-total // COMPARED_BYTES)), int.from_bytes(self._tagger.tag(whole)[:8], "little", signed=True)

    def _tell(self, text: str) -> None:
        """Say something once in the run."""
        if self._group.rank == min(self._group.contributors):
            logger.warning("%s", text)
            tell_of_training(self._group, text)


def _parts_of(table: Any, donors: Sequence[int]) -> dict[int, list[_PlacedTensor]]:
    """Divide a state between donors: consecutive tensors, of about equal weight.

    Raises:
        RemoteProtocolError: the table of tensors, which a rank sent, makes no sense.
    """
    try:
        rows = [(str(name), getattr(torch, dtype), tuple(map(int, shape))) for name, dtype, shape in table]
        for name, dtype, shape in rows:
            if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0:
                raise ValueError(f"{name} is a tensor of {dtype} with shape {list(shape)}")
    except (TypeError, ValueError, AttributeError) as error:
        raise RemoteProtocolError(f"a rank sent a table of its state that makes no sense: {error}") from error
    found: dict[int, list[_PlacedTensor]] = {}
    sizes = [_PlacedTensor(*row, 0).nbytes for row in rows]
    count = min(len(donors), len(rows))
    for donor, (first, last) in zip(donors, cuts(sizes, count) if count else [], strict=False):
        at = 0
        found[donor] = []
        for row, size in zip(rows[first:last], sizes[first:last], strict=True):
            found[donor].append(_PlacedTensor(*row, at))
            at += -(-size // SNAPSHOT_ALIGNMENT) * SNAPSHOT_ALIGNMENT
    return found


def _bytes_of(gradient: torch.Tensor) -> int:
    if not gradient.is_sparse:
        return int(gradient.nbytes)
    whole = gradient.coalesce()
    return int(whole.indices().nbytes) + int(whole.values().nbytes)


def _memory_for(slots: Sequence[_PlacedTensor]) -> torch.Tensor:
    return torch.empty(max(slot.start + slot.nbytes for slot in slots), dtype=torch.uint8)


def _pieces(memory: torch.Tensor) -> list[tuple[int, np.ndarray[Any, Any]]]:
    """Cut a part into messages, which have numbers."""
    row = memory.numpy()
    starts = range(0, row.size, SNAPSHOT_MESSAGE_BYTES)
    return [(number, row[start : start + SNAPSHOT_MESSAGE_BYTES]) for number, start in enumerate(starts)]
