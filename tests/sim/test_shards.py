"""Saves that crash anywhere, machines that vanish: the newest checkpoint that was told to be saved can be loaded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.proto.shards.choice import FoundCheckpoint, complete, found_checkpoints, next_serial, to_delete
from covey.proto.shards.layout import copy_targets, folders_of
from covey.wire.shards import CheckpointPart

NBYTES = 100
STEPS = 120


@dataclass
class Disk:
    """The folder of one machine: what of each checkpoint is in it."""

    step: dict[str, int] = field(default_factory=dict)
    manifest: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Serial number and number of shards."""
    files: dict[str, set[int]] = field(default_factory=dict)

    def parts(self) -> list[CheckpointPart]:
        found = []
        for name, step in self.step.items():
            serial, count = self.manifest.get(name, (0, 0))
            files = tuple((number, NBYTES) for number in sorted(self.files[name]))
            found.append(CheckpointPart(name, step, serial, b"d" * bool(serial), (NBYTES,) * count, files))
        return found

    def delete(self, names: list[str]) -> None:
        for name in names:
            for each in (self.step, self.manifest, self.files):
                each.pop(name, None)


class CrashError(Exception):
    """All processes are killed."""


class Runs:
    """Runs that save, one after the other, on some of the machines."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disks = {bytes([n]) * 16: Disk() for n in range(self.chance.randint(2, 5))}
        self.keep, self.copies = self.chance.randint(1, 3), self.chance.randint(1, 2)
        self.saves = 0
        self.saved: list[tuple[str, int]] = []
        """Names and steps of checkpoints that were told to be saved."""
        self.fuse = 0

    def act(self) -> None:
        """Do one thing to a disk, unless everything is killed before it."""
        self.fuse -= 1
        if self.fuse == 0:
            raise CrashError

    def save(self, members: list[bytes], step: int) -> None:
        chance = self.chance
        self.saves += 1
        name = f"{self.saves:016x}"
        folders = folders_of({rank: (place, place.hex()) for rank, place in enumerate(members)})
        targets = copy_targets(folders, self.copies)
        kept = {place: self.disks[place].parts() for place in members}
        serial = next_serial(kept)
        writes = [(members[t], rank) for rank in range(len(members)) for t in (rank, *targets[rank])]
        chance.shuffle(writes)
        for place, number in writes:
            self.act()
            self.disks[place].step[name] = step
            self.disks[place].files.setdefault(name, set()).add(number)
        for place in chance.sample(members, len(members)):
            self.act()
            self.disks[place].manifest[name] = serial, len(members)
        self.saved.append((name, step))
        new = FoundCheckpoint(serial, step, name, b"d", (members[0],), ((members[0],),))
        for place in chance.sample(members, len(members)):
            for old in to_delete(kept[place], found_checkpoints(kept), new, self.keep):
                self.act()
                self.disks[place].delete([old])

    def loadable(self, machines: list[bytes]) -> list[FoundCheckpoint]:
        return complete(found_checkpoints({place: self.disks[place].parts() for place in machines}))


@in_turn(seed=seeds(200))
def test_what_was_saved_last_can_be_loaded_after_crashes_and_without_a_machine(seed: int) -> None:
    runs = Runs(seed)
    chance, everyone = runs.chance, list(runs.disks)
    step = 0
    for _ in range(STEPS // 4):
        step = max(0, step + chance.choice([1, 1, 1, -2]))
        runs.fuse = chance.choice([0, 0, chance.randint(1, 30)])
        try:
            runs.save(everyone, step)
        except CrashError:
            pass
        else:
            kept = {each.step for each in runs.loadable(everyone)}
            assert len(kept) <= runs.keep, "old ones are deleted"
            assert {each.id for each in runs.loadable(everyone)} >= {runs.saved[-1][0]}
            assert all(len(disk.step) <= runs.keep for disk in runs.disks.values()), "and what crashed, too"
        if runs.saved:
            newest = runs.saved[-1][0]
            for gone in (None, *everyone):
                found = runs.loadable([place for place in everyone if place != gone])
                assert found, "there is always one, also without any one machine"
                assert found[0].id >= newest, "never an older one"


@in_turn(seed=seeds(100))
def test_without_a_newer_complete_checkpoint_nothing_is_deleted(seed: int) -> None:
    runs = Runs(seed)
    everyone = list(runs.disks)
    for step in range(4):
        runs.fuse = runs.chance.choice([0, 5])
        try:
            runs.save(everyone, step)
        except CrashError:
            continue
    kept = {place: runs.disks[place].parts() for place in everyone}
    broken = FoundCheckpoint(99, 9, "f" * 16, b"d", (everyone[0],), ((everyone[0],), ()))
    for new in (None, broken):
        assert all(to_delete(parts, found_checkpoints(kept), new, 1) == [] for parts in kept.values())


def test_the_last_saved_is_the_newest_after_a_program_went_back_to_an_earlier_step() -> None:
    runs = Runs(0)
    everyone = list(runs.disks)
    runs.keep = 3
    for step in (100, 200, 300, 150):
        runs.save(everyone, step)
    assert [each.step for each in runs.loadable(everyone)] == [150, 300, 200]
    runs.save(everyone, 300)
    assert [each.step for each in runs.loadable(everyone)] == [300, 150, 200], "a step that is saved again is replaced"
