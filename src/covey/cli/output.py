"""Ends a command with one error line, not a traceback, if standard output cannot be written."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def output_written() -> Iterator[None]:
    """Exit with 1 and an error line if what the block printed cannot be written to standard output."""
    try:
        yield
    except OSError as error:
        # An unbuffered stream drops what it could not write. Writing again shows whether the error was the stream's.
        _flush("\n" if error.errno is not None and error.filename is None else "")
        raise
    finally:
        _flush()


def _flush(more: str = "") -> None:
    if sys.stdout is None:
        return
    try:
        if more:  # an unbuffered stream performs even empty writes, which may fail
            sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or else the interpreter fails again at exit
        os.close(nowhere)
        with contextlib.suppress(OSError):
            print(f"error: output cannot be written ({error.strerror})", file=sys.stderr)
        raise SystemExit(1) from None
