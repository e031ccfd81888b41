"""Every Python block of README and the guides runs, in the order of its page, on two ranks that are threads or alone.

A block that needs variables gets them from `GIVEN`; one that cannot run here is listed in `NOT_RUN` with the reason.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

import covey
from covey.runtime.joining.node import node_of
from covey.runtime.report_log import log_of
from covey.testing import run_threads

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SESSION = re.compile(r"^```pycon\n(.*?)^```", re.DOTALL | re.MULTILINE)

NOT_RUN = {
    "docs/guides/coordinator.md": "tests/e2e/test_coordinator.py runs it on two workers",
    "docs/guides/from-torchrun.md": "tests/e2e/test_from_elsewhere.py runs it on two ranks",
    "docs/guides/from-mpi4py.md": "tests/e2e/test_from_elsewhere.py runs it on three ranks",
    "docs/guides/from-ray.md": "tests/e2e/test_from_elsewhere.py runs it on three ranks",
    "docs/guides/recipes.md": "tests/torch/test_recipes.py runs them on two ranks",
    "docs/guides/engines.md": "tests/e2e/engines makes the same calls, with real engines",
    "init_device_mesh": "needs GPUs and NCCL",
    "import covey.jax": "tests/e2e/test_jax.py runs it on two ranks, where JAX is installed",
    "covey.data(": "tests/e2e/test_several_machines.py and tests/e2e/test_data.py run the same calls on two machines",
    "covey.run_on(": "tests/e2e/test_several_machines.py runs it on two machines",
}
"""Pages, or blocks by a word in them, that this file does not run."""
SHORTER = {"STEPS = 500": "STEPS = 5", "STEPS = 150": "STEPS = 5"}
"""What is made smaller, for time."""


@dataclass
class Config:
    rate: float


def is_run(page: str, code: str) -> bool:
    return page not in NOT_RUN and not any(word in code for word in NOT_RUN)


def blocks(page: str) -> list[str]:
    """Return the blocks of a page that are run."""
    found = [code for code in BLOCK.findall(PAGES[page]) if is_run(page, code)]
    for long, short in SHORTER.items():
        found = [code.replace(long, short) for code in found]
    return found


def run(page: str, code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block with these names, and return them with those that it made."""
    exec(compile(code, page, "exec", dont_inherit=True), names)
    return names


def test_the_programs_of_the_readme_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    hello, _, loop = blocks("README.md")
    run("README.md", hello, {})
    assert capsys.readouterr().out == "rank 0 of 1: [0. 1. 2. 3.] by no lane\n"
    given = {"covey": covey, "weights": np.zeros(2), "STEPS": 5, "compute": lambda state: state["weights"] - 1.0}
    assert 0.0 < run("README.md", loop, given)["state"]["weights"][0] < 1.0


