"""covey in a real Jupyter kernel: cells launch functions, call them on other machines, and show what they have."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.machines import Machine, new_lab
from tests.support.waiting import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.thorough

CELLS = (
    """
import os
from dataclasses import dataclass
import numpy as np
import covey

@dataclass
class Found:
    rank: int
    total: float

def add(group: covey.Group, scale: float) -> Found:
    x = np.full(3, (group.rank + 1) * scale)
    group.all_reduce(x)
    print(f"rank {group.rank} has added", flush=True)
    return Found(group.rank, float(x.sum()))
""",
    "assert covey.launch(add, 2, 10.0) == [Found(0, 90.0), Found(1, 90.0)]",
    "covey.run_on(os.environ['NORTH'], add, 10.0, processes=2)",
    """
def fail(group):
    raise ValueError("of rank", group.rank)
covey.run_on(os.environ["NORTH"], fail)
""",
    """
group = covey.join()
group
""",
    "group.node.topology()",
    "group.all_reduce(np.ones(3), async_op=True)",
    """
from covey.runtime.progress_bar import ProgressBar
with ProgressBar("sending", 2_000_000, True) as bar:
    bar.show(1_000_000)
    bar.show(1_000_000)
""",
)


@pytest.fixture(scope="module")
def desk() -> Iterator[Machine]:
    """A machine that may start programs on another one, which is called NORTH in its environment."""
    with new_lab() as lab:
        key = secrets.token_bytes(32)
        north, desk = (lab.machine(name, "home", key) for name in ("north", "desk"))
        desk.trust("home", north)
        agent = north.start("-m", "covey", "up", "--allow", "all")
        desk.env["NORTH"] = pipes.stdout(agent).readline().split()[0]
        yield desk
        agent.terminate()
        assert agent.wait(DEADLINE) == 0


def environment(machine: Machine) -> dict[str, str]:
    """Return that of a kernel; with PYTEST_CURRENT_TEST it would not show what child processes print."""
    return {name: value for name, value in (os.environ | machine.env).items() if name != "PYTEST_CURRENT_TEST"}


def text_of(outputs: list[Any], name: str) -> str:
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream" and output["name"] == name)


def shown(outputs: list[Any]) -> dict[str, str]:
    (data,) = [output["data"] for output in outputs if output["output_type"] in ("execute_result", "display_data")]
    return dict(data)


def test_cells_launch_call_and_show(desk: Machine) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    client = NotebookClient(notebook, timeout=DEADLINE, kernel_name="python3", allow_errors=True)
    client.execute(cwd=str(desk.folder), env=environment(desk))
    _, launched, called, failed, group, network, work, bar = (list(cell.outputs) for cell in notebook.cells)
    assert sorted(text_of(launched, "stdout").splitlines()) == ["rank 0 has added", "rank 1 has added"], launched
    assert len(text_of(called, "stdout").splitlines()) == 2, called
    assert "] rank 1 has added" in text_of(called, "stdout")
    assert shown(called)["text/plain"] == "[Found(rank=0, total=90.0), Found(rank=1, total=90.0)]"
    (error,) = [output for output in failed if output["output_type"] == "error"]
    assert error["ename"] == "RemoteCallError"
    assert "ValueError: ('of rank', 0)" in error["evalue"]
    assert "rank 0 of 1" in shown(group)["text/html"]
    assert shown(group)["text/plain"].startswith("<Group")
    assert "Machines" in shown(network)["text/html"]
    assert shown(network)["text/plain"].startswith("site 0: 1 rank")
    assert "all_reduce" in shown(work)["text/html"]
    assert '<progress value="2000000" max="2000000">' in shown(bar)["text/html"]
    assert shown(bar)["text/plain"].startswith("sending: 2.0 MB of 2.0 MB")


def test_the_button_that_interrupts_a_cell_ends_the_ranks_on_other_machines(desk: Machine) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(desk.folder), env=environment(desk))
    seen: list[str] = []

    def note(message: Any) -> None:
        content = message["content"]
        seen.append(content.get("text") or content.get("ename") or "")
        if "waits" in seen[-1]:
            manager.interrupt_kernel()

    try:
        source = """
import os, time, covey
def wait(group):
    print("rank", group.rank, "waits", flush=True)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
covey.run_on(os.environ["NORTH"], wait)
"""
        reply = client.execute_interactive(source, timeout=DEADLINE, output_hook=note)
        assert reply["content"]["ename"] == "KeyboardInterrupt", seen
        assert any("interrupted" in text for text in seen), seen
        wait_until(lambda: desk.covey("ps").stdout.count("running") == 0)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
