"""Hooks of the documentation site (mkdocs.yml): pages that live outside docs/, anchors as GitHub makes them, consoles.

README.md is the start page, CONTRIBUTING.md and CHANGELOG.md are pages, and the examples are files of the site. Links
between them work in a checkout, on GitHub and on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from tools import consoles

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site that are not below docs/: their path in the repository, and on the site."""
ASSETS: Final = ROOT / "tools" / "site_assets"
LINK: Final = re.compile(r"(\]\()([^)\s#]+)?(#[^)\s]*)?(\))")


def slug(text: str, separator: str = "-") -> str:
    """Return the anchor of a heading, by GitHub's rule: letters, digits, hyphens and underscores, in lower case."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def site_path(path: str) -> str:
    """Return where a file of the repository is on the site."""
    return PAGES.get(path) or path.removeprefix("docs/")


def source_path(path: str) -> str:
    """Return where a page of the site is in the repository."""
    back = {page: source for source, page in PAGES.items()}
    return back.get(path) or f"docs/{path}"


def relinked(text: str, page: str) -> str:
    """Return the text of a page of the repository with links for the site; `page` is its path in the repository."""

    def link(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        meant = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        there = posixpath.relpath(site_path(meant), posixpath.dirname(site_path(page)) or ".")
        return f"{opening}{there}{anchor or ''}{closing}"

    return LINK.sub(link, text)


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = consoles.FENCES
    config.watch += [
        str(ROOT / each) for each in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "src", "examples", "tools")
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for example in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{example.name}", abs_src_path=str(example)))
    for asset in ("iframe-worker.js", "site.css"):
        files.append(File.generated(config, f"assets/{asset}", abs_src_path=str(ASSETS / asset)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return relinked(markdown, source_path(page.file.src_uri))
