"""Write the locks: exact versions of everything that `make test` and `make test-all` install, with their hashes.

    python -m tools.lock [--index URL]

pip chooses the versions, for the Python and the platform that this runs on: use Python 3.11 on Linux, as CI does. The
hashes are those of all files of a version that fit Python 3.11 or newer, on any platform, as the index lists them.
Nothing in a lock names an index: pip looks where its user has configured, and checks that the files are these.

requirements-all.lock has only what is not in requirements-dev.lock.

torch is in neither. Its builds (CPU only, CUDA, ROCm) are different files of one version, in different places, and
each platform brings other libraries along. requirements-torch.txt pins its version alone.
"""

from __future__ import annotations

import argparse
import html.parser
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).parents[1]
LOCK: Final = ROOT / "requirements-dev.lock"
LOCK_ALL: Final = ROOT / "requirements-all.lock"
TORCH: Final = ROOT / "requirements-torch.txt"
OLDEST_PYTHON: Final = 11
"""The minor number of the oldest Python 3 whose wheels are listed."""
OF_TORCH: Final = re.compile(r"(torch|triton|pytorch-triton|nvidia-.*|cuda-.*|intel-.*)")
"""torch, and the libraries that only some of its builds need."""
HEADER: Final = """\
# Made by tools/lock.py: do not edit. Install it with
#     pip install --require-hashes --no-deps -r {name}
# torch is in requirements-torch.txt.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    parser.add_argument(
        "--index", default=default, metavar="URL", help="where to read hashes; default: PIP_INDEX_URL, or PyPI"
    )
    index = parser.parse_args().index
    versions = resolve([LOCK, LOCK_ALL])
    of_test = resolve([LOCK], versions)
    for path, names in ((LOCK, of_test.keys()), (LOCK_ALL, versions.keys() - of_test.keys())):
        entries = [entry(name, versions[name], index) for name in sorted(names)]
        path.write_text(HEADER.format(name=path.name) + "".join(entries))
        print(f"{path.name} has {len(entries)} packages", file=sys.stderr)


def resolve(locks: list[Path], versions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what pip would install for these locks into an empty environment: versions by name, the given ones."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in (versions or {}).items()))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        files = [word for path in (*map(wanted_of, locks), TORCH) for word in ("-r", str(path))]
        subprocess.run([*pip, "--report", report, "-c", constraints, *files, *of_project()], check=True)
        chosen = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    found = {canonicalize_name(each["name"]): each["version"] for each in chosen}
    return {name: version for name, version in found.items() if not OF_TORCH.fullmatch(name)}


def wanted_of(lock: Path) -> Path:
    """Return the file from which a lock is made."""
    return lock.with_suffix(".txt")


def of_project() -> list[str]:
    """Return what the package needs to run and to be built."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [*project["project"]["dependencies"], *project["build-system"]["requires"]]


def entry(name: str, version: str, index: str) -> str:
    """Return the lines of the lock for one package."""
    hashes = sorted({digest for file, digest in files(name, index) if fits(file, Version(version))})
    if not hashes:
        raise SystemExit(f"the index lists no file of {name} {version} with its SHA-256")
    return f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in hashes) + "\n"


def files(name: str, index: str) -> list[tuple[str, str]]:
    """Return the files of a project that an index lists, with their SHA-256."""
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text, kind = answer.read().decode(), answer.headers.get_content_type()
    if kind.endswith("json"):
        listed = json.loads(text)["files"]
        return [(each["filename"], each["hashes"]["sha256"]) for each in listed if "sha256" in each["hashes"]]
    page = _Page()
    page.feed(text)
    return page.files


class _Page(html.parser.HTMLParser):
    """A page of an index in HTML (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target, _, fragment = (dict(attrs).get("href") or "").partition("#")
        if tag == "a" and fragment.startswith("sha256="):
            self.files.append((target.rpartition("/")[2], fragment.removeprefix("sha256=")))


def fits(file: str, version: Version) -> bool:
    """Tell whether a file is of this version, and for a Python that covey runs on."""
    try:
        if not file.endswith(".whl"):
            return parse_sdist_filename(file)[1] == version
        _, found, _, tags = parse_wheel_filename(file)
    except (InvalidSdistFilename, InvalidWheelFilename):
        return False
    return found == version and any(_is_recent(tag.interpreter, tag.abi) for tag in tags)


def _is_recent(interpreter: str, abi: str) -> bool:
    match = re.fullmatch(r"(py|cp)3(\d*)", interpreter)
    if match is None:
        return False
    return match[1] == "py" or abi == "abi3" or int(match[2] or 0) >= OLDEST_PYTHON


def locked(*locks: Path) -> dict[str, tuple[Version, frozenset[str]]]:
    """Return what locks hold: the version and the hashes of each package, by name."""
    found = {}
    for line in "".join(lock.read_text() for lock in locks).replace("\\\n", "").splitlines():
        if line and not line.startswith("#"):
            requirement, *hashes = line.split()
            name, _, version = requirement.partition("==")
            found[name] = Version(version), frozenset(each.removeprefix("--hash=sha256:") for each in hashes)
    return found


def wanted(*locks: Path) -> list[Requirement]:
    """Return what the files of these locks and pyproject.toml ask for."""
    text = "".join(wanted_of(lock).read_text() for lock in locks)
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [Requirement(text) for text in (*filter(None, lines), *of_project())]


if __name__ == "__main__":
    main()
