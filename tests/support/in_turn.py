"""Many cases in one test: seeds, sizes and the like are a loop, and a failure names the case.

pytest needs a few milliseconds for each test that it collects, sets up and reports, which is more than most of such
cases take, and a list of a thousand dots hides what failed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MOST_CHARACTERS: Final = 200


def in_turn(**cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with every combination of the values of these parameters, the last one changing fastest.

    A note at the error tells the values. Fixtures are the same for all of them.
    """
    values = {name: list(of_name) for name, of_name in cases.items()}
    assert all(values.values()), f"nothing to try: {values}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        assert values.keys() <= signature.parameters.keys(), f"{test.__name__} lacks one of {list(values)}"

        @functools.wraps(test)
        def try_all(**fixtures: Any) -> None:
            for chosen in itertools.product(*values.values()):
                case = dict(zip(values, chosen, strict=True))
                try:
                    test(**case, **fixtures)
                except BaseException as error:
                    error.add_note("with " + ", ".join(f"{name}={_shown(value)}" for name, value in case.items()))
                    raise

        others = [parameter for name, parameter in signature.parameters.items() if name not in values]
        try_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return try_all

    return decorate


def _shown(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
