"""What may stand in for an array: layouts, other libraries' tensors, and plain buffers."""

from __future__ import annotations

import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.values import all_values, same, values
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey import Group

    Array = np.ndarray[Any, np.dtype[Any]]

SIZE = 3
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda x: x,
    "fortran": lambda x: x,
    "transposed": lambda x: x.T,
    "reversed": lambda x: x[::-1],
    "every other": lambda x: x[:, ::2],
    "a column": lambda x: x[:, 1],
    "a window": lambda x: x[1:-1, 2:5],
    "expanded": lambda x: x[:, None, 3:4],
    "one element": lambda x: x[2, 3, ...],
    "nothing": lambda x: x[:0, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_changed_in_place_and_nothing_around_it(layout: str) -> None:
    view = LAYOUTS[layout]

    def body(group: Group) -> None:
        me = group.rank
        sums = sum(all_values(SIZE, (6, 8)), np.zeros((6, 8)))
        cases: list[tuple[Callable[[Any], Any], Any]] = [
            (lambda x: group.all_reduce(x), sums),
            (lambda x: group.all_reduce(x, async_op=True).wait(DEADLINE), sums),
            (lambda x: group.reduce(x, 1), sums if me == 1 else values(me, (6, 8))),
            (lambda x: group.broadcast(x, 2), values(2, (6, 8))),
        ]
        for call, expected in cases:
            whole = np.array(values(me, (6, 8)), order="F" if layout == "fortran" else "C")
            x = view(whole)
            assert call(x) is x
            outside = values(me, (6, 8))
            view(outside)[...] = view(expected)
            same(np.ascontiguousarray(whole), outside)

        x = view(values(me, (6, 8)))
        for rank, block in enumerate(group.all_gather(x)):
            same(block, np.array(view(values(rank, (6, 8)))))
        same(group.scan(x, "max"), np.array(np.maximum.reduce([view(values(rank, (6, 8))) for rank in range(me + 1)])))

    run_threads(SIZE, body)


def test_rows_to_gather_into_may_be_strided() -> None:
    def body(group: Group) -> None:
        wide = np.full((SIZE, 10, 2), -1.0)
        out = wide[:, :, 0]
        assert group.all_gather(values(group.rank, 10), out=out) is out
        same(np.ascontiguousarray(wide[:, :, 0]), np.stack(all_values(SIZE, 10)))
        assert (wide[:, :, 1] == -1).all()
        own_row = np.zeros((SIZE, 10))
        own_row[group.rank] = values(group.rank, 10)
        group.all_gather(own_row[group.rank], out=own_row)
        same(own_row, np.stack(all_values(SIZE, 10)))

    run_threads(SIZE, body)


def test_scalars_without_axes_and_empty_arrays_work_everywhere() -> None:
    def body(group: Group) -> None:
        me = group.rank
        x = np.array(me + 1.5)
        assert group.all_reduce(x) is x
        assert x == 7.5
        x = np.array(me)
        assert group.broadcast(x, 2) == 2
        assert group.scan(np.array(2), "prod") == 2 ** (me + 1)
        assert group.gather(np.array(me), 1) == ([0, 1, 2] if me == 1 else None)
        for shape in ((0,), (3, 0, 2)):
            empty = np.empty(shape, np.float32)
            assert group.all_reduce(empty) is empty
            group.broadcast(empty)
            assert [each.shape for each in group.all_gather(empty)] == [shape] * SIZE
            assert group.reduce_scatter(empty).size == 0
            assert group.exscan(empty).shape == shape

    run_threads(SIZE, body)


def test_an_array_that_cannot_be_used_is_refused_with_a_reason_and_the_group_lives_on() -> None:
    def body(group: Group) -> None:
        frozen = np.ones(4)
        frozen.flags.writeable = False
        refused: list[tuple[Any, str]] = [
            (frozen, "read-only"),
            (b"immutable", "read-only"),
            (memoryview(b"immutable"), "read-only"),
            (np.ones(4, ">f4"), "native byte order"),
            (np.ones(4, ">i8"), "native byte order"),
            (np.array(["text"]), "cannot move arrays"),
            (np.array([object()]), "cannot move arrays"),
            (np.zeros(2, "M8[s]"), "cannot move arrays"),
            (np.zeros(2, [("a", "i4")]), "cannot move arrays"),
            (np.zeros(2, np.longdouble), "cannot move arrays"),
            ([1.0, 2.0], "list"),
            ({"a": 1}, "dict is no array"),
        ]
        for x, reason in refused:
            with pytest.raises(TypeError, match=reason):
                group.all_reduce(x)
        for x, reason in refused[3:10]:
            with pytest.raises(TypeError, match=reason):
                group.all_gather(x)
        assert group.all_reduce(1) == SIZE

    run_threads(SIZE, body)


def test_what_is_only_read_may_be_read_only_a_list_or_a_number() -> None:
    def body(group: Group) -> None:
        me = group.rank
        frozen = values(me, 6)
        frozen.flags.writeable = False
        for rank, block in enumerate(group.all_gather(frozen)):
            same(block, values(rank, 6))
        same(group.reduce_scatter(frozen), np.array_split(sum(all_values(SIZE, 6), np.zeros(6)), SIZE)[me])
        group.scan(frozen)
        group.all_to_all([frozen] * SIZE)
        root = frozen if me == 0 else np.empty(6)
        assert group.broadcast(root, 0) is root
        assert [each.tolist() for each in group.all_gather([me, 7])] == [[rank, 7] for rank in range(SIZE)]
        assert [each.item() for each in group.all_gather(me + 0.5)] == [0.5, 1.5, 2.5]
        assert [each.item() for each in group.all_gather(np.float32(me))] == [0, 1, 2]
        assert [each.tobytes() for each in group.all_gather(b"abc"[: me + 1])] == [b"a", b"ab", b"abc"]
        assert group.scatter([[1], [2, 2], [3, 3, 3]] if me == 1 else None, 1).tolist() == [me + 1] * (me + 1)

    run_threads(SIZE, body)


def test_plain_buffers_are_used_in_place() -> None:
    def body(group: Group) -> None:
        me = group.rank
        raw = bytearray([me + 1, 10 * me, 3])
        assert group.all_reduce(raw) is raw
        assert raw == bytes([6, 30, 9])
        for code in "bBhHiIlLqQfd":
            numbers = array.array(code, [me, me + 1])
            assert group.all_reduce(numbers) is numbers
            assert numbers.tolist() == [3, 6]
        window = memoryview(bytearray(range(10)))[2:8:2]
        group.all_reduce(window, "max")
        assert window.tolist() == [2, 4, 6]
        grid = memoryview(bytearray(8 * 6)).cast("d", (2, 3))
        grid[1, 2] = me
        group.all_reduce(grid)
        assert grid[1, 2] == 3
        raw = bytearray(3)
        group.broadcast(bytearray(b"xyz") if me == 2 else raw, 2)
        assert raw == (b"xyz" if me != 2 else bytes(3))

    run_threads(SIZE, body)


def test_subclasses_of_arrays_are_seen_as_plain_memory(tmp_path: Any) -> None:
    def body(group: Group) -> None:
        me = group.rank
        on_disk = np.memmap(tmp_path / f"rank{me}", np.float64, "w+", shape=(4, 5))
        on_disk[...] = values(me, (4, 5))
        assert group.all_reduce(on_disk) is on_disk
        same(np.array(on_disk), sum(all_values(SIZE, (4, 5)), np.zeros((4, 5))))
        records = values(me, (3, 2)).view(np.recarray)
        group.all_reduce(records)
        same(np.array(records), sum(all_values(SIZE, (3, 2)), np.zeros((3, 2))))

    run_threads(SIZE, body)


def test_memory_that_is_not_aligned_works() -> None:
    def body(group: Group) -> None:
        for dtype in (np.float32, np.float64, np.complex128):
            count = 5000
            raw = bytearray(count * np.dtype(dtype).itemsize + 1)
            x = np.frombuffer(raw, dtype, count, offset=1)
            x[...] = values(group.rank, count, dtype)
            group.all_reduce(x)
            same(x.copy(), sum(all_values(SIZE, count, dtype), np.zeros(count, dtype)))
            for rank, block in enumerate(group.all_gather(x)):
                same(block, x.copy() if rank == group.rank else block)

    run_threads(SIZE, body, lanes="unix")


def test_torch_tensors_are_used_in_place() -> None:
    torch = pytest.importorskip("torch")

    def body(group: Group) -> None:
        me = group.rank
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64,
                      torch.uint8, torch.complex64):  # fmt: skip
            x = torch.arange(12).reshape(3, 4).to(dtype) * (me + 1)
            address = x.data_ptr()
            assert group.all_reduce(x) is x
            assert x.data_ptr() == address
            assert torch.equal(x, torch.arange(12).reshape(3, 4).to(dtype) * 6)
        flags = torch.tensor([me == 0, me < 3, False])
        group.all_reduce(flags, "and")
        assert flags.tolist() == [False, True, False]

        weight = torch.full((5,), float(me), requires_grad=True)
        group.all_reduce(weight, "mean")
        assert weight.tolist() == [1.0] * 5
        assert weight.requires_grad
        parameter = torch.nn.Parameter(torch.full((2, 3), float(me), dtype=torch.bfloat16))
        group.broadcast(parameter, 2)
        assert (parameter == 2).all()

        ramp = torch.arange(24.0).reshape(4, 6)
        for at in ((slice(None), slice(None, None, 2)), 1, (slice(None), slice(3, 4)), (0, 0), slice(0)):
            whole, expected = ramp * (me + 1), ramp * (me + 1)
            group.all_reduce(whole[at])
            expected[at] = ramp[at] * 6
            assert torch.equal(whole, expected)
        turned = (ramp * (me + 1)).t()
        group.all_reduce(turned)
        assert torch.equal(turned, ramp.t() * 6)
        got = group.all_gather(torch.full((me, 2), me, dtype=torch.int32))
        assert [each.shape for each in got] == [(0, 2), (1, 2), (2, 2)]
        rows = torch.empty(SIZE, 4)
        group.all_gather(torch.arange(4.0) + me, out=rows)
        assert torch.equal(rows, torch.arange(4.0) + torch.arange(3.0)[:, None])
        same(group.reduce_scatter(torch.ones(SIZE, 2)), np.full((1, 2), 3, np.float32))

    run_threads(SIZE, body)


