"""The table of settings: complete, read, and strict about names and values."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.support.in_turn import in_turn
from tests.support.waiting import DEADLINE

import covey
from covey.base.config import KNOWN_VARIABLES, GroupConfig, effective_settings, from_argument, from_file, group_config
from covey.base.errors import ConfigError
from covey.base.numbers import MAX_MEMBERS
from covey.base.setting_kinds import ByteCount
from covey.base.settings import ANY_FILE, SETTINGS, USER_FILE, differences_of
from covey.runtime.joining.request import OTHER_ARGUMENTS, JoinArguments

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src" / "covey"


def test_every_field_of_a_group_is_in_the_table_with_its_default() -> None:
    config = GroupConfig()
    named = {setting.name: setting.default for setting in SETTINGS.values() if setting.of_group}
    assert named == {field.name: getattr(config, field.name) for field in fields(GroupConfig)}


def test_type_checkers_know_the_arguments_of_join_that_the_table_has() -> None:
    ours = {setting.argument for setting in SETTINGS.values()} - {"", "run"}
    assert ours | {*OTHER_ARGUMENTS} == {*JoinArguments.__annotations__}
    for function in (covey.join, covey.join_async, covey.generations):
        shown = inspect.signature(function).parameters
        assert {*shown} == {"run", *JoinArguments.__annotations__}
        for name in shown:
            assert re.search(rf"^ *{name}: .+\.$", str(function.__doc__), re.M | re.S), f"{function.__name__}: {name}"


ROW = """
    fuse: float = _own(
        _LOSSES, Seconds(1.0), 7.5, "How long a fuse burns. Wet.", is_shared=True, option=Option(),
    )
    # fmt: on
"""


def test_a_setting_is_one_row(tmp_path: Path) -> None:
    """A row makes the field, the variable, the key of a file, the argument, the option, its help, and the reference."""
    copied = tmp_path / "covey"
    shutil.copytree(SRC, copied, copy_function=os.symlink)
    table = copied / "base" / "settings.py"
    text = table.read_text()
    table.unlink()
    table.write_text(text.replace("\n    # fmt: on\n", ROW, 1))
    code = """
import contextlib, inspect, json
import covey
from covey.base.config import GroupConfig, from_file, group_config
from covey.base.errors import ConfigError
from covey.cli.main import app
from tools import settings_reference

def refused(function, *given, **named):
    try:
        function(*given, **named)
    except ConfigError as error:
        return str(error)

found = {
    "field": GroupConfig().fuse,
    "variable": group_config({"COVEY_FUSE": "9"}).fuse,
    "file": from_file({"fuse": 3}, "covey.toml", is_users=False),
    "agreed": GroupConfig(fuse=2.0).agreed(),
    "argument": refused(covey.join, fuse="x"),
    "signature": "fuse" in inspect.signature(covey.join).parameters,
    "documentation": "fuse: How long a fuse burns" in covey.join.__doc__,
    "option": refused(app, ["run", "-n", "1", "--fuse", "0.5", "x.py"], standalone_mode=False),
    "reference": next(line for line in settings_reference.page().splitlines() if line.startswith("| `fuse`")),
}
with contextlib.suppress(SystemExit):
    app(["run", "--help"], prog_name="covey")
