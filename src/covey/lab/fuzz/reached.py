"""Records which lines and branches of Python functions were executed, and which were not.

Every conditional jump of a function's bytecode has two branches. A branch is named by its line and by whether the
condition held; each part of a condition (`a or b`) is a jump of its own. Only functions that were entered are reported:
a function that was never entered is called from a branch that was not taken, and that branch is reported.
"""

from __future__ import annotations

import dis
import itertools
import linecache
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import CodeType, FrameType

_CONDITIONAL: Final = ("POP_JUMP", "JUMP_IF", "FOR_ITER")
_UNMATCHED: Final = ("RERAISE", "COPY")


class Missed(NamedTuple):
    """A line or branch of a function that was not reached."""

    module: str
    function: str
    line: str
    """Its source."""
    way: str
    """`never`, or which branch of a jump was not taken: `true`, `false`, `loops`, `ends`."""
    number: int
    """The line number; not part of its identity."""


class ReachedCode:
    """What was executed, by code object."""

    def __init__(self, files: Collection[str]) -> None:
        """Record the functions of these files."""
        self._files = frozenset(files)
        self._ways: dict[CodeType, set[tuple[int, int]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what this thread executes during the block."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    @property
    def files(self) -> set[str]:
        """The files of which a function was entered."""
        return {code.co_filename for code in self._ways}

    def missed(self) -> list[Missed]:
        """Return the lines and branches of entered functions that were not reached."""
        return sorted({missed for code, ways in self._ways.items() for missed in _missed(code, ways)})

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name == "<module>":
            return None
        ways, last = self._ways.setdefault(code, set()), -1
        frame.f_trace_opcodes = True

        def step(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            nonlocal last
            if event == "opcode":
                ways.add((last, frame.f_lasti))
                last = frame.f_lasti
            return step

        return step


def _missed(code: CodeType, ways: set[tuple[int, int]]) -> Iterator[Missed]:
    module, function = code.co_filename.rpartition("/covey/")[2], code.co_qualname
    instructions = list(dis.get_instructions(code))
    start = next(index for index, each in enumerate(instructions) if each.opname == "RESUME")
    by_offset = {each.offset: each for each in instructions}
    executed = {offset for _, offset in ways}
    reached_lines: set[int] = set()
    all_lines: set[int] = set()
    possible: dict[tuple[int, int, str], set[str]] = {}
    """By line, column and source: a condition may be compiled to several jumps, as that of a loop is."""
    taken: dict[tuple[int, int, str], set[str]] = {}
    for before, each in itertools.pairwise(instructions[start:]):
        line = each.positions.lineno if each.positions is not None else None
        if line is None:
            continue
        all_lines.add(line)
        if each.offset not in executed:
            continue
        reached_lines.add(line)
        if not any(name in each.opname for name in _CONDITIONAL):
            continue
        if before.opname == "CHECK_EXC_MATCH" and by_offset[each.argval].opname in _UNMATCHED:
            continue  # an exception that no handler matches would reach the caller, which must not happen
        place = _condition(code, each)
        after = {offset for last, offset in ways if last == each.offset}
        if_jumps, if_falls = _names(each.opname)
        possible.setdefault(place, set()).update((if_jumps, if_falls))
        seen = taken.setdefault(place, set())
        if each.argval in after:
            seen.add(if_jumps)
        if after - {each.argval}:
            seen.add(if_falls)
    for place, all_ways in possible.items():
        for way in all_ways - taken[place]:
            yield Missed(module, function, place[2], way, place[0])
    for number in all_lines - reached_lines:
        yield Missed(module, function, linecache.getline(code.co_filename, number).strip(), "never", number)


def _condition(code: CodeType, jump: dis.Instruction) -> tuple[int, int, str]:
    """Return the line and the column of a condition, and its source."""
    at = jump.positions
    assert at is not None
    line, column = at.lineno or code.co_firstlineno, at.col_offset or 0
    text = linecache.getline(code.co_filename, line).encode()
    end = at.end_col_offset if at.end_lineno == at.lineno else None
    return line, column, text[column:end].decode().strip()


def _names(opname: str) -> tuple[str, str]:
    """Return the names of the two branches of a jump: taken, and not taken."""
    if opname == "FOR_ITER":
        return "ends", "loops"
    if "NOT_NONE" in opname:
        return "is not None", "is None"
    if "NONE" in opname:
        return "is None", "is not None"
    return ("true", "false") if "TRUE" in opname else ("false", "true")
