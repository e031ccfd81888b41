"""Build `covey._native`, the compiled executor, beside the Python files.

hatchling calls this when it makes a wheel or an editable installation; `python build_native.py` does the same by hand.
Without a working compiler the installation succeeds all the same: covey then runs its plans in Python.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "src/covey/native"
EXTENSION = ROOT / "src/covey/_native.abi3.so"
FLAGS = (
    *("-O3", "-std=c11", "-D_GNU_SOURCE", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math"),
    "-pthread",
    *("-Wall", "-Wextra"),
)
"""No fast-math: the bits of a result do not depend on how it was compiled. That no operation traps lets gcc vectorise
selections; it changes no result."""
LINK_FLAGS = ("-bundle", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)


class BuildError(Exception):
    """The extension could not be built."""


def command(output: Path, *extra: str) -> list[str]:
    """Return the command line that compiles all sources into `output`."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    include = sysconfig.get_path("include")
    limited = "-DPy_LIMITED_API=0x030B0000"
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    libraries = ["-ldl"] if sys.platform == "linux" else []
    return [
        *shlex.split(compiler),
        *FLAGS,
        limited,
        f"-I{include}",
        *LINK_FLAGS,
        *extra,
        *sources,
        "-o",
        str(output),
        *libraries,
    ]


def build(*extra: str) -> None:
    """Compile, unless the extension is newer than its sources. The file is replaced at once, or not at all.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    newest = max(source.stat().st_mtime for source in (*SOURCES.iterdir(), Path(__file__)))
    if EXTENSION.exists() and EXTENSION.stat().st_mtime > newest:
        return
    EXTENSION.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=EXTENSION.parent) as folder:
        output = Path(folder) / EXTENSION.name
        try:
            subprocess.run(command(output, *extra), check=True, capture_output=True, text=True, timeout=600)
        except subprocess.CalledProcessError as error:
            raise BuildError(f"the compiler failed: {error.stderr.strip()[-2000:]}") from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the compiler could not be run: {error}") from None
        os.replace(output, EXTENSION)


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the extension to a wheel, if it can be built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before files are collected."""
        try:
            build()
        except BuildError as error:
            self.app.display_warning(f"covey runs its plans in Python, which is slower: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["artifacts"].append(f"/{EXTENSION.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        build(*sys.argv[1:])
    except BuildError as error:
        sys.exit(f"covey._native was not built: {error}")
