"""Two ends of a TLS handshake without the door in front of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from covey.net.keys.tls import Channel
from covey.runtime.links.link import Link

if TYPE_CHECKING:
    import socket

    from covey.net.keys.tls import Credentials


async def secure_end(sock: socket.socket, credentials: Credentials, *, dialled: bool) -> tuple[Link, bytes]:
    """Take one end of a handshake; return the link, and the id at the other end."""
    if not dialled:
        return await Link.accepted(sock, credentials, b"")
    channel = Channel(credentials, dialled=True)
    await asyncio.get_running_loop().sock_sendall(sock, channel.shake())
    return await Link.dialled(sock, channel)
