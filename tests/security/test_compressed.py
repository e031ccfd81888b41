"""Compressed collectives with a rank that breaks their protocol, or whose codec fails or measures nonsense."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from tests.support.compiled import EXECUTORS, use_executors
from tests.support.hostile_ranks import HOSTILE, SIZE, attack
from tests.support.waiting import DEADLINE

from covey import Codec, ConfigError, ErrorFeedback, Int8, MismatchError, PeerLostError, RemoteProtocolError
from covey.base.arithmetic import dtype_code, reduction
from covey.base.config import GroupConfig
from covey.plan import choose, direct
from covey.plan.moves import part
from covey.runtime.compressed import dense, sparse
from covey.runtime.group.internals import engine_of, issuer_of
from covey.testing import run_threads

if TYPE_CHECKING:
    from covey import Group
    from covey.runtime.collectives.attempt import Attempt

    Array = np.ndarray[Any, np.dtype[Any]]

COUNT = 600
PART = COUNT // SIZE
FLOAT32 = dtype_code(np.dtype(np.float32))


def values(rank: int, count: int = COUNT) -> Array:
    return np.random.default_rng([rank, 5]).standard_normal(count, np.float32)


def pairs(positions: list[int]) -> Array:
    """Return selected elements as they travel."""
    return np.concatenate([np.array(positions, np.uint32).view(np.uint8), np.ones(len(positions), "<f4").view("u1")])


# Elements that a sparsifier selected


@dataclass
class Liar:
    """Speaks the protocol of selected elements, and says what it likes in it."""

    count: int = 3
    """How many elements of each part it announces."""
    positions: tuple[int, ...] = (3, 5, 8)
    finished: int = 2
    """How many elements of its own part it announces as finished."""
    finished_positions: tuple[int, ...] = (1, 4)

    def __call__(self, group: Group) -> None:
        call = issuer_of(group).call("all_reduce", FLOAT32, (COUNT,), op="sum", compress="topk(0.02)")
        engine_of(group).run(call, self._body, timeout=None, async_op=False)

    def _body(self, attempt: Attempt) -> None:
        me, ones = attempt.slot, [1] * SIZE
        counts, incoming = np.full((SIZE, 1), self.count, np.uint64), np.zeros((SIZE, 1), np.uint64)
        attempt.execute(direct.all_to_all(me, ones, ones), [*counts, *incoming])
        incoming[me] = 0
        outgoing = [pairs(list(self.positions)) if slot != me else np.empty(0, np.uint8) for slot in range(SIZE)]
        blocks = [np.empty(int(count) * sparse.PAIR_BYTES, np.uint8) for count in incoming[:, 0]]
        plan = direct.all_to_all(me, [block.size for block in outgoing], [block.size for block in blocks])
        attempt.execute(plan, [*outgoing, *blocks])
        finished = np.zeros((SIZE, 1), np.uint64)
        finished[me] = self.finished
        attempt.execute(direct.all_gather(me, ones), list(finished))
        finished[me] = len(self.finished_positions)
        shared = [np.empty(int(count) * sparse.PAIR_BYTES, np.uint8) for count in finished[:, 0]]
        shared[me] = pairs(list(self.finished_positions))
        lengths = tuple(block.size for block in shared)
        attempt.execute(choose.all_gather(me, lengths, attempt.lane_family, None), shared)


def select(group: Group) -> None:
    group.all_reduce(values(group.rank), compress="topk(0.02)")


LIARS = {
    "more elements than the part has": Liar(count=PART + 1),
    "elements for which there is no memory": Liar(count=2**64 - 1),
    "a position beyond the part": Liar(positions=(3, 5, PART)),
    "the greatest position": Liar(positions=(3, 5, 2**32 - 1)),
    "a position twice": Liar(positions=(3, 5, 5)),
    "positions that descend": Liar(positions=(8, 3, 5)),
    "a position beyond the part before the last": Liar(positions=(3, 2**31, 5)),
    "more finished elements than the part has": Liar(finished=PART + 1),
    "finished elements for which there is no memory": Liar(finished=2**64 - 1),
    "pairs where the whole part is shorter": Liar(finished=PART - 1),
    "a finished position beyond the part": Liar(finished_positions=(1, PART)),
    "a finished position twice": Liar(finished_positions=(4, 4)),
}


@pytest.mark.parametrize("lie", LIARS)
def test_selected_elements_that_cannot_be_name_the_rank_that_sent_them(lie: str) -> None:
    assert part(COUNT, SIZE, HOSTILE) == (PART, 2 * PART)
    attack(select, LIARS[lie], (RemoteProtocolError,))


def test_a_rank_that_speaks_the_protocol_well_is_believed() -> None:
    """So that the tests above fail for their lies, and not because their rank says something else altogether."""

    def body(group: Group) -> Array:
        x = values(group.rank)
        if group.rank == HOSTILE:
            Liar()(group)
        else:
            group.all_reduce(x, compress="topk(0.02)")
        return x

    honest = [x for rank, x in enumerate(run_threads(SIZE, body, timeout=DEADLINE)) if rank != HOSTILE]
    assert honest[0].tobytes() == honest[1].tobytes()
    assert np.flatnonzero(honest[0][PART : 2 * PART]).tolist() == [1, 4]
    assert (honest[0][[PART + 1, PART + 4]] == 1).all()


def test_more_elements_than_positions_can_name_are_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sparse, "MOST_ELEMENTS", 100)

    def body(group: Group) -> None:
        with pytest.raises(ConfigError, match=r"topk\(0.1\) goes up to 100 elements, not 101"):
            group.all_reduce(values(group.rank, 101), compress="topk(0.1)")
        group.all_reduce(values(group.rank, 101), compress="randomk(0.1)")  # which sends no positions
        group.all_reduce(values(group.rank, 100), compress="topk(0.1)")

    run_threads(2, body, timeout=DEADLINE)


# Numbers that ranks agree on


def test_an_absurd_number_of_steps_ends_the_warm_up_and_nothing_else() -> None:
    """Ranks follow the one that has taken most steps, so a hostile one can end the warm-up of all."""

    def lie(group: Group, x: Array) -> None:
        call = issuer_of(group).call("all_reduce", FLOAT32, x.shape, op="sum", compress="int8", warmup=9)

        def body(attempt: Attempt) -> None:
            steps = np.array([2**63 - 1], np.int64)
            plan = choose.all_reduce(attempt.slot, attempt.size, 1, 8, attempt.lane_family, None, attempt.sizes)
            attempt.execute(plan, [steps], reduction("max", steps.dtype))
            dense.all_reduce(attempt, x, Int8(), divides=False, algorithm=None, residual=None)

        engine_of(group).run(call, body, timeout=None, async_op=False)

    def body(group: Group) -> Array:
        feedback = ErrorFeedback(warmup=9)
        x, y = values(group.rank), values(group.rank + SIZE)
        if group.rank == HOSTILE:
            lie(group, x)
        else:
            group.all_reduce(x, compress="int8", feedback=feedback, name="w")
            assert feedback.state_dict()["steps"] == {"w": 10}
        group.all_reduce(y, compress="int8", feedback=feedback, name="w")
        return np.concatenate([x, y])

    assert len({x.tobytes() for x in run_threads(SIZE, body, timeout=DEADLINE)}) == 1


@pytest.mark.parametrize("figure", [-np.inf, np.inf, np.nan, 0.0, -1e300, 1e300])
@pytest.mark.parametrize("at", [0, 1, 2, -1])
def test_whatever_a_rank_claims_to_have_measured_all_choose_alike(
    figure: float, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.array

    def lying(given: Any, *args: Any, **options: Any) -> Any:
        made = array(given, *args, **options)
        if threading.current_thread().name == "hostile" and made.dtype == np.float64 and made.size > 3:
            made[at] = figure if at < 2 else -figure  # which is then multiplied by -1
        return made

    monkeypatch.setattr(np, "array", lying)

    def body(group: Group) -> tuple[str, ...]:
        if group.rank == HOSTILE:
            threading.current_thread().name = "hostile"
        codecs = []
        for number in range(5):
            group.all_reduce(values(group.rank + SIZE * number, 20_000), compress="auto")
            codecs.append(group.compression.codec)
        return tuple(codecs)

    assert len(set(run_threads(SIZE, body, lanes="unix", timeout=DEADLINE))) == 1


# Codecs that fail


@dataclass(frozen=True)
class Half(Codec):
    """Casts to float16; fails where a test wants it to."""

    fault: str = ""

    name: ClassVar[str] = "half"
    unit: ClassVar[int] = 8

    def wire_bytes(self, count: int) -> Any:
        extra = {"an offset": 4, "too few": -6 if count > 1000 else 0}.get(self.fault, 0)
        if self.fault == "large ones" and count > 5000:
            extra = 2
        if self.fault == "no integer":
            return 2.0 * count
        return -2 * count if self.fault == "negative" else 2 * count + extra

    def encode(self, x: Array, wire: Array, salt: int = 0) -> None:
        if self.fault == "encode" and threading.current_thread().name == "hostile":
            raise ArithmeticError("this codec cannot encode")
        wire[...] = x.astype(np.float16).view(np.uint8)

    def decode(self, wire: Array, out: Array) -> None:
        if self.fault == "decode" and threading.current_thread().name == "hostile":
            raise ArithmeticError("this codec cannot decode")
        out[...] = wire.view(np.float16)

    def error_bound(self, x: Array) -> Array:
        return np.abs(x) / 1024

    def __str__(self) -> str:
        return "half"  # the same on ranks whose codecs differ


@pytest.mark.parametrize("executors", EXECUTORS)
@pytest.mark.parametrize("fault", ["encode", "decode"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_a_codec_that_fails_on_one_rank_raises_there_and_the_others_are_told_at_once(
    operation: str, fault: str, executors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_executors(monkeypatch, executors)
    root = HOSTILE if fault == "encode" else 0

    def call(group: Group) -> None:
        arguments = {"root": root} if operation == "broadcast" else {}
        getattr(group, operation)(values(group.rank), compress=Half(fault), **arguments)
        group.barrier()  # a root, or a rank that needs nothing from the failing one, may have returned

    def fail(group: Group) -> None:
        threading.current_thread().name = "hostile"
        with pytest.raises(ArithmeticError, match=f"this codec cannot {fault}"):
            call(group)

    for text in attack(call, fail, (PeerLostError,)):
        assert f"this codec cannot {fault}" in text


def test_without_the_rank_whose_codec_fails_the_others_go_on_if_they_are_to(monkeypatch: pytest.MonkeyPatch) -> None:
    init = GroupConfig.__init__
    monkeypatch.setattr(GroupConfig, "__init__", lambda self, **given: init(self, **{**given, "on_loss": "continue"}))

    def body(group: Group) -> bytes:
        x = values(group.rank)
        if group.rank == HOSTILE:
            threading.current_thread().name = "hostile"
            with pytest.raises(ArithmeticError):
                group.all_reduce(x, "mean", compress=Half("encode"))
            assert over.wait(DEADLINE)
            return b""
        group.all_reduce(x, "mean", compress=Half("encode"))
        assert HOSTILE not in group.contributors
        done.release()
        if group.rank == 0:
            for _ in range(SIZE - 1):
                assert done.acquire(timeout=DEADLINE)
            over.set()
        exact = np.mean([values(rank) for rank in range(SIZE) if rank != HOSTILE], axis=0)
        assert np.abs(x - exact).max() < 0.01
        return x.tobytes()

    over, done = threading.Event(), threading.Semaphore(0)
    assert len(set(run_threads(SIZE, body, timeout=DEADLINE)) - {b""}) == 1


@pytest.mark.parametrize("fault", ["an offset", "too few", "no integer", "negative", "large ones"])
def test_sizes_that_do_not_add_up_are_refused_before_anything_is_sent(fault: str) -> None:
    def body(group: Group) -> None:
        x = values(group.rank, 8 * SIZE * 1000)
        for operation in (group.all_reduce, group.reduce_scatter, group.all_gather, group.broadcast):
            with pytest.raises(ConfigError, match="codec half: wire_bytes"):
                operation(x.copy(), compress=Half(fault))
        with pytest.raises(ConfigError, match="codec half: wire_bytes"):
            group.sync_gradients({"w": x.copy()}, compress=Half(fault))
        assert group.all_reduce(1) == SIZE

    run_threads(SIZE, body, timeout=DEADLINE)


def test_ranks_whose_codecs_have_one_name_and_different_sizes_get_a_mismatch() -> None:
    @dataclass(frozen=True)
    class Longer(Half):
        def wire_bytes(self, count: int) -> Any:
            return 3 * count

        def encode(self, x: Array, wire: Array, salt: int = 0) -> None:
            wire[...] = 0

    def call(group: Group) -> None:
        group.all_reduce(values(group.rank), compress=Longer() if group.rank == HOSTILE else Half())

    def body(group: Group) -> None:
        with pytest.raises((MismatchError, PeerLostError)) as caught:
            call(group)
        assert f"rank {HOSTILE}" in str(caught.value) or group.rank == HOSTILE

    run_threads(SIZE, body, timeout=DEADLINE)
