"""Commands that the documentation shows exist, have the options that are shown, and take their values."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import typer.core
from tools import consoles
from tools.command_reference import commands
from typer.main import get_command

from covey.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"(?<!`)`(--[a-z][\w-]*)[^`]*`(?!`)")
INLINE = re.compile(r"(?<!`)`(covey [^`]+)`(?!`)")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")

ACTS = {"--install-completion", "--show-completion"}
"""Options that are not parsed here: the parser itself does what they say, to the shell of the user."""


OTHERS = {
    *("--nnodes", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--local-addr"),  # torchrun
    *("--build-arg", "--mca"),  # docker, mpirun
    *("--fsdp", "--text", "--epochs"),  # examples
}
"""Options of other programs that sentences name alone."""
WITH_OTHERS = "from-torchrun.md"
"""Its tables begin with options of torchrun, which tests/e2e/test_from_elsewhere.py compares with torchrun's."""


def programs(line: str) -> Iterator[list[str]]:
    """Yield the words of each program of a shell's line."""
    lexer = shlex.shlex(line.replace("$(", "(").replace("\\\n", " "), posix=True, punctuation_chars="&|;<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    skips = False
    for word in lexer:
        if word in {"<", ">", ">>"}:
            skips = True  # the file's name is no argument
        elif skips:
            skips = False
        elif set(word) <= set("&|;()"):
            yield words
            words = []
        elif words or not ASSIGNMENT.fullmatch(word):
            words.append(word)
    yield words


def parse(words: list[str]) -> None:
    """Parse `covey ...` as the command does, and start nothing."""
    root: Any = get_command(main.app)
    command: Any = root
    name: str | None = "covey"
    arguments, context = words[1:], None
    while True:
        context = typer.Context(command, info_name=name, parent=context, **command.context_settings)
        with context.scope(cleanup=False):
            rest = command.parse_args(context, list(arguments))
            if not isinstance(command, typer.core.TyperGroup):
                return
            words_left = [*context._protected_args, *rest] if hasattr(context, "_protected_args") else rest
            if not words_left and command.invoke_without_command:
                return
            name, command, arguments = command.resolve_command(context, words_left)


def shown(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield every line of the consoles of a page, and every command in its sentences, and whether it is whole."""
    text = page.read_text()
    for block in CONSOLE.findall(text):
        for typed in consoles.commands(block):
            yield typed.command.replace("$RANDOM", "7"), True
    for found in INLINE.findall(FENCE.sub("", text)):
        yield re.sub(r"\bN\b", "2", " ".join(found.split())).replace("COMMAND", "run"), False


def problem_of(words: list[str], *, is_whole: bool) -> str:
    """Return what is wrong with a command; empty if nothing is."""
    try:
        parse(words)
    except typer.Exit:  # `covey --version`
        return ""
    except Exception as error:
        is_left_out = type(error).__name__ == "MissingParameter" or "requires an argument" in str(error)
        return "" if is_left_out and not is_whole else f"{type(error).__name__}: {error}"
    return ""


def test_every_command_that_a_page_shows_can_be_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_DEBUG", "0")  # parsing `--traceback` sets it for all that this process does later
    lines = {line: str(page.relative_to(ROOT)) for page in PAGES for line in shown(page)}
    assert len(lines) > 150
    problems = [
        f"{page}: {line}: {problem}"
        for (line, is_whole), page in lines.items()
        for words in programs(line)
        if words[:1] == ["covey"] and not ACTS & set(words) and (problem := problem_of(words, is_whole=is_whole))
    ]
    assert problems == []


def test_a_command_that_does_not_exist_is_found() -> None:
    assert "No such command" in problem_of(["covey", "launch", "x"], is_whole=False)
    assert "No such option" in problem_of(["covey", "run", "--sizes", "2"], is_whole=False)
    assert "not a valid" in problem_of(["covey", "run", "-n", "two", "train.py"], is_whole=False)
    assert "Missing" in problem_of(["covey", "run"], is_whole=True)
    assert problem_of(["covey", "run", "-n", "2", "train.py", "--sizes"], is_whole=True) == ""


def test_every_option_that_a_sentence_names_alone_exists() -> None:
    offered = {
        option for command, context in commands() for each in command.get_params(context) for option in each.opts
    }
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        if page.name == WITH_OTHERS:
            text = re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE)
        named = set(OPTION.findall(text))
        assert named <= offered | OTHERS, page


def test_what_pages_make_and_start_is_in_the_tree() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for line, _ in shown(page):
            for words in programs(line):
                if words[:1] == ["make"]:
                    assert {word for word in words[1:] if not ASSIGNMENT.fullmatch(word)} <= targets, (page, line)
                for word in words:
                    if word.startswith(("examples/", "deploy/")) and word != "deploy/docker/secret":
                        assert (ROOT / word).exists(), (page, line)