print(json.dumps(found))
"""
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "COLUMNS": "100"}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr
    *help_lines, last = ended.stdout.splitlines()
    assert json.loads(last) == {
        "field": 7.5,
        "variable": 9.0,
        "file": {"COVEY_FUSE": "3"},
        "agreed": "fuse=2.0",
        "argument": "fuse='x' is not a number of seconds",
        "signature": True,
        "documentation": True,
        "option": "--fuse=0.5 must be at least 1 seconds",
        "reference": "| `fuse` **=** | seconds, at least 1 | `7.5` | `fuse` | yes | How long a fuse burns. Wet. |",
    }
    line = next(line for line in help_lines if "--fuse" in line)
    assert line.split()[1:-1] == ["--fuse", "S", "How", "long", "a", "fuse", "burns.", "[default:", "(7.5)]"]


@functools.cache
def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in SRC.rglob("*.py")}


@in_turn(setting=SETTINGS.values())
def test_every_setting_is_read_somewhere(setting: Any) -> None:
    used = re.compile(rf"\.{setting.name}\b|{setting.variable}\b")
    if setting.of_group:
        used = re.compile(rf"config\.{setting.name}\b")
    readers = [path for path, text in sources().items() if path.parent.name != "base" and used.search(text)]
    if setting.name == "native":  # all layers ask this module
        readers = [SRC / "base" / "native.py"]
        assert setting.variable in readers[0].read_text()
    assert readers


@in_turn(setting=SETTINGS.values())
def test_a_default_is_a_value_of_its_kind_and_survives_being_written(setting: Any) -> None:
    if setting.default is not None:
        assert setting.kind.read("x", setting.default) == setting.default
        assert setting.kind.read("x", setting.show(setting.default)) == setting.default
    assert setting.variable in KNOWN_VARIABLES
    assert setting.meaning.endswith(".")


@pytest.mark.parametrize(
    ("value", "size"), [(65536, 65536), ("65536", 65536), ("64KiB", 65536), ("1 MiB", 1 << 20), ("1gib", 1 << 30)]
)
def test_sizes_are_numbers_or_have_a_unit(value: object, size: int) -> None:
    assert from_argument({"segment_bytes": value}) == {"segment_bytes": size}
    assert from_file({"segment_bytes": value}, "covey.toml", is_users=False)["COVEY_SEGMENT_BYTES"]
    assert group_config({"COVEY_SEGMENT_BYTES": str(value)}).segment_bytes == size


@in_turn(value=["64 KB", "-1", "1.5MiB", "", True, 1.0, None, [1], 4095, 1 << 31, "9999999999999999"])
def test_sizes_that_are_none_are_refused_with_the_place_they_stand_in(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^segment_bytes="):
        from_argument({"segment_bytes": value})
    with pytest.raises(ConfigError, match=r"^/w/covey\.toml: segment_bytes="):
        from_file({"segment_bytes": value}, "/w/covey.toml", is_users=True)


def test_a_name_in_a_file_that_is_no_setting_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(
        ConfigError, match=r"/w/covey.toml: covey has no setting 'segment_byte'; did you mean segment_bytes"
    ):
        from_file({"segment_byte": 5}, "/w/covey.toml", is_users=False)
    with pytest.raises(ConfigError, match=r"no setting 'tool'"):
        from_file({"tool": {"covey": {}}}, "/w/covey.toml", is_users=False)


def test_a_name_in_the_argument_that_is_no_setting_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"'hearbeat': .*did you mean heartbeat\?"):
        from_argument({"hearbeat": 1})
    with pytest.raises(ConfigError, match=r"use lanes= of join"):
        from_argument({"lanes": "shm"})
    with pytest.raises(ConfigError, match=r"use COVEY_EVENTS"):
        from_argument({"events": "x"})


def test_the_file_of_a_working_folder_cannot_weaken_security() -> None:
    weakening = {setting.name for setting in SETTINGS.values() if setting.files == USER_FILE}
    assert weakening == {
        "data_folder", "data_total", "insecure", "map_port", "relays", "seeds", "share_output", "store_file", "tls_ca",
        "tls_cert", "tls_key",
    }  # fmt: skip
    values: dict[str, Any] = {"insecure": True, "seeds": ["192.0.2.1:47700"], "tls_ca": "ca.pem"}
    for name, value in values.items():
        with pytest.raises(
            ConfigError, match=f"{name} cannot be set by the folder of a program.*{SETTINGS[name].variable}"
        ):
            from_file({name: value}, "/w/covey.toml", is_users=False)
        assert from_file({name: value}, "/h/covey.toml", is_users=True)


@pytest.mark.parametrize("name", ["cluster", "secret", "secret_file", "home", "events", "run", "native"])
def test_no_file_chooses_a_cluster_a_secret_or_a_file_to_write(name: str) -> None:
    for is_users in (False, True):
        with pytest.raises(ConfigError, match=f"{name} cannot be set in a file; set {SETTINGS[name].variable}"):
            from_file({name: "x"}, "/w/covey.toml", is_users=is_users)


def test_whatever_a_file_may_set_is_read_as_if_the_environment_had_it() -> None:
    content: dict[str, Any] = {"lanes": "tcp", "timeout": 2.5, "interfaces": ["eth*", "!eth9"], "ring_bytes": "64KiB"}
    content |= {"port": 5000, "streams": 4, "on_loss": "continue"}
    assert all(SETTINGS[name].files == ANY_FILE for name in content)
    env = from_file(content, "covey.toml", is_users=False)
    assert env["COVEY_PORT"] == "5000"
    expected = GroupConfig(
        lanes="tcp", timeout=2.5, interfaces="eth*,!eth9", ring_bytes=1 << 16, streams="4", on_loss="continue"
    )
    assert group_config(env) == expected


def test_the_first_source_that_has_a_setting_decides() -> None:
    layers = {"environment": {"COVEY_TIMEOUT": "5"}, "/w": {"COVEY_TIMEOUT": "6", "COVEY_PATIENCE": "7"}}
    found = {each.name: each for each in effective_settings(layers)}
    assert (found["timeout"].value, found["timeout"].source) == ("5", "environment")
    assert (found["patience"].value, found["patience"].source) == ("7", "/w")
    assert (found["lanes"].value, found["lanes"].source) == ("auto", "default")
    assert len(found) == len(SETTINGS)


def test_a_secret_is_not_shown() -> None:
    found = {each.name: each for each in effective_settings({"environment": {"COVEY_SECRET": "hush hush"}})}
    assert found["secret"].value == "(hidden)"
    assert "hush" not in repr(found)


def test_what_ranks_must_agree_on_is_told_only_where_it_is_not_the_default() -> None:
    assert GroupConfig(lanes="tcp", on_loss="continue", patience=3.0).agreed() == ""
    assert GroupConfig(segment_bytes=8192, tree_bytes=0).agreed() == "tree_bytes=0, segment_bytes=8192"
    sizes = {name: each.kind for name, each in SETTINGS.items() if each.is_shared and isinstance(each.kind, ByteCount)}
    most: dict[str, Any] = {name: kind.most for name, kind in sizes.items()}
    assert 0 < len(GroupConfig(**most).agreed()) <= 256, "longer than the field of a Hello"


def test_two_ranks_that_differ_are_told_each_setting_and_both_values() -> None:
    assert differences_of("", "") == []
    assert differences_of("tree_bytes=0", "tree_bytes=0") == []
    assert differences_of("tree_bytes=0, segment_bytes=8192", "segment_bytes=4096") == [
        ("segment_bytes", "8192", "4096"),
        ("tree_bytes", "0", "131072"),
    ]
    assert differences_of("", "new_in_a_later_version=3") == [("new_in_a_later_version", "unknown", "3")]


@pytest.mark.parametrize("name", ["run_size", "run_min_size", "run_max_size"])
def test_a_run_may_have_as_many_nodes_as_a_view_has_members(name: str) -> None:
    setting = SETTINGS[name]
    assert setting.kind.read(name, str(MAX_MEMBERS)) == MAX_MEMBERS
    with pytest.raises(ConfigError, match=f"{name}='{MAX_MEMBERS + 1}' must be a number from 1 to {MAX_MEMBERS}"):
        setting.kind.read(name, str(MAX_MEMBERS + 1))


def test_silences_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_silence=2 must be at least 4\.5 times heartbeat=0\.5"):
        GroupConfig(host_silence=2.0)
    with pytest.raises(ConfigError, match=r"process_silence=4 must be at least host_silence=4\.5"):
        GroupConfig(process_silence=4.0)
    with pytest.raises(ConfigError, match=r"heartbeat=0\.01 must be at least 0\.1 seconds"):
        GroupConfig(heartbeat=0.01)
