"""This release and a later one, each in processes of its own: what they speak, and what they say if they cannot.

`tests.support.later_release` builds the later one. It adds an optional field and an optional message, which this one
skips; and a field that it needs where its feature is used, or everywhere if it requires the feature.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.jobs import Ended, Job, finish_all, new_job
from tests.support.later_release import FEATURE, RELEASE, build
from tests.support.machines import heard
from tests.support.waiting import DEADLINE

from covey.base.version import __version__
from covey.wire.versions import FEATURES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PRELUDE = """
import json, logging, os, sys, time
import numpy as np
import covey
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.node import node_of

sys.argv[0] = "job.py"  # nodes of a run have the same program
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")

def say(what):
    print(json.dumps(what), flush=True)

def work(group):
    x = np.arange(5_001, dtype=np.float64) * (group.rank + 1)
    group.all_reduce(x)
    speaks = node_of(group).speaks
    return dict(
        rank=group.rank, size=group.size, sums=[float(x[1]), float(x[-1])], version=speaks.version,
        features=sorted(speaks.features), releases=[member.version for member in group.members],
    )

"""
JOIN = (
    PRELUDE
    + """
options = json.loads(os.environ.pop("TEST_JOIN", "{}"))
say("joining")
with covey.join(**options) as group:
    report = work(group)
    if "TEST_HOLDS" in os.environ:
        say(report)
        sys.stdin.readline()
        group.barrier()
say(report)
"""
)
ELASTIC = (
    PRELUDE
    + """
options = json.loads(os.environ.pop("TEST_JOIN"))
say("joining")
for group in covey.generations(**options):
    report = work(group)
    say(report)
    if group.size == 3:
        break
    while not group.change_pending:
        group.barrier()
        time.sleep(0.01)
"""
)


class Releases:
    """Starts programs with this release of covey, or with a later one."""

    def __init__(self, job: Job, builds: Path) -> None:
        self._job, self._builds, self._secret = job, builds, secrets.token_hex(32)

    def later(self, **changes: object) -> str:
        """Return where a later release is that was built with these changes, by this test or one before it."""
        folder = self._builds / "-".join(["later", *(f"{name}-{value}" for name, value in sorted(changes.items()))])
        if not (folder / "covey").exists():
            build(folder, **changes)  # type: ignore[arg-type]
        return str(folder)

    def start(self, code: str, later: str = "", **env: object) -> subprocess.Popen[str]:
        """Start a program with this release, or with that in the folder `later`."""
        self._job.popen = subprocess.Popen if later else forked.Popen
        return self._job.start(code, **(env | {"PYTHONPATH": later} if later else env))

    def node(
        self, later: str = "", *, code: str = JOIN, holds: bool = False, **options: object
    ) -> subprocess.Popen[str]:
        """Start a node of a cluster."""
        env = {"TEST_HOLDS": 1} if holds else {}
        home = self._job.folder / f"home{len(self._job.processes)}"
        return self.start(
            code, later, COVEY_SECRET=self._secret, COVEY_INTERFACES="lo", COVEY_HOME=home,
            TEST_JOIN=json.dumps({"run": "mine", "timeout": DEADLINE, **options}), **env,
        )  # fmt: skip

    def rank(self, rank: int, size: int, later: str = "", **env: object) -> subprocess.Popen[str]:
        """Start a rank as a launcher would."""
        return self.start(JOIN, later, RANK=rank, WORLD_SIZE=size, **env)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Later releases, which programs of all tests here use."""
    return tmp_path_factory.mktemp("releases")


@pytest.fixture
def releases(builds: Path) -> Iterator[Releases]:
    with new_job() as job:
        yield Releases(job, builds)


def check_run(ended: list[Ended], version: int, features: list[str], later: int) -> None:
    reports = sorted((each.report for each in ended), key=lambda report: report["rank"])
    size = len(reports)
    factor = size * (size + 1) / 2
    for report in reports:
        assert (report["version"], report["features"]) == (version, features)
        assert report["sums"] == [factor, 5_000 * factor]
        assert report["releases"].count(RELEASE) == later
        assert report["releases"].count(__version__) == size - later


@pytest.mark.parametrize("first", ["this", "later"])
def test_ranks_of_two_releases_speak_the_older_protocol_whichever_dials(releases: Releases, first: str) -> None:
    """The higher rank dials. What the later release has added is skipped, and its feature is not used."""
    later = releases.later()
    ranks = [releases.rank(rank, 3, later if (rank == 0) == (first == "later") else "") for rank in range(3)]
    check_run(finish_all(ranks), 3, [*FEATURES], 1 if first == "later" else 2)


