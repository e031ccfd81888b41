"""What a seed of `covey chaos --check` decides, orders that wait for a moment, and records that are checked again."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.waiting import DEADLINE
from tests.unit.lab.test_chaos_checker import FORGERIES, right_history

from covey.base.errors import ConfigError
from covey.lab.chaos import orders
from covey.lab.chaos.checked_run import CIRCUMSTANCES, check_again, draw
from covey.lab.chaos.checker import Circumstances
from covey.lab.chaos.hosts import require_hosts
from covey.lab.chaos.orders import Order
from covey.lab.chaos.records import to_line

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("hosts", [None, 3])
def test_a_seed_draws_the_same_scene_again_and_another_seed_another_one(hosts: int | None) -> None:
    scenes = [draw(seed, hosts=hosts) for seed in range(50)]
    assert scenes == [draw(seed, hosts=hosts) for seed in range(50)]
    assert len({msgspec.json.encode(each) for each in scenes}) == 50
    assert {each.is_one_host for each in scenes} == {hosts is None}


def test_what_is_asked_for_beats_what_the_seed_would_choose() -> None:
    assert draw(1, processes=5).processes == (5,)
    assert draw(1, processes=2, hosts=3).processes == (2, 2, 2)
    assert draw(1, lanes="tcp").lanes == "tcp"
    terms = draw(1, count=0, every=0.5, duration=9.0, min_alive=2, kinds=("kill",)).terms
    assert (terms.count, terms.every, terms.duration, terms.min_alive, terms.kinds) == (0, 0.5, 9.0, 2, ("kill",))
    assert (terms.seed, terms.where, terms.restarts) == (1, "machine", 20)


def test_what_cannot_be_done_is_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="at least 2 processes, so that one is left; got 1"):
        draw(1, processes=1)
    with pytest.raises(ConfigError, match="2 to 16 processes in all; got 17"):
        draw(1, processes=17)
    with pytest.raises(ConfigError, match="above 0"):
        draw(1, every=0.0)
    with pytest.raises(ConfigError, match="knows no 'unplug' on one machine"):
        draw(1, kinds=("unplug",))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root may make network namespaces"):
        require_hosts()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no `ip` command"):
        require_hosts()


# Orders


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / orders.ORDERS_FOLDER).mkdir()
    return str(tmp_path)


def test_an_order_is_taken_by_a_process_that_it_fits_in_its_moment(folder: str) -> None:
    for number, whom in enumerate(("fresh", "old", "first", "any")):
        orders.give(folder, number, Order("restore", whom, 9, 0.1))
    assert orders.take(folder, "split", rank=1, is_fresh=False) is None

    def taken(rank: int, *, is_fresh: bool) -> str:
        order = orders.take(folder, "restore", rank=rank, is_fresh=is_fresh)
        return order.target if order is not None else "none"

    assert taken(2, is_fresh=True) == "fresh"
    assert taken(2, is_fresh=True) == "any"
    assert taken(2, is_fresh=True) == "none"
    assert taken(0, is_fresh=True) == "first"
    assert taken(1, is_fresh=False) == "old"
    assert not orders.are_waiting(folder)


def test_only_one_process_takes_an_order(folder: str) -> None:
    for number in range(50):
        orders.give(folder, number, Order("split", "any", 9, 0.0))
    taken: list[Order] = []

    def take_all() -> None:
        while (order := orders.take(folder, "split", rank=0, is_fresh=False)) is not None:
            taken.append(order)

    threads = [threading.Thread(target=take_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(taken) == 50


def test_orders_that_no_process_took_are_withdrawn(folder: str) -> None:
    for number in range(3):
        orders.give(folder, number, Order("split", "any", 9, 0.0))
    orders.take(folder, "split", rank=0, is_fresh=False)
    assert orders.withdraw(folder) == 2
    assert not orders.are_waiting(folder)


# Records that are checked again


def write(folder: Path, history: dict[str, Any]) -> None:
    (folder / CIRCUMSTANCES).write_bytes(msgspec.json.encode(Circumstances()))
    for name, records in history.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(map(to_line, records)) + b'{"type":"done","sto')  # killed here


def test_records_are_checked_again(tmp_path: Path) -> None:
    write(tmp_path, right_history())
    story = check_again(str(tmp_path))
    assert (story.code, story.problems, story.figures["operations"]) == (0, [], 17)
    history = right_history()
    FORGERIES["a wrong bit"][0](history)
    write(tmp_path, history)
    story = check_again(str(tmp_path))
    assert (story.code, story.figures["operations"], story.folder) == (1, 17, str(tmp_path))
    assert any("WRONG RESULT on b" in problem for problem in story.problems)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a checked run"):
        check_again(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        check_again(str(tmp_path / "nowhere"))
