"""Two sets of tests: those of `make test`, and the rest, marked `thorough`, which only `make test-all` runs whole.

A test is thorough if it takes long and a change seldom breaks it alone: other tests, of `make test`, guard the same
promise. So that the rest does not rot, CI runs a fifth of it, which the hash of the commit chooses: `--fifth COMMIT`.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PARTS: Final = 5
Function = TypeVar("Function", bound="Callable[..., Any]")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fifth",
        type=lambda text: int(text, 16) % PARTS,
        metavar="COMMIT",
        help="of the tests marked thorough, run the fifth that the hash of this commit chooses",
    )
    parser.addoption("--fifth-of-all", action="store_true", help="with --fifth: of all tests, not only those")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.option.fifth
    if part is None:
        return
    of_all = config.option.fifth_of_all
    left_out = {item for item in items if part_of(item) != part or not (of_all or item.get_closest_marker("thorough"))}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def part_of(item: pytest.Item) -> int:
    """Return the part of a test; cases of one function are in the same one."""
    return zlib.crc32(item.nodeid.partition("[")[0].encode()) % PARTS


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`: only so many, the first, are in `make test`."""
    return [case if place < count else _thorough(case) for place, case in enumerate(cases)]


def only(chosen: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`: only those that are chosen are in `make test`."""
    kept = list(chosen)
    return [case if case in kept else _thorough(case) for case in cases]


def in_part(name: str, cases: Sequence[Any], count: int = 2) -> Callable[[Function], Function]:
    """Parametrize a test with these cases, of which `make test` has so many: the name of the test chooses them.

    So each case has its share of the tests of a file, and each test some of the cases.
    """

    def decorate(test: Function) -> Function:
        start = zlib.crc32(test.__name__.encode())
        chosen = [cases[(start + 2 * place) % len(cases)] for place in range(count)]
        decorated: Function = pytest.mark.parametrize(name, only(chosen, cases))(test)
        return decorated

    return decorate


def pairs(ones: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return all pairs for `parametrize`: `make test` has as few of them as have every one and every other."""
    fewer = min(len(ones), len(others))
    return [
        (one, other) if place % fewer == other_place % fewer else _thorough(one, other)
        for place, one in enumerate(ones)
        for other_place, other in enumerate(others)
    ]


def _thorough(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.thorough)
