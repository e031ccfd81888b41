"""`group.checkpoint`: state is saved on every machine's own disk, and comes back to any ranks, whatever went wrong.

A rank is a thread here, and its machine a folder of its own.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds
from tests.support.sets import first

import covey
from covey import CheckpointError, ConfigError, MismatchError
from covey.proto.shards.boxes import split
from covey.runtime.shards import folder as folders
from covey.runtime.shards.folder import MANIFEST_FILE, ShardFolder, decode_manifest, encode_manifest
from covey.testing import FakeDevice, run_threads
from covey.wire.shards import SHARD_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from covey import Group

SIZE = 1003


def weights(step: int) -> Any:
    return np.random.default_rng(step).standard_normal((SIZE, 6))


def state(group: Group, step: int) -> dict[Any, Any]:
    """Return a state of which each rank has a part, of another length on each."""
    rows = split((SIZE, 6), 0, group.rank, group.size)
    return {
        "weights": covey.Shard(weights(step)[rows.key]),
        "column": covey.Shard(weights(step).astype("f4")[:, group.rank :: group.size], 1),
        "all": {
            "large": weights(step).T,
            "small": [np.array([1, step], np.float32), np.array(True)],
            "none": np.zeros((0, 3)),
        },
        0: ("a tuple", step, None, 1.5, b"bytes"),
    }


def same(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes()


def check(group: Group, loaded: tuple[Any, int], wanted: int | None = None) -> int:
    """Check that a rank has its part of the state of a step, whatever step that is; return it."""
    got, step = loaded
    assert wanted in (None, step)
    same(got["weights"].array, weights(step)[split((SIZE, 6), 0, group.rank, group.size).key])
    assert got["weights"].shape == (SIZE, 6)
    same(got["all"]["large"], weights(step).T)
    same(got["all"]["small"][0], np.array([1, step], np.float32))
    same(got["all"]["small"][1], np.array(True))
    assert got["all"]["none"].shape == (0, 3)
    assert got[0] == ("a tuple", step, None, 1.5, b"bytes")
    return step


def save(group: Group, places: list[Path], *steps: int, **options: Any) -> None:
    for step in steps:
        group.checkpoint.save(state(group, step), step, folder=places[group.rank], **options).wait()


def load(group: Group, places: list[Path], **options: Any) -> int:
    return check(group, group.checkpoint.load(folder=places[group.rank], **options))


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"machine {rank}" for rank in range(5)]


def test_any_number_of_ranks_get_the_state_back_without_one_of_the_machines(places: list[Path]) -> None:
    run_threads(4, save, places, 10, 20, lanes="tcp")
    shutil.rmtree(places[1])  # for good
    for others in (places[:4], [places[0], places[2], places[3]], places[:5]):
        assert set(run_threads(len(others), load, others)) == {20}
    shutil.rmtree(places[2])
    with pytest.raises(ExceptionGroup) as failed:
        run_threads(2, load, [places[0], places[3]])
    texts = {str(error) for error in failed.value.exceptions}
    assert len(texts) == 1, "all ranks raise the same"
    (text,) = texts
    assert all(word in text for word in ("step 20 lacks 1 of 4 shards: 1 (", "complete ones: none"))


def test_ranks_that_share_a_folder_write_nothing_twice_and_need_no_copies(places: list[Path]) -> None:
    run_threads(3, save, [places[0]] * 3, 1)
    assert len(list(places[0].glob("step-*/*.safetensors"))) == 3
    assert run_threads(1, load, [places[0]]) == [1]
    run_threads(4, save, [places[1], places[1], places[2], places[2]], 1)
    for place in places[1:3]:
        assert len(list(place.glob("step-*/*.safetensors"))) == 4, "its own two, and those of the other machine"
        assert run_threads(1, load, [place]) == [1]


def test_replicated_state_is_on_disk_once_and_evenly_split(places: list[Path]) -> None:
    def body(group: Group) -> int:
        values = {"w": np.arange(3 << 20, dtype=np.float64).reshape(-1, 3), "b": np.arange(7)}
        report = group.checkpoint.save(values, 1, folder=places[group.rank], copies=0).wait()
        assert abs(report.bytes_written - report.total_bytes / 3) < 1000
        loaded, _ = group.checkpoint.load(folder=places[group.rank])
        same(loaded["w"], values["w"])
        return report.total_bytes

    assert run_threads(3, body, lanes="shm")[0] < 8 * (3 << 20) + 3000


def test_only_the_newest_remain_and_a_wanted_step_is_found(places: list[Path]) -> None:
    run_threads(2, save, places, 1, 2, 3, 4, 5)
    assert len(list(places[0].glob("step-*"))) == 3

    def body(group: Group) -> list[int]:
        place = places[group.rank]
        assert check(group, group.checkpoint.load(step=4, folder=place)) == 4
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 2 .*\[5, 4, 3\]"):
            group.checkpoint.load(step=2, folder=place)
        save(group, places, 2)  # it went back
        assert check(group, group.checkpoint.load(folder=place)) == 2
        return group.checkpoint.steps(folder=place)

    assert run_threads(2, body) == [[2, 4, 5]] * 2


def test_state_is_filled_in_place_with_any_part_and_whatever_is_not_asked_for_is_not_read(places: list[Path]) -> None:
    run_threads(3, save, places, 7)

    def body(group: Group) -> None:
        rows = slice(0, 1000) if group.rank == 0 else slice(990, SIZE)
        part = np.zeros((rows.stop - rows.start, 6))
        box = covey.Shard(part, shape=(SIZE, 6), offset=(rows.start, 0))
        large = np.zeros((SIZE, 6)).T  # not contiguous
        uneven = np.zeros((1 if group.rank == 0 else SIZE - 1, 6))
        mine = {"weights": box, "all": {"large": large}, 0: (None,) * 5}
        loaded, step = group.checkpoint.load(mine, folder=places[group.rank])
        assert step == 7
        assert loaded["all"]["large"] is large
        assert loaded["weights"] is box
        same(part, weights(7)[rows])
        assert np.array_equal(large, weights(7).T)
        assert loaded[0][1] == 7
        group.checkpoint.load({"weights": covey.Shard(uneven)}, folder=places[group.rank])
        same(uneven, weights(7)[:1] if group.rank == 0 else weights(7)[1:])
        for wrong, text in (
            ({"other": large}, "no array 'other'"),
            ({"weights": covey.Shard(uneven[:0])}, "add up to 0"),
            ({"weights": covey.Shard(uneven.astype("f4"))}, "float32"),
            ({"all": {"large": np.zeros((6, 5))}}, r"covey\.Shard"),
        ):
            with pytest.raises(MismatchError, match=text):
                group.checkpoint.load(wrong, folder=places[group.rank])
        assert group.checkpoint.load(folder=places[group.rank]).step == 7

    run_threads(2, body)


def test_arrays_that_are_changed_after_the_call_are_saved_as_they_were(places: list[Path]) -> None:
    def body(group: Group) -> None:
        values: dict[str, Any] = {"w": np.arange(1 << 20), "n": [1]}
        works = []
        for step in (1, 2):
            works.append(group.checkpoint.save(values, step, folder=places[group.rank]))
            values["w"] += 1
            values["n"][0] += 1
        assert group.all_reduce(1.0) == group.size, "the group is free meanwhile"
        covey.wait_all(works)
        for step in (1, 2):
            loaded = group.checkpoint.load(step=step, folder=places[group.rank]).state
            assert loaded["w"][0] == step - 1
            assert loaded["n"] == [step]

    run_threads(2, body)


def test_tensors_and_foreign_arrays_are_arrays(places: list[Path]) -> None:
    torch = pytest.importorskip("torch")

    def body(group: Group) -> None:
        tensor = torch.arange(6.0).reshape(2, 3).to(torch.bfloat16)
        saved = {"t": tensor, "p": torch.nn.Parameter(torch.ones(3)), "b": covey.Shard(tensor.T[group.rank :: 2])}
        group.checkpoint.save(saved, 1, folder=places[group.rank]).wait()
        mine = {"t": torch.zeros(2, 3, dtype=torch.bfloat16), "p": torch.nn.Parameter(torch.zeros(3))}
        group.checkpoint.load(mine, folder=places[group.rank])
        assert torch.equal(mine["t"], tensor)
        assert torch.equal(mine["p"], saved["p"])

    run_threads(2, body)


def test_arrays_on_devices_and_those_that_cannot_be_changed_are_saved_and_loaded_where_they_live(
    places: list[Path],
) -> None:
    with FakeDevice() as device:

        def body(group: Group) -> None:
            whole, part = device.array(np.arange(6.0)), device.array(np.full(3, group.rank + 1.0))
            saved = {"d": whole, "s": covey.Shard(part)}
            whole.add(1.0)
            group.checkpoint.save(saved, 1, folder=places[group.rank]).wait()
            mine: dict[str, Any] = {"d": device.array(np.zeros(6)), "s": covey.Shard(device.array(np.zeros(3)))}
            loaded = group.checkpoint.load(mine, folder=places[group.rank]).state
            assert loaded["d"] is mine["d"]
            assert loaded["d"].numpy().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
            assert loaded["s"].array.numpy().tolist() == [group.rank + 1.0] * 3

        run_threads(2, body)


@pytest.mark.thorough
def test_arrays_of_jax_are_saved_and_new_ones_are_loaded(places: list[Path]) -> None:
    jax = pytest.importorskip("jax")

    def body(group: Group) -> None:
        group.checkpoint.save({"j": jax.numpy.arange(4.0), "n": 3}, 1, folder=places[group.rank]).wait()
        mine = {"j": jax.numpy.zeros(4), "n": 0}
        loaded = group.checkpoint.load(mine, folder=places[group.rank]).state
        assert isinstance(loaded["j"], jax.Array)
        assert (loaded["j"].tolist(), loaded["n"], mine["j"].tolist()) == ([0.0, 1.0, 2.0, 3.0], 3, [0.0] * 4)

    run_threads(2, body)


# What the ranks do not agree on


def test_ranks_that_differ_are_told_what_in(places: list[Path]) -> None:
    def body(group: Group) -> None:
        rank, place = group.rank, places[group.rank]
        array = np.zeros(3)
        wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            ({"a": {"b": rank}}, {}, MismatchError, r"a\.b differs between rank 0 and rank 1"),
            ({"a": array[rank:]}, {}, MismatchError, "pass covey.Shard"),
            ({"a": array}, {"keep": 1 + rank}, MismatchError, "keep=2"),
            ({"a": object() if rank else 1}, {}, CheckpointError, "rank 1: a is a object, which cannot be saved"),
            ({"a": array}, {"copies": -1}, CheckpointError, "copies=-1"),
            ({"a": array}, {"folder": "/dev/null/x"}, CheckpointError, "rank 0: cannot make the folder"),
        ]
        for values, options, kind, text in wrong:
            work = group.checkpoint.save(values, 1, **{"folder": place, **options})
            with pytest.raises(kind, match=text):
                work.wait()
        assert group.checkpoint.steps(folder=place) == []
        assert not list(place.glob("*step*"))
        with pytest.raises(CheckpointError, match="no checkpoint is on the machines"):
            group.checkpoint.load(folder=place)
        with pytest.raises(CheckpointError, match="pass folder="):
            group.split(0).checkpoint.steps()

    run_threads(2, body)


# Damage


def damage(place: Path, name: str, how: Callable[[bytes], bytes]) -> None:
    for file in place.glob(f"step-*/{name}"):
        file.write_bytes(how(file.read_bytes()))


def flip(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def test_damaged_files_are_replaced_by_copies_and_named_if_there_are_none(places: list[Path]) -> None:
    run_threads(3, save, places, 3)
    damage(places[0], "shard-00000-*", flip)
    damage(places[1], "shard-00001-*", lambda data: data[:-1])
    damage(places[2], MANIFEST_FILE, flip)
    assert run_threads(3, load, places) == [3, 3, 3]
    damage(places[1], "shard-00000-*", flip)
    with pytest.raises(ExceptionGroup) as failed:
        run_threads(3, load, places)
    errors: tuple[Any, ...] = failed.value.exceptions
    assert {error.files for error in errors} == {("shard-00000-of-00003.safetensors",)}


def test_a_manifest_of_a_later_release_is_refused_and_stays_as_it_is(places: list[Path]) -> None:
    run_threads(1, save, places, 3)
    (file,) = places[0].glob(f"step-*/{MANIFEST_FILE}")
    later = file.read_bytes().replace(b'"format": 1', b'"format": 2')
    file.write_bytes(later)
    for function in (load, lambda group, places: save(group, places, 4)):
        with pytest.raises(ExceptionGroup) as failed:
            run_threads(1, function, places)
        assert "later release of covey (format 2" in str(failed.value.exceptions[0])
    assert file.read_bytes() == later
    assert len(list(places[0].glob("step-*"))) == 1


def test_foreign_files_and_links_are_neither_read_nor_deleted(places: list[Path], tmp_path: Path) -> None:
    run_threads(1, save, places, 1)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (places[0] / "notes").write_text("mine")
    fake = places[0] / f"step-0000000009.{'0' * 16}"
    fake.mkdir()
    (fake / MANIFEST_FILE).symlink_to(secret)
    (fake / "shard-00000-of-00001.safetensors").symlink_to(secret)
    assert run_threads(1, load, places) == [1]
    run_threads(1, save, places, 2, 3, 4, 5)
    assert secret.read_text() == "secret"
    assert (places[0] / "notes").read_text() == "mine"
    assert not fake.exists()


def test_chunks_of_large_shards_come_whole_from_several_ranks(places: list[Path]) -> None:
    count = 5 * SHARD_CHUNK_BYTES // 8 + 12345

    def body(group: Group, save_first: bool) -> None:
        values = np.arange(count, dtype=np.int64)
        if save_first:
            group.checkpoint.save({"w": values}, 1, folder=places[group.rank]).wait()
        elif group.rank == 2:
            assert not (places[2] / "place").exists(), "a machine that has nothing"
        same(group.checkpoint.load(folder=places[group.rank]).state["w"], values)

    run_threads(2, body, True)
    run_threads(3, body, False, lanes="tcp")


# Faults at every write


class Faults:
    """Lets the n-th operation on files of covey fail, and all later ones of the same rank if it `stays`."""

    OPERATIONS = ("write", "fsync", "rename", "mkdir", "open", "close", "link", "unlink")

    def __init__(self, at: int, *, stays: bool) -> None:
        self.at, self.stays, self.count = at, stays, 0
        self.failing: int | None = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return self._guarded(name) if name in self.OPERATIONS else getattr(os, name)

    def _fails(self) -> bool:
        with self._lock:
            self.count += 1
            if self.count == self.at:
                self.failing = threading.get_ident()
                return True
            return self.stays and self.failing == threading.get_ident()

    def _guarded(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def operation(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **options)
            if name != "close" and self._fails():
                if name == "write" and len(args[1]) > 1:
                    real(args[0], args[1][: len(args[1]) // 2])  # half of it is there
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        return operation


def saves_with_faults(places: list[Path], faults: Faults, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Save step 1, and with faults 2; check that all can load one of them and save again; return what 2 raised."""

    def body(group: Group) -> str:
        place = places[group.rank]
        save(group, places, 1)
        group.barrier()
        if group.rank == 0:
            monkeypatch.setattr(folders, "os", faults)
        group.barrier()
        try:
            save(group, places, 2)
            text = ""
        except CheckpointError as error:
            text = str(error)
        group.barrier()
        if group.rank == 0:
            monkeypatch.setattr(folders, "os", os)
        group.barrier()
        loaded = check(group, group.checkpoint.load(folder=place))
        assert loaded == 2 or (text and loaded == 1), "a save that failed may be whole all the same"
        save(group, places, 3)
        assert check(group, group.checkpoint.load(folder=place)) == 3
        assert not list(place.glob(".*")), "nothing is left over"
        return text

    try:
        return set(run_threads(2, body))
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("part", first(1, range(5)))
def test_an_error_at_any_write_leaves_the_previous_checkpoint_and_is_the_same_on_all_ranks(
    part: int, places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(0, stays=False)
    assert saves_with_faults(places, faults, monkeypatch) == {""}
    total = faults.count
    assert total > 20
    chance = random.Random("faults")
    for at in range(1 + part, total + 1, 5):
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        said = saves_with_faults(places, Faults(at, stays=chance.random() < 0.5), monkeypatch)
        assert len(said) == 1, f"at {at} of {total}"
        (text,) = said
        assert not text or ("No space left on device" in text and "rank " in text), text


def test_a_folder_that_another_program_saves_into_is_left_alone(places: list[Path]) -> None:
    import fcntl

    run_threads(1, save, places, 1)
    with open(places[0] / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ExceptionGroup) as failed:
            run_threads(1, save, places, 2)
    assert "another program saves into" in str(failed.value.exceptions[0])
    assert run_threads(1, load, places) == [1]


@in_turn(seed=seeds(40))
def test_a_manifest_with_any_byte_changed_is_damaged(seed: int, tmp_path: Path) -> None:
    place = tmp_path / "m"
    if not place.exists():
        run_threads(1, save, [place], 1)
    (part,) = ShardFolder(place).parts()
    assert part.saved is not None
    data = bytearray(encode_manifest(part.saved))
    assert decode_manifest(bytes(data), "m") == part.saved
    chance = random.Random(seed)
    at = chance.randrange(len(data))
    data[at] ^= chance.randrange(1, 256)
    with pytest.raises((CheckpointError, ConfigError)):
        decode_manifest(bytes(data), "m")
