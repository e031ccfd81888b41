"""Encodes messages as bytes and decodes them. Pure; sizes are checked before memory is allocated."""
