"""What all commands have in common: errors, exit codes, -h, `covey help`, completion, and help at every width."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, TypeAlias

import pytest
from tests.support.jobs import SOURCE
from tests.support.sets import only, pairs
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError, DeadlineError, PeerLostError
from covey.cli import main as command_line
from covey.cli.main import COMMANDS, HEADINGS
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORDS = [[name] for name in COMMANDS] + [["secret", "show"], ["secret", "rotate"], ["bench", "ddp"], []]
HEADED = [name for names in HEADINGS.values() for name in names]
WIDTHS = [60, 80, 120]

Covey: TypeAlias = "Callable[..., tuple[int, str, str]]"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COVEY_DEBUG", "0")
    return tmp_path / "home"


@pytest.fixture
def covey(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Covey:
    """Run a command in this process; returns its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["covey", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        shown = capfd.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ConfigError("--x is wrong; write --y"), 2, ["error: --x is wrong; write --y"]),
        (DeadlineError("too late"), 1, ["error: too late", "what to do: try again, perhaps with more time"]),
        (PeerLostError("gone", rank=1), 1, ["error: gone", "what to do: make a new group of the remaining ranks"]),
        (KeyError("oops"), 70, ["error: unexpected KeyError: 'oops'", "--traceback"]),
    ],
    ids=["config", "deadline", "lost", "fault"],
)
def test_an_error_is_its_message_and_its_remedy_and_has_its_exit_code(
    covey: Covey, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, shown: list[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(clusters, "list_clusters", fail)
    ended, out, err = covey("clusters")
    assert (ended, out) == (code, "")
    assert len(err.splitlines()) == len(shown)
    for line, words in zip(err.splitlines(), shown, strict=True):
        assert line.startswith(words) or words in line


@pytest.mark.parametrize("words", [["--traceback", "clusters", "--yes"], ["clusters", "--yes", "--traceback"]])
def test_traceback_shows_the_rest_before_and_after_the_command(
    covey: Covey, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["covey", *words])
    with pytest.raises(ConfigError, match="use one of"):
        command_line.main()
    assert os.environ["COVEY_DEBUG"] == "1"  # for the processes that a command starts


def test_traceback_after_a_script_is_the_scripts(covey: Covey) -> None:
    code, _, err = covey("run", "-n", "0", "-m", "pip", "--traceback")
    assert code == 2
    assert err.startswith("error: ")


@pytest.mark.parametrize("width", only([60], WIDTHS))
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_help_fits_the_terminal_and_is_the_same_in_all_three_ways(
    covey: Covey, home: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = covey(*words, "-h")
    assert (code, err) == (0, "")
    for line in out.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()
        assert "\x1b" not in line
        assert "…" not in line  # a word that was cut off
    assert " --traceback " in out
    assert "--help" in out
    if width == 80:
        assert covey(*words, "--help") == covey("help", *words) == (0, out, "")
    assert not home.exists()


def test_help_of_what_is_no_command_is_refused(covey: Covey) -> None:
    assert covey("help", "secret", "keep")[::2] == (
        2,
        "error: there is no command 'secret keep'; `covey help` lists the commands\n",
    )


@pytest.fixture
def complete(home: Path, covey: Covey, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """What bash gets when TAB is typed after these words."""

    def ask(words: str) -> list[str]:
        monkeypatch.setenv("_COVEY_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        code, out, err = covey()
        assert (code, err) == (0, "")
        return out.split()

    return ask


def test_the_shell_completes_commands_options_clusters_and_nodes(home, complete) -> None:
    assert complete("covey ru") == ["run"]
    assert complete("covey secret ro") == ["rotate"]
    assert complete("covey run --on-") == ["--on-loss"]
    assert complete("covey run --lanes s") == ["shm", "secure"]
    assert complete("covey help sta") == ["status"]
    assert complete("covey status ") == []
    assert not home.exists()
    for name in ("attic", "home"):
        clusters.save(Cluster(ClusterSecret(name, bytes(32))))
    clusters.remember("attic", bytes(range(32)), "north-aaaq")
    assert complete("covey status ") == ["attic", "home"]
    assert complete("covey run --cluster h") == ["home"]
    assert complete("covey clusters --default a") == ["attic"]
    assert complete("covey deny --cluster attic n") == ["north-aaaq"]
    (home / "clusters" / "attic.json").write_text("damaged")
    assert complete("covey status ") == []


def test_bash_completes_with_the_script_that_covey_shows(home: Path, tmp_path: Path) -> None:
    program = tmp_path / "covey"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m covey "$@"\n')
    program.chmod(0o755)
    script = """
        source <(covey --show-completion bash)
        COMP_WORDS=(covey cl) COMP_CWORD=1
        _covey_completion covey
        echo "${COMPREPLY[@]}"
    """
    ended = subprocess.run(
        ["bash", "-c", script],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(SOURCE),
            "COVEY_HOME": str(home),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert ended.stdout.splitlines() == ["clusters"], ended.stderr


@pytest.mark.parametrize("words", ["clusters", "audit", "audit --verify", "secret show", "status --wait 0.1", "doctor"])
def test_commands_that_show_something_create_no_files(covey: Covey, home: Path, monkeypatch, words: str) -> None:
    monkeypatch.setenv("COVEY_INTERFACES", "lo")
    if words.startswith("status"):
        monkeypatch.setenv("COVEY_SECRET_FILE", str(secret := home.parent / "secret"))
        secret.write_text("00" * 32)
        secret.chmod(0o600)
    code, _, err = covey(*words.split())
    assert code in (0, 1, 2)
    assert "Traceback" not in err
    assert not home.exists()


def test_help_lists_each_command_once_under_a_heading(covey: Covey, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(HEADED) == sorted(COMMANDS)
    monkeypatch.setenv("COLUMNS", "60")
    code, shown, _ = covey("help")
    assert code == 0
    listed = re.findall(r"^│ ([a-z]+) ", shown, re.MULTILINE)
    assert listed == HEADED
    places = [shown.index(f"─ {heading} ") for heading in HEADINGS]
    assert places == sorted(places)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
@pytest.mark.parametrize(("words", "unbuffered"), pairs([["--version"], ["bench", "--help"]], ["", "1"]))
def test_a_command_on_a_full_disk_says_so_in_one_line_and_fails(words: list[str], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "covey", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (ended.returncode, ended.stderr) == (1, "error: output cannot be written (No space left on device)\n")
