"""A state on disk: covey saves what `group.restore` was given when a run has to end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import DTYPES
from covey.base.errors import ConfigError
from covey.net.host import folders
from covey.runtime.buffers import readable
from covey.wire import objects

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORMS: Final = "covey/forms"
"""The key of a table by name: dtype and shape of an array, None for a value."""


def save_state(state: Mapping[str, Any], name: str) -> str:
    """Write a state to `name`.npz in the working folder, else in covey's own folder; return the path.

    Raises:
        ConfigError: neither folder can be written to.
        TypeError: the state holds a value that `group.restore` does not accept either.
    """
    forms: dict[str, Any] = {}
    contents: dict[str, np.ndarray[Any, Any]] = {}
    for key, value in state.items():
        try:
            operand = readable(value)
        except TypeError:
            forms[key], contents[key] = None, np.frombuffer(objects.encode(value), np.uint8)
        else:
            forms[key] = [DTYPES[operand.code].name, list(operand.shape)]
            contents[key] = operand.load().view(np.uint8)
    contents[_FORMS] = np.frombuffer(objects.encode(forms), np.uint8)
    problem: OSError | None = None
    for folder in (Path.cwd(), folders.private_folder(folders.home() / "runs")):
        path = folder / f"{name}.npz"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                np.savez(file, **contents)  # type: ignore[arg-type]  # a name could be one of its options
            return str(path)
        except OSError as error:
            problem = error
    raise ConfigError(f"the state could not be saved: {problem}")


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a state that covey saved when a run had to end (`SplitRunError.saved`): arrays and values by name."""
    by_name = {dtype.name: dtype for dtype in DTYPES}
    state: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as contents:
        for key, form in objects.decode(contents[_FORMS].tobytes()).items():
            if form is None:
                state[key] = objects.decode(contents[key].tobytes())
            else:
                state[key] = contents[key].view(by_name[form[0]]).reshape(form[1])
    return state
