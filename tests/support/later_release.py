"""Builds later releases of covey: this tree, with edits such as a later release would make.

The edits add a version of the protocol, a feature, an optional field, a field that is required where the feature is
used, a message that earlier releases skip, and one that they cannot skip. A program uses such a build if its folder is
on PYTHONPATH; it is started by `subprocess`, since a forked program has imported this tree already.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

RELEASE: Final = "9.9.0"
FEATURE: Final = "weather"
_SOURCE: Final = Path(__file__).parents[2] / "src" / "covey"
_EDITS: Final = {
    "base/version.py": [('__version__ = "0.1.0.dev0"', f'__version__ = "{RELEASE}"')],
    "wire/versions.py": [
        ("NEWEST: Final = 3\n", "NEWEST: Final = 4\n"),
        (", WIDE_STORE)", f', "{FEATURE}", WIDE_STORE)'),
    ],
    "wire/messages.py": [
        (
            'run\'s store (`store_file`)."""\n\n\ndef key_of',
            'run\'s store (`store_file`)."""\n    mood: Name = "calm"\n\n\ndef key_of',
        ),
        ("    clock: Seconds\n\n\nclass Forming", '    clock: Seconds\n    weather: Name = ""\n\n\nclass Forming'),
        (
            "HandshakeMessage = Hello",
            "class Rumour(msgspec.Struct, frozen=True, array_like=True, tag=1000):\n    text: Name\n\n\n"
            "class Demand(msgspec.Struct, frozen=True, array_like=True, tag=900):\n    text: Name\n\n\n"
            "HandshakeMessage = Hello",
        ),
        ("    | StreamNews\n)", "    | StreamNews\n    | Rumour\n    | Demand\n)"),
    ],
    "runtime/links/link.py": [
        (
            '        self.data_received(b"")\n        if self.ended.is_set():\n            on_end()\n',
            "        self.send(messages.encode(messages.Rumour('rain')))\n"
            "        if __import__('os').environ.get('TEST_DEMANDS') == '1':\n"
            "            self.send(messages.encode(messages.Demand('now')))\n"
            '        self.data_received(b"")\n        if self.ended.is_set():\n            on_end()\n',
        ),
    ],
    "runtime/peers/cluster_mesh.py": [  # a member may ask before the other has its seat
        (
            "                remote.send(messages.Pong(number, time.time()))\n",
            "                remote.send(messages.Pong(number, time.time(), 'sun'))\n",
        ),
    ],
    "runtime/views/views.py": [
        (
            "        self._peers.send(seat, messages.Pong(ping.number, time.time()))\n",
            f"        said = 'sun' if {FEATURE!r} in self.speaks.features else ''\n"
            "        self._peers.send(seat, messages.Pong(ping.number, time.time(), said))\n",
        ),
        (
            "        self.losses.answered(seat, pong.number, pong.clock)\n",
            f"        if {FEATURE!r} in self.speaks.features and not pong.weather:\n"
            "            raise __import__('covey').RemoteProtocolError('a Pong without its weather')\n"
            "        self.losses.answered(seat, pong.number, pong.clock)\n",
        ),
    ],
}


def build(folder: Path, *, requires: bool = False, oldest: int = 3) -> Path:
    """Write a later release into a folder; return what a program puts on PYTHONPATH to use it.

    It speaks protocol `oldest` to 4, and with `requires` only with processes that know its feature. Modules that are
    not edited bring their bytecode: it counts as long as the time of the source is the same.
    """
    made = folder.with_name(f"{folder.name}-part")  # a build that fails is no release of this one
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(_SOURCE, made / "covey", ignore=shutil.ignore_patterns("native"))
    for name, edits in _EDITS.items():
        _edit(made / "covey" / name, edits)
    versions = made / "covey" / "wire" / "versions.py"
    if requires:
        _edit(versions, [("REQUIRED: Final[tuple[str, ...]] = ()", "REQUIRED: Final = FEATURES")])
    _edit(versions, [("OLDEST: Final = 3\n", f"OLDEST: Final = {oldest}\n")])
    made.rename(folder)
    return folder


def _edit(path: Path, edits: list[tuple[str, str]]) -> None:
    text = path.read_text()
    for before, after in edits:
        assert text.count(before) == 1, f"{path.name} has changed: {before!r}"
        text = text.replace(before, after)
    path.write_text(text)
