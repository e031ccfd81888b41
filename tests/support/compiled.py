"""What the tests of the compiled executor share: whether there is one, a compiler, and how to choose the executor."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.waiting import DEADLINE

from covey.base.native import native
from covey.runtime.lanes.lanes import Lanes

if TYPE_CHECKING:
    from covey.runtime.peers.peer_table import PeerTable

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/covey/native"
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]

needs_native = pytest.mark.skipif(native().module is None, reason=f"no compiled executor: {native().why_not}")
needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="no compiler")


_libraries: dict[str, Path] = {}


def shared_library(folder: Path, text: str) -> Path:
    """Compile a C file that may include the sources of the extension, with its flags; return the library.

    A process compiles a text once: the folder is one that is kept while tests run.
    """
    from build_native import FLAGS, LINK_FLAGS

    if text in _libraries and _libraries[text].exists():
        return _libraries[text]
    source, library = folder / "library.c", folder / "library.so"
    source.write_text(text)
    command = [COMPILER, *FLAGS, "-Wno-unused-function", "-DPy_LIMITED_API=0x030B0000", *LINK_FLAGS, f"-I{SOURCES}"]
    include = sysconfig.get_path("include")
    subprocess.run([*command, f"-I{include}", str(source), "-o", str(library)], check=True, timeout=DEADLINE)
    _libraries[text] = library
    return library


EXECUTORS = ("python", "native", "mixed")
"""What runs the plans of a group: Python, the compiled executor, or that one on even ranks only."""


_start_lanes = Lanes.__init__


def takes_native(executors: str, rank: int) -> bool:
    """Tell whether a rank uses the compiled executor."""
    return executors == "native" or (executors == "mixed" and rank % 2 == 0)


def use_executors(monkeypatch: pytest.MonkeyPatch, executors: str) -> None:
    """Let the nodes that this process starts from now on use the executors named."""

    def choosing(self: Lanes, *parts: Any, peers: PeerTable, **more: Any) -> None:
        _start_lanes(self, *parts, peers=peers, **more)
        if self.factory.is_native:  # a node that cannot use the compiled executor stays with Python
            self.factory.is_native = takes_native(executors, peers.seat)

    monkeypatch.setattr(Lanes, "__init__", choosing)
