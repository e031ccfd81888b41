"""What people type after `covey run`, and what becomes of it."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import typer.main

from covey.base.errors import ConfigError
from covey.cli.options import check_compress, words_of
from covey.cli.run import app, command_line, is_run_name, share_of_run
from covey.cli.several_machines import Program, environment_with, script_in, sized
from covey.runtime.joining.torch_env import without_rank

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a script, and a user that is in no cluster."""
    for name in list(os.environ):
        if name.startswith("COVEY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data").mkdir()
    return tmp_path


def parsed(*words: str) -> dict[str, Any]:
    """Return the options that were given, the script, and what belongs to it."""
    context = typer.main.get_command(app).make_context("run", list(words))
    given = {name: value for name, value in context.params.items() if value not in (None, False, (), [])}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def test_the_first_word_is_the_script_if_there_is_no_other() -> None:
    assert parsed("train.py") == {"script": "train.py"}
    assert parsed("nonsense") == {"script": "nonsense"}


def test_a_word_before_the_script_names_the_run() -> None:
    assert parsed("mine", "train.py", "--lr", "3") == {
        "run": "mine",
        "script": "train.py",
        "arguments": ["--lr", "3"],
    }


@pytest.mark.parametrize(
    "words",
    [
        ("mine", "--min", "3", "-n", "2", "train.py", "--min", "9"),
        ("--min", "3", "mine", "-n", "2", "train.py", "--min", "9"),
        ("-n", "2", "--min", "3", "mine", "train.py", "--min", "9"),
        ("--run", "mine", "-n", "2", "--min", "3", "train.py", "--min", "9"),
    ],
)
def test_options_may_stand_before_and_after_the_name_of_the_run_but_not_after_the_script(words) -> None:
    wanted = {"run": "mine", "processes": 2, "run_min_size": "3", "script": "train.py", "arguments": ["--min", "9"]}
    assert parsed(*words) == wanted


@pytest.mark.parametrize("first", ["train.py", "python", "python3", "./train.py", "absent.py", "no/such/script"])
def test_what_is_or_looks_like_a_script_or_python_names_no_run(first) -> None:
    assert not is_run_name(first, "train.py")
    assert parsed(first, "train.py") == {"script": first, "arguments": ["train.py"]}


@pytest.mark.parametrize("first", ["sh", "data", "mine"])
def test_before_a_python_script_a_word_names_the_run_whatever_else_is_called_so(first) -> None:
    assert parsed(first, "train.py") == {"run": first, "script": "train.py"}


@pytest.mark.parametrize("first", ["sh", "data"])
def test_a_program_or_a_folder_before_other_words_names_no_run(first) -> None:
    assert parsed(first, "-c", "true") == {"script": first, "arguments": ["-c", "true"]}


@pytest.mark.parametrize("options", [("--size", "3"), ("-n", "2", "--on-loss", "continue")])
def test_a_program_before_options_of_covey_and_a_script_is_an_error_that_names_both_meanings(options) -> None:
    with pytest.raises(ConfigError, match="two meanings") as raised:
        parsed("sh", *options, "train.py")
    rest = " ".join((*options, "train.py"))
    assert f"covey run --run sh {rest}" in str(raised.value)
    assert f"covey run {shutil.which('sh')} {rest}" in str(raised.value)
    assert parsed("--run", "sh", *options, "train.py")["run"] == "sh"
    whole = str(shutil.which("sh"))
    assert parsed(whole, *options, "train.py") == {"script": whole, "arguments": [*options, "train.py"]}


@pytest.mark.parametrize("words", [("-n",), ("-n", "x"), ("--nproc", "2", "train.py"), ("-n", "2", "absent.py")])
def test_a_program_before_its_own_options_is_that_program(words) -> None:
    assert parsed("sh", *words) == {"script": "sh", "arguments": list(words)}


def test_with_a_module_only_the_option_names_the_run() -> None:
    assert parsed("-m", "mine", "train") == {"module": True, "script": "mine", "arguments": ["train"]}
    assert parsed("--run", "mine", "-m", "nest.egg")["run"] == "mine"


def test_a_run_has_one_name() -> None:
    for words in (("--run", "a", "b", "train.py"), ("b", "--run", "a", "train.py")):
        with pytest.raises(ConfigError, match="two names, 'b' and 'a'"):
            parsed(*words)


