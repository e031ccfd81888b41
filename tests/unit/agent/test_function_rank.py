"""A function for other machines: what travels there, and that what comes back is data."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from covey.agent import function_rank
from covey.agent.function_rank import (
    FunctionOutcome,
    arguments_file,
    function_file,
    load_function,
    outcome_of,
    parts_of,
    result_of,
    signature_of,
    values_file,
)
from covey.base.errors import ConfigError, RemoteProtocolError
from covey.runtime.calls.functions import failure_of
from covey.wire.call_values import decoded, pack


@dataclass
class Reading:
    name: str
    values: np.ndarray


def outcome_file(value: Any, rank: int = 0) -> bytes:
    return values_file([msgspec.msgpack.encode(FunctionOutcome(rank)), *pack(value, function_rank.CONVERTER)])


def test_arguments_arrive_as_the_annotations_say() -> None:
    def fn(group: Any, reading: Reading, *more: int) -> None: ...

    signature = signature_of(fn)
    large = np.arange(20_000.0)
    parts = parts_of(arguments_file([Reading("a", large), 4, 5]))
    (reading, *more), named = decoded(signature.arguments, parts[0], parts, function_rank.CONVERTER)
    assert isinstance(reading, Reading)
    assert (reading.values == large).all()
    assert (more, named) == ([4, 5], {})
    parts = parts_of(arguments_file(["no reading"]))
    with pytest.raises(TypeError, match="Expected `object`, got `str`"):
        decoded(signature.arguments, parts[0], parts, function_rank.CONVERTER)


def test_a_function_keeps_its_variables_and_the_types_of_its_annotations() -> None:
    scale = 7

    def fn(group: Any, reading: Reading) -> Reading:
        return Reading(reading.name, reading.values * scale)

    loaded = load_function(function_file(fn))
    assert loaded.__annotations__["reading"] is Reading
    assert (loaded(None, Reading("a", np.ones(2))).values == 7).all()


def test_a_function_of_another_python_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    file = function_file(lambda group: None)
    monkeypatch.setattr(function_rank, "_own_python", lambda: [3, 99])
    with pytest.raises(ConfigError, match=r"made by Python 3\.\d+, and .* is 3\.99; name an interpreter"):
        load_function(file)


@pytest.mark.parametrize("kind", ["asynchronous", "generator", "unknown"])
def test_what_cannot_be_called_there_is_refused_here(kind: str) -> None:
    async def asynchronous(group: Any) -> None: ...

    def generator(group: Any) -> Any:
        yield group

    def unknown(group: Any) -> NoSuchType:  # type: ignore[name-defined]  # noqa: F821
        ...

    with pytest.raises(ConfigError, match=r"asynchronous or a generator|NoSuchType"):
        signature_of(locals()[kind])


def test_a_result_is_of_the_type_that_the_function_promised() -> None:
    def fn(group: Any) -> list[Reading]:
        return []

    outcome, parts = outcome_of(outcome_file([Reading("x", np.ones(3))], rank=2))
    (reading,) = result_of(signature_of(fn), parts)
    assert outcome == FunctionOutcome(2)
    assert isinstance(reading, Reading)
    _, parts = outcome_of(outcome_file([1]))
    with pytest.raises(TypeError, match="Expected `object`, got `int`"):
        result_of(signature_of(fn), parts)


class Trap:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a result was unpickled",))


def test_nothing_that_a_machine_sends_back_is_unpickled() -> None:
    trap = pickle.dumps(Trap())
    _, parts = outcome_of(outcome_file(trap))
    assert result_of(signature_of(lambda group: None), parts) == trap, "bytes stay bytes"
    for file in (trap, values_file([trap]), values_file([])):
        with pytest.raises(RemoteProtocolError):
            outcome_of(file)
    _, parts = outcome_of(values_file([msgspec.msgpack.encode(FunctionOutcome(0)), trap]))
    with pytest.raises((RemoteProtocolError, TypeError)):
        result_of(signature_of(lambda group: None), parts)


def test_a_file_that_was_changed_anywhere_is_an_error_or_other_values_and_nothing_else() -> None:
    def fn(group: Any) -> dict[str, np.ndarray]:
        return {}

    file = outcome_file({"a": np.arange(5), "b": np.ones((2, 3))})
    chance = random.Random(1)
    for _ in range(2000):
        changed = bytearray(file)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            _, parts = outcome_of(bytes(changed[: chance.randrange(len(changed)) if chance.random() < 0.2 else None]))
            result_of(signature_of(fn), parts)
        except (RemoteProtocolError, TypeError):
            pass


def test_a_failure_travels_with_its_class_and_text() -> None:
    failure = failure_of(1, ValueError("no"))
    outcome, _ = outcome_of(values_file([msgspec.msgpack.encode(FunctionOutcome(3, failure))]))
    assert outcome.failure is not None
    assert (outcome.rank, outcome.failure.error, outcome.failure.text) == (3, "ValueError", "no")
