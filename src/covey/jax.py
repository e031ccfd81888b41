"""Operations of a group inside programs that JAX compiles: `covey.jax.all_reduce(x)` in `jit`, `scan`, `cond`, `grad`.

Each is an ordered callback: JAX runs them in the order of the program, on a thread of its own, also outside `jit`. So
before the program calls the group itself, it waits for JAX: `jax.block_until_ready(result)`, or `jax.effects_barrier()`
where there is no result. Ranks are processes: JAX runs the operations of all threads of a process one after the other,
so that ranks which are threads would wait for each other. The group is the one that `covey.join` returned last, unless
`group=` names another; a compiled program keeps the group with which it was traced. An error of an operation is raised
by JAX as an error of its own, whose text has that of covey.

`all_reduce` of a sum or mean can be differentiated, as in mpi4jax: each rank differentiates with respect to its own
input, as if the inputs of the others were constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import io_callback

from covey.base.errors import ConfigError
from covey.plan.moves import part
from covey.runtime.joining.bootstrap import joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.arithmetic import Op
    from covey.runtime.group.group import Group

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "send",
    "sendrecv",
]


def all_reduce(x: Any, op: Op = "sum", *, group: Group | None = None, timeout: float | None = None) -> jax.Array:
    """Return the combination of `x` of all ranks; `op` is that of `Group.all_reduce`."""
    group = _group(group)
    reduced: jax.Array = (_linear_all_reduce if op in ("sum", "mean") else _all_reduce)(_array(x), op, group, timeout)
    return reduced


def reduce(
    x: Any, root: int = 0, op: Op = "sum", *, group: Group | None = None, timeout: float | None = None
) -> jax.Array:
    """Return the combination of `x` of all ranks on `root`, and `x` on the others."""
    group = _group(group)
    return _call(lambda a: group.reduce(_own(a), root, op, timeout=timeout), x)


def broadcast(x: Any, root: int = 0, *, group: Group | None = None, timeout: float | None = None) -> jax.Array:
    """Return `x` of `root`; the others pass an array of the same shape and dtype."""
    group = _group(group)
    return _call(lambda a: group.broadcast(_own(a), root, timeout=timeout), x)


def all_gather(x: Any, *, group: Group | None = None, timeout: float | None = None) -> jax.Array:
    """Return `x` of all ranks in an array with a first axis of ranks; all have the same shape."""
    group, x = _group(group), _array(x)
    shape = (group.size, *x.shape)
    return _call(lambda a: group.all_gather(a, out=np.empty(shape, a.dtype), timeout=timeout), x, shape)


def reduce_scatter(x: Any, op: Op = "sum", *, group: Group | None = None, timeout: float | None = None) -> jax.Array:
    """Return this rank's part of the combination of `x`, whose axis 0 is split as numpy.array_split does."""
    group, x = _group(group), _array(x)
    if not x.ndim:
        raise TypeError("reduce_scatter splits axis 0, but the array has no axes")
    start, stop = part(x.shape[0], group.size, group.rank)
    shape = (stop - start, *x.shape[1:])
    return _call(lambda a: group.reduce_scatter(a, op, timeout=timeout), x, shape)


def all_to_all(x: Any, *, group: Group | None = None, timeout: float | None = None) -> jax.Array:
    """Send row r of `x` to rank r, and return an array whose row r comes from rank r."""
    group = _group(group)
    return _call(lambda a: group.all_to_all(a, out=np.empty_like(a), timeout=timeout), x)


def scan(x: Any, op: Op = "sum", *, group: Group | None = None, timeout: float | None = None) -> jax.Array:
    """Return the combination of `x` of ranks 0 to this one."""
    group = _group(group)
    return _call(lambda a: group.scan(a, op, timeout=timeout), x)


def send(x: Any, dst: int, tag: int = 0, *, group: Group | None = None, timeout: float | None = None) -> None:
    """Send `x` to rank `dst`; see `Group.send`."""
    group = _group(group)
    _run(lambda a: group.send(a, dst, tag, timeout=timeout), None, _array(x))


def recv(like: Any, src: int, tag: int = 0, *, group: Group | None = None, timeout: float | None = None) -> jax.Array:
    """Return the next array from rank `src` with `tag`, which has the shape and dtype of `like`."""
    group = _group(group)
    shape, dtype = np.shape(like), np.dtype(like.dtype)
    result = jax.ShapeDtypeStruct(shape, dtype)
    received: jax.Array = _run(lambda: group.recv(src, tag, out=np.empty(shape, dtype), timeout=timeout), result)
    return received


def sendrecv(
    x: Any, dst: int, src: int, tag: int = 0, *, group: Group | None = None, timeout: float | None = None
) -> jax.Array:
    """Send `x` to rank `dst` and return what comes from rank `src`, of the same shape and dtype, both at once."""
    group = _group(group)
    return _call(lambda a: group.sendrecv(a, dst, src, tag, out=np.empty_like(a), timeout=timeout), x)


def barrier(*, group: Group | None = None, timeout: float | None = None) -> None:
    """Return, or let the program go on, once every rank has called this."""
    group = _group(group)
    _run(lambda: group.barrier(timeout=timeout), None)


def _all_reduce(x: Any, op: str, group: Group, timeout: float | None) -> jax.Array:
    reduced: Any = group.all_reduce
    return _call(lambda a: reduced(_own(a), op, timeout=timeout), x)


def _differentiate(
    op: str, group: Group, timeout: float | None, primals: tuple[Any], tangents: tuple[Any]
) -> tuple[jax.Array, jax.Array]:
    """Return sum and derivative. The derivative of a sum by this rank's own input is 1, that of a mean 1 / size."""

    def forwards(_: Any, tangent: Any) -> Any:
        return _linear_all_reduce(tangent, op, group, timeout)

    def backwards(_: Any, cotangent: Any) -> Any:
        return cotangent / group.size if op == "mean" else cotangent

    tangent = jax.custom_derivatives.linear_call(forwards, backwards, (), tangents[0])
    return _linear_all_reduce(primals[0], op, group, timeout), tangent


_linear_all_reduce = jax.custom_jvp(_all_reduce, nondiff_argnums=(1, 2, 3))
_linear_all_reduce.defjvp(_differentiate)


def _group(group: Group | None) -> Group:
    found = joined() if group is None else group
    if found is None:
        raise ConfigError("there is no group: call covey.join() first, or pass group=")
    return found


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)


def _own(a: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a copy that an operation may change: the memory of an argument is JAX's."""
    return a.copy()


def _call(operation: Callable[[Any], Any], x: Any, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Run an operation on `x` that returns an array of its dtype, of the same shape if none is given."""
    x = _array(x)
    result = jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype)
    made: jax.Array = _run(operation, result, x)
    return made


def _run(operation: Callable[..., Any], result: Any, *arguments: Any) -> Any:
    """Run an operation when its turn comes in the program."""

    def on_host(*given: Any) -> Any:
        return operation(*map(np.asarray, given))

    return io_callback(on_host, result, *arguments, ordered=True)