@pytest.mark.parametrize("page", ["docs/guides/first-cluster.md", "docs/guides/chaos.md"])
def test_the_program_of_the_guide_runs_alone(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(page)
    run(page, code, {})
    assert re.match(r"rank 0 of 1: \[0\. 1\. 2\. 3\.\] by |step 5, ", capsys.readouterr().out)


def test_the_programs_of_the_guide_to_losses_run() -> None:
    page = "docs/guides/elastic.md"
    loop, shrinking, saving = blocks(page)
    assert run(page, loop, {})["state"]["step"] == 5

    def save(group: covey.Group) -> tuple[float, float, int]:
        weights, moments = np.full(4, 2.0), np.full(2, float(group.rank))
        given = {"covey": covey, "group": group, "weights": weights, "moments": moments, "step": 7}
        names = run(page, saving, given)
        return names["state"]["weights"][3], names["state"]["moments"].array[0], names["step"]

    assert run_threads(2, save) == [(2.0, 0.0, 7), (2.0, 1.0, 7)]

    def lose(group: covey.Group) -> int:
        def step(group: covey.Group) -> None:
            raise covey.PeerLostError("as if", rank=1, operation="all_reduce", sequence=0)

        names = run(page, shrinking, {"covey": covey, "group": group, "step": step})
        return int(names["group"].size)

    assert run_threads(1, lose) == [1]


def test_the_calls_of_the_guide_to_collectives_run_on_two_ranks() -> None:
    page = "docs/guides/collectives.md"

    def rank_main(group: covey.Group) -> float:
        given = {"group": group, "batch": [1] * (group.rank + 1), "Config": Config, "config": Config(0.1)}
        arrays = {name: np.full(4, group.rank, np.float32) for name in ("x", "gw", "gb")}
        names: dict[str, Any] = {**given, **arrays, "anything": {1, 2}, "__name__": "a_page"}
        tour, mesh, types, messages, urgent, ahead, _, typed = blocks(page)
        run(page, tour, names)
        assert run(page, types, {**names, "x": names["x"].copy()})["names"] == ["north"] * 2
        run(page, mesh, {**names, "covey": covey, "x": names["x"].copy()})
        sent = run(page, messages, {**names, "np": np, "covey": covey})
        assert run(page, urgent, sent)["flag"].wait() == [2.0]
        train_ahead = run(page, ahead, {"covey": covey})["train_ahead"]
        assert train_ahead(group, [np.ones(3)] * 2, lambda: False)
        found = run(page, typed, {**names, "config": Config(0.1)})
        assert found["configs"] == [Config(0.1)] * 2
        assert found["tags"] == [{"a", "b"}] * 2
        assert (names["gw"] == 0.5).all()
        return float(names["x"][0])

    assert run_threads(2, rank_main) == [1.0, 1.0]


def test_the_adapter_of_the_guide_to_arrays_takes_part_in_an_operation() -> None:
    (code,) = blocks("docs/guides/arrays.md")

    class Ledger:
        def __init__(self, entries: list[float]) -> None:
            self.entries = entries

    def rank_main(group: covey.Group) -> list[float]:
        names = run("docs/guides/arrays.md", code, {"Ledger": Ledger, "group": group, "np": np, "covey": covey})
        rows: list[Any] = group.all_gather(names["ledger"])
        entries: list[float] = names["ledger"].entries + rows[1].entries
        return entries

    assert run_threads(2, rank_main) == [[2.0, 4.0, 2.0, 4.0]] * 2


def test_the_asyncio_program_of_the_guide_to_collectives_runs() -> None:
    import asyncio

    page = "docs/guides/collectives.md"
    names = run(page, blocks(page)[6], {"covey": covey})
    assert asyncio.run(names["main"]()) == 1


def test_the_functions_of_the_guide_to_calls_run_on_two_ranks() -> None:
    page = "docs/guides/calls.md"
    tour, handles, double = blocks(page)
    run(page, double, {})

    def rank_main(group: covey.Group) -> list[Any]:
        names: dict[str, Any] = {"__name__": "covey_guide"}
        sys.modules["covey_guide"] = types.ModuleType("covey_guide")  # where dataclasses look for their own names
        run(page, tour, names)
        run(page, handles, names)
        names["serve"](group)
        group.barrier()
        used = names["use"](group)
        group.barrier()
        total = names["count_together"](group)
        group.barrier()
        return [used, total]

    try:
        first, second = run_threads(2, rank_main, lanes="unix")
    finally:
        del sys.modules["covey_guide"]
    assert first == [["step 1 of rank 1", "step 0", "step 1"], 3]
    assert second == [["step 1 of rank 0", "step 0", "step 1"], 3]


def test_the_function_of_the_guide_to_running_runs() -> None:
    page = "docs/guides/running.md"
    code, placed = blocks(page)
    assert "print(covey.launch(mean_of_ranks, 4, 10))  # [15.0, 15.0, 15.0, 15.0]" in code
    mean_of_ranks = run(page, code, {"__name__": "a_page"})["mean_of_ranks"]
    assert run_threads(4, mean_of_ranks, 10) == [15.0] * 4
    assert run(page, placed, {})["group"].size == 1


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher of one rank sets."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **address}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("one_rank")
def test_the_loop_of_the_guide_to_training_together_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    page = "docs/guides/training-together.md"
    (loop,) = blocks(page)
    model = torch.nn.Linear(4, 1)
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    judged: list[float] = []

    def evaluate(model: Any) -> None:
        judged.append(float(torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).detach()))

    evaluate(model)
    names = {
        "covey": covey,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": torch.utils.data.DataLoader(data, batch_size=10),
        "loss_fn": torch.nn.functional.mse_loss,
        "evaluate": evaluate,
    }
    together = run(page, "import covey.torch\n" + loop, names)["together"]
    assert (together.done, together.samples) == (True, 600)
    assert judged[1] < judged[0] / 10


