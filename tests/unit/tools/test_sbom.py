"""The bill of materials of a wheel: valid CycloneDX, and complete by what is installed."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import uuid
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.support.waiting import DEADLINE
from tools import lock, sbom

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


def build_wheel(folder: Path) -> Path:
    """Return the wheel of this source, built as `make wheel` does."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", folder, ROOT], timeout=DEADLINE, check=True)
    (made,) = folder.glob("covey-*.whl")
    return made


@pytest.fixture(scope="module")
def bill(wheel: Path) -> dict[str, Any]:
    """What `make sbom` writes."""
    command = [sys.executable, "-m", "tools.sbom", str(wheel)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert ended.returncode == 0, ended.stderr
    written = Path(ended.stdout.strip())
    assert written == wheel.with_suffix(".cdx.json")
    return dict(json.loads(written.read_text()))


def needed(name: str) -> set[str]:
    """Return what an installed package needs here, by its own metadata."""
    requirements = map(Requirement, metadata.requires(name) or [])
    chosen = [each for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    assert not any(each.extras for each in chosen), f"{name} needs extras, which the bill does not follow"
    return {canonicalize_name(each.name) for each in chosen}


def test_it_has_the_form_of_cyclonedx(bill: dict[str, Any]) -> None:
    """By the schema of CycloneDX 1.6: required fields, enumerations, formats, unique references."""
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    uuid.UUID(bill["serialNumber"].removeprefix("urn:uuid:"))
    assert datetime.fromisoformat(bill["metadata"]["timestamp"]).tzinfo is not None
    components = [bill["metadata"]["component"], *bill["components"]]
    allowed = {"type", "bom-ref", "name", "version", "description", "licenses", "purl", "hashes", "properties"}
    for each in components:
        assert {"type", "name"} <= each.keys() <= allowed
        assert each["type"] == "library"
        assert each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}"
        assert each["hashes"]
        for digest in each["hashes"]:
            assert digest["alg"] == "SHA-256"
            assert re.fullmatch(r"[a-f0-9]{64}", digest["content"])
        assert each["licenses"]
        for licence in each["licenses"]:  # either expressions or licences with an id or a name
            assert licence.keys() in ({"expression"}, {"license"})
            assert licence.get("expression") or licence["license"]["name"] not in ("", "unknown")
    references = [each["bom-ref"] for each in components]
    assert len(set(references)) == len(references)
    assert sorted(each["ref"] for each in bill["dependencies"]) == sorted(references)
    for each in bill["dependencies"]:
        assert set(each["dependsOn"]) <= set(references)
        assert len(set(each["dependsOn"])) == len(each["dependsOn"])


def test_it_names_the_wheel_by_its_hash(bill: dict[str, Any], wheel: Path) -> None:
    product = bill["metadata"]["component"]
    assert (product["name"], product["licenses"]) == ("covey", [{"expression": "Apache-2.0"}])
    assert product["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]


def test_it_is_complete_by_what_is_installed(bill: dict[str, Any]) -> None:
    """Nothing is missing, nothing is too much: walk the dependencies anew, starting from pyproject.toml."""
    listed = {each["name"]: each for each in bill["components"]}
    graph = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    own = {canonicalize_name(Requirement(text).name) for text in lock.of_project()} - {"hatchling"}
    assert graph[bill["metadata"]["component"]["bom-ref"]] == sorted(listed[name]["bom-ref"] for name in own)
    found, waiting = set[str](), set[str](own)
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= needed(name) - found
        assert listed[name]["version"] == metadata.version(name)
        assert graph[listed[name]["bom-ref"]] == sorted(listed[other]["bom-ref"] for other in needed(name))
    assert found == listed.keys()
    assert "torch" not in found


def test_its_hashes_are_those_of_the_lock(bill: dict[str, Any]) -> None:
    locked = lock.locked(lock.LOCK)
    for each in bill["components"]:
        assert {digest["content"] for digest in each["hashes"]} == locked[each["name"]][1]


@pytest.mark.thorough
def test_the_same_source_gives_the_same_wheel_and_bill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    wheels = [build_wheel(tmp_path / name) for name in ("one", "two")]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    first = sbom.bill(wheels[0])
    assert first == sbom.bill(wheels[1])
    assert first["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"


def test_a_version_that_is_not_locked_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rich = lock.locked(lock.LOCK) | {"rich": (Version("0.0.1"), frozenset({"0" * 64}))}
    monkeypatch.setattr(sbom, "locked", lambda _: rich)
    with pytest.raises(SystemExit, match=r"rich .* which requirements-dev\.lock does not have"):
        sbom.bill(wheel)
