"""Console blocks: what is a command, of which machine, and what the copy button of the site copies."""

from __future__ import annotations

import re
from html import unescape

from tools import consoles

BLOCK = """\
north$ covey init      # shows a code
    4 8 2   9 1 3
south$ covey deny --list
"""


def test_a_command_begins_with_a_prompt_and_loses_its_comment() -> None:
    first, printed, last = consoles.parsed(BLOCK)
    assert first == consoles.Typed("north$ ", "north", "covey init", "      # shows a code")
    assert printed == "    4 8 2   9 1 3"
    assert last == consoles.Typed("south$ ", "south", "covey deny --list", "")


def test_a_command_goes_on_after_a_backslash() -> None:
    (typed,) = consoles.commands("$ covey run \\\n    train.py\nstep 1\n")
    assert typed.command == "covey run \\\n    train.py"


def test_the_button_of_a_block_copies_commands_alone() -> None:
    shown = consoles.console("$ echo '<a>'  # why\n<a>\n$ true\n", "console", "", {}, None)
    (copied,) = re.findall(r'data-copy="([^"]*)"', shown)
    assert unescape(copied) == "echo '<a>'\ntrue"
    text = unescape(re.sub(r"<[^>]+>", "", shown))
    assert text == "$ echo '<a>'  # why\n<a>\n$ true\n"


def test_commands_of_several_machines_have_a_button_each() -> None:
    shown = consoles.console(BLOCK, "console", "", {}, None)
    assert re.findall(r'data-clipboard-text="([^"]*)"', shown) == ["covey init", "covey deny --list"]
    assert "data-copy" not in shown
    assert "no-copy" in shown


def test_a_session_of_python_is_copied_without_its_prompts_and_results() -> None:
    assert consoles.doctest_lines(">>> for x in [1]:\n...     x\n1\n>>> 2\n2\n") == "for x in [1]:\n    x\n2"