@pytest.mark.usefixtures("one_rank")
def test_the_programs_of_the_guide_to_pytorch_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed as dist

    import covey.torch

    page = "docs/guides/pytorch.md"
    init, late, save, store, diloco, norm, hook, elastic, replicas = blocks(page)
    _, wrap, _ = blocks("README.md")
    model = torch.nn.Linear(2, 1)
    names: dict[str, Any] = {"covey": covey, "threading": threading, "torch": torch}
    try:
        run(page, init, names)
        assert dist.get_backend() == "covey"
        dist.barrier()
        run(page, save, {**names, "state": {"model": model}, "folder": tmp_path, "step": 1})
        assert list(tmp_path.iterdir())
        kept = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        assert run(page, store, {**names, **kept})["step"] == 100
        far = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        learning = {"optimizer": torch.optim.SGD(far.parameters(), lr=0.1), "loss_fn": torch.nn.functional.mse_loss}
        before = far[0].weight.detach().clone()
        run(page, diloco, {**names, **learning, "model": far, "batches": [(torch.ones(3, 2), torch.zeros(3, 1))] * 21})
        assert (far[0].weight != before).all()
        run(page, late, names)
        names["timer"].cancel()
        names["timer"].function()  # what it would do after a minute
        dist.destroy_process_group()
        ddp = run("README.md", wrap, {"model": model})["model"]
        normal = {
            "model": torch.nn.BatchNorm1d(2),
            "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
        }
        assert run(page, norm, {**names, **normal})["model"](torch.eye(2)).shape == (2, 2)
        inputs = torch.ones(3, 2)
        run(page, hook, {**names, "ddp": ddp, "inputs": inputs, "loss": ddp(inputs).mean()})
        assert model.weight.grad is not None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "optimizer": optimizer, "data": torch.ones(600, 2), "targets": torch.ones(600, 1)}
    loop = run(page, elastic, {**names, **given, "loss_fn": torch.nn.functional.mse_loss})
    assert loop["elastic"].done
    assert loop["elastic"].samples == 5 * 600
    try:  # one process holds the whole of its replica
        own = {**names, **given, "fully_shard": torch.distributed.fsdp.fully_shard, "model": torch.nn.Linear(2, 1)}
        sharded = run(page, replicas.replace("shards=2", "shards=1"), own)
        for indices in sharded["elastic"]:
            sharded["model"](given["data"][indices]).square().mean().backward()
            sharded["elastic"].step()
        assert sharded["elastic"].samples == 600
    finally:
        dist.destroy_process_group()


