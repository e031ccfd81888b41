"""A file that a later release has written is refused with one sentence, and its bytes stay as they are."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.in_turn import in_turn

from covey.agent import data_store
from covey.agent.data_sets import DataFile, DataManifest
from covey.base.errors import ConfigError
from covey.coordinator.state_file import StateFile
from covey.net.audit import audit_log
from covey.net.host import folders, run_notes, saved_figures, saved_runs
from covey.net.host.store_file import StoreFile
from covey.net.keys import clusters, identity, owner, trust
from covey.net.keys.clusters import Cluster
from covey.proto.ballot import first_record
from covey.runtime.joining.records import Records
from covey.wire.formation import Ending, Remembered
from covey.wire.membership import Bound, MemberKey
from covey.wire.messages import Wait
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Callable

CLUSTER = Cluster(ClusterSecret("lab", b"k" * 32))
LINEAGE = b"l" * 16
BOUND = Bound(1, first_record([MemberKey(b"i" * 32, b"l" * 16)], LINEAGE), LINEAGE)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))


def as_json(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: msgspec.json.encode({**msgspec.json.decode(data), "of a later release": [1], **changes})


def as_array(*, at: int) -> Callable[[bytes], bytes]:
    """The number of the format is where it was, and the other fields are no more what they were."""

    def change(data: bytes) -> bytes:
        fields = msgspec.msgpack.decode(data)
        assert fields[at] == 1
        return msgspec.msgpack.encode([*({"new": "layout"} for _ in fields[:at]), 2, "of a later release"])

    return change


def write_log() -> None:
    audit_log.append([audit_log.Note("lab", "met")])


def records() -> Records:
    return Records("lab", "run", b"i" * 32)


def figures() -> None:
    saved_figures.keep_figures(b"m" * 32, [])


def save_run() -> None:
    record = saved_runs.RunSummary(name="train", began=1.0, pid=1)
    saved_runs.SavedRun(record, output_bytes=0, total_bytes=1 << 20).end(0, "")


def keep_wait() -> None:
    wait = Wait("nodes", "1 of 2 nodes so far")
    run_notes.keep_wait(
        run_notes.FailedWait(run="train", cluster="lab", at=time.time(), seconds=60.0, node="n", wait=wait)
    )


MANIFEST = DataManifest([DataFile("empty", 0, b"")])


def publish() -> None:
    store = data_store.DataStore()
    partial, _ = store.begin("set", MANIFEST, 1 << 30)
    partial.check(lambda: False, [])
    store.publish("set", partial, "north")
    partial.close()


FILES: dict[str, tuple[Callable[[], Any], str, Callable[[bytes], bytes], Callable[[], Any]]] = {
    "cluster": (
        lambda: clusters.save(CLUSTER),
        "clusters/lab.json",
        as_json(version=2),
        lambda: clusters.save(CLUSTER),
    ),
    "known": (
        lambda: clusters.save(CLUSTER),
        "clusters/lab.json",
        as_json(version=2),
        lambda: clusters.remember_waiting("lab", b"i" * 32, "a node"),
    ),
    "trust": (
        lambda: trust.remember(CLUSTER, {b"i" * 32: "a machine"}),
        "trusted.json",
        as_json(version=2),
        lambda: trust.remember(CLUSTER, {b"j" * 32: "another"}),
    ),
    "ssh hosts": (
        lambda: trust.remember_ssh_hosts(["north"]),
        "ssh-hosts.json",
        as_json(version=2),
        lambda: trust.remember_ssh_hosts(["south"]),
    ),
    "identity": (
        identity.own_machine,
        "identities/0.key",
        lambda data: data.strip() + b" format=2\n",
        identity.own_machine,
    ),
    "owner": (
        lambda: owner.make("lab"),
        "clusters/lab.owner",
        lambda data: data.strip() + b" format=2\n",
        lambda: owner.held(CLUSTER),
    ),
    "record": (lambda: records().write(BOUND), "runs/*.record", as_array(at=4), lambda: records().read()),
    "lineages": (
        lambda: records().remember(Remembered(ended=(Ending(LINEAGE, True),))),
        "runs/*.lineages",
        as_array(at=3),
        lambda: records().remember(Remembered(ended=(Ending(b"m" * 16, True),))),
    ),
    "last wait": (
        keep_wait,
        "last-wait",
        as_json(format=2),
        lambda: run_notes._read_wait(folders.existing() / run_notes.LAST_WAIT_FILE),
    ),
    "run": (save_run, "history/*/about", as_json(format=2), saved_runs.past_runs),
    "pushed data": (
        lambda: data_store.remember_pushed("set", Path("/data"), MANIFEST),
        "pushed/*/pushed.json",
        as_json(format=2),
        lambda: data_store.data("set"),
    ),
    "data set": (publish, "data/*/current.json", as_json(format=2), lambda: data_store.data("set")),
    "audit": (write_log, "audit/head", as_json(format=2), write_log),
    "store": (
        lambda: StoreFile(folders.home() / "store").write(0, (("key", b"value"),)),
        "store",
        as_array(at=0),
        lambda: StoreFile(folders.home() / "store").read(),
    ),
}
"""By name: what writes the file, where it is, what a later release makes of it, and what would change it."""


@in_turn(name=FILES)
def test_a_file_of_a_later_release_is_refused_and_not_changed(name: str, tmp_path: Path) -> None:
    write, pattern, change, use = FILES[name]
    write()
    (path,) = folders.existing().glob(pattern)
    newer = change(path.read_bytes())
    path.write_bytes(newer)
    before = {each: each.read_bytes() for each in folders.existing().rglob("*") if each.is_file()}
    with pytest.raises(ConfigError) as raised:
        use()
    assert "was written by a later release of covey (format 2, and this release reads up to 1)" in str(raised.value)
    assert str(raised.value).endswith("update covey on this machine. The file was not changed")
    assert {each: each.read_bytes() for each in before} == before
    path.unlink()


def test_figures_of_a_later_release_are_not_used_nor_replaced(caplog: pytest.LogCaptureFixture) -> None:
    figures()
    path = folders.existing() / saved_figures.FIGURES_FILE
    path.write_bytes(newer := as_array(at=2)(path.read_bytes()))
    assert saved_figures.read_figures(b"m" * 32) == ()
    figures()
    assert path.read_bytes() == newer
    assert all("a later release" in record.message for record in caplog.records)
    assert len(caplog.records) == 2


def test_the_state_of_a_later_coordinator_is_not_opened(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state")
    state.close()
    path = tmp_path / "state" / "coordinator.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA user_version=2")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="a later release of covey"):
        StateFile(tmp_path / "state")
    assert path.read_bytes() == before


def test_a_failed_wait_is_kept_for_its_cluster_until_its_run_has_begun() -> None:
    assert run_notes.last_wait("lab") is None
    keep_wait()
    found = run_notes.last_wait("lab")
    assert found is not None
    assert (found.run, found.wait.text) == ("train", "1 of 2 nodes so far")
    assert run_notes.last_wait("home") is None
    run_notes.forget_wait("evaluate", "lab")
    assert run_notes.last_wait("lab") == found
    run_notes.keep_wait(msgspec.structs.replace(found, at=found.at - run_notes.WAIT_RECENT_SECONDS - 1))
    assert run_notes.last_wait("lab") is None
    run_notes.keep_wait(found)
    run_notes.forget_wait("train", "lab")
    assert run_notes.last_wait("lab") is None
    run_notes.keep_wait(found)
    path = folders.existing() / run_notes.LAST_WAIT_FILE
    path.write_bytes(newer := as_json(format=2)(path.read_bytes()))
    run_notes.keep_wait(found)
    assert path.read_bytes() == newer, "that of a later release stays"
    path.write_bytes(b"damaged")
    assert run_notes.last_wait("lab") is None
