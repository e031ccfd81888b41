"""What holds for every test: its processes compute on one thread each, and what they keep in covey's folder is gone
afterwards."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from tests.support import sets, workers
from tests.support.durations import Durations
from tests.support.guard import Guard
from tests.support.relinking import wait_for_links
from tests.support.seeds import seeds

from covey.net.keys.secret_sources import forgetting_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator

# numpy starts a thread for every core, and each spins for a while before it sleeps: a quarter of the processor time it
# takes to start a rank and join a run, in every one of a thousand ranks. No test multiplies matrices that need them.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# With it, a program writes each word of a line by itself, and a process that stands still between two of them may have
# its line cut by another. Tests of such programs set it.
os.environ.pop("PYTHONUNBUFFERED", None)

# Importing the tests makes a million objects and hardly any garbage: looking for that, again and again among all of
# them, is a third of the time. `pytest_collection_finish` begins to look.
gc.disable()

# A program that a script or nohup starts in the background ignores these signals, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_DFL)

# Without it, nodes, runs and traces of tests would be in the folder of the user that runs them. Workers inherit it. Not
# COVEY_HOME: many tests start programs without the variables of covey.
_OWN_HOME = "" if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="covey-tests-")
if _OWN_HOME:
    os.environ["XDG_CONFIG_HOME"] = _OWN_HOME
    os.environ.pop("COVEY_HOME", None)

# A process may stand still for longer than an example should take; tests have a deadline as a whole.
settings.register_profile("covey", deadline=None, max_examples=len(seeds(40)))
settings.load_profile("covey")


def pytest_addoption(parser: pytest.Parser) -> None:
    workers.pytest_addoption(parser)
    sets.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    if "not thorough" in config.option.markexpr:
        os.environ["TEST_FEWER"] = "1"  # before test files are imported: `examples` of tests.support.seeds
    config.pluginmanager.register(Durations())
    config.pluginmanager.register(Guard())
    workers.pytest_configure(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sets.pytest_collection_modifyitems(config, items)
    workers.pytest_collection_modifyitems(config, items)


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_unconfigure() -> None:
    if _OWN_HOME:
        shutil.rmtree(_OWN_HOME, ignore_errors=True)  # a process that a test has left may still write there


@pytest.fixture
def links_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of this process whose links the test ends have time to link again."""
    wait_for_links(monkeypatch)


@pytest.fixture(autouse=True)
def _forgetting_secrets() -> Iterator[None]:
    """No test joins with the secret that a test before it, in the same process, was given."""
    with forgetting_secrets():
        yield


@pytest.fixture(autouse=True)
def _leaves_no_group_open() -> Iterator[None]:
    """The test that joined a group closes it: a later test in the same process joins with other settings."""
    yield
    from covey.runtime.group.internals import engine_of  # imports numpy, which reads the variables above
    from covey.runtime.joining import bootstrap

    joined = bootstrap._joined
    if joined is not None and not engine_of(joined[1]).is_over:
        joined[1].close()
        pytest.fail("this test has left a group open")
