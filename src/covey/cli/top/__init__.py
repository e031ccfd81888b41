"""`covey top`: a run in a terminal, drawn anew every second.

`state` is what the person has chosen, `frame` draws it (pure), `screen` owns the terminal, `loop` connects them with a
collector.
"""

from covey.cli.top.command import app as app
