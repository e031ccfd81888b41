"""Meshes: the ranks of a group as a grid; and what split groups know of the group that they come from."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import covey
from covey.runtime.group.mesh import coordinate_of, rank_of
from covey.testing.threads import run_threads


def test_places_and_ranks_are_one_order() -> None:
    shape = (2, 3, 4)
    places = list(itertools.product(*map(range, shape)))
    assert [coordinate_of(rank, shape) for rank in range(24)] == places
    assert [rank_of(place, shape) for place in places] == list(range(24))


def test_sums_along_each_axis_are_those_of_its_ranks() -> None:
    def body(group: covey.Group) -> list[Any]:
        with covey.Mesh((2, -1), ("hosts", "devices"), group) as mesh:
            assert mesh.shape == (2, 3)
            assert mesh.rank_at(*mesh.coordinate) == group.rank
            assert repr(mesh).startswith("<Mesh hosts=2, devices=3 of ")
            across, along = mesh["hosts"], mesh["devices"]
            assert [across.to_parent(rank) for rank in range(across.size)] == [group.rank % 3, group.rank % 3 + 3]
            assert [along.to_local(rank) for rank in range(6)].index(along.rank) == group.rank
            assert along.to_local((group.rank + 3) % 6) is None
            assert along.parent is group
            assert group.parent is None
            assert group.to_local(group.rank) == group.rank
            return [float(each.all_reduce(np.full(2, 10.0**group.rank))[0]) for each in (across, along)]

    sums = run_threads(6, body)
    assert sums == [[10.0 ** (rank % 3) + 10.0 ** (rank % 3 + 3), 111.0 if rank < 3 else 111000.0] for rank in range(6)]


def test_a_mesh_that_does_not_fit_is_refused_and_the_group_goes_on() -> None:
    def body(group: covey.Group) -> None:
        for shape, names, words in (
            ((2, 2), ("a", "b"), r"shape \(2, 2\) .* each of the 3 ranks"),
            ((-1, -1), ("a", "b"), "does not have a place"),
            ((2, -1), ("a", "b"), "does not have a place"),
            ((0, -1), ("a", "b"), "does not have a place"),
            ((3,), ("a", "b"), "one name for each axis"),
            ((1, 3), ("a", "a"), "one name for each axis"),
            ((), (), "one name for each axis"),
        ):
            with pytest.raises(covey.ConfigError, match=words):
                covey.Mesh(shape, names, group)
        with covey.Mesh([1, 3], ["one", "all"], group) as mesh:
            assert (mesh["one"].size, mesh["all"].size) == (1, 3)
            with pytest.raises(covey.ConfigError, match="no axis 'rows'; it has 'one', 'all'"):
                mesh["rows"]
            with pytest.raises(covey.ConfigError, match=r"\(0, 3\) is no place"):
                mesh.rank_at(0, 3)
        with pytest.raises(covey.ClosedError):
            mesh["all"].barrier()
        group.barrier()

    run_threads(3, body)


def test_settings_of_a_group_are_told_and_cannot_be_changed() -> None:
    def body(group: covey.Group) -> None:
        assert group.settings.lanes == "memory"
        assert group.settings.check_every == 9
        with pytest.raises(AttributeError):
            group.settings.lanes = "tcp"  # type: ignore[misc]

    run_threads(1, body, settings={"check_every": 9})


def test_the_election_names_one_leader_and_the_term() -> None:
    def body(group: covey.Group) -> Any:
        group.barrier()
        return group.node.election

    found = run_threads(3, body, on_loss="continue")
    assert [(each.leader, each.generation, each.view) for each in found] == [(0, 0, 0)] * 3
    assert [each.state for each in found] == ["leading", "following", "following"]
    with covey.join() as alone:
        assert alone.node.election == ("leading", 0, 0, 0)
