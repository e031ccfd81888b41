"""What torch's profiler, dispatcher modes and compiler see of the operations of process groups.

Profiler and modes look at torch's dispatcher, through which torch reaches backends in C++; a process group in Python is
called directly. So while one of them looks, and only then, an operation is first announced: the same call is made with
tensors without memory on a process group of torch that does nothing. Then it runs as always, inside of a range of the
profiler that ends with it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from covey.torch.backend.description import DescribedProcessGroup

    ClassT = TypeVar("ClassT", bound=type[DescribedProcessGroup])

COLLECTIVES: Final = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "allgather",
    "allgather_coalesced", "_allgather_base", "all_gather_single", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single", "barrier",
)  # fmt: skip
MESSAGE_NAMES: Final = ("send", "recv", "recv_anysource")
NAMES_IN_C: Final = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""What torch's own groups call them."""
WITH_MEMORY: Final = (
    "allreduce_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
)  # fmt: skip
"""torch has no kernels of these for tensors without memory."""
PARAMETERS: Final = "covey:param_comms"
"""The range that tells the parameters of an operation. torch's own, `record_param_comms`, can only be made in C++:
torch (2.13) crashes at one that is made in Python."""


class _Inside(threading.local):
    operation = False
    """Whether this thread is in an operation that was announced: one may be made of another."""


_inside = _Inside()
_is_profiled = torch.autograd._profiler_enabled
_modes = torch._C._len_torch_dispatch_stack


def visible(group: ClassT) -> ClassT:
    """Let the tools of torch see the operations of a class of process groups."""
    for name in (*COLLECTIVES, *MESSAGE_NAMES):
        if name in vars(group):
            setattr(group, name, _seen(name, vars(group)[name]))
    return group


def _seen(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def method(group: DescribedProcessGroup, /, *args: Any, **named: Any) -> Any:
        if (_is_profiled() or _modes()) and not _inside.operation:
            return _shown(group, name, operation, args, named)
        return operation(group, *args, **named)

    return method


def is_wrapper(code: object) -> bool:
    """Tell whether a frame with this code stands between a caller and an operation."""
    return code in (_CODE, _shown.__code__)


_CODE: Final = _seen("", lambda: None).__code__


def _shown(
    group: DescribedProcessGroup, name: str, operation: Callable[..., Any], args: Any, named: dict[str, Any]
) -> Any:
    """Announce an operation, and perform it in a range of the profiler."""
    is_open = _inside.operation = True
    range = torch.autograd.profiler.record_function(f"covey:{name.strip('_')}")
    range.__enter__()
    try:
        described = describe(group, name, [*args, *named.values()])
        with torch._C._profiler._RecordFunctionFast(PARAMETERS, [], described):
            _announce(group, NAMES_IN_C.get(name, name), args, named)
        work = operation(group, *args, **named)
        if work is not None and not work.is_completed():
            range._call_end_callbacks_on_future(work.get_future())
            is_open = False
        return work
    finally:
        _inside.operation = False
        if is_open:
            range.__exit__(None, None, None)


def describe(group: DescribedProcessGroup, name: str, args: list[Any]) -> dict[str, Any]:
    """Return what the profiler tells of an operation if it records shapes, in the words of `record_param_comms`."""
    tensors = [each for each in trees.tree_leaves(args) if isinstance(each, torch.Tensor)]
    told: dict[str, Any] = {
        "Collective name": name.strip("_"),
        "Process Group Name": group.group_name,
        "Process Group Description": group.group_desc,
        "Group size": group.size(),
        "Rank": group.rank(),
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "shapes": str([list(each.shape) for each in tensors]),
    }
    if tensors and tensors[0].is_cuda:
        told["stream"] = torch.cuda.current_stream(tensors[0].device).cuda_stream
    return told


def _announce(group: DescribedProcessGroup, name: str, args: Any, named: dict[str, Any]) -> None:
    """Make the same call on a process group that does nothing, where modes and the profiler see it."""
    silent = _silent_group(group.rank(), group.size())
    with _disable_current_modes():
        device = "cpu" if name in WITH_MEMORY else "meta"
        args, named = trees.tree_map_only(
            torch.Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device), (args, named)
        )
    getattr(silent, name)(*args, **named)


@functools.cache
def _silent_group(rank: int, size: int) -> Any:
    """Return a process group whose operations do nothing."""
    from torch._C._distributed_c10d import FakeProcessGroup

    made, kind = dist.ProcessGroup(rank, size), dist.ProcessGroup.BackendType.CUSTOM
    backend = FakeProcessGroup._create_internal(rank, size)
    for device in ("cpu", "meta"):
        made._register_backend(torch.device(device), kind, backend)
    made._set_default_backend(kind)
    return made


_WAITING: Final = frozenset(inspect.unwrap(each).__code__ for each in (dist.send, dist.recv))


def is_waited_for(called: FrameType) -> bool:
    """Tell whether `dist.send` or `dist.recv` called a method: they wait at once, so the message can move before.

    torch calls the same method for `isend`, whose message another thread has to move; that takes five times as long.
    Any other caller gets a work, and only loses time.
    """
    frame = called.f_back
    while frame is not None and is_wrapper(frame.f_code):
        frame = frame.f_back
    return frame is not None and frame.f_back is not None and frame.f_back.f_code in _WAITING


def keep_from_dynamo(*classes: type) -> None:
    """Keep torch.compile from tracing methods that torch calls while it traces, as DDP's reducer does.

    `torch.compiler.disable` would do the same, but imports the compiler, which takes seconds. Versions of torch without
    the functions used here trace the methods.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame as frames

        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for value in (value for each in classes for value in vars(each).values()):
            for function in (value, getattr(value, "__wrapped__", None)):
                if code := getattr(function, "__code__", None):
                    frames.set_code_exec_strategy(code, skip)
