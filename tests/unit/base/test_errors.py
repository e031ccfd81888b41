from __future__ import annotations

import inspect
import pickle

import pytest
from tests.support.in_turn import in_turn

from covey.base import errors
from covey.base.errors import CoveyError, DeadlineError, PeerLostError, RankFailedError, Remedy

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CoveyError)]


@in_turn(kind=[kind for kind in KINDS if kind is not CoveyError])
def test_every_error_stands_in_the_tree_with_its_remedy(kind: type[CoveyError]) -> None:
    tree = [line for line in (errors.__doc__ or "").splitlines() if line.startswith(("├──", "└──"))]
    lines = [line for line in tree if line.split()[1] == kind.__name__]
    assert len(lines) == 1
    assert lines[0].split()[-1] == kind.remedy.name
    assert kind.__doc__


def test_errors_are_also_what_python_code_expects() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.ConnectError, ConnectionError)
    assert {kind.remedy for kind in KINDS} == set(Remedy)


def test_errors_carry_their_facts() -> None:
    lost = PeerLostError("gone", rank=3, host="north", operation="barrier()", sequence=7)
    assert (lost.rank, lost.host, lost.operation, lost.sequence) == (3, "north", "barrier()", 7)
    assert DeadlineError("late", late=(1, 2)).late == (1, 2)
    assert RankFailedError("died", rank=1, exit_code=-9).exit_code == -9


@pytest.mark.parametrize(
    "error",
    [
        errors.MismatchError("differs"),
        DeadlineError("late", late=(1, 2)),
        PeerLostError("gone", rank=3, host="north", operation="barrier()", sequence=7),
        RankFailedError("died", rank=1, exit_code=-9),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_way_from_another_process(error: CoveyError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
