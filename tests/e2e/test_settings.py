"""Settings as people give them: files, variables and arguments; `covey config` says which are in effect."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest
from tests.support.jobs import Job, finish, finish_all, new_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = """
import os, sys
os.chdir({folder!r})
from covey.cli.main import main
sys.argv = ["covey", "config", *{words!r}]
main()
"""
SUM = """
import covey, json, os
os.chdir({folder!r})
with covey.join({arguments}) as group:
    print(json.dumps(group.all_reduce(group.rank + 1)))
"""


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        yield made


@pytest.fixture
def folder(job: Job) -> Path:
    made = job.folder / "work"
    made.mkdir()
    return made


def test_config_prints_every_setting_in_effect_and_its_source(job: Job, folder: Path) -> None:
    job.home.mkdir(mode=0o700, exist_ok=True)
    (job.home / "covey.toml").write_text("patience = 9\nsegment_bytes = 8192\n")
    (folder / "covey.toml").write_text('segment_bytes = "1MiB"\n')
    code = CONFIG.format(folder=str(folder), words=["--json"])
    found = {each["name"]: each for each in finish(job.start(code, COVEY_TIMEOUT=5, COVEY_SECRET="hush")).report}
    assert (found["timeout"]["value"], found["timeout"]["source"]) == ("5", "environment")
    assert (found["segment_bytes"]["value"], found["segment_bytes"]["source"]) == ("1MiB", str(folder / "covey.toml"))
    assert (found["patience"]["value"], found["patience"]["source"]) == ("9", str(job.home / "covey.toml"))
    assert found["lanes"]["source"] == "default"
    assert found["secret"]["value"] == "(hidden)"
    table = finish(job.start(CONFIG.format(folder=str(folder), words=["--changed"]), COVEY_TIMEOUT=5, COLUMNS=300)).out
    assert [line.split()[:2] for line in table.splitlines()] == [
        ["SETTING", "VALUE"],
        ["timeout", "5"],
        ["patience", "9"],
        ["segment_bytes", "1MiB"],
        ["home", str(job.home)],
    ]


def test_a_mistake_in_a_file_is_an_error_that_names_the_file_and_the_setting_that_was_meant(
    job: Job, folder: Path
) -> None:
    (folder / "covey.toml").write_text("hearbeat = 1\n")
    ended = finish(job.start(CONFIG.format(folder=str(folder), words=[])))
    assert ended.code == 2
    assert f"{folder / 'covey.toml'}: covey has no setting 'hearbeat'; did you mean heartbeat?" in ended.err
    ended = finish(job.start(SUM.format(folder=str(folder), arguments="")))
    assert "did you mean heartbeat?" in ended.error


def test_ranks_with_different_sizes_fail_at_once_with_the_setting_and_both_values(job: Job, folder: Path) -> None:
    (folder / "covey.toml").write_text('segment_bytes = "1MiB"\n')
    ranks = [
        job.start(SUM.format(folder=str(each), arguments=""), RANK=rank, WORLD_SIZE=2)
        for rank, each in enumerate((folder, job.folder))
    ]
    for ended in finish_all(ranks):
        assert ended.error.startswith("covey.ConfigError")
        assert "segment_bytes is '4194304' on rank 1 and '1048576' on rank 0" in ended.error


def test_an_argument_beats_the_variable_and_the_file(job: Job, folder: Path) -> None:
    (folder / "covey.toml").write_text("tree_bytes = 4\n")
    code = SUM.format(folder=str(folder), arguments="settings={'tree_bytes': 5}")
    code += "    from covey.runtime.group.internals import engine_of\n    print(engine_of(group).config.tree_bytes)\n"
    ranks = job.ranks(code, 2, COVEY_TREE_BYTES=3)
    assert [ended.out.split() for ended in finish_all(ranks)] == [["3", "5"]] * 2


def test_a_file_in_the_working_folder_cannot_turn_encryption_off(job: Job, folder: Path) -> None:
    (folder / "covey.toml").write_text("insecure = true\n")
    ended = finish(
        job.start(SUM.format(folder=str(folder), arguments=""), RANK=0, WORLD_SIZE=2, MASTER_ADDR="192.0.2.1")
    )
    assert ended.error.startswith("covey.ConfigError")
    assert "insecure cannot be set by the folder of a program, because it affects security" in ended.error


def test_a_stopped_process_is_lost_as_soon_as_the_settings_say(job: Job) -> None:
    code = """
import covey, os, signal, sys
settings = {"heartbeat": 0.1, "host_silence": 1, "process_silence": 1.2}
with covey.join(settings=settings) as group:
    group.barrier()
    print("here", flush=True)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()
"""
    ranks = job.ranks(code, 2)
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "here\n"
    try:
        error = finish(ranks[0]).error
        assert error.startswith("covey.PeerLostError")
        silent = re.search(r"silent for ([\d.]+) s", error)
        assert silent, error
        assert 1.2 <= float(silent[1]) < 15, error  # more than 1.2 where both stood still; 15 without the settings
    finally:
        os.kill(ranks[1].pid, signal.SIGKILL)


def test_the_json_of_config_explains_each_setting(job: Job, folder: Path) -> None:
    ended = finish(job.start(CONFIG.format(folder=str(folder), words=["--json"])))
    assert all(each["meaning"] for each in json.loads(ended.out))
