"""Processes of one keeper that are killed and stopped: the run does not end while one of them exists and stays."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from tests.support.plays import performed
from tests.support.seeds import seeds

from covey.lab.churn import Play
from covey.lab.invariants import BrokenError
from covey.lab.workers import Worker
from covey.proto import keeper
from covey.proto.health import STOPPED_SILENCE
from covey.wire.membership import Decided

LOOK_EVERY = 0.1


class StoppedHost(Play):
    """The keeper gives up what `keeping.lost_ranks` says, as a keeper of real processes does."""

    faults = ("crash", "stop", "stop", "stop", "leave")
    surprising = ("crash", "stop", "stop", "crash", "stop")
    sizes = (2, 5)
    giving_up = 0.0

    def __init__(self, seed: int, *, tell: bool = False, **_ignored: Any) -> None:
        super().__init__(seed, has_keeper=True, tell=tell)
        self.min_size, self.world.loss = 1, 0.0
        self.crashed: set[bytes] = set()
        self.stopped_at: dict[bytes, float] = {}
        self.lost: set[int] = set()
        self.members: tuple[int, ...] = tuple(range(len(self.ids)))
        crash = self.world.crash

        def note_crash(id: bytes, **how: Any) -> None:
            self.crashed.add(id)
            crash(id, **how)

        self.world.crash = note_crash  # type: ignore[method-assign]
        self.world.at(0.0, self._look)

    def _judge_all(self, id: bytes, is_dead: bool) -> None:
        """Do nothing: the keeper looks at the processes itself."""

    def _look(self) -> None:
        world = self.world
        world.at(world.now + LOOK_EVERY, self._look)
        for id in self.ids:
            if id in world.nodes and world.nodes[id].backlog is not None:
                self.stopped_at.setdefault(id, world.now)
            else:
                self.stopped_at.pop(id, None)
        node = world.nodes.get(self.keeper or b"")
        if node is None or not isinstance(node.core, Worker):
            return
        core = node.core.core
        exited = [rank for rank, id in enumerate(self.ids) if id in self.crashed]
        stopped = [self.ids.index(id) for id, at in self.stopped_at.items() if world.now >= at + STOPPED_SILENCE]
        stays = [rank for rank in core.view.ranks if rank not in core.leaving]
        lost = keeper.lost_ranks(exited, stopped, stays)
        for rank in sorted(lost ^ self.lost):
            self._judge(self.keeper or b"", self.ids[rank], rank in lost, True)
        self.lost = lost

    def said(self, worker: Worker, message: Any) -> None:
        super().said(worker, message)
        if isinstance(message, Decided) and message.view.successor is None:
            for rank in self.members if not message.view.ranks else ():
                id = self.ids[rank]
                if id not in self.crashed and rank not in self.workers[id].core.leaving:
                    raise BrokenError(f"the run ended although rank {rank} exists: {message.view}")
            self.members = message.view.ranks


def test_a_run_does_not_end_while_a_process_that_stays_exists() -> None:
    scenes = [performed(StoppedHost(seed)) for seed in seeds(60)]
    assert any(len(scene.members) == 1 for scene in scenes), "no run was left with one member"


def test_a_keeper_that_gives_up_every_stopped_process_is_caught() -> None:
    with mock.patch.object(keeper, "lost_ranks", lambda exited, stopped, _stays: {*exited, *stopped}):
        for seed in range(400):
            try:
                StoppedHost(seed).perform()
            except BrokenError as broken:
                if "the run ended although" in str(broken):
                    return
    pytest.fail("400 plays did not notice")
