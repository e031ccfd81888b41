"""The rank processes of a bench: real processes that fail in a chosen order, and which of them is blamed."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from covey.base.errors import RankFailedError
from covey.lab.bench.processes import RankProcesses
from covey.lab.bench.sweep import MEASURED_OPERATIONS, Case, Contender

RANK = """
import os, signal, socket, sys, time
from pathlib import Path
from covey.lab.bench.processes import Failed, EngineUp, RankChannel, ValuesRight

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(str(folder / "front"))
    channel = RankChannel(sock)
    channel.send(EngineUp(rank, os.getpid(), {}))
    next(channel.orders())
    if rank == 1:
        channel.send(ValuesRight(""))
        (folder / "answered").touch()
        time.sleep(0.1)  # the front has read the answer by then
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "answered").exists():
        time.sleep(0.01)
    channel.send(Failed("PeerLostError: rank 1 was lost"))
"""


class ScriptedRanks(RankProcesses):
    """Ranks that do what `RANK` says instead of measuring."""

    def _commands(self) -> list[list[str]]:
        return [[sys.executable, "-c", RANK, str(self._folder), str(rank)] for rank in range(self.size)]


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Not tmp_path: its name is too long for the unix sockets in it.
    with tempfile.TemporaryDirectory(prefix="cb-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def test_a_rank_that_was_killed_after_its_answer_is_blamed_and_not_the_rank_that_missed_it() -> None:
    with ScriptedRanks(Contender("covey shm", "covey", "shm"), 2, busy=False) as ranks:
        ranks.await_hello()
        with pytest.raises(RankFailedError, match=r"^covey shm rank 1 was killed by SIGKILL in all_reduce") as failure:
            ranks.prepare(Case(MEASURED_OPERATIONS["all_reduce"], 16, 2, "float32"))
    assert failure.value.rank == 1
    assert not Path(ranks._folder).exists()
