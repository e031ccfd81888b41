"""Arrays that are not numpy's: every operation takes them, and gives back what lives where they live."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.values import all_values, combined, same, values

from covey import ConfigError, register_adapter, wait_all
from covey.runtime.buffers import StagedOperand, as_array, readable, writable
from covey.testing import FakeArray, FakeDevice, run_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey import Group

    Array = np.ndarray[Any, np.dtype[Any]]

SHAPE = (6, 5)
DTYPES = (np.float32, np.int32, ml_dtypes.bfloat16)


class Kind:
    """A type of arrays: how to make one, what values it has, and whether operations change it."""

    def __init__(
        self, name: str, array_type: type, make: Any, numpy: Any, *, is_changed: bool, made: Any = None
    ) -> None:
        self.name, self.array_type, self.make, self.numpy = name, array_type, make, numpy
        self.is_changed, self.made = is_changed, made or array_type

    def check(self, result: Any, expected: Array, given: Any = None) -> None:
        """Fail unless an operation returned the expected values in an array of this kind, in `given` if it changes."""
        if given is None:
            assert isinstance(result, self.made), type(result)
        else:
            assert isinstance(result, self.array_type), type(result)
            assert (result is given) == self.is_changed
        same(result if isinstance(result, np.ndarray) else self.numpy(result), expected)


def fake() -> Kind:
    device = FakeDevice(seed=1)
    return Kind("a fake device", FakeArray, device.array, FakeArray.numpy, is_changed=True)


def on_torch() -> Kind:
    torch = pytest.importorskip("torch")

    def make(array: Array) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
        return torch.from_numpy(array.copy())

    return Kind("torch", torch.Tensor, make, lambda x: as_array(x).copy(), is_changed=True, made=np.ndarray)


def on_jax() -> Kind:
    jax = pytest.importorskip("jax")
    return Kind("jax", jax.Array, jax.numpy.asarray, np.asarray, is_changed=False)


def on_mlx() -> Kind:
    mx = pytest.importorskip("mlx.core")

    def make(array: Array) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return mx.array(array.astype(np.float32)).astype(mx.bfloat16)
        return mx.array(array)

    return Kind("mlx", mx.array, make, lambda x: readable(x).load().reshape(x.shape).copy(), is_changed=False)


def collectives(group: Group, kind: Kind, dtype: Any) -> None:
    """Call every collective with arrays of a kind."""
    rank, size = group.rank, group.size
    every = all_values(size, SHAPE, dtype)
    total = combined("sum", every)

    def x() -> Any:
        return kind.make(values(rank, SHAPE, dtype))

    given = x()
    kind.check(group.all_reduce(given), total, given)
    expected = combined("sum", [total] * size if kind.is_changed else every)
    kind.check(group.all_reduce(given, algorithm="ring"), expected, given)
    for root in range(size):
        given = x()
        result = group.broadcast(given, root)
        assert (result is given) == (kind.is_changed or rank == root)
        same(kind.numpy(result), every[root])
        reduced = group.reduce(x(), root, "max")
        same(kind.numpy(reduced), combined("max", every) if rank == root else every[rank])
        rows = group.gather(x(), root)
        assert (rows is not None) == (rank == root)
        for row, expected in zip(rows or [], every, strict=False):
            kind.check(row, expected)
    for row, expected in zip(group.all_gather(x()), every, strict=True):
        kind.check(row, expected)
    out = kind.make(np.zeros((size, *SHAPE), dtype))
    kind.check(group.all_gather(x(), out=out), np.stack(every), out)
    part = slice(*np.array_split(np.arange(SHAPE[0]), size)[rank][[0, -1]] + [0, 1])
    kind.check(group.reduce_scatter(x()), total[part])
    out = kind.make(np.zeros_like(total[part]))
    kind.check(group.reduce_scatter(x(), out=out), total[part], out)
    kind.check(group.scan(x()), combined("sum", every[: rank + 1]))
    sent = [kind.make(values(rank, (4,), dtype, seed=to)) for to in range(size)]
    for of, got in enumerate(group.all_to_all(sent)):
        kind.check(got, values(of, (4,), dtype, seed=rank))
    out = kind.make(np.zeros((size, 3), dtype))
    expected = np.stack([values(of, (size, 3), dtype)[rank] for of in range(size)])
    kind.check(group.all_to_all(kind.make(values(rank, (size, 3), dtype)), out=out), expected, out)
    mine = group.scatter(sent if rank == 0 else None)
    if rank == 0:
        kind.check(mine, values(0, (4,), dtype, seed=0))
    else:
        same(mine, values(0, (4,), dtype, seed=rank))
    arrays = [x() for _ in range(5)]
    works = [group.all_reduce(each, async_op=True) for each in arrays]
    for each, done in zip(arrays, wait_all(works), strict=True):
        kind.check(done, total, each)


def gradients(group: Group, kind: Kind) -> None:
    """Reduce floats with a codec, weighted, and by name."""
    rank, size = group.rank, group.size
    every = all_values(size, SHAPE, np.float32)
    given = kind.make(every[rank].copy())
    result = group.all_reduce(given, "mean", weight=1.0)
    assert (result is given) == kind.is_changed
    np.testing.assert_allclose(kind.numpy(result), np.mean(every, axis=0), rtol=1e-6)
    plain = every[rank].copy()
    group.all_reduce(plain, compress="int8")
    given = kind.make(every[rank].copy())
    kind.check(group.all_reduce(given, compress="int8"), plain, given)
    for each, other in zip(
        group.all_gather(kind.make(every[rank]), compress="bf16"),
        group.all_gather(every[rank], compress="bf16"),
        strict=True,
    ):
        kind.check(each, other)
    names = {"a": SHAPE, "b": (3,), "c": (2, 2)}
    for bucket_bytes in (1, 1 << 20):
        grads = {name: kind.make(values(rank, shape, np.float32)) for name, shape in names.items()}
        synced = group.sync_gradients(grads, "sum", bucket_bytes=bucket_bytes)
        assert list(synced) == list(grads)
        for name, shape in names.items():
            kind.check(synced[name], combined("sum", all_values(size, shape, np.float32)), grads[name])


def messages(group: Group, kind: Kind) -> None:
    """Send and receive arrays of a kind, small and large."""
    rank, size = group.rank, group.size
    to, of = (rank + 1) % size, (rank - 1) % size
    for count in (3, 100_000):
        x = kind.make(values(rank, count, np.float32))
        expected = values(of, count, np.float32)
        out = kind.make(np.zeros(count, np.float32))
        kind.check(group.sendrecv(x, to, of, out=out), expected, out)
        work = group.send(x, to, 7, async_op=True)
        out = kind.make(np.zeros(count, np.float32))
        received = group.recv(of, 7, out=out, async_op=True)
        kind.check(received.wait(), expected, out)
        work.wait()
        work = group.send([x, x], to, 8, async_op=True)
        for each in group.recv(of, 8):
            same(each, expected)
        work.wait()


def everything(group: Group, kind: Kind) -> None:
    for dtype in DTYPES:
        collectives(group, kind, dtype)
    gradients(group, kind)
    messages(group, kind)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, size) for kind in (fake, on_torch) for size in (1, 3)),
        *(pytest.param(kind, 3, marks=pytest.mark.thorough) for kind in (on_jax, on_mlx)),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_every_operation_takes_arrays_of_every_kind_and_returns_what_lives_there(
    kind: Callable[[], Kind], size: int
) -> None:
    run_threads(size, everything, kind())


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice(seed=2) as made:
        yield made


def test_work_of_the_device_before_and_after_an_operation_stays_before_and_after(device: FakeDevice) -> None:
    def body(group: Group) -> list[float]:
        x, y, out = device.array(np.zeros(4)), device.array(np.zeros(4)), device.array(np.full(4, 9.0))
        seen = device.array(np.zeros(4))
        x.add(group.rank + 1.0)
        group.all_reduce(x)  # waits for the addition
        x.add(10.0)  # comes after the sum
        y.add(1.0)
        work = group.all_reduce(y, async_op=True)
        seen.copy_from(out)  # reads what the next operation overwrites
        work.wait()
        y.add(20.0)
        if group.rank == 0:
            group.send(np.full(4, 5.0), 1)
        else:
            group.recv(0, out=out)
        out.add(1.0)
        return [float(each.numpy().min()) for each in (x, y, seen, out)]

    assert run_threads(2, body) == [[13.0, 22.0, 9.0, 10.0], [13.0, 22.0, 9.0, 6.0]]


def test_a_fake_device_shows_what_is_read_too_early_and_not_ordered(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    x = device.array(np.ones(3))
    staged = StagedOperand.of(x, _adapter_of(x))
    assert staged.load().tolist() == [1.0] * 3
    device.leaving.add(lambda: _wait(held))
    staged = StagedOperand.of(x, _adapter_of(x))
    assert np.isnan(staged.flat).all()  # as `load` would see it if it did not wait
    held.set()
    staged.load()[...] = 7
    held.clear()
    device.coming.add(lambda: _wait(held))
    staged.store()
    assert x.numpy().tolist() == [1.0] * 3  # as a program would see it without `order`
    staged._staged.order()
    after = device.array(np.zeros(3))
    after.copy_from(x)
    held.set()
    assert after.numpy().tolist() == [7.0] * 3
    staged._staged.synchronise()
    assert np.isnan(staged.flat).all()  # a later use of this host memory would be seen


def _wait(event: threading.Event) -> None:
    assert event.wait(250)


def _adapter_of(x: Any) -> Any:
    from covey.arrays.adapter import adapter_of

    return adapter_of(x)


def test_a_device_is_not_copied_to_the_host_where_the_operation_overwrites_all(device: FakeDevice) -> None:
    def body(group: Group) -> None:
        group.broadcast(device.array(np.ones(4)))
        group.all_gather(np.ones(3), out=device.array(np.zeros((2, 3))))

    run_threads(2, body)
    assert device.copies == 4  # the root's array to the host; the other's and both outputs to the device


def test_lost_rows_of_an_output_on_a_device_stay_what_they_were(device: FakeDevice) -> None:
    def body(group: Group) -> Any:
        if group.rank == 2:
            group.leave()
            return None
        out = device.array(np.full((3, 2), 9.0))
        group.barrier()  # which rank 2 is not in: both go on when it has left
        group.all_gather(np.full(2, float(group.rank)), out=out)
        return out.numpy().tolist()

    found = run_threads(3, body, on_loss="continue")
    assert found[:2] == [[[0.0, 0.0], [1.0, 1.0], [9.0, 9.0]]] * 2


class Boxed:
    """An array type of a program: a list of numbers."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers


