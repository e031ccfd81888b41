"""The guides for people who come from torchrun, mpi4py and Ray: both programs of each guide print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import forked
from tests.support.jobs import LAUNCHERS, SOURCE
from tests.support.waiting import DEADLINE

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BIN = Path(sys.executable).parent
MPIRUN = (str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3")
THEIRS = {
    "from-torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--tee", "3"),
    "from-mpi4py": (*MPIRUN, sys.executable),
    "from-ray": (sys.executable,),
}
"""What starts the program of another project. `--tee` keeps lines of two workers apart."""
OURS = {
    "from-torchrun": ("-m", "covey", "run", "-n", "2"),
    "from-mpi4py": ("-m", "covey", "run", "-n", "3"),
    "from-ray": (),
}


def block(guide: str, kind: str) -> str:
    """Return the one block of a kind of a guide."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", (GUIDES / f"{guide}.md").read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def lines_of(folder: Path, code: str, *words: str) -> list[str]:
    """Return what a program prints when these words start it, without the numbers of its processes, sorted."""
    script = folder / "program.py"
    script.write_text(code)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment = kept | {"PYTHONPATH": str(SOURCE), "PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder)}
    popen = forked.TorchPopen if "import torch" in code else forked.Popen
    ended = forked.run(
        [*words, str(script)], popen=popen,
        capture_output=True, text=True, timeout=DEADLINE, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return sorted(re.sub(r"^\[(default)?\d+\]:? ?", "", line) for line in ended.stdout.splitlines())


@pytest.mark.parametrize("guide", OURS)
def test_our_program_prints_what_the_guide_shows(guide: str, tmp_path: Path) -> None:
    shown = block(guide, "text").splitlines()
    assert lines_of(tmp_path, block(guide, "python"), sys.executable, *OURS[guide]) == shown


@pytest.mark.thorough
@pytest.mark.parametrize("guide", THEIRS)
def test_their_program_prints_the_same(guide: str, tmp_path: Path) -> None:
    assert lines_of(tmp_path, block(guide, "py"), *THEIRS[guide]) == block(guide, "text").splitlines()


@pytest.mark.thorough
def test_each_may_start_the_program_of_the_other(tmp_path: Path) -> None:
    """Our programs by their launchers, and theirs by ours."""
    shown = {guide: block(guide, "text").splitlines() for guide in THEIRS}
    for guide in ("from-torchrun", "from-mpi4py"):
        assert lines_of(tmp_path, block(guide, "python"), *THEIRS[guide]) == shown[guide]
    words = (sys.executable, *OURS["from-torchrun"], "--as", "gloo")
    assert lines_of(tmp_path, block("from-torchrun", "py"), *words) == shown["from-torchrun"]


ROWS = """
from mpi4py import MPI
import numpy as np
import covey

comm = MPI.COMM_WORLD


def same(theirs, ours, what):
    flat = [np.asarray(each).tolist() for each in (theirs, ours)]
    assert flat[0] == flat[1], (what, flat)


with covey.join() as group:
    rank, size = group.rank, group.size
    same([comm.rank, comm.size], [rank, size], "rank, size")
    x, number = np.arange(6.0) * (rank + 2), rank + 3
    for theirs, ours in ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max")):
        out = np.empty(6)
        comm.Allreduce(x, out, theirs)
        same(out, group.all_reduce(x.copy(), ours), ours)
        same(comm.allreduce(number, theirs), group.all_reduce(number, ours), ours)
        same(comm.scan(number, theirs), group.scan(number, ours), ours)
    truths, bits = np.array([True, rank == 0, False]), np.array([7, rank + 1, 12], np.uint8)
    for logical, bitwise, ours in (
        (MPI.LAND, MPI.BAND, "and"), (MPI.LOR, MPI.BOR, "or"), (MPI.LXOR, MPI.BXOR, "xor"),
    ):
        for values, theirs in ((truths, logical), (bits, bitwise)):
            out = np.empty_like(values)
            comm.Allreduce(values, out, theirs)
            same(out, group.all_reduce(values.copy(), ours), ours)
    pair = (-abs(rank - 1), rank)
    same(comm.allreduce(pair, MPI.MAXLOC), max(group.all_gather_object(pair)), "MAXLOC")

    out = np.empty(6)
    comm.Reduce(x, out, root=1)
    ours = group.reduce(x.copy(), root=1)
    if rank == 1:
        same(out, ours, "Reduce")
    before = comm.exscan(number)
    same(0 if rank == 0 else before, group.exscan(number), "exscan")

    gathered, whole = np.empty((size, 6)), np.empty((size, 6))
    comm.Allgather(x, gathered)
    same(gathered, group.all_gather(x, out=whole), "Allgather")
    same(gathered, group.all_gather(x), "Allgatherv")
    same(comm.gather(rank, root=2), group.gather_object(rank, root=2), "gather")
    values = [[each] for each in range(size)] if rank == 0 else None
    same(comm.scatter(values), group.scatter_object(values), "scatter")
    sent, received, also = np.arange(size * 2.0).reshape(size, 2) + rank, np.empty((size, 2)), np.empty((size, 2))
    comm.Alltoall(sent, received)
    same(received, group.all_to_all(sent, out=also), "Alltoall")
    counts = [1, 2, 3]
    part = np.empty(counts[rank])
    comm.Reduce_scatter(x, part, counts, MPI.SUM)
    same(part, group.reduce_scatter(x, counts=counts), "Reduce_scatter")

    color = rank % 2 if rank != 1 else None
    theirs = comm.Split(MPI.UNDEFINED if color is None else color, -rank)
    ours = group.split(color, -rank)
    assert (theirs == MPI.COMM_NULL) == (ours is None)
    if ours is not None:
        same([theirs.rank, theirs.size], [ours.rank, ours.size], "Split")
    same(comm.Split_type(MPI.COMM_TYPE_SHARED).size, group.split_by_host().size, "Split_type")
    same(1, group.split(rank).size, "COMM_SELF")
    some = group.split(0 if rank in (0, 2) else None)
    assert (some is None) == (rank == 1)

    right, left = (rank + 1) % size, (rank - 1) % size
    theirs, ours = x.copy(), x.copy()
    comm.Sendrecv_replace(theirs, right, source=left)
    same(theirs, group.sendrecv(ours.copy(), right, src=left, out=ours), "Sendrecv_replace")
    requests = [comm.isend({"of": rank}, right, 5), comm.irecv(source=left, tag=5)]
    works = [group.send_object({"of": rank}, right, 5, async_op=True), group.recv_object(left, 5, async_op=True)]
    assert MPI.Request.waitall(requests)[1] == covey.wait_all(works)[1]
    column = np.arange(9.0).reshape(3, 3)[:, rank]
    same(column, group.sendrecv(column, rank, src=rank), "a strided array")
    group.send([column, bits], right, 6, async_op=True)
    seen = group.probe(left, 6)
    assert (seen.source, seen.tag) == (left, 6)
    first, second = group.recv(seen.source, seen.tag)
    assert second.dtype == np.uint8
print("all rows hold")
"""


@pytest.mark.thorough
def test_calls_of_mpi4py_and_those_beside_them_return_the_same(tmp_path: Path) -> None:
    """One program under mpirun that makes both, and compares."""
    assert lines_of(tmp_path, ROWS, *THEIRS["from-mpi4py"]) == ["all rows hold"] * 3


NAMES = """
import functools, importlib, re, sys

def exists(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            functools.reduce(getattr, parts[count:], importlib.import_module(".".join(parts[:count])))
            return True
        except (ImportError, AttributeError):
            continue
    return False

print([name for name in sys.argv[1:] if not exists(name)])
"""


def missing(names: set[str]) -> str:
    """Return which of these names Python does not find, in a process of its own: importing mpi4py starts MPI."""
    words = [sys.executable, "-c", NAMES, *sorted(names)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=DEADLINE).stdout.strip()


@pytest.mark.thorough
def test_the_names_of_mpi4py_and_ray_in_the_guides_exist() -> None:
    page = (GUIDES / "from-mpi4py.md").read_text()
    names = {f"mpi4py.MPI.Intracomm.{name}" for name in re.findall(r"\bcomm\.(\w+)", page)}
    names |= {f"mpi4py.MPI.{name}" for name in re.findall(r"\bMPI\.([\w.]*\w)", page)}
    assert len(names) > 60
    ray = {name for name in re.findall(r"\bray\.[\w.]*\w", (GUIDES / "from-ray.md").read_text())}
    assert len(ray) > 10
    assert missing(names | ray) == "[]"


@pytest.mark.thorough
def test_the_table_of_options_has_every_option_of_torchrun() -> None:
    text = (GUIDES / "from-torchrun.md").read_text()
    table = text.partition("| torchrun | covey run |")[2].partition("\n\n")[0]
    shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", "".join(row.split("|")[1] for row in table.splitlines()[1:])))
    code = "from torch.distributed.run import get_args_parser as p; print(*[a.option_strings for a in p()._actions])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE
    ).stdout
    offered = [set(re.findall(r"'(--?[\w-]+)'", names)) for names in re.findall(r"\[([^\]]+)\]", out)]
    assert shown <= set().union(*offered)
    assert [names for names in offered if not names & shown and "--help" not in names] == []
