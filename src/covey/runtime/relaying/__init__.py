"""Relays: programs at which two nodes meet that cannot connect with each other. `covey relay` runs one.

One asyncio loop, of the program's own. Imports the room of links for its limits on sources. Called by the command line.
"""
