"""Prove that the plans of all ranks compute the right result under every schedule.

    plans = [ring.all_reduce(rank, 5, 12, segment=2) for rank in range(5)]
    check.all_reduce(plans, 12)

A plan fixes the order of a rank's sends and of its receives; the speed of lanes and the size of their buffers are
unknown. So four things are proved, and the first that fails is raised as a `PlanError`:

1. The transfers match: the k-th send from a to b is as long as the k-th receive of b from a, and none is left over.
2. No deadlock, even on lanes that buffer nothing, where a send completes only when the other end is at its receive.
   The plans leave no choice in the order of events, so if one schedule ends, all do.
3. Determinacy, even on lanes that buffer everything: a send and a receive that touch the same element are ordered by
   what each rank must have done before. So all schedules give the same result.
4. That result, with symbols for numbers: each element combines each contributor exactly once, and with the same
   expression on every rank, so that the bits are equal, too; a FINAL value is not combined again.

The work grows with elements times ranks. Prove small counts: larger ones add no new cases.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.plan.moves import FINAL, LEFT_OPERAND, REDUCE, STORE, Plan, Recv, Send

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

ACTIONS: Final = frozenset({STORE} | {REDUCE | left | final for left in (0, LEFT_OPERAND) for final in (0, FINAL)})


class PlanError(ConfigError):
    """A plan is wrong; the message names the rank, the move and the reason."""

    def __init__(self, reason: str, *, rank: int, move: Send | Recv | None = None) -> None:
        super().__init__(f"rank {rank}, {move}: {reason}" if move else f"rank {rank}: {reason}")
        self.rank = rank
        self.move = move


def prove(
    plans: Sequence[Plan],
    initial: Sequence[Sequence[Sequence[Hashable]]],
    expected: Sequence[Mapping[int, Sequence[Hashable]]],
    *,
    final: bool = False,
) -> None:
    """Raise PlanError unless `plans` always end and turn `initial` into `expected`.

    initial[rank][buffer][element] names the value of an element; None if it has none, so that it must not be read.
    expected[rank][buffer][element] is a name, or the frozenset of the names that are combined there (None: it
    must not be written). Elements with the same set must have equal expressions. Buffers that are not listed may hold
    anything. With `final`, combined results must be marked FINAL; without it they must not be.
    """
    for rank, plan in enumerate(plans):
        _check_moves(rank, plan, len(plans), [len(buffer) for buffer in initial[rank]])
    schedule = _Schedule(plans)
    for rank in range(len(plans)):
        schedule.check_races(rank)
    values = _Values()
    memory = [[[values.named(name) for name in buffer] for buffer in buffers] for buffers in initial]
    _evaluate(plans, schedule.steps, memory, values)
    for rank, buffers in enumerate(expected):
        for buffer, elements in buffers.items():
            for element, (found, wanted) in enumerate(zip(memory[rank][buffer], elements, strict=True)):
                if reason := values.objection(found, wanted, final=final):
                    move = _last_writer(plans[rank], buffer, element)
                    raise PlanError(f"buffer {buffer}[{element}] {reason}", rank=rank, move=move)


def all_reduce(plans: Sequence[Plan], count: int) -> None:
    """Prove that buffer 0 ends as the reduction of every rank's buffer 0, bit for bit the same on all ranks."""
    inputs, sums = _inputs(len(plans), count)
    prove(plans, [[x] for x in inputs], [{0: sums}] * len(plans), final=True)


def reduce(plans: Sequence[Plan], root: int, count: int) -> None:
    """Prove that buffer 0 of `root` ends as the reduction of every rank's buffer 0."""
    inputs, sums = _inputs(len(plans), count)
    prove(plans, [[x] for x in inputs], [{0: sums} if rank == root else {} for rank in range(len(plans))], final=True)


def broadcast(plans: Sequence[Plan], root: int, count: int) -> None:
    """Prove that buffer 0 of every rank ends as that of `root` was."""
    inputs, _ = _inputs(len(plans), count)
    prove(plans, [[x] for x in inputs], [{0: inputs[root]}] * len(plans))


def reduce_scatter(plans: Sequence[Plan], counts: Sequence[int]) -> None:
    """Prove that the last buffer ends as the reduction of part `rank`, and that the input does not change."""
    ranks = range(len(plans))
    inputs = [[[(rank, part, e) for e in range(count)] for part, count in enumerate(counts)] for rank in ranks]
    sums = [[frozenset((rank, part, e) for rank in ranks) for e in range(count)] for part, count in enumerate(counts)]
    expected: list[dict[int, Sequence[Hashable]]] = [
        {**dict(enumerate(inputs[r])), len(counts): sums[r]} for r in ranks
    ]
    prove(plans, [[*inputs[rank], inputs[rank][rank]] for rank in ranks], expected, final=True)