class StagedBox:
    def __init__(self, x: Boxed) -> None:
        self._x, self.host = x, np.empty(len(x.numbers))

    def stage_in(self) -> Callable[[], None]:
        self.host[:] = self._x.numbers
        return lambda: None

    def stage_out(self) -> Boxed:
        self._x.numbers = self.host.tolist()
        return self._x

    def order(self) -> None: ...

    def synchronise(self) -> None: ...


class BoxAdapter:
    def view(self, x: Boxed) -> None:
        return None

    def stage(self, x: Boxed) -> StagedBox:
        return StagedBox(x)

    def new(self, values: Array, like: Boxed) -> Boxed:
        return type(like)(values.tolist())


def test_a_registered_type_takes_part_with_its_subclasses() -> None:
    class Sub(Boxed): ...

    with pytest.raises(TypeError, match="register_adapter adds a type"):
        writable(Boxed([1.0]))
    register_adapter(Boxed, BoxAdapter())

    def body(group: Group) -> Any:
        mine: Any = Sub([1.0, group.rank])
        assert group.all_reduce(mine) is mine
        rows: Any = group.all_gather(mine)
        assert type(rows[0]) is Sub
        return mine.numbers, rows[1].numbers

    assert run_threads(2, body) == [([2.0, 1.0], [2.0, 1.0])] * 2


@pytest.mark.parametrize(
    ("array_type", "adapter", "text"),
    [
        (np.ndarray, BoxAdapter(), "ndarray is a numpy array"),
        ("cupy", BoxAdapter(), "array_type='cupy' must be the class"),
        (Boxed, object(), "has no view, stage, new"),
    ],
)
def test_what_is_no_adapter_is_refused(array_type: Any, adapter: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        register_adapter(array_type, adapter)


@pytest.mark.thorough
def test_an_array_inside_jit_is_refused_with_what_to_call() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"call covey\.jax\.all_reduce"):
        jax.jit(lambda x: writable(x).flat)(np.ones(3))


@pytest.mark.thorough
def test_sharded_arrays_of_jax_come_back_sharded_alike() -> None:
    pytest.importorskip("jax")
    program = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, numpy as np
from covey.testing import run_threads
mesh = jax.make_mesh((2,), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
def body(group):
    x = jax.device_put(np.arange(4.0, dtype=np.float32) + group.rank, sharding)
    y = group.all_reduce(x)
    assert y.sharding == sharding and y.tolist() == [1.0, 3.0, 5.0, 7.0], y
    assert len(group.reduce_scatter(x).devices()) in (1, 2)
run_threads(2, body)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=250)
