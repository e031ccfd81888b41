"""Write the bill of materials of a built wheel beside it: CycloneDX JSON of what it needs to run.

    python -m tools.sbom dist/covey-0.1.0-py3-none-any.whl

The components are the dependencies of the wheel, without extras, and all that these need, as they are installed here:
run this in the environment of `make .venv/.built`, which has the versions of requirements-dev.lock. Their hashes are
those of the lock: of all files of that version that fit Python 3.11 or newer, on any platform.

The same wheel gives the same bill: with SOURCE_DATE_EPOCH to the byte, as for builds that can be reproduced.
"""

from __future__ import annotations

import email.parser
import hashlib
import json
import os
import sys
import time
import uuid
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import LOCK, locked

if TYPE_CHECKING:
    from collections.abc import Iterable
    from email.message import Message

NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_DNS, "covey/sbom")
HASHES: Final = "SHA-256 of every file of this version that requirements-dev.lock allows, on any platform"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    wheel = Path(sys.argv[1])
    path = wheel.with_suffix(".cdx.json")
    path.write_text(json.dumps(bill(wheel), indent=2) + "\n")
    print(path)


def bill(wheel: Path) -> dict[str, Any]:
    """Return the bill of materials of a wheel, as CycloneDX 1.6 wants it.

    Raises:
        SystemExit: a dependency is not installed here, or not in the version that the lock has.
    """
    about = _metadata(wheel)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    product = _component(about, [digest])
    needs = closure(about.get_all("Requires-Dist", []))
    lock = locked(LOCK)
    components = []
    for name in sorted(needs):
        found = metadata.metadata(name)
        if name not in lock or str(lock[name][0]) != found["Version"]:
            raise SystemExit(f"{name} {found['Version']} is installed here, which requirements-dev.lock does not have")
        component = _component(found, sorted(lock[name][1]))
        component["properties"] = [{"name": "covey:hashes", "value": HASHES}]
        components.append(component)
    references: dict[str, str] = {canonicalize_name(each["name"]): each["bom-ref"] for each in components}
    graph = {references[name]: sorted(references[other] for other in others) for name, others in needs.items()}
    graph[product["bom-ref"]] = sorted(references[name] for name in _names(about.get_all("Requires-Dist", [])))
    moment = time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", moment),
            "lifecycles": [{"phase": "build"}],
            "component": product,
        },
        "components": components,
        "dependencies": [{"ref": reference, "dependsOn": graph[reference]} for reference in sorted(graph)],
    }


def closure(requirements: Iterable[str]) -> dict[str, list[str]]:
    """Return all that these requirements need, as installed here: for each package the names that it needs itself."""
    found: dict[str, list[str]] = {}
    waiting = _names(requirements)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = _names(metadata.requires(name) or [])
        except metadata.PackageNotFoundError:
            raise SystemExit(
                f"{name} is not installed here; run this in the environment of `make .venv/.built`"
            ) from None
        waiting += found[name]
    return found


def _names(requirements: Iterable[str]) -> list[str]:
    """Return the packages that are needed here, without extras."""
    parsed = map(Requirement, requirements)
    return sorted(
        {canonicalize_name(each.name) for each in parsed if not each.marker or each.marker.evaluate({"extra": ""})}
    )


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


def _component(about: Any, hashes: list[str]) -> dict[str, Any]:
    name, version = canonicalize_name(about["Name"]), about["Version"]
    reference = f"pkg:pypi/{name}@{version}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "description": about["Summary"] or "",
        "licenses": _licences(about),
        "purl": reference,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in hashes],
    }


def _licences(about: Any) -> list[dict[str, Any]]:
    """Return what a package says about its licence: an SPDX expression if it has one, else a name."""
    if expression := about["License-Expression"]:
        return [{"expression": expression}]
    classified = [
        line.rpartition(" :: ")[2] for line in about.get_all("Classifier", []) if line.startswith("License ::")
    ]
    named = (about["License"] or "").strip().partition("\n")[0]
    return [{"license": {"name": name}} for name in classified or [named or "unknown"]]


if __name__ == "__main__":
    main()
