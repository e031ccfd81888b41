"""Which scripts are started as forks of a process that has imported covey."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from covey.base.errors import ConfigError
from covey.runtime.keeper.warm_start import is_of_use

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only on Linux")
ALWAYS = {"COVEY_WARM_START": "1"}


def words(folder: Path, source: str, name: str = "job.py") -> list[str]:
    (folder / name).write_text(source)
    return [sys.executable, str(folder / name), "argument"]


@pytest.mark.parametrize(
    "source",
    [
        "import covey",
        "import numpy as np, covey\n",
        "from covey import join\n",
        "from covey.torch import ElasticTrainer\n",
        "import os\nif True:\n    import covey\n",
        "'''Sums.'''\nimport time\nT = time.time()\n\timport covey",
    ],
)
def test_scripts_that_import_covey_are(tmp_path: Path, source: str) -> None:
    assert is_of_use(words(tmp_path, source), 2, ALWAYS)


@pytest.mark.parametrize(
    "source",
    [
        "import numpy\n",
        "import coveys, my_covey\n",
        "print('import covey')\n",
        "# import covey\n",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport covey\n",
        "import os\nos.putenv('OPENBLAS_NUM_THREADS', '2')\nimport covey\n",
        "import covey\nimport os\nos.environ |= dict(MKL_NUM_THREADS='1')\n",
    ],
)
def test_scripts_that_do_not_or_that_may_set_numpy_up_are_not(tmp_path: Path, source: str) -> None:
    assert not is_of_use(words(tmp_path, source), 2, ALWAYS)


def test_only_scripts_of_this_interpreter_are(tmp_path: Path) -> None:
    argv = words(tmp_path, "import covey")
    assert is_of_use(argv, 2, ALWAYS)
    assert not is_of_use(["/bin/python", *argv[1:]], 2, ALWAYS)
    assert not is_of_use([sys.executable, "-m", "covey"], 2, ALWAYS)
    assert not is_of_use(words(tmp_path, "import covey", "job"), 2, ALWAYS)
    assert not is_of_use([sys.executable, str(tmp_path / "nowhere.py")], 2, ALWAYS)
    assert not is_of_use([sys.executable], 2, ALWAYS)


def test_the_number_of_cores_decides_unless_the_environment_does(tmp_path: Path) -> None:
    argv, cores = words(tmp_path, "import covey"), len(os.sched_getaffinity(0))
    assert not is_of_use(argv, cores, {})
    assert is_of_use(argv, cores + 1, {"COVEY_WARM_START": ""})
    assert not is_of_use(argv, cores + 1, {"COVEY_WARM_START": "0"})
    assert not is_of_use(argv, 1, ALWAYS)


def test_watching_processes_begin_shows_all_of_them(tmp_path: Path) -> None:
    argv = words(tmp_path, "import covey")
    assert not is_of_use(argv, 2, {**ALWAYS, "PYTHONPROFILEIMPORTTIME": "1"})
    assert not is_of_use(argv, 2, {**ALWAYS, "COVERAGE_PROCESS_START": "x"})


def test_a_malformed_setting_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="COVEY_WARM_START='maybe' must be 1 or 0"):
        is_of_use(words(tmp_path, "import covey"), 2, {"COVEY_WARM_START": "maybe"})
