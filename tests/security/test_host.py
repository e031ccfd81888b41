"""Other users of the same host: they find nothing they can read, and stop nothing by being there first."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.attackers import new_cluster, victim

from covey.base.errors import ConfigError
from covey.net.discovery.host_registry import HostRegistry
from covey.net.keys import clusters
from covey.net.keys.identity import NodeIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def shared_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of all users, in which another user was first to take the name of ours."""
    with tempfile.TemporaryDirectory(prefix="covey-sec-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        taken = Path(folder, f"covey-{os.getuid()}")
        taken.mkdir()
        taken.chmod(0o777)
        yield Path(folder)


def test_a_folder_that_others_may_write_to_is_not_used(shared_folder: Path) -> None:
    with pytest.raises(ConfigError, match="0700"):
        HostRegistry("tag")
    assert [path.name for path in shared_folder.iterdir()] == [f"covey-{os.getuid()}"]


def test_a_user_that_takes_the_name_of_our_folder_is_noticed_at_once(shared_folder: Path) -> None:
    """A node that could not be found by others must not start and wait for them."""
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"), victim(new_cluster()):
        pass


def test_everything_on_disk_is_for_its_owner_only(home: Path) -> None:
    clusters.save(new_cluster())
    with NodeIdentity.acquire(), victim(new_cluster()):
        folders = [home, *Path(tempfile.gettempdir()).glob(f"covey-{os.getuid()}/nodes-*")]
        files = [path for folder in folders for path in (folder, *folder.rglob("*"))]
        loose = [path for path in files if path.exists() and path.stat().st_mode & 0o077]
        assert [path for path in loose if not path.is_socket()] == []  # what counts for those is their folder


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o602, 0o666])
def test_a_secret_that_others_may_read_or_write_is_refused(home: Path, mode: int) -> None:
    path = clusters.save(new_cluster())
    path.chmod(mode)
    with pytest.raises(ConfigError):
        clusters.load("prey")


def test_a_link_in_place_of_a_secret_is_refused(home: Path, tmp_path: Path) -> None:
    path = clusters.save(new_cluster())
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ConfigError):
        clusters.load("prey")
