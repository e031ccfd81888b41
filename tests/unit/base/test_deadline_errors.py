"""Errors of deadlines say "timeout", as the users of torch and torch's own tests expect them to."""

from __future__ import annotations

import ast
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import covey
from covey.testing import run_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(covey.__file__).parent
WORDS = re.compile(r" timeout |Timed out")
TORCH = re.compile(r" (Timed out|closed|timeout) ")
"""What torch's tests of process groups look for."""


def errors_of_deadlines() -> Iterator[tuple[str, str]]:
    """Yield where each DeadlineError is made, and the fixed part of what it says."""
    for path in sorted(SOURCE.rglob("*.py")):
        if "DeadlineError" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and (message := message_of(call)) is not None:
                    yield f"{path.relative_to(SOURCE)}:{call.lineno}", fixed_part(message, function)


def message_of(call: ast.Call) -> ast.expr | None:
    """Return the message, if a call makes a DeadlineError or the fault that becomes one."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name == "DeadlineError":
        return call.args[0]
    if name == "Fault" and isinstance(call.args[0], ast.Constant) and call.args[0].value == "DeadlineError":
        return call.args[1]
    return None


def fixed_part(message: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in message.values)
    if isinstance(message, ast.BinOp):
        return fixed_part(message.left, function) + fixed_part(message.right, function)
    if isinstance(message, ast.Name):
        assigned = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == message.id
        ]
        return " / ".join(fixed_part(value, function) for value in assigned)
    return "_"


def test_every_deadline_error_of_the_package_says_timeout() -> None:
    found = dict(errors_of_deadlines())
    found = {place: text for place, text in found.items() if not place.startswith("runtime/fault.py")}  # passes it on
    assert len(found) >= 20
    assert [(place, text) for place, text in found.items() if not WORDS.search(text)] == []


def test_what_a_program_sees_when_time_is_up_says_timeout() -> None:
    def work(group: covey.Group) -> list[str]:
        part = group.split(0)
        group.barrier()
        said = []

        def late(call: Any) -> None:
            with pytest.raises(covey.DeadlineError) as caught:
                call()
            said.append(str(caught.value))

        if group.rank == 0:
            late(lambda: group.recv(src=1, timeout=0.05))
            late(lambda: group.recv(timeout=0.05))
            late(lambda: group.recv(src=1, async_op=True).wait(0.05))
            late(lambda: part.all_reduce(np.ones(3), timeout=0.1))
            waiting = group.recv(src=1, tag=5, async_op=True, timeout=0.05)
            late(waiting.wait)
        group.barrier()
        return said

    said = run_threads(2, work)[0]
    assert len(said) == 5
    assert [text for text in said if not TORCH.search(text)] == []


def test_a_rank_that_does_not_come_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(covey.DeadlineError, match=r"0\.3 s") as caught:
        covey.join(timeout=0.3)
    assert TORCH.search(str(caught.value))
