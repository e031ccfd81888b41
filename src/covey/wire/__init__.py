"""Bytes to messages and back. Pure, and bounded before memory is taken."""