def test_a_script_that_is_missing_is_named_together_with_the_run() -> None:
    with pytest.raises(ConfigError, match=r"no script or program 'tran' to start in the run 'mine'"):
        command_line("tran", [], module=False, run_name="mine")
    assert command_line("train.py", ["-x"], module=False) == [sys.executable, "train.py", "-x"]
    assert command_line("nest.egg", [], module=True) == [sys.executable, "-m", "nest.egg"]


def test_covey_is_a_program_also_if_it_is_not_on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder / "empty"))
    assert parsed("-n", "2", "covey", "bench", "--quick")["script"] == "covey"
    assert command_line("covey", ["bench"], module=False) == [sys.executable, "-m", "covey", "bench"]
    assert parsed("covey", "train.py") == {"run": "covey", "script": "train.py"}
    (folder / "covey").write_text("")
    assert command_line("covey", ["bench"], module=False) == [sys.executable, "covey", "bench"]


def test_without_a_cluster_nothing_starts_and_the_ways_into_one_are_told() -> None:
    with pytest.raises(ConfigError, match=r"covey init.*covey enroll.*covey run -n K"):
        share_of_run(1, {"COVEY_RUN": "mine"})


def test_a_secret_of_the_environment_goes_to_the_processes_by_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_SECRET", "cd" * 32)
    monkeypatch.setenv("COVEY_SEEDS", "10.0.0.1:47700")
    run = share_of_run(3, {"COVEY_RUN": "mine", "COVEY_CLUSTER": "lab"})()
    assert run.secret_variable() == ("COVEY_SECRET_FD", b"\xcd" * 32)
    place = {"COVEY_RUN": "mine", "COVEY_CLUSTER": "lab", "COVEY_SEEDS": "10.0.0.1:47700"}
    assert run.variables(1) == {**place, "COVEY_KEEPER_ID": run.service.id.hex(), **without_rank({})}
    assert run.size == 3
    assert "COVEY_SECRET" not in os.environ


