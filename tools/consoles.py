"""Console blocks of the documentation: which lines are commands, of which machine, and how the site shows them.

A command begins with a prompt, `$ ` or `north$ `, and may go on in the next line after a backslash. Other lines are
what it prints. The copy button of the site copies commands alone; in a block with commands of several machines, each
has a button of its own.
"""

from __future__ import annotations

import html
import re
from typing import Any, Final, NamedTuple

PROMPT: Final = re.compile(r"(?P<prompt>(?P<machine>[\w-]*)\$ +)(?P<rest>.*)")
COMMENT: Final = re.compile(r"\s+# .*$")
DOCTEST: Final = re.compile(r"(?:>>>|\.\.\.) ?(.*)")


class Typed(NamedTuple):
    """A command of a block as it is written there, prompt and comment included."""

    prompt: str
    machine: str
    """The name before the `$`; empty if there is none."""
    command: str
    comment: str


def parsed(block: str) -> list[Typed | str]:
    """Return commands and printed lines of a block, in their order."""
    found: list[Typed | str] = []
    lines = iter(block.rstrip("\n").split("\n"))
    for line in lines:
        match = PROMPT.fullmatch(line)
        if match is None:
            found.append(line)
            continue
        rest = match["rest"]
        while rest.endswith("\\"):
            rest += "\n" + next(lines)
        comment = COMMENT.search(rest)
        command = rest[: comment.start()] if comment else rest
        found.append(Typed(match["prompt"], match["machine"], command.rstrip(), comment[0] if comment else ""))
    return found


def commands(block: str) -> list[Typed]:
    """Return the commands of a block."""
    return [each for each in parsed(block) if isinstance(each, Typed)]


def doctest_lines(block: str) -> str:
    """Return what is typed in a session of Python."""
    return "\n".join(match[1] for line in block.splitlines() if (match := DOCTEST.match(line)))


def console(source: str, language: str, css_class: str, options: Any, md: Any, **kwargs: Any) -> str:
    """Return the HTML of a console block; superfences calls it."""
    typed = commands(source)
    is_split = len({each.machine for each in typed}) > 1
    lines = [_line(each, has_button=is_split) for each in parsed(source)]
    inner = f"<pre><span></span><code>{chr(10).join(lines)}\n</code></pre>"
    if is_split or not typed:
        return f'<div class="language-console console highlight no-copy">{inner}</div>'
    copied = html.escape("\n".join(each.command for each in typed))
    return f'<div class="language-console console highlight" data-copy="{copied}">{inner}</div>'


def _line(each: Typed | str, *, has_button: bool) -> str:
    if isinstance(each, str):
        return f'<span class="go">{html.escape(each)}</span>' if each else ""
    parts = [f'<span class="gp">{each.prompt}</span><span class="command">{html.escape(each.command)}</span>']
    if each.comment:
        parts.append(f'<span class="c1">{html.escape(each.comment)}</span>')
    if has_button:
        copied = html.escape(each.command)
        button = f'class="md-code__button" data-md-type="copy" title="Copy the command for {each.machine}"'
        parts.append(f'<button {button} data-clipboard-text="{copied}"></button>')
    return "".join(parts)


def session(source: str, language: str, css_class: str, options: Any, md: Any, **kwargs: Any) -> str:
    """Return the HTML of a session of Python; superfences calls it."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonConsoleLexer

    shown = highlight(source, PythonConsoleLexer(), HtmlFormatter(nowrap=True))
    copied = html.escape(doctest_lines(source))
    return (
        f'<div class="language-pycon highlight" data-copy="{copied}"><pre><span></span><code>{shown}</code></pre></div>'
    )


FENCES: Final = [
    {"name": "console", "class": "console", "format": console},
    {"name": "pycon", "class": "pycon", "format": session},
]
"""For `custom_fences` of superfences."""
