"""The rules of covey's protocols as state machines without I/O: bytes and calls in, bytes and results out."""
