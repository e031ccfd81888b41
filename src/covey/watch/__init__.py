"""What a person wants to see of machines and runs: collected once a second, without HTTP and without a terminal.

`Collector` asks, `Overview` is what it knows at one moment, and `covey ui`, `covey top` and `covey status --watch` are
views of it. Imports `runtime` and what is below. Used by `ui` and `cli`.
"""
