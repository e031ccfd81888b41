"""torch on several machines: by name, under `covey run` and under torchrun; and nothing of it in clear on the wire."""

from __future__ import annotations

import json
import secrets
import sys
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.testing import netns
from covey.testing.netns import Lan

ROOT = Path(__file__).parents[2]
PREFIX = "covey-torch"
SCRIPT = """
    import json, os, sys
    import torch
    import torch.distributed as dist

    block = bytes.fromhex(sys.argv[1])
    for method in sys.argv[2:]:
        dist.init_process_group("covey", init_method=method)
        rank, size = dist.get_rank(), dist.get_world_size()
        x = torch.tensor([10.0**rank])
        dist.all_reduce(x)
        tensor = torch.frombuffer(bytearray(block * 4096), dtype=torch.uint8)
        copy = tensor.clone() if rank == 0 else torch.zeros_like(tensor)
        dist.broadcast(copy, 0)
        assert torch.equal(copy, tensor)
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.set(f"key-{block.hex()}", block)
        assert store.get(f"key-{block.hex()}") == block
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        local = [int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])]
        print(json.dumps([method[:5], rank, size, x.item(), local, type(store).__name__]) + "\\n", end="", flush=True)
        dist.barrier()
        dist.destroy_process_group()
"""
COVEY_RUN = "-m covey run hidden-run --size 2 --wait 500"
TORCHRUN = (
    "-m torch.distributed.run --rdzv-backend covey --rdzv-id hidden-run --nnodes 2 --nproc-per-node 1 "
    "--rdzv-conf timeout=500"
)


@pytest.fixture(autouse=True)
def _torch(_forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs on hosts are forked from a process that has imported torch."""
    monkeypatch.setattr(netns, "subprocess", SimpleNamespace(**(vars(forked) | {"Popen": forked.TorchPopen})))


@pytest.mark.parametrize(
    ("launcher", "methods"),
    [
        (COVEY_RUN, ("covey://hidden-other?size=2&timeout=500", "env://")),
        pytest.param(TORCHRUN, ("env://",), marks=pytest.mark.thorough),
    ],
    ids=["covey run", "torchrun"],
)
def test_two_machines_train_and_a_capture_of_all_of_it_tells_nothing(
    launcher: str, methods: tuple[str, ...], tmp_path: Path
) -> None:
    block, secret, script = secrets.token_bytes(64), tmp_path / "secret", tmp_path / "train.py"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    script.write_text(textwrap.dedent(SCRIPT))
    argv = [sys.executable, *launcher.split(), str(script), block.hex(), *methods]
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{entry_points(tmp_path)}", "COVEY_SECRET_FILE": str(secret)}
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        lan.switch.start_capture()
        pair = [host.popen(argv, env=env | {"OMP_NUM_THREADS": "1", "HOME": str(host.home)}) for host in lan.hosts]
        ends = [(*process.communicate(timeout=DEADLINE), process.returncode) for process in pair]
        capture = lan.switch.captured()
    assert [code for *_, code in ends] == [0, 0], ends
    said = [json.loads(line.partition("] ")[2] or line) for out, *_ in ends for line in out.splitlines()]
    expected = [[method[:5], rank, 2, 11.0, [0, 1], "CoveyStore"] for method in methods for rank in range(2)]
    assert sorted(said) == sorted(expected), ends
    assert sum(map(len, capture.streams().values())) > len(block) * 4096, "the tensor did not travel over the network"
    needles = {"tensor": block[:16], "its end": block[-16:], "key": block.hex().encode(), "run": b"hidden"}
    needles |= {"a key of torch's own": b"default_pg"}
    assert [what for what, needle in needles.items() if needle in capture] == []


def entry_points(folder: Path) -> Path:
    """Return where torch finds the entry points of an installed covey."""
    installed = folder / "path" / "imagined-1.dist-info"
    installed.mkdir(parents=True)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in each.items()) for group, each in points.items()
    ]
    (installed / "entry_points.txt").write_text("".join(lines))
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: imagined\nVersion: 1\n")
    return installed.parent


GLOO = """
    import json
    import socket
    import covey
    import torch
    import torch.distributed as dist

    with covey.join() as group:
        assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
        dist.init_process_group("gloo")
        x = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(x)
        print(json.dumps([dist.get_rank() == group.rank, x.item()]))
        dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "option", [pytest.param("--torch-env", marks=pytest.mark.thorough), ""], ids=["torch's store", "covey's store"]
)
def test_plain_gloo_works_between_machines_whose_own_names_resolve_to_loopback(option: str, tmp_path: Path) -> None:
    """As Debian sets it up: by itself gloo would tell the others to connect to 127.0.1.1."""
    secret, script = tmp_path / "secret", tmp_path / "train.py"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    script.write_text(textwrap.dedent(GLOO))
    argv = [sys.executable, *f"-m covey run gloo --size 2 --wait 500 {option} {script}".split()]
    env = {"PYTHONPATH": str(ROOT / "src"), "COVEY_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"}
    with Lan(hosts=2, kind="switch", hosts_file=True, prefix=PREFIX) as lan:
        pair = [host.popen(argv, env=env | {"HOME": str(host.home)}) for host in lan.hosts]
        ends = [(*process.communicate(timeout=DEADLINE), process.returncode) for process in pair]
    assert [code for *_, code in ends] == [0, 0], ends
    assert [json.loads(out.partition("] ")[2]) for out, *_ in ends] == [[True, 11.0]] * 2, ends
