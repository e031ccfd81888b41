"""Bounds of messages that other rooms need too, without the messages, which take long to load."""

from __future__ import annotations

from typing import Final

NAME_LIMIT: Final = 100
REASON_LIMIT: Final = 200
"""Characters of a program's error in messages to other ranks."""
MAX_MEMBERS: Final = 1024
"""Members of a view. This many fit into one control frame, whatever their names and contacts."""
REPORT_NAMES: Final = 32
"""Names that a program may report."""
REPORT_NAME_LETTERS: Final = 40
REPORT_ROWS: Final = 4096
"""Rows of reports that a process keeps."""
