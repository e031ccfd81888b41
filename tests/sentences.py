"""Sentences of the documents, and the tests that hold them.

`tests/claims/<page>.txt` has one line for every sentence, table row and line of a format in `docs/<page>.md`, as it
stands there but for line breaks. The indented lines below it name the tests that fail if it is not so, or say why it
needs none:

    = names     it says what a word means, or what comes next
    = advice    it tells people what to do
    = concedes  it says what is not protected

`python -m tests.sentences` prints what is missing or out of date.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
THOROUGH = "pytest.mark.thorough"
WITHOUT_TESTS = ("= names", "= advice", "= concedes")


def sentences(page: str) -> list[str]:
    """Return the sentences of a page in order, table rows and lines of code blocks among them; headings are none."""
    found: list[str] = []
    paragraph: list[str] = []
    is_code = False

    def end_paragraph() -> None:
        found.extend(_split(" ".join(paragraph)))
        paragraph.clear()

    for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
        text = line.strip()
        if text.startswith("```"):
            end_paragraph()
            is_code = not is_code
        elif is_code:
            found.extend([" ".join(text.split())] if text else [])
        elif text.startswith("#") or not text:
            end_paragraph()
        elif text.startswith("|"):
            end_paragraph()
            if not re.fullmatch(r"[|\s:-]+", text):
                found.append(text)
        else:
            if re.match(r"(- |\d+\. )", text):
                end_paragraph()
                text = text.partition(" ")[2]
            paragraph.append(text)
    end_paragraph()
    return found


def _split(paragraph: str) -> list[str]:
    text = re.sub(r"^\*\*([^*]+)\.\*\* ", "", paragraph)  # a label in front of it
    return [part for part in re.split(r"(?:(?<=[.?!])|(?<=[.?!]\*\*))\s+(?=[\"*(]*[A-Z0-9`])", text) if part.strip()]


def claims(page: str) -> dict[str, list[str]]:
    """Return what is listed for a page: sentences, and for each what holds it."""
    listed: dict[str, list[str]] = {}
    last: list[str] = []
    for line in (ROOT / "tests" / "claims" / f"{page}.txt").read_text().splitlines():
        if line.startswith("    "):
            last.append(line.strip())
        elif line.strip():
            if line in listed:
                raise ValueError(f"{page}.txt has this twice: {line}")
            last = listed[line] = []
    return listed


@functools.cache
def tests_of(path: str) -> dict[str, bool]:
    """Return the test functions of a file below `tests`, and whether `make test` runs each."""
    file = ROOT / "tests" / path
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    marks = (
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    is_left = any(THOROUGH in ast.unparse(node.value) for node in marks)
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found[node.name] = not is_left and THOROUGH not in map(ast.unparse, node.decorator_list)
    return found


def faults(page: str) -> list[str]:
    """Return what is wrong with the list of a page, in words."""
    said, listed = sentences(page), claims(page)
    found = [f"not listed: {sentence}" for sentence in dict.fromkeys(said) if sentence not in listed]
    found += [f"listed, and not said (any more): {sentence}" for sentence in listed if sentence not in said]
    for sentence, holders in listed.items():
        if not holders:
            found.append(f"no test: {sentence}")
        elif len(holders) > 1 and any(holder.startswith("=") for holder in holders):
            found.append(f"either tests or a reason for none: {sentence}")
        in_test = []
        for holder in holders:
            path, _, name = holder.partition("::")
            if not (holder in WITHOUT_TESTS or name in tests_of(path)):
                found.append(f"no such test: {holder}")
            in_test.append(holder in WITHOUT_TESTS or tests_of(path).get(name, True))
        if holders and not any(in_test):
            found.append(f"only tests that `make test` leaves to `make test-all`: {sentence}")
    return found


if __name__ == "__main__":
    for page in sys.argv[1:] or ("security",):
        print(*faults(page), sep="\n")
