"""Write docs/reference/settings.md from the table of settings.

    python -m tools.settings_reference

`make docs` runs this, and a test compares the page with the table.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.settings import ANY_FILE, SETTINGS, SETTINGS_FILE, USER_FILE

if TYPE_CHECKING:
    from covey.base.settings import Setting

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
HEAD: Final = """\
# Settings

<!-- Made by `python -m tools.settings_reference` from the table of settings: do not edit. -->

A setting has the value of the first of these that names it:

1. an argument of `covey.join`, or a key of its argument `settings=`;
2. the environment variable `COVEY_` and the name in capitals: `COVEY_TIMEOUT`;
3. `covey.toml` in the working folder;
4. `covey.toml` in the configuration folder (`~/.config/covey`);
5. its default.

`covey config` prints the values that are in effect, and where each comes from. An unknown name or a malformed value is
an error, with the name that was probably meant.

```toml
# covey.toml
timeout = 120
segment_bytes = "1MiB"
interfaces = ["eth*", "!docker*"]
```

Sizes are numbers of bytes, or text with KiB, MiB or GiB. Times are seconds. In the column `covey.toml`, *user* means
that only the file in the configuration folder may have the setting: the file in a working folder may come from another
person, together with the program, and must not [weaken security](../security.md#settings-in-files).

Settings marked **=** must have the same value on all ranks of a run. If two ranks differ, `covey.join` raises
`ConfigError` on a launcher's ranks, naming the setting and both values; nodes of a cluster refuse each other for the
same reason, and `DeadlineError` lists it.
"""
FILES: Final = {ANY_FILE: "yes", USER_FILE: "user", "": ""}


def _row(setting: Setting) -> str:
    argument = f"`{setting.argument}`" if setting.argument else ""
    default = f"`{setting.shown_default}`" if setting.default not in (None, "") else ""
    shared = " **=**" if setting.is_shared else ""
    cells = (f"`{setting.name}`{shared}", setting.kind.words, default, argument, FILES[setting.files], setting.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for section, settings in groupby(SETTINGS.values(), key=lambda setting: setting.section):
        head = [
            f"## {section}",
            "",
            f"| name | type | default | argument | {SETTINGS_FILE} | what it does |",
            "|---|---|---|---|---|---|",
        ]
        parts.append("\n".join([*head, *map(_row, settings)]) + "\n")
    return "\n".join(parts)


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
