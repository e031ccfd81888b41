"""Counts the Python frames of one small `node.call` between two processes: `python -m tools.call_frames`.

All threads of both processes are traced while one rank calls a function of the other. A frame is one call of a function
in a module of covey; functions of the program and of libraries, and constructors that Python generates, are left out.
Of many calls the one with the fewest is shown: in the others a heartbeat came, or a thread took over from another one.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import covey
from covey.runtime import loop as control
from covey.runtime.keeper.launch import launch

if TYPE_CHECKING:
    from types import FrameType

    from covey.runtime.group.group import Group

MOST_FRAMES: Final = {"unix": 60, "secure": 70}
"""By lane: the most frames of a small call on each of the two nodes."""
WARM_CALLS: Final = 300
COUNTED_CALLS: Final = 101
_PACKAGE: Final = os.path.dirname(covey.__file__) + os.sep
_CUT: Final = "-"
"""Stands in the list of frames where a call begins."""


class Frame(NamedTuple):
    """A function that was called: where it is, and on which thread it ran."""

    module: str
    function: str
    thread: str


class CallWalk(NamedTuple):
    """The frames of one call in order: those of the caller's process, and those of the process that was called."""

    caller: list[Frame]
    called: list[Frame]

    @property
    def frames(self) -> list[Frame]:
        """All frames."""
        return [*self.caller, *self.called]

    def __str__(self) -> str:
        lines = []
        for side, frames in (("caller", self.caller), ("called", self.called)):
            modules = collections.Counter(frame.module for frame in frames)
            changes = sum(one.module != other.module for one, other in itertools.pairwise(frames))
            lines.append(f"{side}: {len(frames)} frames, {len(modules)} modules, {changes} changes of module")
            lines += [f"  {count:4} {module}" for module, count in modules.most_common()]
            lines += [f"    {frame.thread:24} {frame.module}:{frame.function}" for frame in frames]
        return "\n".join([f"{len(self.frames)} frames in all", *lines])


class _Tracer:
    """Notes the frames of all threads that begin after it was installed, and of the control loop, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.frames: list[Any] = []
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        control.soon(sys.setprofile, self._note)

    def cut(self) -> None:
        if self.is_on:
            self.frames.append(_CUT)

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        if self.is_on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(_PACKAGE):
                module = code.co_filename.removeprefix(_PACKAGE)
                self.frames.append(Frame(module, code.co_qualname, threading.current_thread().name))

    def calls(self) -> list[list[Frame]]:
        """Return the frames between two cuts."""
        cuts = [at for at, frame in enumerate(self.frames) if frame is _CUT]
        return [self.frames[start + 1 : end] for start, end in itertools.pairwise(cuts)]


def _rank(group: Group) -> list[Frame]:
    tracer, node, is_caller = _Tracer(), group.node, group.rank == 0

    @node.rpc
    def add(a: int, b: int) -> int:
        tracer.cut()
        return a + b

    group.barrier()
    for turn in range(WARM_CALLS + COUNTED_CALLS):
        if turn == WARM_CALLS:
            group.barrier()
            tracer.is_on = True
            group.barrier()
        if is_caller:
            tracer.cut()
            assert node.call(1, "add", turn, 1) == turn + 1
    if not is_caller:
        group.barrier()
    tracer.is_on = False
    if is_caller:
        group.barrier()
    sys.setprofile(None)
    control.soon(sys.setprofile, None)
    # On the called side, two cuts are two runs of the function: its answer, and the receiving of the next call.
    return min(tracer.calls()[1:-1], key=len)


def walk(lanes: str = "secure") -> CallWalk:
    """Return the frames of a small call between two processes that have made many before."""
    os.environ["COVEY_LANES"] = lanes  # the ranks inherit it
    return CallWalk(*launch(_rank, 2, timeout=120))


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(prog="tools.call_frames", description=__doc__)
    parser.add_argument("--lanes", default="secure")
    print(walk(parser.parse_args().lanes))


if __name__ == "__main__":
    main()
