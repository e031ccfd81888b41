"""A member with a valid certificate that speaks broken HTTP/2: the coordinator stays, small, and serves the others."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.security.test_coordinator import options
from tests.support.authorities import Authority
from tests.support.coordinators import coordinate, status
from tests.support.machines import end, new_lab
from tests.support.sets import first

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")

SEEDS = int(os.environ.get("COVEY_FUZZ_SEEDS", "3"))
GROWTH_BYTES = 64 << 20
"""By how much a coordinator may grow, whatever one member sends: each of the courses below sends up to 4 MiB."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
MOST_SECONDS = 2.0
"""How long a member tries to write to a coordinator that reads nothing more of it."""


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def request(path: bytes = b"/covey.Coordinator/GetStatus") -> bytes:
    """Return a block of header fields that gRPC accepts."""
    words = [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    block = b"\x83\x87\x04" + bytes([len(path)]) + path + b"\x01\x01x"
    return block + b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in words)


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([1, 24, 1000, 1 << 18]))


def random_frames(rng: random.Random) -> bytes:
    """Return frames of any kind, some of which have another length than they say."""
    parts = [PREFACE, frame(SETTINGS)]
    for _ in range(rng.randrange(1, 400)):
        payload = rng.choice([rng.randbytes(rng.randrange(40)), request(), rng.randbytes(rng.randrange(20_000))])
        length = None if rng.random() < 0.9 else rng.randrange(1 << 24)
        parts.append(
            frame(rng.randrange(12), payload, rng.randrange(256), rng.choice([0, 1, 3, 5, 1 << 31, 2]), length)
        )
    return b"".join(parts)


def endless_headers(rng: random.Random) -> bytes:
    field = b"\0\x01a" + b"\x7f\x81\x7e" + rng.randbytes(1) * 16_256
    more = b"".join(frame(CONTINUATION, field[:16_384], 0, 1) for _ in range(200))
    return PREFACE + frame(SETTINGS) + frame(HEADERS, request(), 0, 1) + more


def rapid_resets(rng: random.Random) -> bytes:
    parts = [PREFACE, frame(SETTINGS)]
    for stream in range(1, 20_001, 2):
        parts += [frame(HEADERS, request(), END_HEADERS, stream), frame(RST_STREAM, struct.pack(">I", 8), 0, stream)]
    return b"".join(parts)


def open_streams(rng: random.Random) -> bytes:
    """Return requests without an end, each with the beginning of a message that is said to be as long as can be."""
    parts = [PREFACE, frame(SETTINGS)]
    for stream in range(1, 4_001, 2):
        parts += [
            frame(HEADERS, request(), END_HEADERS, stream),
            frame(DATA, b"\0\xff\xff\xff\xff" + bytes(10), 0, stream),
        ]
    return b"".join(parts)


def floods(rng: random.Random) -> bytes:
    """Return frames that each want an answer, which is never read."""
    settings = struct.pack(">HI", rng.randrange(1, 7), rng.getrandbits(32))
    each = rng.choice(
        [frame(PING, bytes(8)), frame(SETTINGS), frame(SETTINGS, settings), frame(PRIORITY, bytes(5), 0, 3)]
    )
    return PREFACE + frame(SETTINGS) + each * 100_000


def windows(rng: random.Random) -> bytes:
    update = frame(WINDOW_UPDATE, struct.pack(">I", rng.choice([0, 1, (1 << 31) - 1])))
    return PREFACE + frame(SETTINGS, struct.pack(">HI", 4, 0)) + update * 50_000


COURSES: tuple[Callable[[random.Random], bytes], ...] = (
    noise, random_frames, endless_headers, rapid_resets, open_streams, floods, windows,
)  # fmt: skip


def speak(context: ssl.SSLContext, where: tuple[str, int], data: bytes) -> socket.socket:
    """Send what the coordinator takes; return the connection, which reads nothing and stays open."""
    sock = context.wrap_socket(socket.create_connection(where, MOST_SECONDS), server_hostname=where[0])
    sock.settimeout(MOST_SECONDS)
    with contextlib.suppress(OSError):
        for at in range(0, len(data), 1 << 14):
            sock.sendall(data[at : at + (1 << 14)])
    return sock


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("seeds", first(1, [1, SEEDS]))
def test_a_member_that_speaks_broken_http_harms_no_other(seeds: int) -> None:
    with new_lab() as lab, contextlib.ExitStack() as stack:
        machine, acme = lab.machine(), Authority(lab.folder, "acme")
        served, alice, mallory = acme.issue("coordinator", "served"), acme.issue("alice"), acme.issue("mallory")
        coordinator, address = coordinate(machine, *options(served))
        context = ssl.create_default_context(cafile=mallory["tls_ca"])
        context.load_cert_chain(mallory["tls_cert"], mallory["tls_key"])
        context.set_alpn_protocols(["h2"])
        host, _, port = address.rpartition(":")
        assert status(machine, address, *options(alice)) == []
        before = resident_bytes(coordinator.pid)
        for seed in range(seeds):
            rng = random.Random(seed)
            for course in COURSES:
                connection = speak(context, (host, int(port)), course(rng))
                if rng.random() < 0.7:
                    stack.enter_context(connection)  # stays half-open
                else:
                    connection.close()
                assert coordinator.poll() is None, f"seed={seed}, {course.__name__}: the coordinator has ended"
                grown = resident_bytes(coordinator.pid) - before
                assert grown < GROWTH_BYTES, f"seed={seed}, {course.__name__}: it has grown by {grown >> 20} MiB"
        assert status(machine, address, *options(alice)) == [], "another member is not served any more"
        stack.close()
        coordinator.send_signal(signal.SIGTERM)
        assert end(coordinator)[0] == 0
