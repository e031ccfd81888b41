"""What a script shows when an error of covey's ends it: the user's own lines, and no others."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import threading
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.jobs import SOURCE
from tests.support.waiting import DEADLINE

import covey
from covey.base.errors import ClosedError, DeadlineError, MismatchError
from covey.runtime import loop, tracebacks

if TYPE_CHECKING:
    from collections.abc import Callable


def shown(fail: Callable[[], object]) -> list[str]:
    """Return the lines of the traceback that a program that calls `fail` would end with."""
    try:
        fail()
    except BaseException as error:
        tracebacks.shorten(error)
        return "".join(traceback.format_exception(error)).splitlines()
    raise AssertionError("it did not fail")


async def raising(error: Exception) -> None:
    raise error


def test_frames_of_covey_and_of_the_library_below_them_are_left_out() -> None:
    def missed_join() -> None:
        loop.run(raising(DeadlineError("no run 'x'")), 10.0)

    lines = shown(missed_join)
    assert [line.split(" in ")[1] for line in lines if line.startswith("  File")] == ["shown", "missed_join", "raising"]
    assert lines[-1] == "covey.DeadlineError: no run 'x'"


def test_exceptions_that_covey_caught_on_the_way_are_left_out_and_documented_causes_stay() -> None:
    def bad_setting() -> None:
        covey.join(lanes="pigeons")  # type: ignore[arg-type]

    lines = shown(bad_setting)
    assert lines[0] == "Traceback (most recent call last):"
    assert not any("src/covey" in line or "The above" in line or "During handling" in line for line in lines)

    def closed() -> None:
        raise ClosedError("the group ended") from MismatchError("rank 1 called barrier()")

    assert "covey.MismatchError: rank 1 called barrier()" in shown(closed)


def test_what_the_user_caught_before_is_still_shown() -> None:
    def uncaught() -> None:
        try:
            dict[str, int]()["mine"]
        except KeyError:
            covey.join(lanes="pigeons")  # type: ignore[arg-type]

    lines = shown(uncaught)
    assert "KeyError: 'mine'" in lines
    assert not any("src/covey" in line for line in lines)


def test_an_error_that_is_not_of_covey_is_shown_whole() -> None:
    lines = shown(lambda: loop.run(raising(ZeroDivisionError("a fault")), 10.0))
    assert any("src/covey/runtime/loop.py" in line for line in lines)


def test_an_error_of_the_user_that_follows_one_of_covey_keeps_it_short() -> None:
    def handles() -> None:
        try:
            covey.join(lanes="pigeons")  # type: ignore[arg-type]
        except covey.ConfigError:
            raise RuntimeError("no training today")  # noqa: B904

    lines = shown(handles)
    assert lines[-1] == "RuntimeError: no training today"
    assert any(line.startswith("covey.ConfigError: ") for line in lines)
    assert not any("src/covey" in line for line in lines)


def test_frames_of_torch_on_the_way_to_covey_are_left_out(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("def call(function):\n    function()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # what is there now comes back at the end
    del sys.modules["torch"]
    torch = importlib.import_module("torch")
    lines = shown(lambda: torch.call(functools.partial(covey.join, lanes="pigeons")))  # type: ignore[arg-type]
    assert not any("torch" in line for line in lines[:-1] if line.startswith("  File"))

    def own() -> None:
        raise DeadlineError("raised by the user")

    assert any(f"{tmp_path}" in line for line in shown(lambda: torch.call(own)))  # covey is not below these


def test_a_thread_that_fails_is_shown_short_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Future[list[str]] = Future()

    def tell(args: Any) -> None:
        told.set_result(traceback.format_exception(args.exc_value))

    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", tell)
    tracebacks.install()
    thread = threading.Thread(target=lambda: covey.join(lanes="pigeons"))  # type: ignore[arg-type]
    thread.start()
    thread.join(DEADLINE)
    assert [line for line in told.result(DEADLINE) if "src/covey" in line] == []


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_script_ends_with_its_own_line_unless_it_is_debugged(tmp_path, debug: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import covey\n\ncovey.join(lanes='pigeons')\n")
    env = {"PYTHONPATH": str(SOURCE), "COVEY_HOME": str(tmp_path / "home"), "COVEY_DEBUG": debug}
    ended = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert ended.returncode == 1
    files = [line.split('"')[1] for line in ended.stderr.splitlines() if line.startswith("  File")]
    assert files[0] == str(script)
    assert (len(files) > 1) == (debug == "1")
    assert ended.stderr.splitlines()[-1].startswith("covey.ConfigError: ")


@pytest.mark.parametrize("keeper", ["covey run", "none", "covey run, with COVEY_DEBUG"])
def test_ctrl_c_is_one_line_of_each_rank_under_covey_run_and_a_traceback_elsewhere(
    keeper: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("COVEY_KEEPER", "COVEY_KEEPER_ID", "COVEY_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    if keeper != "none":
        monkeypatch.setenv("COVEY_KEEPER", "/somewhere")
    if "DEBUG" in keeper:
        monkeypatch.setenv("COVEY_DEBUG", "1")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    tracebacks.install()

    def train() -> None:
        raise KeyboardInterrupt

    try:
        train()
    except KeyboardInterrupt as interrupt:
        sys.excepthook(KeyboardInterrupt, interrupt, interrupt.__traceback__)
    shown = capsys.readouterr().err
    if keeper == "covey run":
        assert re.fullmatch(r"interrupted in test_tracebacks.py, line \d+ \(.*train\)\n", shown)
    else:
        assert shown.startswith("Traceback")
