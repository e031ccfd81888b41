"""What this process tells other machines of the output of its run here: only if the run was started so that it does.

`covey run` keeps the output, and names its folder to its processes; each of them can tell of all. Whoever asks has
proved the secret of the cluster, and no more: so nothing is told unless COVEY_SHARE_OUTPUT says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.base.settings import SETTINGS
from covey.net.host.machine import short_host_name
from covey.net.host.run_notes import KEPT_FOLDER
from covey.net.host.saved_output import log_end, logs_in, read_log, tail_of
from covey.net.host.settings_files import effective_environment
from covey.wire import reports as wire

SHARED_TAIL_BYTES: Final = 256 << 10
"""What an asker gets of the output before its first question, of all logs together; at least a sixteenth from each."""


def shared_folder() -> Path | None:
    """Return where the output of this run is kept; None if it is not, or if this machine keeps it to itself."""
    folder = os.environ.get(KEPT_FOLDER, "")
    env, row = effective_environment(), SETTINGS["share_output"]
    try:
        is_shared = row.variable in env and row.kind.read(row.variable, env[row.variable])
    except ConfigError:
        return None
    return Path(folder) if folder and is_shared else None


def encode_shared(folder: Path, about: bytes) -> bytes:
    """Return what is new of the logs in a folder, for an asker that knows this; empty if its question is none."""
    try:
        asked = wire.decode_known(about) if about else wire.OutputKnown(())
    except RemoteProtocolError:
        return b""
    known, logs, room, has_more = dict(asked.logs), [], wire.LOGS_BYTES, False
    found = logs_in(folder)[: wire.LOGS_LIMIT]
    for at, (name, path) in enumerate(found):
        fair = max(room // (len(found) - at), 1)
        offset = known.get(name)
        if offset is None:
            tail = max(SHARED_TAIL_BYTES // len(found), SHARED_TAIL_BYTES // 16)
            offset = 0 if asked.wants_all else tail_of(path, tail)
        try:
            batch = read_log(path, offset, fair)
        except (ConfigError, OSError):  # no record begins there: what the asker knows is another log
            continue
        records = tuple(
            wire.ToldRecord(each.stream, each.rank, each.at, each.lines_before, each.data) for each in batch.records
        )
        room = max(0, room - sum(len(each.data) for each in records))
        has_more = has_more or (bool(records) and batch.next < log_end(path))
        logs.append(wire.ToldLog(name, batch.next, records))
    machine = short_host_name()
    return wire.encode(wire.ToldOutput(machine, tuple(logs), has_more))