def test_the_codec_of_the_guide_to_compression_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.compress import parsing

    monkeypatch.setattr(parsing, "_factories", dict(parsing._factories))
    page = "docs/guides/compression.md"
    *_, code = blocks(page)
    names = run(page, code, {"__name__": "a_page"})
    assert f"# {capsys.readouterr().out}" in code
    codec = names["Fixed"](0.5)
    assert parsing.parse("fixed(0.5)") == codec
    x, out = np.array([0.2, 0.3, -7.9, np.nan, np.inf, -1e9], np.float32), np.zeros(6, np.float32)
    wire = np.zeros(codec.wire_bytes(6), np.uint8)
    codec.encode(x, wire)
    codec.decode(wire, out)
    assert out[:3].tolist() == [0.0, 0.5, -8.0]
    assert np.isnan(out[3:]).all()
    assert codec.error_bound(x).tolist() == [pytest.approx(0.255)] * 3 + [np.inf] * 3


def test_the_functions_of_the_guide_to_observing_run_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    page = "docs/guides/observing.md"

    def rank_main(group: covey.Group) -> None:
        names: dict[str, Any] = {}
        for code in blocks(page):
            run(page, code, names)
        names["look"](group)
        names["train"](group)
        told = log_of(node_of(group)).latest()
        assert told is not None
        assert (told.step, told.values) == (2, {"loss": 1 / 3, "samples": 32.0})
        names["both"](group)
        names["share"](group)
        group.barrier()

    run_threads(2, rank_main)
    printed = capsys.readouterr().out
    assert "has ranks (0, 1)" in printed
    assert "to rank 1 by memory  local" in printed
    assert "ticket 2 of" in printed
    assert printed.count("came first") == 1
    assert printed.count("first is rank") == 2


def test_the_calls_of_the_guide_to_compression_run_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    page = "docs/guides/compression.md"
    calls, loop, *_ = blocks(page)

    def array(rank: int, number: int) -> Any:
        return np.random.default_rng([rank, number]).standard_normal((200, 200)).astype(np.float32)

    def rank_main(group: covey.Group) -> list[bytes]:
        grads = {name: array(group.rank, number) for number, name in enumerate(("embed.w", "layer.w", "layer.bias"))}
        given = {"covey": covey, "group": group, "x": array(group.rank, 3), "grads": grads, "loss": group.rank}
        names = run(page, calls, given)
        assert set(group.feedback.names()) == {"embed.w", "layer.w"}
        assert names["exact"] == 0.5
        assert np.array_equal(grads["layer.bias"], (array(0, 2) + array(1, 2)) / 2)
        assert np.abs(grads["layer.w"] - (array(0, 1) + array(1, 1)) / 2).max() < 0.05
        run(page, loop, {**names, "compute_gradient": lambda step: array(group.rank, step)})
        return [names["x"].tobytes(), np.stack(names["rows"]).tobytes(), *(grad.tobytes() for grad in grads.values())]

    first, second = run_threads(2, rank_main)
    assert first == second
    assert capsys.readouterr().out.count("Compression(operations=") == 2


@pytest.mark.usefixtures("one_rank")
def test_the_hook_of_the_guide_to_compression_runs() -> None:
    import torch
    import torch.distributed as dist

    import covey.torch

    page = "docs/guides/compression.md"
    *_, hook, _ = blocks(page)
    dist.init_process_group("covey")
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 200))
        run(page, hook, {"covey": covey, "ddp": ddp})
        ddp(torch.ones(3, 300)).sum().backward()
        assert all(parameter.grad is not None for parameter in ddp.parameters())
    finally:
        dist.destroy_process_group()


def test_the_programs_of_the_guide_to_metrics_run(capsys: pytest.CaptureFixture[str]) -> None:
    from prometheus_client import REGISTRY

    page = "docs/guides/metrics.md"
    counting, serving, pushing, spans = blocks(page)
    run(page, counting, {})
    assert re.match(
        r"100 all_reduce, 0 bytes sent, 0 failed\n"
        r"half of them took at most \d+ us, and 99 of 100 at most \d+ us\n\d+% of the time",
        capsys.readouterr().out,
    )
    before = set(REGISTRY._collector_to_names)
    run(page, serving, {})
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics\n", capsys.readouterr().out)
    (added,) = set(REGISTRY._collector_to_names) - before
    REGISTRY.unregister(added)
    run(page, pushing, {})
    assert re.fullmatch(r"[1-9]\d* lines to send\n", capsys.readouterr().out)
    run(page, spans, {})


