"""One word for one thing: no class name means two things, and retired words do not come back.

`docs/glossary.md` has the words of the project. This file is the one list of those that were retired. It also holds the
rules for sentences that can be checked: the subject is a rank, a node, a process or a function, and a text is a whole
sentence or a noun phrase.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src" / "covey"

RETIRED = frozenset(
    [
        "acquaintance",
        "advocate",
        "board",
        "boards",
        "candidacy",
        "candidate",
        "candidates",
        "chamber",
        "circle",
        "company",
        "council",
        "crew",
        "desk",
        "despair",
        "ear",
        "ears",
        "entrance",
        "forming",
        "gathering",
        "greet",
        "greeting",
        "kept",
        "history",
        "knock",
        "ledger",
        "letter",
        "letters",
        "lobby",
        "mailbox",
        "meeting",
        "neighbour",
        "neighbours",
        "pact",
        "place",
        "places",
        "post",
        "roll",
        "rollcall",
        "spokesman",
        "station",
        "vigil",
        "voice",
        "voices",
        "ward",
        "warden",
        "wards",
        "watch",
    ]
)
"""No module, class or function has one of these in its name: private metaphors, and words with two meanings."""

EXCEPTIONS = {
    "__post_init__": "Python's own name",
    "Candidate": "a plan that could be chosen",
    "_watch": "the option --watch of covey status and covey doctor; an observer in testing/proxy.py",
    "watch": "torch and asyncio say so: a thread that watches a value; the method of a launcher's handler",
    "watch_prefix": "a store's `watch`, of all entries that begin alike",
    "history": "what views show of a run over time, as `covey history` does of all runs",
    "neighbours": "members that are adjacent in an overlay, as in a graph",
    "_letters_for": "letters of the alphabet, in join codes",
    "_place": "the verb: to place an item",
    "_state_letters": "letters of the alphabet, one for each rank",
}
"""Names with a retired word in its ordinary meaning."""

REMAINING = frozenset(
    [
        "Forming",
        "RequestRules",
        "SecretKept",
        "_check_place",
        "gate",
        "watch_closely",
    ]
)
"""Names that are still to be changed. `python -m tests.unit.docs.test_words` prints those that may be struck off."""

SHARED = {
    "Gateway": "a service of gRPC, whose generated code is named by its protocol, and a router of tests",
    "Standing": "two messages, of formation and of checkpoints: recorded messages name their types",
}
"""Class names that are defined more than once, and why."""

PEOPLE = re.compile(r"\b(nobody|somebody|whoever|everybody|anybody|someone)\b", re.IGNORECASE)
"""Words that leave open which rank, node or process is meant."""
CONTINUE = re.compile(r"\b(go|goes|going|went) on\b")
FRAGMENT = re.compile(r'"""\s*Of\b')
PAGES = ("README.md", "docs/guides", "docs/concepts", "docs/reference", "docs/security.md", "docs/glossary.md")
FRAGMENTS = {
    "proto/replication.py": 10,
    "proto/store.py": 2,
    "proto/store_copy.py": 2,
    "runtime/compressed/automatic.py": 1,
    "runtime/compressed/sparse.py": 1,
    "wire/store.py": 5,
}
"""How many texts still begin with "Of", by module; a fragment such as "Of the whole file." says less than "Bytes of the
whole file."."""

DEFINITION = re.compile(r"^[ \t]*(?:(?P<class>class)|(?:async )?def) (?P<name>\w+)[(:\[]", re.MULTILINE)
"""In formatted code it finds what `ast` finds, in a twentieth of the time."""


def parts(name: str) -> set[str]:
    """Return the words of an identifier: `_new_circle` and `NewCircle` have the same two."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@functools.cache
def definitions() -> list[tuple[str, str, bool]]:
    """Return classes and functions: the path of the file below the package, the name, and whether it is a class."""
    return [
        (str(path.relative_to(SRC)), found["name"], found["class"] is not None)
        for path in sorted(SRC.rglob("*.py"))
        for found in DEFINITION.finditer(path.read_text())
    ]


@functools.cache
def defined() -> dict[str, list[str]]:
    """Return the names of all modules, classes and functions, with the files that define them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC)
        for part in file.with_suffix("").parts:
            found[part].append(str(file))
    for file_name, name, _ in definitions():
        found[name].append(file_name)
    return found


@functools.cache
def classes() -> dict[str, list[str]]:
    """Return the classes by name, with the files that define them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file, name, is_class in definitions():
        if is_class:
            found[name].append(file)
    return found


def struck_off() -> list[str]:
    """Return what may leave the lists: retired names that are gone, and class names that occur once."""
    names = {*REMAINING, *EXCEPTIONS} - defined().keys()
    return sorted(names | {name for name in SHARED if len(classes().get(name, ())) < 2})


def test_no_name_has_a_retired_word_in_it() -> None:
    known = REMAINING | EXCEPTIONS.keys()
    found = {name: files for name, files in defined().items() if parts(name) & RETIRED and name not in known}
    assert found == {}, "say it with the words of docs/glossary.md"


def test_no_class_name_means_two_things() -> None:
    found = {name: files for name, files in classes().items() if len(files) > 1 and name not in SHARED}
    assert found == {}, "give one of them another name, or list it in SHARED with the reason"


@functools.cache
def texts() -> list[tuple[str, str, bool]]:
    """Return texts of the package that may break a rule: the module, the text, and whether it is documentation."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        source = path.read_text()
        if not (PEOPLE.search(source) or CONTINUE.search(source) or FRAGMENT.search(source)):
            continue  # parsing takes far longer than reading
        tree = ast.parse(source)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                found.append((str(path.relative_to(SRC)), node.value, id(node) in documentation))
    return found


def pages() -> Iterator[Path]:
    for name in PAGES:
        page = ROOT / name
        yield from [page] if page.is_file() else sorted(page.glob("*.md"))


def test_pages_and_messages_say_which_process_they_mean() -> None:
    found = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages()
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        if PEOPLE.search(line)
    ]
    found += [
        f"{file}: {text}" for file, text, is_documentation in texts() if PEOPLE.search(text) and not is_documentation
    ]
    assert found == [], "name the rank, the node, the process or the person"


def test_pages_and_messages_say_continue() -> None:
    found = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in pages()
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        if CONTINUE.search(line)
    ]
    found += [
        f"{file}: {text}"
        for file, text, is_documentation in texts()
        if CONTINUE.search(text) and not is_documentation and not file.startswith("lab/")
    ]
    assert found == [], "a run continues, and is running"


def test_documentation_is_no_fragment() -> None:
    found: defaultdict[str, int] = defaultdict(int)
    for file, text, is_documentation in texts():
        if is_documentation and re.match(r"Of\b", text.strip()):
            found[file] += 1
    assert {file: count for file, count in found.items() if count > FRAGMENTS.get(file, 0)} == {}


def test_the_glossary_is_alphabetical_and_has_no_retired_word_as_an_entry() -> None:
    entries = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert entries == sorted(entries, key=str.lower)
    assert not [entry for entry in entries if parts(entry) & RETIRED]
    assert len(entries) == len(set(entries)) >= 40


if __name__ == "__main__":
    print(*struck_off(), sep="\n")
