"""Commands about clusters at 60, 80 and 120 columns and in a pipe: no line too long, no key column lost, no escapes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.cli.test_main import covey, home  # noqa: F401 - fixtures

from covey.cli import allow, audit, charter, secret
from covey.cli.layout import room, table
from covey.cli.terminal import say
from covey.net.audit import audit_log as log
from covey.net.audit import audit_reader
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.wire.messages import Address, Card, Contact, Waiting
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Callable

NODE, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def cluster(home: Any, monkeypatch: pytest.MonkeyPatch) -> Cluster:  # noqa: F811
    made = Cluster(ClusterSecret("observatory", bytes(32)), seeds=("192.0.2.17:47700", "[2001:db8::17]:47700"))
    clusters.save(made)
    clusters.remember("observatory", NODE, "a-machine-with-a-long-name-aaaq")
    clusters.update("observatory", lambda now: replace(now, denied=frozenset({NODE, OTHER})))
    log.note("observatory", "denied", node=NODE, name="a-machine-with-a-long-name-aaaq", reason="on this machine")
    return made


def fits(text: str, width: int | None) -> None:
    for line in text.splitlines():
        assert width is None or len(line) <= width, line
        assert line == line.rstrip()
        assert "\x1b" not in line


@pytest.mark.parametrize("width", [60, 80, 120, None])
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("clusters", ["CLUSTER", "observatory", "DEFAULT", "yes", "192.0.2.17:47700", "[2001:db8::17]:47700"]),
        ("deny --list", ["NODE", "long-name-aaaq", "ID", "aaaqeaye", "on this machine"]),
        ("secret show", ["knows no owner of 'observatory'"]),
        ("allow --list", ["Every machine", "unless it is denied"]),
        ("audit", ["long-name-aaaq", "denied", "on this machine"]),
        ("audit --verify", ["The audit log is whole: 1 entry,"]),
    ],
)
def test_a_command_fits_its_terminal(
    cluster: Cluster,
    covey: Callable[..., tuple[int, str, str]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    keys: list[str],
    width: int | None,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = covey(*words.split())
    assert (code, err) == (0, "")
    if words != "audit":  # in a pipe its lines are for programs
        fits(out, width)
    text = re.sub(r"\s+", " ", out)
    for key in keys:
        assert key in text or key in text.replace(" ", "")


@pytest.mark.parametrize("width", [60, 80, 120, None])
def test_tables_of_nodes_fit_a_terminal(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", str(width))
    assert room() == width
    contact = Contact("h", (Address("2001:db8::dead:beef:17", 47700, "eth0"),), "")
    name, host = "a-machine-with-a-long-name-aaaq", "a-machine-with-a-long-name.example.org"
    card = Card(NODE, bytes(16), name, host, 4711, contact, "1.2")
    waiting = [Waiting(NODE, name, host, "2001:db8::dead:beef:17")]
    entries = list(audit_reader.entries())
    shown = {
        "secret": secret._listed([card]),
        "waiting": table(allow._waiting_columns(waiting), room()),
        "allowed": allow._table(frozenset({NODE}), {NODE: name}),
        "audit": table(audit._columns(entries), room()),
    }
    for what, text in shown.items():
        fits(text, width)
        for key in (name, "denied" if what == "audit" else "aaaqeaye"):
            assert key in "".join(text.split()), what


def test_what_nodes_that_run_now_do_about_a_list_is_said_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    card = Card(NODE, bytes(16), "north-aaaq", "north", 1, Contact("h", (), ""), "1.2")
    charter.tell_result([], [])
    charter.tell_result([card], [])
    charter.tell_result([], [card])
    out = capsys.readouterr().out
    fits(out, 60)
    assert " ".join(out.split()) == (
        "No other node was found running. Nodes get it when they meet a node of this machine. "
        "1 node running now obeys it: north-aaaq. "
        "north-aaaq (aaaqeaye) does not obey it: does it know this cluster's owner?"
    )


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_spinner_is_for_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], term: str
) -> None:
    from covey.cli.terminal import working

    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        with working("looking ..."):
            pass
        assert bool(capsys.readouterr().err) == (is_terminal and term != "dumb")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_join_code_is_one_line_and_all_else_fits(
    home: Any,  # noqa: F811
    covey: Callable[..., tuple[int, str, str]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for words in (["init", "attic"], ["init", "--show", "attic"]):
        code, out, err = covey(*words)
        assert (code, err) == (0, "")
        assert len(re.findall(r"^    covey1-\S+$", out, re.MULTILINE)) == 1
        fits("\n".join(line for line in out.splitlines() if "covey1-" not in line), width)
        assert "covey enroll  (it asks for the code)" in out


def test_errors_wrap_at_words_on_a_terminal_and_stay_whole_for_programs_that_read_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "others may enter the folder; run: chmod 700 /srv/observatory/keys"
    monkeypatch.setenv("COLUMNS", "40")
    say(text, err=True)
    assert capsys.readouterr().err == f"{text}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    say(text, err=True)
    assert capsys.readouterr().err.splitlines() == [
        "others may enter the folder; run: chmod",
        "700 /srv/observatory/keys",
    ]
