"""The locks: all that is asked for is in them, with hashes, and they work with any index."""

from __future__ import annotations

import hashlib
import http.server
import itertools
import os
import re
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.support.waiting import DEADLINE
from tools import install, lock

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]


LOCKS = {"make test": [lock.LOCK], "make test-all": [lock.LOCK, lock.LOCK_ALL]}

sets = pytest.mark.parametrize("locks", LOCKS.values(), ids=LOCKS)


@sets
def test_the_lock_satisfies_what_is_asked_for(locks: list[Path]) -> None:
    locked = lock.locked(*locks)
    for requirement in lock.wanted(*locks):
        name = canonicalize_name(requirement.name)
        assert name in locked, requirement
        assert requirement.specifier.contains(locked[name][0], prereleases=True), requirement


@sets
def test_the_lock_has_all_that_its_packages_need(locks: list[Path]) -> None:
    """It is installed with --no-deps: what is missing in it would be missing in the environment."""
    locked = lock.locked(*locks)
    for name in locked.keys() & installed().keys():
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            other = canonicalize_name(needed.name)
            if not lock.OF_TORCH.fullmatch(other):
                assert other in locked, f"{name} needs {text}"
                assert needed.specifier.contains(locked[other][0], prereleases=True), f"{name} needs {text}"


def installed() -> dict[str, str]:
    return {canonicalize_name(each.name): each.version for each in metadata.distributions()}


@sets
def test_what_is_installed_here_is_what_the_lock_says(locks: list[Path]) -> None:
    here, locked = installed(), lock.locked(*locks)
    missing = locked.keys() - here.keys()
    assert missing == set() or missing == lock.locked(lock.LOCK_ALL).keys(), "all of a lock is installed, or nothing"
    assert {name: here[name] for name in locked.keys() - missing} == {
        name: str(version) for name, (version, _) in locked.items() if name not in missing
    }


def test_a_package_is_in_one_lock() -> None:
    assert not lock.locked(lock.LOCK).keys() & lock.locked(lock.LOCK_ALL).keys()


@pytest.mark.parametrize("path", [lock.LOCK, lock.LOCK_ALL], ids=lambda path: path.name)
def test_every_line_of_a_lock_is_exact_and_hashed_and_none_names_an_index(path: Path) -> None:
    text = path.read_text()
    for name, (version, hashes) in lock.locked(path).items():
        assert re.search(rf"^{re.escape(name)}=={re.escape(str(version))} ", text, re.MULTILINE)
        assert hashes, name
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in hashes), name
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    assert not any(lock.OF_TORCH.fullmatch(name) for name in lock.locked(path))


def test_what_make_installs_is_checked_against_the_lock(tmp_path: Path) -> None:
    """The recipe of the environment that tests run in installs nothing unchecked but torch, and builds offline."""
    ended = subprocess.run(["make", "-n", "-B", ".venv/.all"], cwd=ROOT, capture_output=True, text=True, check=True)
    installs = [line for line in ended.stdout.splitlines() if "install" in line]
    editable = "--quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation --editable ."
    assert installs == [
        ".venv/bin/python tools/install.py requirements-dev.lock",
        f".venv/bin/python -m pip install {editable}",
        ".venv/bin/python tools/install.py requirements-all.lock",
    ]
    torch, *parts = install.at_once(lock.LOCK, tmp_path)
    assert torch == ["--no-deps", "-r", str(lock.TORCH)]
    assert {tuple(arguments[:-1]) for arguments in parts} == {("--require-hashes", "--no-deps", "-r")}


@pytest.mark.parametrize("path", [lock.LOCK, lock.LOCK_ALL], ids=lambda path: path.name)
def test_the_parts_of_a_lock_are_all_of_it_and_none_is_twice(tmp_path: Path, path: Path) -> None:
    texts = [Path(arguments[-1]).read_text() for arguments in install.at_once(path, tmp_path)[1:]]
    assert len(texts) > 1
    locked = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert sorted(line for text in texts for line in text.splitlines()) == sorted(locked)
    for text in texts:
        assert not any(line.startswith(" ") for line in text.splitlines()[:1]), "hashes without their package"
        for line, after in itertools.pairwise(text.splitlines()):
            assert line.endswith("\\") == after.startswith(" "), line


def test_torch_is_pinned_in_a_file_of_its_own() -> None:
    lines = [line for line in lock.TORCH.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["torch==2.13.0"]


def test_the_hashes_are_for_other_platforms_and_pythons_too() -> None:
    """numpy has a wheel for each Python and platform, and a source archive."""
    assert len(lock.locked(lock.LOCK)["numpy"][1]) > 20


@pytest.mark.parametrize(
    ("file", "fits"),
    [
        ("p-1.0-py3-none-any.whl", True),
        ("p-1.0-py2.py3-none-any.whl", True),
        ("p-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("p-1.0-cp313-cp313t-macosx_11_0_arm64.whl", True),
        ("p-1.0-cp38-abi3-win_amd64.whl", True),
        ("p-1.0.tar.gz", True),
        ("p-1.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("p-1.0-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
        ("p-1.0-py2-none-any.whl", False),
        ("p-1.0.1-py3-none-any.whl", False),
        ("p-1.0.exe", False),
        ("../p-1.0-py3-none-any.whl.asc", False),
    ],
)
def test_files_of_the_version_for_pythons_in_use_are_listed(file: str, fits: bool) -> None:
    assert lock.fits(file, Version("1.0")) is fits


PAGES = {
    "text/html": '<a href="../../f/p-1.0.tar.gz#sha256=aa" data-yanked="x">p</a><a href="p-2.0.tar.gz">no hash</a>',
    "application/vnd.pypi.simple.v1+json": '{"files": [{"filename": "p-1.0.tar.gz", "hashes": {"sha256": "aa"}},'
    '{"filename": "p-2.0.tar.gz", "hashes": {}}]}',
}


@pytest.fixture(params=PAGES)
def index(request: pytest.FixtureRequest) -> Iterator[str]:
    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", request.param)
            self.end_headers()
            self.wfile.write(PAGES[request.param].encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_hashes_are_read_from_either_kind_of_index(index: str) -> None:
    assert lock.files("p", index) == [("p-1.0.tar.gz", "aa")]
    assert lock.entry("p", "1.0", index) == "p==1.0 \\\n    --hash=sha256:aa\n"
    with pytest.raises(SystemExit, match=r"p 2\.0"):
        lock.entry("p", "2.0", index)


@pytest.mark.parametrize("is_genuine", [True, False])
def test_pip_takes_only_files_whose_hashes_are_in_a_lock(tmp_path: Path, is_genuine: bool) -> None:
    """The form of our lock is one that pip checks: a file that was exchanged is not installed."""
    archive = tmp_path / "files" / "p-1.0.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(b"not what was locked")
    digest = hashlib.sha256(archive.read_bytes() if is_genuine else b"what was locked").hexdigest()
    (tmp_path / "lock").write_text(
        f"{lock.HEADER}p==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", "--find-links", str(archive.parent)]
    checked = ["--require-hashes", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "out")]
    command = [*pip, *checked, "-r", str(tmp_path / "lock")]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert ended.returncode != 0  # it is no archive
    assert ("DO NOT MATCH THE HASHES" in ended.stderr) is not is_genuine
