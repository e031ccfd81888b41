"""Make the Python modules of `proto/`, beside the code that uses them.

    python -m tools.generate_proto

A test compares the modules with what this would make. Needs grpcio-tools, which is among the development packages.
"""

from __future__ import annotations

import tempfile
from importlib import resources
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PROTOS: Final = ("covey/coordinator/coordinator.proto", "covey/gateway/gateway.proto")


def generate(target: Path) -> list[Path]:
    """Write the modules of all files below `target`; return their paths, relative to it."""
    from grpc_tools import protoc

    well_known = resources.files("grpc_tools") / "_proto"
    for proto in PROTOS:
        (target / proto).parent.mkdir(parents=True, exist_ok=True)
    words = ["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}"]
    words += [f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}", *PROTOS]
    if protoc.main(words) != 0:
        raise SystemExit("protoc failed; see above")
    return sorted(path.relative_to(target) for path in target.rglob("*_pb2*.py*"))


def differing() -> list[Path]:
    """Return the modules in the source folder that are not what `generate` makes."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        source = ROOT / "src"
        names = generate(made)
        return [
            name
            for name in names
            if not (source / name).exists() or (source / name).read_text() != (made / name).read_text()
        ]


if __name__ == "__main__":
    for name in generate(ROOT / "src"):
        print(name)