def all_gather(plans: Sequence[Plan], lengths: Sequence[int]) -> None:
    """Prove that buffer j of every rank ends as rank j's block, when each rank starts with only its own."""
    blocks = _blocks(lengths)
    initial = [_only(rank, blocks) for rank in range(len(plans))]
    prove(plans, initial, [dict(enumerate(blocks))] * len(plans))


def all_to_all(plans: Sequence[Plan], lengths: Sequence[Sequence[int]]) -> None:
    """Prove that buffer size + j ends as rank j's buffer for this rank; lengths[i][j] go from i to j.

    The caller copies the block from a rank to itself, so no move may touch it.
    """
    ranks = range(len(plans))
    out = [[[(i, j, e) for e in range(lengths[i][j])] for j in ranks] for i in ranks]
    empty = [[[None] * lengths[i][j] for i in ranks] for j in ranks]
    full = [[empty[j][j] if i == j else out[i][j] for i in ranks] for j in ranks]
    prove(plans, [[*out[j], *empty[j]] for j in ranks], [dict(enumerate([*out[j], *full[j]])) for j in ranks])


def gather(plans: Sequence[Plan], root: int, lengths: Sequence[int]) -> None:
    """Prove that buffer j of `root` ends as rank j's block, and that every rank keeps its own."""
    blocks = _blocks(lengths)
    initial = [_only(rank, blocks) for rank in range(len(plans))]
    prove(plans, initial, [dict(enumerate(blocks)) if rank == root else {rank: own} for rank, own in enumerate(blocks)])


def scatter(plans: Sequence[Plan], root: int, lengths: Sequence[int]) -> None:
    """Prove that buffer `rank` of every rank ends as that buffer of `root`, which keeps them all."""
    blocks = _blocks(lengths)
    initial = [blocks if rank == root else [[None] * length for length in lengths] for rank in range(len(plans))]
    prove(plans, initial, [dict(enumerate(blocks)) if rank == root else {rank: own} for rank, own in enumerate(blocks)])


def scan(plans: Sequence[Plan], count: int) -> None:
    """Prove that buffer 0 ends as the reduction of buffer 0 of ranks 0..rank."""
    inputs, _ = _inputs(len(plans), count)
    prove(plans, [[x] for x in inputs], [{0: _prefix(rank + 1, count)} for rank in range(len(plans))])


def exscan(plans: Sequence[Plan], count: int) -> None:
    """Prove that buffer 1 ends as the reduction of buffer 0 of ranks 0..rank-1, and that buffer 0 does not change.

    The caller fills buffer 1 of rank 0, so no move may touch it.
    """
    inputs, _ = _inputs(len(plans), count)
    expected = [{0: x, 1: _prefix(rank, count)} for rank, x in enumerate(inputs)]
    prove(plans, [[x, [None] * count] for x in inputs], expected)


def barrier(plans: Sequence[Plan]) -> None:
    """Prove that no rank can finish before every rank has started."""
    prove(plans, [[()]] * len(plans), [])
    schedule = _Schedule(plans)
    for rank in range(len(plans)):
        for other in range(len(plans)):
            if other != rank and not schedule.heard(rank, other):
                raise PlanError(f"may finish before rank {other} has started", rank=rank)


def _inputs(size: int, count: int) -> tuple[list[list[Hashable]], list[Hashable]]:
    """Return a name for each element of each rank, and for each element the set of names that its sum combines."""
    inputs: list[list[Hashable]] = [[(rank, e) for e in range(count)] for rank in range(size)]
    return inputs, _prefix(size, count)


def _prefix(size: int, count: int) -> list[Hashable]:
    return [frozenset((rank, e) for rank in range(size)) for e in range(count)]


def _blocks(lengths: Sequence[int]) -> list[list[Hashable]]:
    return [[(rank, e) for e in range(length)] for rank, length in enumerate(lengths)]


def _only(rank: int, blocks: Sequence[Sequence[Hashable]]) -> list[Sequence[Hashable]]:
    """Return the blocks of `rank` when it has only its own."""
    return [block if owner == rank else [None] * len(block) for owner, block in enumerate(blocks)]


