"""Standard output that cannot be written: a command ends with one line about it instead of a traceback."""

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
        # An unbuffered stream forgets what it could not write. Another byte shows whether this was the stream's error.
        _flush("\n" if error.errno is not None and error.filename is None else "")
        raise
    finally:
        _flush()


def _flush(more: str = "") -> None:
    if sys.stdout is None:
        return
    try:
        if more:  # an unbuffered stream writes nothing, too, and may fail at it
            sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or else the interpreter fails once more when it ends
        os.close(nowhere)
        with contextlib.suppress(OSError):
            print(f"error: output cannot be written ({error.strerror})", file=sys.stderr)
        raise SystemExit(1) from None
