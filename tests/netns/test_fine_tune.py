"""The guide to fine-tuning: a small language model on two machines, of which one is lost and comes back."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.jobs import SOURCE
from tests.support.screens import at_a_terminal
from tests.support.waiting import DEADLINE
from tests.support.walks import Started

from covey.testing import netns
from covey.testing.netns import Lan

if TYPE_CHECKING:
    from covey.testing.netns import Host

pytestmark = pytest.mark.thorough

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"


@pytest.fixture(autouse=True)
def _torch(_forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs on hosts are forked from a process that has imported torch."""
    monkeypatch.setattr(netns, "subprocess", SimpleNamespace(**(vars(forked) | {"Popen": forked.TorchPopen})))


def test_a_machine_is_lost_and_comes_back_while_both_fine_tune_and_top_shows_the_loss(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    env = {"PYTHONPATH": str(SOURCE), "COVEY_SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"}

    def start(host: Host) -> Started:
        """Start what the guide types, with a base that is made sooner, and without an end."""
        script = [str(EXAMPLE), "--base-steps", "20", "--epochs", "10000", "--folder", str(host.home / "lora")]
        return Started(host.popen([sys.executable, "-m", "covey", "run", "--wait", "500", *script], env=env))

    with Lan(hosts=2, names=("north", "south"), prefix="covey-tune") as lan:
        runs = [start(host) for host in lan.hosts]
        begun = [run.said(" of 2: trains and sends 16384 of 153600 parameters")[0] for run in runs]
        (first,) = [index for index, line in enumerate(begun) if "rank 0 of 2" in line]
        stays, lost = runs[first], runs[1 - first]
        stays.said("epoch 2")
        assert any((lan.hosts[1 - first].home / "lora").glob("step-*")), "each machine saves"

        os.killpg(lost.process.pid, signal.SIGKILL)
        stays.said("ranks 1", 2)
        again = start(lan.hosts[1 - first])
        again.said("continues after")
        again.said("rank 1 of 2: trains and sends")
        before = len(stays.said("ranks 2"))
        stays.said("ranks 2", before + 2)

        host = lan.hosts[first]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")} | env
        own = {"COVEY_HOME": str(host.home), "TMPDIR": str(host.temp), "XDG_RUNTIME_DIR": str(host.temp)}
        with at_a_terminal(host.command([sys.executable, "-m", "covey", "top", "lora"]), clean | own, 100, 30) as top:
            top.wait_for(lambda text: re.search(r"loss +\d\.\d", text) is not None)

        for run in (again, stays):
            run.process.send_signal(signal.SIGTERM)
        for run in (again, stays):
            assert run.process.wait(DEADLINE) == 0, run.lines
        losses = [float(found[1]) for line in stays.said("epoch") if (found := re.search(r"loss ([\d.]+)", line))]
        assert losses[-1] < losses[0]
