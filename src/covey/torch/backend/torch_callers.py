"""What covey has to know about the code of torch that calls it: which functions wait, and which are traced."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from covey.torch.backend.visible import is_wrapper

if TYPE_CHECKING:
    from types import FrameType

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