@pytest.mark.thorough
def test_ranks_of_the_later_release_alone_speak_what_it_has_added(releases: Releases) -> None:
    ranks = [releases.rank(rank, 2, releases.later()) for rank in range(2)]
    check_run(finish_all(ranks), 4, sorted([FEATURE, *FEATURES]), 2)


def test_nodes_of_two_releases_found_a_run_that_speaks_the_older_protocol(releases: Releases) -> None:
    nodes = [releases.node(later, size=3) for later in ("", releases.later(), releases.later())]
    check_run(finish_all(nodes), 3, [*FEATURES], 2)


FEATURE_NEEDED, VERSION_DROPPED = {"requires": True}, {"oldest": 4}
thorough = pytest.mark.thorough


@pytest.mark.parametrize(
    ("dials", "changes"),
    [
        pytest.param("this", FEATURE_NEEDED, id="this-feature"),
        pytest.param("later", VERSION_DROPPED, id="later-version"),
        pytest.param("this", VERSION_DROPPED, id="this-version", marks=thorough),
        pytest.param("later", FEATURE_NEEDED, id="later-feature", marks=thorough),
    ],
)
def test_ranks_that_cannot_talk_all_end_at_once_with_the_machine_to_update(
    releases: Releases, dials: str, changes: dict[str, object]
) -> None:
    later = releases.later(**changes)
    ended = finish_all(
        [releases.rank(rank, 2, later if (rank == 1) == (dials == "later") else "") for rank in range(2)]
    )
    for each in ended:
        assert each.error.startswith("covey.ConfigError"), each.err
        check_words(each.error, changes)


def check_words(text: str, changes: dict[str, object]) -> None:
    host = os.uname().nodename
    assert f"covey {RELEASE}" in text
    assert f"covey {__version__}" in text
    if "requires" in changes:
        assert f"{host} (covey {RELEASE}) needs {FEATURE}, which {host} (covey {__version__}) does not know" in text
    else:
        assert f"{host} speaks protocol 4 (covey {RELEASE})" in text or f"{host} speaks 4 (covey {RELEASE})" in text
        assert f"speaks protocol 3 (covey {__version__})" in text or f"speaks 3 (covey {__version__})" in text
    assert f": update covey on {host} for process " in text


@pytest.mark.parametrize(
    "changes",
    [pytest.param(FEATURE_NEEDED, id="feature"), pytest.param(VERSION_DROPPED, id="version", marks=thorough)],
)
def test_nodes_that_cannot_talk_both_say_which_machine_to_update(
    releases: Releases, changes: dict[str, object]
) -> None:
    """Each node hears of it whichever of the two dials: the one that dials is told, the other one tells."""
    nodes = [releases.node(later, size=2, holds=True) for later in ("", releases.later(**changes))]
    for node in nodes:
        assert heard(node) == "joining"
        assert node.stderr is not None
        found = next(line for line in node.stderr if "update covey on" in line)
        check_words(found, changes)


def test_a_newer_node_joins_a_run_of_an_older_release_and_speaks_its_protocol(releases: Releases) -> None:
    older = [releases.node(code=ELASTIC, min_size=2) for _ in range(2)]
    for node in older:
        assert heard(node) == "joining"
        assert heard(node)["size"] == 2
    newer = releases.node(releases.later(), code=ELASTIC, min_size=2)
    ended = finish_all([*older, newer])
    check_run(ended, 3, [*FEATURES], 1)
    assert {each.report["size"] for each in ended} == {3}


@pytest.mark.thorough
def test_an_older_node_is_told_that_a_run_of_newer_ones_speaks_another_protocol(releases: Releases) -> None:
    newer = [releases.node(releases.later(), code=ELASTIC, min_size=2) for _ in range(2)]
    for node in newer:
        assert heard(node) == "joining"
        assert heard(node)["version"] == 4
    older = releases.node(code=ELASTIC, min_size=2)
    assert heard(older) == "joining"
    assert older.stderr is not None
    found = next(line for line in older.stderr if "update covey" in line)
    assert f"speaks protocol 4 (covey {RELEASE}), this node 3 (covey {__version__})" in found
    assert "update covey here" in found


def test_a_message_that_must_not_be_skipped_ends_the_link_and_both_ends_say_why(releases: Releases) -> None:
    later = releases.later()
    ranks = [releases.rank(0, 2, TEST_HOLDS=1), releases.rank(1, 2, later, TEST_DEMANDS=1, TEST_HOLDS=1)]
    host = os.uname().nodename
    for rank in ranks:
        assert rank.stderr is not None
        found = next(line for line in rank.stderr if "update covey on" in line)
        assert f"{host} (covey {RELEASE}) sent a control message of an unknown type, 900, which" in found
        assert f"{host} (covey {__version__}) does not know: update covey on {host} for process {ranks[0].pid}" in found