def _check_moves(rank: int, plan: Plan, size: int, lengths: Sequence[int]) -> None:
    """Raise PlanError for a move that is wrong whatever the other ranks do."""
    moves: list[tuple[Send | Recv, int]] = [(send, len(plan.recvs)) for send in plan.sends]
    moves += [(recv, len(plan.sends)) for recv in plan.recvs]
    for move, others in moves:
        if not 0 <= move.peer < size or move.peer == rank:
            raise PlanError(f"the peer is not another rank of 0..{size - 1}", rank=rank, move=move)
        if not 0 <= move.buffer < len(lengths):
            raise PlanError(f"there are {len(lengths)} buffers", rank=rank, move=move)
        if not 0 <= move.start <= move.stop <= lengths[move.buffer]:
            raise PlanError(f"not a range of {lengths[move.buffer]} elements", rank=rank, move=move)
        if not 0 <= move.after <= others:
            raise PlanError(f"waits for {move.after} of {others} moves", rank=rank, move=move)
        if isinstance(move, Recv) and move.action not in ACTIONS:
            raise PlanError(f"there is no action {move.action}", rank=rank, move=move)


class _Schedule:
    """One order in which all moves can happen, and what must have happened before each receive in any order."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        """Raise PlanError unless all transfers match and can happen."""
        self._plans = plans
        self._first_bit = list(accumulate((len(plan.sends) for plan in plans), initial=0))
        self._known: list[list[int]] = [[0] for _ in plans]
        """_known[rank][n] is the set of sends, as bits, that are complete in any order once n receives are applied."""
        self.steps: list[tuple[int, int]] = []
        """(rank, index of a send), or (rank, ~index of a receive), in an order possible on lanes without buffers."""
        self._run(self._match())

    def heard(self, rank: int, other: int) -> bool:
        """Return whether `rank` cannot finish before `other` completed a send."""
        return bool(self._known[rank][-1] >> self._first_bit[other] & 1)

    def check_races(self, rank: int) -> None:
        """Raise PlanError if a receive may write an element before or after a send reads it, depending on the lanes."""
        plan = self._plans[rank]
        readers: dict[tuple[int, int], list[int]] = {}
        for index, send in enumerate(plan.sends):
            for element in range(send.start, send.stop):
                readers.setdefault((send.buffer, element), []).append(index)
        applied_before = list(accumulate((send.after for send in plan.sends), max))
        first, ours = self._first_bit[rank], (1 << len(plan.sends)) - 1
        for index, recv in enumerate(plan.recvs):
            if recv.start == recv.stop:
                continue
            done = (self._known[rank][index + 1] >> first & ours).bit_length()
            for element in range(recv.start, recv.stop):
                sends = readers.get((recv.buffer, element), ())
                at = bisect_left(sends, done)
                # Later sends wait for at least as many receives, so checking the first send that is not done is enough.
                if at < len(sends) and applied_before[sends[at]] <= index:
                    reason = f"unordered with send {sends[at]}, which reads element {element}"
                    raise PlanError(reason, rank=rank, move=recv)

    def _match(self) -> list[list[int]]:
        """Return for each send of each rank the index of the receive that matches it."""
        waiting: dict[tuple[int, int], list[int]] = {}
        for rank, plan in enumerate(self._plans):
            for index, recv in enumerate(plan.recvs):
                waiting.setdefault((recv.peer, rank), []).append(index)
        for indices in waiting.values():
            indices.reverse()
        targets: list[list[int]] = []
        for rank, plan in enumerate(self._plans):
            targets.append([])
            for send in plan.sends:
                indices = waiting.get((rank, send.peer), [])
                if not indices:
                    raise PlanError(f"rank {send.peer} does not receive it", rank=rank, move=send)
                recv = self._plans[send.peer].recvs[indices[-1]]
                if send.stop - send.start != recv.stop - recv.start:
                    raise PlanError(f"rank {send.peer} receives it by {recv}, of other length", rank=rank, move=send)
                targets[-1].append(indices.pop())
        for (peer, rank), indices in waiting.items():
            if indices:
                raise PlanError(f"rank {peer} does not send it", rank=rank, move=self._plans[rank].recvs[indices[-1]])
        return targets

    def _run(self, targets: list[list[int]]) -> None:
        """Take every step on lanes without buffers, and record which sends each step proves to be complete."""
        plans, known = self._plans, self._known
        sent: list[list[int]] = [[0] for _ in plans]  # as `_known`, once n sends are complete
        done, applied = [0 for _ in plans], [0 for _ in plans]
        arrived: list[int | None] = [None for _ in plans]  # what the sender of the current receive knew
        ready = list(range(len(plans)))
        while ready:
            rank = ready.pop()
            sends, recvs = plans[rank]
            while True:
                at = done[rank]
                if (
                    at < len(sends)
                    and (send := sends[at]).after <= applied[rank]
                    and targets[rank][at] == applied[send.peer]
                ):
                    news = sent[rank][at] | known[rank][send.after] | 1 << self._first_bit[rank] + at
                    sent[rank].append(news)
                    arrived[send.peer] = news
                    done[rank] = at + 1
                    self.steps.append((rank, at))
                    ready.append(send.peer)
                    continue
                at = applied[rank]
                taken = arrived[rank]
                if taken is None or (after := recvs[at].after) > done[rank]:
                    break
                known[rank].append(known[rank][at] | taken | sent[rank][after])
                arrived[rank] = None
                applied[rank] = at + 1
                self.steps.append((rank, ~at))
                if at + 1 < len(recvs):
                    ready.append(recvs[at + 1].peer)
        for rank, (sends, recvs) in enumerate(plans):
            if (at := done[rank]) < len(sends):
                send = sends[at]
                theirs = f"receive {applied[send.peer]} of rank {send.peer}"
                reason = f"{send.after} receives" if send.after > applied[rank] else theirs
                raise PlanError(f"deadlock: send {at} waits for {reason}", rank=rank, move=send)
            if (at := applied[rank]) < len(recvs):
                raise PlanError(f"deadlock: receive {at} never comes", rank=rank, move=recvs[at])


class _Values:
    """Symbolic values as small ints: two are equal if they are the same expression of the same names."""

    NOTHING: Final = 0

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {None: self.NOTHING}
        self._names: list[Hashable] = []
        self._combined: dict[tuple[int, int, int], int] = {}
        self._goals: dict[Hashable, int] = {}  # contributors of what is wanted
        self._accepted: dict[int, int] = {}  # the value, by contributors
        self._contributors = [0]  # of each value, a set of indices in _names as bits
        self._final = [False]

    def named(self, name: Hashable) -> int:
        """Return the value of that name; None is the absence of one."""
        if name not in self._known:
            self._known[name] = self._add(1 << len(self._names), False)
            self._names.append(name)
        return self._known[name]

    def combined(self, left: int, right: int, final: int) -> int:
        """Return the combination of two values; raise ValueError if they cannot be combined."""
        key = left, right, final
        value = self._combined.get(key)
        if value is None:
            if self.NOTHING in (left, right):
                raise ValueError("combines a value with none")
            if self._final[left] or self._final[right]:
                raise ValueError("combines a value that is final already")
            ours, theirs = self._contributors[left], self._contributors[right]
            if ours & theirs:
                raise ValueError(f"counts {self._list(ours & theirs)} twice")
            value = self._combined[key] = self._add(ours | theirs, bool(final))
        return value

    def objection(self, value: int, wanted: Hashable, *, final: bool) -> str | None:
        """Return why `value` is not what is wanted, or differs from one accepted for the same set; else None."""
        goal = self._goals.get(wanted)
        if goal is None:
            names = wanted if isinstance(wanted, frozenset) else (wanted,)
            goal = self._goals[wanted] = sum(self._contributors[self.named(name)] for name in names)
        found = self._contributors[value]
        if goal & ~found:
            return f"lacks {self._list(goal & ~found)}"
        if found & ~goal:
            return f"should not have {self._list(found & ~goal)}"
        if goal & (goal - 1) and self._final[value] != final:  # combined from more than one
            return "was never marked FINAL" if final else "is marked FINAL"
        if self._accepted.setdefault(goal, value) != value:
            return "is combined in another order than elsewhere"
        return None

    def _add(self, contributors: int, final: bool) -> int:
        self._contributors.append(contributors)
        self._final.append(final)
        return len(self._final) - 1

    def _list(self, contributors: int) -> str:
        return ", ".join(str(name) for index, name in enumerate(self._names) if contributors >> index & 1)


def _evaluate(
    plans: Sequence[Plan], steps: Sequence[tuple[int, int]], memory: list[list[list[int]]], values: _Values
) -> None:
    """Run the steps on symbolic memory. There are no races, so any order gives the same result."""
    arriving: list[list[int]] = [[] for _ in plans]
    for rank, index in steps:
        if index >= 0:
            send = plans[rank].sends[index]
            payload = memory[rank][send.buffer][send.start : send.stop]
            if values.NOTHING in payload:
                raise PlanError("sends an element that was never written", rank=rank, move=send)
            arriving[send.peer] = payload
            continue
        recv = plans[rank].recvs[~index]
        payload = arriving[rank]
        if recv.action & REDUCE:
            own = memory[rank][recv.buffer][recv.start : recv.stop]
            pairs = zip(payload, own, strict=True) if recv.action & LEFT_OPERAND else zip(own, payload, strict=True)
            try:
                payload = [values.combined(left, right, recv.action & FINAL) for left, right in pairs]
            except ValueError as reason:
                raise PlanError(str(reason), rank=rank, move=recv) from None
        memory[rank][recv.buffer][recv.start : recv.stop] = payload


def _last_writer(plan: Plan, buffer: int, element: int) -> Recv | None:
    writers = [recv for recv in plan.recvs if recv.buffer == buffer and recv.start <= element < recv.stop]
    return writers[-1] if writers else None
