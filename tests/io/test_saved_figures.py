"""The file with the figures of links: bounded, private, replaced as a whole, and a hint that may be anything."""

from __future__ import annotations

import logging
import os
import stat
from typing import TYPE_CHECKING

import msgspec
import pytest

from covey.net.host import saved_figures
from covey.net.host.saved_figures import FIGURES_FILE, OLDEST_SECONDS, is_recent, keep_figures, read_figures
from covey.wire.saved_figures import MAX_FIGURES, SavedFigure, SavedFigures, encode_saved_figures

if TYPE_CHECKING:
    from pathlib import Path

HERE, THERE = b"h" * 32, b"t" * 32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(saved_figures, "_said", set())
    return tmp_path / "home"


def figure(sender: int = 0, speed: float = 1e6, at: float = 1000.0, cluster: bytes = b"c") -> SavedFigure:
    return SavedFigure(cluster, THERE, sender, 0, "eth0", "10.0.0.1", "10.0.0.2", speed, 1e-3, at)


def test_figures_are_added_and_later_ones_replace_those_of_the_same_link(folder: Path) -> None:
    assert read_figures(HERE) == ()
    keep_figures(HERE, [figure(0, 1e6), figure(1, 2e6)])
    keep_figures(HERE, [figure(1, 3e6, at=2000.0), figure(0, 9e6, at=500.0), figure(0, 4e6, cluster=b"d")])
    known = {(each.cluster, each.sender): each.bytes_per_second for each in read_figures(HERE)}
    assert known == {(b"c", 0): 1e6, (b"c", 1): 3e6, (b"d", 0): 4e6}
    assert stat.S_IMODE((folder / FIGURES_FILE).stat().st_mode) == 0o600


def test_the_file_keeps_the_latest_figures_only(folder: Path) -> None:
    keep_figures(HERE, [figure(at % 1000, 1e3 + at, at, bytes([at // 1000])) for at in range(MAX_FIGURES)])
    keep_figures(HERE, [figure(0, 7e6, at=1e9, cluster=b"new")])
    known = read_figures(HERE)
    assert len(known) == MAX_FIGURES
    assert known[-1].bytes_per_second == 7e6
    assert min(each.at for each in known) == 1
    assert (folder / FIGURES_FILE).stat().st_size < 1 << 18


def hostile(good: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "text": b"not msgpack at all",
        "cut": good[:-3],
        "too many": msgspec.msgpack.encode([HERE, [msgspec.to_builtins(figure())] * (MAX_FIGURES + 1)]),
        "a speed that is none": good.replace(msgspec.msgpack.encode(1e6), msgspec.msgpack.encode(float("nan"))),
        "an endless speed": good.replace(msgspec.msgpack.encode(1e6), msgspec.msgpack.encode(float("inf"))),
        "of another machine": encode_saved_figures(SavedFigures(THERE, (figure(),))),
        "nested": b"\x91" * 100_000,
    }


@pytest.mark.parametrize("what", hostile(b""))
def test_a_file_that_is_damaged_or_of_another_machine_is_ignored_with_one_line_and_replaced(
    what: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_figures(HERE, [figure()])
    (folder / FIGURES_FILE).write_bytes(hostile((folder / FIGURES_FILE).read_bytes())[what])
    with caplog.at_level(logging.WARNING, "covey"):
        assert read_figures(HERE) == ()
        assert read_figures(HERE) == ()
        assert len(caplog.records) == 1
        keep_figures(HERE, [figure(3, 5e6)])
    assert [each.sender for each in read_figures(HERE)] == [3]


def test_a_file_that_others_can_read_or_that_is_a_link_is_ignored(folder: Path, tmp_path: Path) -> None:
    keep_figures(HERE, [figure()])
    (folder / FIGURES_FILE).chmod(0o644)
    assert read_figures(HERE) == ()
    (folder / FIGURES_FILE).rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o600)
    (folder / FIGURES_FILE).symlink_to(tmp_path / "elsewhere")
    assert read_figures(HERE) == ()


def test_a_folder_that_cannot_be_used_is_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "covey"):
        keep_figures(HERE, [figure()])
        assert read_figures(HERE) == ()
    assert "not kept for the next run" in caplog.text


def test_nothing_is_left_beside_the_file(folder: Path) -> None:
    keep_figures(HERE, [figure()])
    assert sorted(os.listdir(folder)) == [f".{FIGURES_FILE}.lock", FIGURES_FILE]


def test_old_figures_and_those_of_a_clock_that_was_set_back_are_not_recent() -> None:
    now = 1e9
    assert is_recent(figure(at=now), now)
    assert is_recent(figure(at=now - OLDEST_SECONDS), now)
    assert not is_recent(figure(at=now - OLDEST_SECONDS - 1), now)
    assert not is_recent(figure(at=now + 3600), now)
