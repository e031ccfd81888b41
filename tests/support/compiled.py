"""What the tests of the compiled executor share: whether there is one, a compiler, and how to choose the executor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from covey.base.native import native

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/covey/native"
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]

needs_native = pytest.mark.skipif(native().module is None, reason=f"no compiled executor: {native().why_not}")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no compiler")


def shared_library(folder: Path, text: str) -> Path:
    """Compile a C file that may include the sources of the extension, with its flags; return the library."""
    from build_native import FLAGS, LINK_FLAGS

    source, library = folder / "library.c", folder / "library.so"
    source.write_text(text)
    command = [COMPILER, *FLAGS, "-Wno-unused-function", "-DPy_LIMITED_API=0x030B0000", *LINK_FLAGS, f"-I{SOURCES}"]
    include = sysconfig.get_path("include")
    subprocess.run([*command, f"-I{include}", str(source), "-o", str(library)], check=True, timeout=100)
    return library