def test_torch_tensors_that_have_no_plain_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")

    def body(group: Group) -> None:
        for tensor, reason in (
            (torch.zeros(3, 3).to_sparse(), "sparse"),
            (torch.zeros(3, device="meta"), "meta"),
            (torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
            (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        ):
            with pytest.raises(TypeError, match=reason):
                group.all_reduce(tensor)
        assert group.all_reduce(1) == 2

    run_threads(2, body)


def test_arguments_that_are_not_whole_numbers_change_nothing() -> None:
    def body(group: Group) -> float:
        other = 1 - group.rank
        with pytest.raises(ConfigError, match=r"tag=1\.5"):
            group.send(np.ones(1), other, tag=1.5)  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match=r"2\*\*62"):
            group.send(np.ones(1), other, tag=2**62)
        with pytest.raises(ConfigError, match=r"from 0 to 2\*\*62 - 1, not -3"):
            group.send(np.ones(1), other, tag=-3)
        group.send(np.ones(1), other, tag=2**62 - 1)
        group.recv(other, 2**62 - 1)
        with pytest.raises(ConfigError, match="counts"):
            group.reduce_scatter(np.ones(4), counts=[2.5, 1.5])  # type: ignore[list-item]
        group.send(np.array([7.0]), np.int64(other), tag=np.int8(3))  # type: ignore[call-overload]
        return float(group.recv(other, 3, timeout=float("inf"))[0])

    assert run_threads(2, body) == [7.0, 7.0]
