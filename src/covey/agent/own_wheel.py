"""A wheel of the covey that runs here, for environments on machines that have another release."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import covey
from covey.base.version import __version__

_MOMENT: Final = (1980, 1, 1, 0, 0, 0)
"""Of every file: the same package makes the same wheel."""


class OwnWheel(NamedTuple):
    """The wheel as a file."""

    name: str
    data: bytes

    @property
    def digest(self) -> str:
        """The SHA-256, by which an environment is known that has it."""
        return hashlib.sha256(self.data).hexdigest()


def make_own_wheel() -> OwnWheel:
    """Make a wheel of the package as it lies here; another Python does not load what was compiled for this one."""
    package = Path(covey.__file__).parent
    files = {
        f"covey/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"covey-{__version__}.dist-info"
    files |= {f"{info}/{name}": text.encode() for name, text in _metadata().items()}
    record = "".join(f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _MOMENT), data, zipfile.ZIP_DEFLATED)
    return OwnWheel(f"covey-{__version__}-py3-none-any.whl", written.getvalue())


def _metadata() -> dict[str, str]:
    """Return the files that tell pip what the package needs; without an installed one, its name alone."""
    told = {"METADATA": f"Metadata-Version: 2.1\nName: covey\nVersion: {__version__}\n"}
    try:
        installed = metadata.distribution("covey")
    except metadata.PackageNotFoundError:  # run from its source folder
        pass
    else:
        for name in ("METADATA", "entry_points.txt"):
            told |= {name: text} if (text := installed.read_text(name)) else {}
    return {**told, "WHEEL": "Wheel-Version: 1.0\nGenerator: covey\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
