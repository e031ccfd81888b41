"""covey installs with a compiler, without one and with one that fails; only the speed differs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from tests.support.compiled import COMPILER, ROOT, needs_compiler
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from pathlib import Path

QUESTION = """
import covey, numpy
from covey.base.native import native
from covey.testing.threads import run_threads
print(bool(native().module), native().why_not, run_threads(2, lambda group: float(group.all_reduce(group.rank + 1.0))))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the sources, in which nothing was built."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", "build_native.py", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def wheel(checkout: Path, compiler: str) -> Path:
    """Build a wheel offline and return it."""
    command = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-index",
               "--no-build-isolation", "--wheel-dir", str(checkout / "dist"), str(checkout)]  # fmt: skip
    env = {**os.environ, "CC": compiler}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = (checkout / "dist").glob("*.whl")
    return made


def run(folder: Path, **env: str) -> str:
    """Ask a covey that lies in `folder` which executor it uses, and let it reduce something."""
    environment = {key: value for key, value in os.environ.items() if key != "COVEY_NATIVE"}
    done = subprocess.run(
        [sys.executable, "-c", QUESTION],
        env={**environment, "PYTHONPATH": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "compiler",
    ["/nonexistent", pytest.param("/bin/false", marks=pytest.mark.thorough)],
    ids=["missing", "failing"],
)
def test_without_a_working_compiler_the_wheel_is_pure_and_works(checkout: Path, tmp_path: Path, compiler: str) -> None:
    made = wheel(checkout, compiler)
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "installed")
    said = run(tmp_path / "installed")
    assert said.startswith("False covey._native was not built")
    assert said.endswith("[3.0, 3.0]")


@pytest.mark.thorough
@needs_compiler
def test_with_a_compiler_the_wheel_has_the_extension_for_every_later_python(checkout: Path, tmp_path: Path) -> None:
    made = wheel(checkout, f"{COMPILER} -Werror")  # the words after the first are its arguments
    assert "-cp311-abi3-" in made.name
    with zipfile.ZipFile(made) as archive:
        assert "covey/_native.abi3.so" in archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert run(tmp_path / "installed") == "True  [3.0, 3.0]"
    assert run(tmp_path / "installed", COVEY_NATIVE="0") == "False COVEY_NATIVE=0 is set [3.0, 3.0]"


def test_a_build_that_fails_leaves_no_old_extension_behind(checkout: Path) -> None:
    """An extension that is older than its sources would run other code than the sources say."""
    extension = checkout / "src/covey/_native.abi3.so"
    extension.write_bytes(b"old")
    os.utime(extension, (1, 1))
    done = subprocess.run(
        [sys.executable, "build_native.py"],
        cwd=checkout,
        env={**os.environ, "CC": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1
    assert "was not built" in done.stderr
    assert not extension.exists()


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("clang") is None, reason="no clang")
def test_clang_has_nothing_to_warn_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from build_native import command

    monkeypatch.setenv("CC", "clang -Werror")
    done = subprocess.run(command(tmp_path / "library.so"), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
