"""The examples for torch run, and show what they promise.

Most of them run one after the other in the same two ranks: this file is also the script of those ranks.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

EXAMPLES = Path(__file__).parents[2] / "examples"
TOGETHER = {
    "ddp.py": ("--epochs", "3"),
    "fsdp2.py": (),
    "diloco.py": ("--steps", "160"),
    "pipeline.py": ("--steps", "20"),
    "tensor_parallel.py": ("--steps", "20"),
    "gpt.py": ("--steps", "16", "--fsdp"),
}
EXPECTED = {
    "ddp.py": r"\[0\] ranks: 2, on .*(\n.*)*\[0\] epoch  2   loss 0\.\d+   right +\d\d\.\d %",
    "fsdp2.py": r"\[1\] rank 1 of 2 holds 33280 of 66625 parameters(\n.*)*\[0\] step  30   error (.*)   loaded",
    "diloco.py": r"\[0\] step 159   the models of 2 ranks are right in +\d+\.\d % of all sums",
    "pipeline.py": r"\[1\] rank 1 of 2 has layers 3 to 5 of 6(\n.*)*\[1\] step  19   loss 0\.\d+",
    "tensor_parallel.py": r"\[0\] step  19   loss (\d\.\d{4})   alone \1",
    "gpt.py": r"\[0\] step   15   loss 2\.\d+(\n.*)*\[0\] After:\n\[0\] \w",
}


def run(*command: str, cwd: Path | None = None) -> str:
    """Return what `python -m command` said; it must end well, and in time."""
    process = forked.TorchPopen(
        [sys.executable, "-m", *command],
        stdout=forked.PIPE,
        stderr=forked.STDOUT,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            process.communicate()
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What both ranks said, by example."""
    parts = re.split(r"^\[0\] == (.*)\n", run("covey", "run", "-n", "2", __file__), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("example", TOGETHER)
def test_the_example_trains_on_two_ranks(example: str, outputs: dict[str, str]) -> None:
    assert re.search(EXPECTED[example], outputs[example]), outputs[example]


def test_the_elastic_example_loses_a_rank_and_no_sample() -> None:
    output = run("covey", "run", "-n", "2", "--on-loss", "continue", str(EXAMPLES / "elastic.py"), "--epochs", "2")
    assert "rank 1 was killed by SIGKILL; the others continue" in output
    assert "[0] 4000 samples, 50 of them given out a second time" in output


def test_the_example_that_trains_together_chooses_a_way_and_all_ranks_have_one_model() -> None:
    output = run("covey", "run", "-n", "2", str(EXAMPLES / "together.py"), "--epochs", "60")
    assert re.search(r"epoch +\d+   (DDP|DiLoCo)", output), output
    said = re.findall(r"rank \d: (.*) % of all sums", output)
    assert len(said) == 2, output
    assert said[0] == said[1]
    assert said[0].startswith(f"{60 * 17 * 17} samples")


def test_the_fine_tuning_example_trains_adapters_alone_saves_them_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "verse.txt").write_text((EXAMPLES / "data" / "sonnets.txt").read_text()[:3000])
    words = ("covey", "run", "-n", "2", str(EXAMPLES / "lora.py"), "--text", "verse.txt", "--base-steps", "5")
    first = run(*words, "--epochs", "2", cwd=tmp_path)
    assert "[1] rank 1 of 2: trains and sends 16384 of 153600 parameters" in first
    before, after = re.findall(r"epoch 1   loss ([\d.]+)|epoch 2   loss ([\d.]+), and", first)
    assert float(after[1]) < float(before[0])
    assert sum(file.stat().st_size for file in (tmp_path / "lora").glob("step-*/*")) < 2 * 350_000
    again = run(*words, "--epochs", "3", cwd=tmp_path)
    assert "[0] continues after 184 lines" in again
    assert "makes a base model" not in again
    assert re.search(r"epoch 3   loss [\d.]+, and", again)


@pytest.mark.thorough
def test_an_example_runs_under_torchrun_as_well() -> None:
    output = run("torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "ddp.py"), "--epochs", "2")
    assert re.search(r"ranks: 2, on .*(\n.*)*epoch  1   loss", output), output


def test_every_example_is_tried() -> None:
    by_others = {"data_parallel.py", "hello.py", "relay.py", "survive.py", "typed.py"}  # in tests/test_examples.py
    by_others |= {"coordinated.py"}  # in tests/e2e/test_coordinator.py
    assert {path.name for path in EXAMPLES.glob("*.py")} == TOGETHER.keys() | by_others | {
        "elastic.py",
        "lora.py",
        "together.py",
    }


if __name__ == "__main__":
    import torch.distributed as dist

    import covey

    with covey.join() as ranks:
        for name, arguments in TOGETHER.items():
            ranks.barrier()  # what they say does not get mixed
            if ranks.rank == 0:
                print(f"== {name}")
            ranks.barrier()
            sys.argv = [str(EXAMPLES / name), *arguments]
            runpy.run_path(sys.argv[0], run_name="__main__")
            assert not dist.is_initialized(), f"{name} left its process group behind"
