"""The documentation is whole: links and anchors lead somewhere, every page is on the site, references are complete."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import command_reference, metrics_reference, settings_reference, site

from covey.base.settings import SETTINGS
from covey.runtime.metrics.samples import TABLE

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub and the site make them."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        name = site.slug(heading)
        names.add(name if found[name] == 0 else f"{name}-{found[name]}")
        found[name] += 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_list_and_table_of_a_page_begins_after_an_empty_line(page: Path) -> None:
    """Otherwise it is shown as text on the site, though not on GitHub."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"(- |\d+\. )\S", line):
            assert not before.strip() or re.match(r"(- |\d+\. |\s|#)", before), line
        if line.startswith("|"):
            assert not before.strip() or before.startswith(("|", "<!--")), line


def named(entries: list[Any]) -> set[str]:
    """Return the paths that a navigation names."""
    values = [value for entry in entries for value in entry.values()]
    return {path for value in values for path in ({value} if isinstance(value, str) else named(value))}


def test_the_navigation_of_the_site_names_every_page_once() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]) == pages | set(site.PAGES.values())


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    text = command_reference.PAGE.read_text()
    assert text == command_reference.page(), "run `python -m tools.command_reference`"


def test_the_page_of_settings_has_every_setting_as_the_table_does() -> None:
    text = settings_reference.PAGE.read_text()
    assert text == settings_reference.page(), "run `python -m tools.settings_reference`"
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == list(SETTINGS)


def test_the_page_of_metrics_and_the_dashboard_are_what_the_table_says() -> None:
    assert metrics_reference.PAGE.read_text() == metrics_reference.page(), "run `python -m tools.metrics_reference`"
    assert metrics_reference.DASHBOARD.read_text() == metrics_reference.dashboard()


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    labels = {row.name: {*row.labels, "rank"} for row in TABLE}
    for row in TABLE:
        if row.kind == "histogram":
            labels |= {row.name + end: {*row.labels, "rank", "le"} for end in ("_bucket", "_sum", "_count")}
    panels = json.loads(metrics_reference.DASHBOARD.read_text())["panels"]
    for target in [target for panel in panels for target in panel["targets"]]:
        names = re.findall(r"covey_\w+", target["expr"])
        used = [re.findall(r"\w+", found) for found in re.findall(r"by \(([^)]*)\)", target["expr"])]
        used.append(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert names
        for name in names:
            assert {label for group in used for label in group} <= labels[name], target


def offered(package: str) -> list[str]:
    """Return what `__all__` of a package lists, without importing it: torch takes seconds."""
    tree = ast.parse((ROOT / "src" / package.replace(".", "/") / "__init__.py").read_text())
    values = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    ]
    return [f"{package}.{name}" for name in ast.literal_eval(values[0])]


@pytest.mark.parametrize(("page", "package"), [("python", "covey"), ("torch", "covey.torch")])
def test_the_reference_has_every_public_name_once(page: str, package: str) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    listed = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(offered(package))


def test_links_are_rewritten_for_the_place_of_a_page_on_the_site() -> None:
    assert site.relinked("[a](docs/wire.md#x) [b](#y)", "README.md") == "[a](wire.md#x) [b](#y)"
    assert site.relinked("[a](../../examples/ddp.py)", "docs/guides/pytorch.md") == "[a](../examples/ddp.py)"
    assert site.relinked("[a](../../CONTRIBUTING.md)", "docs/guides/chaos.md") == "[a](../contributing.md)"
    assert site.relinked("![a](docs/demo.svg)", "README.md") == "![a](demo.svg)"
