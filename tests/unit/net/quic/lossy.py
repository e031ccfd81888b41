"""Two carriers on a network in memory that loses, repeats, reorders and alters datagrams, in virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.net.quic.carrier import Carrier, QuicCredentials, accept, dial
from covey.net.quic.line import Entering, FirstDatagrams
from covey.wire import quic

if TYPE_CHECKING:
    from covey.net.quic.carrier import Address

KEY = bytes(range(32))
DIALLER: Address = ("10.0.0.1", 1000)
ACCEPTOR: Address = ("10.0.0.2", 2000)
HORIZON = 600.0
"""Virtual seconds after which a story is over."""
CREDENTIALS = QuicCredentials(KEY)


@dataclass(frozen=True)
class Faults:
    loss: float = 0.0
    repeats: float = 0.0
    alters: float = 0.0
    delay: float = 0.01
    jitter: float = 0.0


class Pair:
    """A dialler and the carrier that accepts it, if it does."""

    def __init__(self, seed: int, faults: Faults, keys: tuple[bytes, ...] = (KEY,)) -> None:
        self.random, self.faults, self._keys = random.Random(seed), faults, keys
        self.now = 100.0
        cid = quic.proving_cid(KEY, self.random.randbytes(quic.CID_NONCE_BYTES))
        self.dialler = dial(CREDENTIALS.dialling, cid, ACCEPTOR, self.now)
        self.acceptor: Carrier | None = None
        self.first = FirstDatagrams()
        self._on_the_way: list[tuple[float, int, bool, bytes]] = []
        self._count = 0
        self.sent = {True: 0, False: 0}
        """Bytes of datagrams, by whether the dialler sent them."""
        self.dialler_address = DIALLER

    def ends(self) -> list[Carrier]:
        return [self.dialler] if self.acceptor is None else [self.dialler, self.acceptor]

    def turn(self) -> None:
        """Send what is to be sent, then go on to what happens next."""
        for end in self.ends():
            for data, _ in end.datagrams(self.now):
                self._send(data, to_acceptor=end is self.dialler)
        dues = [end.due() for end in self.ends() if not end.is_over]
        if self._on_the_way:
            dues.append(self._on_the_way[0][0])
        self.now = max(self.now, min(dues, default=self.now + 1.0))
        while self._on_the_way and self._on_the_way[0][0] <= self.now:
            _, _, to_acceptor, data = heapq.heappop(self._on_the_way)
            self._deliver(data, to_acceptor=to_acceptor)
        for end in self.ends():
            if not end.is_over and end.due() <= self.now:
                end.tick(self.now)

    def _send(self, data: bytes, *, to_acceptor: bool) -> None:
        faults, chance = self.faults, self.random
        self.sent[to_acceptor] += len(data)
        if chance.random() < faults.loss:
            return
        if chance.random() < faults.alters:
            at = chance.randrange(len(data))
            data = data[:at] + bytes((data[at] ^ (1 << chance.randrange(8)),)) + data[at + 1 :]
        for _ in range(1 + (chance.random() < faults.repeats)):
            self._count += 1
            due = self.now + faults.delay + chance.uniform(0, faults.jitter)
            heapq.heappush(self._on_the_way, (due, self._count, to_acceptor, data))

    def _deliver(self, data: bytes, *, to_acceptor: bool) -> None:
        if not to_acceptor:
            self.dialler.receive([data], ACCEPTOR, self.now)
            return
        cid = quic.destination_of(data)
        if self.acceptor is not None and cid in self.acceptor.ids:
            self.acceptor.receive([data], self.dialler_address, self.now)
            return
        found = self.first.judge(data, self.dialler_address, self._keys, self.now)
        if isinstance(found, Entering):
            if self.acceptor is None:
                self.first.entered(found)
                self.acceptor = accept(CREDENTIALS.accepting, found.original, found.chosen, self.now)
                self.acceptor.receive([data], self.dialler_address, self.now)
        elif found:
            assert len(found) < len(data), "an answer to a stranger is shorter than the question"
            self._send(found, to_acceptor=False)
