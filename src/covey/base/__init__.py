"""Types, errors and settings that every other layer may use. Pure: no sockets, threads, clocks or files."""
