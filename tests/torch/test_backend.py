"""torch on covey: what gloo has no like of, groups, failures, meeting, and the end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.sets import first
from tests.support.torch_ranks import run_torch_ranks
from tests.support.waiting import DEADLINE
from tests.torch import programs

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("program", "size"),
    [
        (programs.beyond_gloo, 1),
        (programs.beyond_gloo, 3),
        (programs.messages, 3),
        (programs.groups, 4),
        (programs.inside_and_across, 4),
        (programs.dozens, 3),
        (programs.threads, 3),
        (programs.own_thread, 3),
        (programs.detailed, 2),
        (programs.come_late, 3),
        (programs.disagree, 3),
        (programs.abort_pending, 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_ranks_find_what_they_expect(program: Callable[..., Any], size: int) -> None:
    run_torch_ranks(size, program)


def test_a_rank_that_waits_can_ask_who_is_late() -> None:
    first, *_ = run_torch_ranks(4, programs.ask_who_is_late)
    behind, silent = first
    assert "rank 2 (" in behind
    assert behind.endswith("is 1 operation behind; it last entered all_reduce(float32[3], op=sum)")
    assert "rank 3 (" in silent
    assert silent.endswith("does not answer")


def test_ranks_meet_again_and_again_over_one_store() -> None:
    first, second = run_torch_ranks(2, programs.again_and_again)
    assert first == second
    assert len(first) == 3


SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("covey")
    print(f"{dist.get_rank()} of {dist.get_world_size()}")
    x = torch.ones(1000)
    future = dist.all_reduce(x, async_op=True).get_future()
    future.then(lambda ended: ended.value()[0].sum().item()).wait()
    assert x[0] == dist.get_world_size()
    if sys.argv[1:] == ["destroy"]:
        dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", first(1, ["just exit alone", "just exit", "destroy"]))
def test_an_installed_covey_needs_no_import_and_ends_cleanly_under_covey_run(tmp_path: Path, end: str) -> None:
    """Ranks that end one after the other are in test_exit.py; these import torch, for seconds each."""
    size = 1 if "alone" in end else 2
    installed = tmp_path / "path" / "imagined-1.dist-info"
    installed.mkdir(parents=True)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    lines = [f"{name} = {target}\n" for name, target in points.items()]
    (installed / "entry_points.txt").write_text("[torch.backends]\n" + "".join(lines))
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: imagined\nVersion: 1\n")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = subprocess.run(
        [sys.executable, "-m", "covey", "run", "-n", str(size), "--torch-env", str(script), end],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT / 'src'}:{installed.parent}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(f"{rank} of {size}" in run.stdout for rank in range(size))
    assert "rror" not in run.stderr
