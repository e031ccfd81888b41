"""What a seed of `covey chaos --check` decides, orders that wait for a moment, and records that are checked again."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.waiting import DEADLINE
from tests.unit.lab.test_chaos_checker import FORGERIES, right_history

from covey.base.errors import ConfigError
from covey.lab.chaos.checked import orders
from covey.lab.chaos.checked.campaign import Campaign, check_records
from covey.lab.chaos.checked.checked_run import CIRCUMSTANCES
from covey.lab.chaos.checked.checker import Circumstances
from covey.lab.chaos.checked.hosts import require_hosts
from covey.lab.chaos.checked.orders import MOMENTS, Order
from covey.lab.chaos.checked.plan import HOSTS, LOCAL, draw
from covey.lab.chaos.checked.records import to_line

if TYPE_CHECKING:
    from pathlib import Path

    from covey.lab.chaos.checked.plan import Scene


def scene(seed: int, **changes: Any) -> Scene:
    chosen: dict[str, Any] = {"processes": None, "hosts": None, "kinds": (), "every": 1.5, "count": 8, "lanes": ""}
    return draw(seed, **chosen | changes)


@pytest.mark.parametrize("hosts", [None, 3])
def test_a_seed_draws_the_same_scene_again_and_another_seed_another_one(hosts: int | None) -> None:
    scenes = [scene(seed, hosts=hosts) for seed in range(50)]
    assert scenes == [scene(seed, hosts=hosts) for seed in range(50)]
    assert len({msgspec.json.encode(each) for each in scenes}) == 50


@pytest.mark.parametrize(("hosts", "known"), [(None, LOCAL), (4, HOSTS)])
def test_every_kind_of_fault_and_every_moment_comes_up(hosts: int | None, known: dict[str, Any]) -> None:
    troubles = [trouble for seed in range(200) for trouble in scene(seed, hosts=hosts).troubles]
    assert {trouble.kind for trouble in troubles} == set(known)
    given = [trouble.order for trouble in troubles if trouble.order is not None]
    assert {order.moment for order in given} == set(MOMENTS)
    assert {order.signal for order in given} == {signal.SIGKILL, signal.SIGSTOP}
    assert all((order.seconds > 0) == (order.signal == signal.SIGSTOP) for order in given)
    assert all((trouble.kind == "order") == (trouble.order is not None) for trouble in troubles)


def test_faults_come_in_order_about_as_often_as_asked_for() -> None:
    times = [trouble.at for trouble in scene(3, count=400, every=2.0).troubles]
    assert times == sorted(times)
    assert 1.8 < (times[-1] - times[0]) / 399 < 2.2
    counts = Counter(trouble.kind for trouble in scene(3, count=400, kinds=("kill", "cut")).troubles)
    assert counts.keys() == {"kill", "cut"}


def test_what_is_asked_for_beats_what_the_seed_would_choose() -> None:
    assert scene(1, processes=5).processes == (5,)
    assert scene(1, processes=2, hosts=3).processes == (2, 2, 2)
    assert scene(1, lanes="tcp").lanes == "tcp"
    assert scene(1, count=0).troubles == ()
    with pytest.raises(ConfigError, match="knows no 'unplug' on one machine; choose from kill"):
        scene(1, kinds=("unplug",))
    with pytest.raises(ConfigError, match="knows no 'all' across hosts"):
        scene(1, kinds=("all",), hosts=3)


def campaign(**changes: Any) -> Campaign:
    chosen: dict[str, Any] = {
        "seed": 1, "runs": 1, "processes": None, "hosts": None, "kinds": ("kill",), "every": 1.0, "count": 1,
        "lanes": "", "as_json": False,
    }  # fmt: skip
    return Campaign(**chosen | changes)


def test_what_cannot_be_done_is_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="2 to 16 processes"):
        campaign(processes=1)
    with pytest.raises(ConfigError, match="2 to 16 processes in all; got 17"):
        campaign(processes=17)
    with pytest.raises(ConfigError, match="above 0"):
        campaign(every=0.0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root may make network namespaces"):
        campaign(hosts=3)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no `ip` command"):
        require_hosts()


# Orders


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / orders.FOLDER).mkdir()
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


def test_records_are_checked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, right_history())
    assert check_records(str(tmp_path), as_json=False) == 0
    assert capsys.readouterr().out.startswith("passed: 17 operations")
    history = right_history()
    FORGERIES["a wrong bit"][0](history)
    write(tmp_path, history)
    assert check_records(str(tmp_path), as_json=False) == 1
    assert "WRONG RESULT on b" in capsys.readouterr().out
    assert check_records(str(tmp_path), as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["right"] is False
    assert told["runs"][0]["figures"]["operations"] == 17


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a checked run"):
        check_records(str(tmp_path), as_json=False)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_records(str(tmp_path / "nowhere"), as_json=False)