def test_a_secret_in_a_file_is_left_for_the_processes_to_find(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "key").write_text("cd" * 32)
    (folder / "key").chmod(0o600)
    monkeypatch.setenv("COVEY_SECRET_FILE", str(folder / "key"))
    run = share_of_run(1, {"COVEY_RUN": "mine"})()
    assert run.secret_variable() == ("", b"")
    later = without_rank({})
    assert run.variables(0) == {"COVEY_RUN": "mine", "COVEY_KEEPER_ID": run.service.id.hex(), **later}
    with pytest.raises(ValueError, match=r"not known before this process joins: call covey\.join or"):
        int(later["RANK"])
    torchs = share_of_run(1, {"COVEY_RUN": "mine", "COVEY_TORCH_ENV": "1"})()
    assert "RANK" not in torchs.variables(0)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"COVEY_RUN_SIZE": "2"}, "-n 3 are more than the 2 nodes"),
        ({"COVEY_RUN_MAX_SIZE": "2"}, "-n 3 are more than the 2 nodes"),
        ({"COVEY_RUN_MIN_SIZE": "4", "COVEY_RUN_MAX_SIZE": "3"}, "less than min_size"),
        ({"COVEY_JOIN_TIMEOUT": "-1"}, "above 0"),
        ({"COVEY_INTERFACES": "!!eth0"}, "eth0"),
        ({"COVEY_RUN": "x" * 101}, "1 to 100 printable"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(monkeypatch, variables, complaint) -> None:
    monkeypatch.setenv("COVEY_SECRET", "cd" * 32)
    with pytest.raises(ConfigError, match=complaint):
        share_of_run(3, {"COVEY_RUN": "mine", **variables})


@pytest.mark.parametrize(
    ("compress", "error"),
    [
        (
            "int9",
            r"^--compress int9: there is no codec 'int9' \(did you mean int8\?\).*script registers",
        ),
        (
            "*=int8, head=topk(ratoi=0.1)",
            r"no parameter 'ratoi' \(did you mean ratio\?\); its parameters: ratio$",
        ),
    ],
)
def test_a_mistyped_codec_is_an_error_before_anything_is_started(compress: str, error: str) -> None:
    check_compress("embed.*=topk(0.01), *=int8")
    with pytest.raises(ConfigError, match=error):
        typer.main.get_command(app).main(["-n", "2", "--compress", compress, "train.py"], standalone_mode=False)


def test_another_interpreter_runs_the_script_if_there_is_one() -> None:
    assert command_line("train.py", [], module=False, python="/bin/sh") == ["/bin/sh", "train.py"]
    assert command_line("nest.egg", [], module=True, python="sh")[1:] == ["-m", "nest.egg"]
    with pytest.raises(ConfigError, match="--python /nowhere/python: there is no such program"):
        command_line("train.py", [], module=False, python="/nowhere/python")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--on", "all", "--hosts", "a"), "give one of them"),
        (("--on", ","), "--on names no machine"),
        (("--on", "all", "-n", "0"), "at least one process"),
        (("--on", "all", "--requirements", "r.txt", "--python", "p"), "give one of them"),
        (("--on", "all", "--requirements", "missing.txt"), "missing.txt: No such file"),
        (("--on", "all", "--requirements", "train.py"), "names no package"),
        (("--on", "all", "--http", "9000"), "--http does not go with --on"),
        (("--hosts", "a", "--detach"), "use --on"),
        (("--hosts", "a:x"), "--hosts a:x"),
        (("--detach",), "go with --on"),
        (("--requirements", "r.txt"), "go with --on"),
    ],
)
def test_options_for_several_machines_that_do_not_fit_are_refused_with_a_remedy(
    words: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        typer.main.get_command(app).main(["run", *words, "train.py"][1:], standalone_mode=False)


def test_a_script_outside_of_the_folder_that_is_sent_is_refused(folder: Path) -> None:
    inside = Program(str(folder / "train.py"), (), "train", False, None)
    assert script_in(folder, inside) == "train.py"
    (folder / "other").mkdir()
    with pytest.raises(ConfigError, match="is not in"):
        script_in(folder / "other", inside)
    assert script_in(folder, Program("nvidia-smi", (), "x", False, None)) == "nvidia-smi"


def test_options_of_all_machines_are_passed_on_as_they_were_given() -> None:
    given = {"on_loss": "continue", "join_timeout": "5.0", "map_port": "1"}
    assert words_of(given) == ["--on-loss=continue", "--wait=5.0", "--map-port"]
    assert parsed(*words_of(given), "train.py") == {
        "on_loss": "continue",
        "join_timeout": "5.0",
        "map_port": True,
        "script": "train.py",
    }
    assert sized({"run_min_size": "2"}, 8) == {"run_min_size": "2"}
    assert sized({}, 8) == {"run_size": "8"}


def test_a_terminal_looks_for_agents_where_the_nodes_of_its_run_will() -> None:
    with patch.dict(os.environ):  # in a terminal, they are settings of all that it starts
        env = dict(environment_with({"seeds": "north", "interfaces": "eth0", "tls_ca": "/ca.pem", "patience": "5"}))
    found = {name: env.get(name) for name in ("COVEY_SEEDS", "COVEY_INTERFACES", "COVEY_TLS_CA", "COVEY_TLS_KEY")}
    assert list(found.values()) == ["north", "eth0", "/ca.pem", None]
    assert "COVEY_PATIENCE" not in env


def test_each_option_is_checked_by_the_kind_of_its_setting_and_its_error_names_the_option() -> None:
    for words, problem in (
        (("--lanes", "smh"), "--lanes='smh' is unknown; use one of auto, shm"),
        (("--min", "0"), "--min='0' must be a number from 1 to 1024"),
        (("--patience", "soon"), "--patience='soon' is not a number of seconds"),
        (("--limit", "10"), "--limit='10' is not a rate"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parsed(*words, "train.py")
    assert parsed("--tls-ca", "ca.pem", "train.py")["tls_ca"] == os.path.abspath("ca.pem")


def test_options_that_ask_for_a_run_of_the_cluster_are_not_ignored_with_n() -> None:
    for words in (("--seeds", "a"), ("--size", "2"), ("--run", "mine"), ("--new",), ("--relay-limit", "20M")):
        with pytest.raises(ConfigError, match="covey enroll"):
            typer.main.get_command(app).main(["-n", "2", *words, "train.py"], standalone_mode=False)
    for flag in ("--insecure", "--map-port"):
        with pytest.raises(ConfigError, match=f"{flag} does not go with --on and --hosts"):
            typer.main.get_command(app).main(["--on", "all", flag, "train.py"], standalone_mode=False)
