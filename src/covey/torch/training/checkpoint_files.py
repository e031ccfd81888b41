"""The folder of checkpoints on disk: names and versions, manifests, and the check for damage.

    FOLDER/step-0000000200/
        manifest.json        format, step, size and BLAKE2b of every file, and its own BLAKE2b
        structure.pickle     everything but the tensors, and where these go
        .metadata, __0_0.distcp ...   the tensors, as torch.distributed.checkpoint writes them

A checkpoint is complete once it has a manifest. A name that starts with a dot is a checkpoint that is being written or
removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.base.version import NewerFormatError, check_format, newer_file

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT_FORMAT: Final = 1
"""The format of checkpoints."""
CHECKPOINT_MANIFEST, STRUCTURE = "manifest.json", "structure.pickle"
STEP_NAME = re.compile(r"step-(\d{10,})(?:\.(\d+))?")
"""A step, and the version of its checkpoint; the highest version is the current one."""


def remove_old(folder: Path, step: int, keep: int | None) -> None:
    """Remove replaced checkpoints and all but the `keep` highest steps, but never the new one of `step`."""
    complete = complete_in(folder)
    remaining = {*(sorted(complete) if keep is None else sorted(complete)[-keep:]), step}
    for number, _, name in versions_in(folder):
        if number not in remaining or complete.get(number, name) != name:
            (folder / name).rename(
                folder / f".{name}.old"
            )  # a checkpoint that is removed in part must not look complete
            shutil.rmtree(folder / f".{name}.old")


def versions_in(folder: Path) -> list[tuple[int, int, str]]:
    """Return step, version and name of every checkpoint's folder, in order."""
    if not folder.is_dir():
        return []
    found = [match for name in os.listdir(folder) if (match := STEP_NAME.fullmatch(name))]
    return sorted((int(match[1]), int(match[2] or 0), match[0]) for match in found)


def complete_in(folder: Path) -> dict[int, str]:
    """Return the names of the complete checkpoints by step."""
    return {step: name for step, _, name in versions_in(folder) if (folder / name / CHECKPOINT_MANIFEST).is_file()}


def find(folder: Path, step: int | None) -> tuple[int, str]:
    """Return the step and the name of the checkpoint of `step`, or of the latest; ConfigError if there is none."""
    complete = complete_in(folder)
    if not complete:
        raise ConfigError(f"no checkpoint in {folder.absolute()}")
    wanted = max(complete) if step is None else step
    if wanted not in complete:
        raise ConfigError(f"no checkpoint of step {wanted} in {folder.absolute()}; there are {sorted(complete)}")
    return wanted, complete[wanted]


def write_manifest(folder: Path, step: int, files: dict[str, tuple[int, str]]) -> None:
    """Write the manifest of a checkpoint whose `files` have these sizes and digests, and sync it to disk."""
    manifest = {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "files": {name: {"bytes": size, "blake2b": digest} for name, (size, digest) in files.items()},
    }
    path = folder / CHECKPOINT_MANIFEST
    path.write_text(json.dumps(manifest | {"blake2b": _digest_of(manifest)}, indent=1))
    sync(path)


def verify(folder: Path, rank: int, size: int) -> list[tuple[str, str]]:
    """Return the damaged files among those that this rank checks, each with what is wrong.

    Raises:
        ConfigError: a later release has written the checkpoint.
    """
    try:
        manifest = json.loads((folder / CHECKPOINT_MANIFEST).read_bytes())
        check_format(int(manifest.get("format", 1)), CHECKPOINT_FORMAT)
        digest, files = manifest.pop("blake2b"), sorted(manifest["files"].items())
        intact = digest == _digest_of(manifest)
    except NewerFormatError as error:
        raise newer_file(folder / CHECKPOINT_MANIFEST, error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        return [(CHECKPOINT_MANIFEST, "differs from what was written")] if rank == 0 else []
    wrong = []
    for name, saved in files[rank::size]:
        path = folder / name
        if not path.is_file():
            wrong.append((name, "is missing"))
        elif path.stat().st_size != saved["bytes"]:
            wrong.append((name, f"has {path.stat().st_size} bytes instead of {saved['bytes']}"))
        elif fingerprint(path)[1] != saved["blake2b"]:
            wrong.append((name, "differs from what was written"))
    return wrong


def fingerprint(path: Path, *, is_synced: bool = False) -> tuple[int, str]:
    """Return size and digest of a file; with `is_synced`, sync it to disk first."""
    with path.open("rb") as file:
        if is_synced:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, hashlib.blake2b).hexdigest()
        return file.tell(), digest


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