def test_the_session_shows_what_python_prints() -> None:
    import doctest

    text = PAGES["docs/concepts/lanes-and-plans.md"]
    session = doctest.DocTestParser().get_doctest("".join(SESSION.findall(text)), {}, "lanes-and-plans", None, 0)
    assert session.examples
    assert doctest.DocTestRunner().run(session).failed == 0


def test_the_loop_of_the_guide_to_services_saves_on_both_ranks() -> None:
    page = "docs/guides/services.md"
    loop = blocks(page)[0]
    paths: list[tuple[str, int]] = []

    def rank_main(group: covey.Group) -> list[str]:
        names = run(page, loop, {})
        if group.rank == 1:
            group.request_checkpoint("/backup/monday", id="monday")
        group.barrier()
        saved = names["train"](group, 100, lambda path, state: paths.append((path, state["step"])))
        group.barrier()
        return list(saved)

    assert run_threads(2, rank_main) == [["monday"]] * 2
    assert paths == [paths[0]] * 2
    assert paths[0][0] == "/backup/monday"


def test_the_launch_of_the_guide_to_notebooks_has_the_mean_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: `tests/e2e/test_launch.py` shows that functions travel."""
    page = "docs/guides/notebooks.md"

    def launch(fn: Any, nprocs: int, *args: Any) -> list[Any]:
        return run_threads(nprocs, lambda group: fn(group, *args))

    monkeypatch.setattr(covey, "launch", launch)
    results = run(page, blocks(page)[0], {})["results"]
    assert len(set(results)) == 1
    assert abs(results[0] - 1.0) < 0.01


def test_the_strategies_of_the_guide_to_services_agree() -> None:
    page = "docs/guides/services.md"
    strategies = blocks(page)[1]

    def rank_main(group: covey.Group) -> list[list[float]]:
        names = run(page, strategies, {"covey": covey, "np": np})
        by_host = names["fit_by_host"](group, 20)
        return [names["fit"](covey.GroupStrategy(group), 20).tolist(), by_host.tolist()]

    first, second = run_threads(2, rank_main)
    assert first == second
    assert first[0] == first[1]
    assert 0.0 < first[0][0] < 1.0


def test_the_check_of_the_guide_to_services_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = "docs/guides/services.md"
    run(page, blocks(page)[2], {"covey": covey})
    assert '"disk": {\n   "ok": true,' in capsys.readouterr().out


def test_the_closers_of_the_guide_to_services_run_in_reverse_order() -> None:
    page = "docs/guides/services.md"
    program = "import covey, os\n" + blocks(page)[3] + "files = []\nserve(files)\nprint(files)"
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True
    ).stdout
    assert out == "['state saved', 'database closed']\n"


def test_every_block_of_every_page_is_run_or_listed() -> None:
    run_here = {
        **dict.fromkeys(("docs/guides/first-cluster.md", "docs/guides/chaos.md"), 1),
        "docs/guides/compression.md": 4,
        "docs/guides/running.md": 2,
        "docs/guides/elastic.md": 3,
        "docs/guides/collectives.md": 8,
        "docs/guides/arrays.md": 1,
        **dict.fromkeys(("README.md", "docs/guides/calls.md"), 3),
        "docs/guides/observing.md": 4,
        "docs/guides/notebooks.md": 1,
        "docs/guides/pytorch.md": 9,
        "docs/guides/training-together.md": 1,
        "docs/guides/metrics.md": 4,
        "docs/guides/services.md": 4,
    }
    assert {page: len(blocks(page)) for page in PAGES if blocks(page)} == run_here
    assert all(word in PAGES or any(word in text for text in PAGES.values()) for word in NOT_RUN)
