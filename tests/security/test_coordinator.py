"""What a coordinator refuses: strangers, other secrets and certificates, and workers that pose as others."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from tests.support.authorities import Authority
from tests.support.coordinators import coordinate, status, work
from tests.support.machines import end, heard, new_lab

from covey.base.errors import ConfigError
from covey.coordinator import security
from covey.coordinator.certificates import derived, key_of, subject_of
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.net.keys.pem_files import PemFiles
from covey.runtime.environment import ClusterOptions
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machines import Lab, Machine


def options(files: dict[str, str]) -> list[str]:
    return [word for name, path in files.items() for word in (f"--{name.replace('_', '-')}", path)]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


def ended(worker: subprocess.Popen[str]) -> str:
    """Return the last line of the error with which a worker failed."""
    code, _, err = end(worker)
    assert code == 1
    return err.strip().splitlines()[-1]


def register(machine: Machine, address: str, worker: str, **config: object) -> None:
    """Let a worker be alone in a run, and leave it."""
    process = work(machine, address, worker, size=1, **config)
    assert heard(process)[0] == "before"
    assert heard(process)[:2] == ["started", 0]
    assert end(process)[0] == 0


def test_only_holders_of_the_secret_are_heard_and_each_worker_has_its_own_key(lab: Lab) -> None:
    key = secrets.token_bytes(32)
    one, two, other = (lab.machine(name, "lab", key) for name in ("one", "two", "other"))
    other.enroll("lab", secrets.token_bytes(32))
    _, address = coordinate(one, "--cluster", "lab")
    register(two, address, "w0", cluster="lab")
    assert "AuthError" in (error := ended(work(one, address, "w0", size=1, cluster="lab")))
    assert "'w0' of run 'run' was registered by key" in error
    register(two, address, "w0", cluster="lab")  # the same key again
    (run,) = status(one, address, "--cluster", "lab")
    assert (run["round"], run["workers"][0]["worker_id"]) == (2, "w0")
    for words in (("--cluster", "lab"), ()):  # another secret; clear text
        refused = other.covey("coordinator", "status", address, *words)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "cannot be reached" in refused.stderr


def test_certificates_decide_who_is_heard_and_are_read_again_when_they_change(lab: Lab) -> None:
    machine = lab.machine()
    acme, rogue = Authority(lab.folder, "acme"), Authority(lab.folder, "rogue")
    served = acme.issue("coordinator", "served")
    alice, bob = acme.issue("alice"), acme.issue("bob")
    _, address = coordinate(machine, *options(served))
    register(machine, address, "w0", **alice)
    assert "subject CN=alice, not by subject CN=bob" in ended(work(machine, address, "w0", size=1, **bob))
    register(machine, address, "w0", **acme.issue("alice"))  # renewed, with another key
    mallory = rogue.issue("alice")
    for wrong in (mallory, mallory | {"tls_ca": alice["tls_ca"]}):  # another authority; its certificate only
        refused = machine.covey("coordinator", "status", address, *options(wrong))
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "cannot be reached" in refused.stderr
    rogue.issue("coordinator", "served")  # the organisation moves to another authority
    (lab.folder / "acme-ca.pem").write_bytes((lab.folder / "rogue-ca.pem").read_bytes())
    assert status(machine, address, *options(mallory))[0]["round"] == 2


def test_files_in_the_middle_of_a_renewal_change_nothing(tmp_path: Path) -> None:
    acme = Authority(tmp_path, "acme")
    named = acme.issue("alice")
    files = PemFiles.of(*named.values())
    assert files is not None
    good = files.read()
    assert subject_of(good.chain) == "subject CN=alice"
    before = (tmp_path / "acme-alice.key").read_bytes()
    acme.issue("alice")
    after = (tmp_path / "acme-alice.key").read_bytes()
    (tmp_path / "acme-alice.key").write_bytes(before)  # the certificate is new, the key is not
    assert files.read() == good
    (tmp_path / "acme-alice.key").write_bytes(after)
    assert files.read() != good
    (tmp_path / "acme-alice.key").unlink()
    assert files.read().key == after
    with pytest.raises(ConfigError, match="cannot read"):
        PemFiles(**{name.removeprefix("tls_"): path for name, path in named.items()}).read()
    (tmp_path / "acme-alice.key").write_bytes(before)
    with pytest.raises(ConfigError, match="is not the key of the certificate"):
        PemFiles(**{name.removeprefix("tls_"): path for name, path in named.items()}).read()


def test_a_certificate_without_a_subject_is_known_by_its_names_and_garbage_by_nothing(tmp_path: Path) -> None:
    acme = Authority(tmp_path, "acme")
    named = acme.issue("", "nameless")
    content = (tmp_path / "nameless.pem").read_bytes()
    assert subject_of(content) == "names 127.0.0.1"
    assert key_of(content).startswith("key ")
    assert subject_of(b"garbage") == key_of(b"garbage") == ""
    assert named["tls_cert"].endswith("nameless.pem")


def test_a_changed_secret_is_used_for_the_next_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(security, "READ_SECONDS", 0.0)
    before, after = ClusterSecret("lab", bytes(32)), ClusterSecret("lab", bytes(31) + b"1")
    clusters.save(Cluster(before))
    saved = security.SecretSecurity(ClusterOptions("lab"))
    given = security.SecretSecurity(ClusterOptions("other", bytes(32)))
    assert saved.find().secret == before
    clusters.save(Cluster(after))
    assert saved.find().secret == after
    assert given.find().secret.key == bytes(32)  # it was given, and is in no file


def test_keys_differ_by_machine_and_role_and_stay_the_same(tmp_path: Path) -> None:
    secret, before = ClusterSecret("lab", bytes(32)), ClusterSecret("lab", bytes(31) + b"1")
    found = {}
    for home in ("one", "two"):
        with patch.dict("os.environ", COVEY_HOME=str(tmp_path / home)):
            for role in ("worker/run/w0", "worker/run/w1", "server"):
                papers = derived(secret, before, role)
                assert derived(secret, None, role).key == papers.key
                assert papers.authorities.count(b"BEGIN CERTIFICATE") == 2
                found[home, role] = key_of(papers.chain)
    assert len(set(found.values())) == len(found)
