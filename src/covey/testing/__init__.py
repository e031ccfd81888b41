"""Tools to test programs that use covey: whole groups inside one process."""
