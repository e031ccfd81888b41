"""Failure detection: each member judges the others by what it *received* from them, never by what it could send.

Any message on a peer's link is a sign of life; only a peer that was quiet for an interval is pinged. A peer on this
node's own machine is pinged rarely while its keeper vouches for it. A silent peer is first suspected, later dead. How
soon depends on other evidence:

- *Another sign from its machine* (of another member, of the keeper, an acknowledgement of its kernel) tells a busy
  process from a dead host. A host that can give such signs and gives none is dead after HOST_SILENCE. A process on a
  host that is heard, or that never gave other signs, has PROCESS_SILENCE: it may only be in a long C call.
- *The keeper*, which sees its processes in the kernel, vouches for a process that is alive and busy, and reports one
  that is stopped or has exited.
- *The end of a link* proves nothing about the machine behind it, and a reset can be forged. It makes a peer suspected
  at once, and changes no deadline.

Time in which this node did not listen does not count as silence of its peers. A late tick reveals such time: the node
was suspended, or its interpreter was held. The node then suspects no peer, and shifts its deadlines by that time.

These are opinions, and a sign of life takes them back; only the exit of a process is final. All members agree on what
follows from an opinion (`proto.membership`).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final, TypeAlias

INTERVAL: Final = 0.5
"""Seconds without a message after which a peer is pinged, and between the reports of a keeper. A quiet pair exchanges
some four small messages a second."""
REPEAT: Final = INTERVAL / 2
"""Seconds between pings while none is answered: on a bad link each is another chance."""
SUSPECT_LEAST: Final = 3 * INTERVAL
"""Seconds of silence that make a peer suspected on a perfect link: four pings were not answered and the fifth is sent.
A message that is lost, or stalls for 200 ms as on Wi-Fi, does not matter."""
SUSPECT_MOST: Final = 3.0
"""The same on the worst link, and on one that was never measured. It leaves time before HOST_SILENCE to dial anew:
after an outage TCP waits as long again before it retransmits, a new connection does not."""
HOST_SILENCE: Final = 4.5
"""Seconds without any sign from a machine after which it is dead: with half a second for messages on the way and for
this node's own timers, a pulled cable is noticed in under 5 s."""
PROCESS_SILENCE: Final = 15.0
"""The same for one process, if nothing shows that its machine is dead: longer than ordinary code keeps an interpreter
from running other threads."""
STOPPED_SILENCE: Final = 0.5
"""Seconds that a process may be stopped: a debugger that attaches stops it for a moment. A stopped process should be
known within a second, and the keeper needs part of that to notice."""
ASK_VOUCHED: Final = 10.0
"""Seconds without a message after which a peer on this machine is pinged while its keeper vouches for it. Processes of
one machine cannot be cut off from each other, and the kernel tells the keeper more than an answer would. With a hundred
of them, pings twice a second for every pair would take both cores of a small machine."""
FRESH: Final = SUSPECT_MOST
"""Seconds for which a keeper's "alive, busy" replaces such an answer. Six reports of a keeper can be lost."""
VOUCHED: Final = 300.0
"""Seconds of silence that a keeper's "alive, busy" explains; after that a process is taken to hang for good."""
BEAT: Final = 0.25
"""Longest time between ticks: the precision with which this node knows how long it did not listen."""
GRAIN: Final = 0.05
"""Shortest time between two checks of all peers, so that many are checked together."""
LATE: Final = 0.25
"""Seconds by which a tick of a listening node may be late: a loaded machine, a garbage collection."""
SLEPT: Final = 5.0
"""A tick later than this means that the machine was suspended and its network has to come up again: all deadlines start
anew. After shorter gaps they are only shifted; otherwise a node that is held up again and again would never notice a
loss."""


class Vouch(enum.IntEnum):
    """What a keeper reports about a process."""

    BUSY = 1
    """It is alive, whether or not it sends messages."""
    STOPPED = 2
    """A signal or a debugger has stopped it."""
    EXITED = 3
    """It has ended. A later life of the same node proves that too."""


class Standing(enum.Enum):
    """This node's opinion of a peer."""

    TRUSTED = "trusted"
    SUSPECT = "suspect"
    DEAD = "dead"


class Cause(enum.IntEnum):
    """Why a peer is suspected or dead; a suspected peer is suspected again for a later cause in this list."""

    SILENT = 1
    LINK_LOST = 2
    STOPPED = 3
    HOST_SILENT = 4
    EXITED = 5


@dataclass(frozen=True, slots=True)
class Ping:
    """Ping this peer, if it has a link, and report the round trip of the answer."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Unheard:
    """Nothing is received on the link with this peer: dial its other addresses, even if its keeper vouches for it.

    The path of the link may be dead.
    """

    peer: bytes


@dataclass(frozen=True, slots=True)
class Suspect:
    """The peer may be gone. Show it as suspected."""

    peer: bytes
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Trust:
    """The peer is well after all. Show it as active."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Dead:
    """The peer should be given up."""

    peer: bytes
    cause: Cause
    reason: str


Effect: TypeAlias = Ping | Unheard | Suspect | Trust | Dead


def suspect_after(round_trip: float, jitter: float) -> float:
    """Return the seconds of silence that make a peer suspected, from the mean and mean deviation of its round trip.

    Answers may take four mean deviations (RFC 6298) more than usual, within bounds.
    """
    return min(SUSPECT_LEAST + round_trip + 4 * jitter, SUSPECT_MOST)


class _Host:
    """The signs of life of one machine."""

    def __init__(self, name: str, now: float, *, is_own: bool) -> None:
        self.name, self.heard_at, self.is_own = name, now, is_own
        self.gives_signs = False
        """Whether it gives signs while its members are busy: reports of a keeper, acknowledgements of its kernel."""

    def gave_sign(self, at: float) -> None:
        """Note a sign that is not a member's message. Silence of this node's own machine would mean nothing."""
        self.heard_at, self.gives_signs = max(self.heard_at, at), not self.is_own


class _Peer:
    """The evidence about one member."""

    def __init__(self, id: bytes, host: _Host, now: float) -> None:
        self.id, self.host = id, host
        self.standing = Standing.TRUSTED
        self.cause = Cause.SILENT
        """Why it is not trusted, unless it is."""
        self.is_linked = self.is_unheard = False
        self.heard_at = now
        self.vouched_at = now
        self.has_keeper = False
        """Whether a keeper has ever vouched for it."""
        self.stopped_at: float | None = None
        self.pinged_at = -math.inf
        self.round_trip: float | None = None
        self.jitter = 0.0
        self.patience = SUSPECT_MOST
        """What `suspect_after` says."""

    @property
    def alive_at(self) -> float:
        """When it was last known to be alive."""
        return max(self.heard_at, min(self.vouched_at, self.heard_at + VOUCHED))

    @property
    def has_exited(self) -> bool:
        return self.cause is Cause.EXITED

    @property
    def ask_at(self) -> float:
        """When to ping it if no message comes before."""
        quiet_until = self.heard_at + INTERVAL
        if self.host.is_own and self.has_keeper:
            asked_or_heard_at = max(self.heard_at, self.pinged_at)
            quiet_until = max(quiet_until, min(self.vouched_at + FRESH, asked_or_heard_at + ASK_VOUCHED))
        return max(quiet_until, self.pinged_at + REPEAT)

    def end(self) -> tuple[float, Cause]:
        """Return when it is dead if nothing more is received, and the cause."""
        ends = [(self.alive_at + PROCESS_SILENCE, Cause.SILENT)]
        if self.host.gives_signs:
            ends.append((self.host.heard_at + HOST_SILENCE, Cause.HOST_SILENT))
        if self.stopped_at is not None:
            ends.append((self.stopped_at + STOPPED_SILENCE, Cause.STOPPED))
        return min(ends)


class Health:
    """One member's opinions of its peers. Drain `effects` after every call; call `tick` at `next_deadline`, not before.

    `next_deadline` may come earlier after any call but `heard` and `round_trip`.
    """

    def __init__(self, host: str, now: float) -> None:
        """Begin without peers; `host` is the machine of this member, which is never silent."""
        self._own_host = host
        self._peers: dict[bytes, _Peer] = {}
        self._hosts: dict[str, _Host] = {}
        self._effects: list[Effect] = []
        self._look_at = math.inf
        """The earliest time at which some peer may need a ping or a judgement. Messages only make it later, so `heard`
        need not touch it."""
        self._beat_at = now + BEAT

    # Peers

    def watch(self, peer_id: bytes, host: str, now: float) -> None:
        """Begin to judge a peer, trusting it; replaces its last life if that was judged."""
        if not self._peers:  # so there were no ticks until now
            self._look_at, self._beat_at = math.inf, now + BEAT
        self.forget(peer_id)
        if host not in self._hosts:
            self._hosts[host] = _Host(host, now, is_own=host == self._own_host)
        self._peers[peer_id] = _Peer(peer_id, self._hosts[host], now)
        self._look_by(now + SUSPECT_MOST)

    def forget(self, peer_id: bytes) -> None:
        """Judge a peer no more."""
        peer = self._peers.pop(peer_id, None)
        if peer is not None and all(other.host is not peer.host for other in self._peers.values()):
            del self._hosts[peer.host.name]

    # Inputs

    def heard(self, peer_id: bytes, now: float) -> None:
        """Note a message of any kind on the link with a peer."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.heard_at = peer.host.heard_at = now
            peer.is_unheard = False
            if peer.standing is not Standing.TRUSTED:
                self._reconsider(peer, now)

    def round_trip(self, peer_id: bytes, seconds: float) -> None:
        """Note the round trip of a ping."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        if peer.round_trip is None:  # as TCP does it, RFC 6298
            peer.round_trip, peer.jitter = seconds, seconds / 2
        else:
            peer.jitter += (abs(seconds - peer.round_trip) - peer.jitter) / 4
            peer.round_trip += (seconds - peer.round_trip) / 8
        peer.patience = suspect_after(peer.round_trip, peer.jitter)

    def acknowledged(self, peer_id: bytes, at: float) -> None:
        """Note that the kernel of a peer's machine acknowledged bytes of its link, last `at` this time.

        A driver that can ask its own kernel for this (TCP_INFO) reports it with every `Ping`: a host with one such
        report is expected to give more.
        """
        if (peer := self._peers.get(peer_id)) is not None:
            peer.host.gave_sign(at)

    def link_up(self, peer_id: bytes, now: float) -> None:
        """Note an authenticated link with a peer."""
        if (peer := self._peers.get(peer_id)) is not None:
            peer.is_linked = True
            self._look_by(now + INTERVAL)
            self.heard(peer_id, now)

    def link_lost(self, peer_id: bytes, now: float) -> None:
        """Note that the link with a peer ended and none has replaced it."""
        peer = self._peers.get(peer_id)
        if peer is not None and peer.is_linked:
            peer.is_linked = False
            self._suspect(peer, Cause.LINK_LOST, now)

    def vouched(self, peer_id: bytes, vouch: Vouch, now: float) -> None:
        """Take a keeper's report about a peer's process; expected every INTERVAL, and at once after a change."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.has_exited:
            return
        peer.host.gave_sign(now)
        self._look_by(now + HOST_SILENCE)
        match vouch:
            case Vouch.BUSY:
                peer.vouched_at, peer.stopped_at, peer.has_keeper = now, None, True
                if peer.standing is not Standing.TRUSTED:
                    self._reconsider(peer, now)
            case Vouch.STOPPED:
                if peer.stopped_at is None:
                    peer.stopped_at = now
                    self._look_by(now + STOPPED_SILENCE)
                self._suspect(peer, Cause.STOPPED, now)
            case Vouch.EXITED:
                self._give_up(peer, Cause.EXITED, now)

    def tick(self, now: float) -> None:
        """Ping quiet peers and judge silent ones."""
        late = now - self.next_deadline()
        if late < 0:
            return
        self._beat_at = now + BEAT
        if late > LATE:
            self._forgive(late if late < SLEPT else math.inf, now)
            self._look_at = now + GRAIN  # by then the messages that have been waiting are read
        elif now >= self._look_at:
            self._look_at = max(now + GRAIN, min(self._look(peer, now) for peer in self._peers.values()))

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return min(self._look_at, self._beat_at) if self._peers else math.inf

    def effects(self) -> list[Effect]:
        """Return the effects to perform, in order, and clear them."""
        effects, self._effects = self._effects, []
        return effects

    # State

    def is_unheard(self, peer_id: bytes) -> bool:
        """Tell whether nothing is received on the link with a peer, whatever its keeper says."""
        return peer_id in self._peers and self._peers[peer_id].is_unheard

    def is_suspected(self, peer_id: bytes) -> bool:
        """Tell whether a judged peer is not trusted now."""
        return peer_id in self._peers and self._peers[peer_id].standing is not Standing.TRUSTED

    def standing(self, peer_id: bytes) -> Standing:
        """Return the opinion of a judged peer."""
        return self._peers[peer_id].standing

    def explain(self, peer_id: bytes, now: float) -> str:
        """Describe the opinion of a peer, its cause, and what follows."""
        peer = self._peers[peer_id]
        if peer.round_trip is None:
            link = "round trip not measured"
        else:
            link = f"round trip {1e3 * peer.round_trip:.3g} ms, give or take {1e3 * peer.jitter:.2g} ms"
        if peer.standing is Standing.TRUSTED:
            busy = f", vouched for {now - peer.vouched_at:.1f} s ago" if peer.vouched_at > peer.heard_at else ""
            return f"trusted: last heard {now - peer.heard_at:.1f} s ago{busy}; {link}"
        text = f"{peer.standing.value}: {self._why(peer, peer.cause, now)}"
        if not peer.has_exited:
            text += (
                f"; last heard {now - peer.heard_at:.1f} s ago, its host {now - peer.host.heard_at:.1f} s ago; {link}"
            )
        if peer.standing is Standing.SUSPECT:
            text += f"; dead in {max(0.0, peer.end()[0] - now):.1f} s if nothing more is heard"
        if len(self._peers) > 1 and all(other.standing is not Standing.TRUSTED for other in self._peers.values()):
            text += "; no other peer is heard either: this machine may be cut off"
        return text

    def _why(self, peer: _Peer, cause: Cause, now: float) -> str:
        match cause:
            case Cause.SILENT:
                hangs = peer.vouched_at > peer.heard_at + VOUCHED
                return f"silent for {now - peer.heard_at:.1f} s{'; it is alive, so it hangs' if hangs else ''}"
            case Cause.LINK_LOST:
                return "its link ended"
            case Cause.STOPPED:
                return "its process is stopped (SIGSTOP, a debugger)"
            case Cause.HOST_SILENT:
                return f"nothing heard from its host {peer.host.name} for {now - peer.host.heard_at:.1f} s"
            case Cause.EXITED:
                return "its process has exited"

    # Judging

    def _look(self, peer: _Peer, now: float) -> float:
        """Do what is due for a peer; return when to check it again if it sends nothing."""
        if peer.has_exited:
            return math.inf
        again = math.inf
        if peer.is_linked:
            # Processes of one machine are pinged rarely, and have no path that could die.
            if not (peer.is_unheard or peer.host.is_own) and now >= peer.heard_at + peer.patience:
                peer.is_unheard = True
                self._effects.append(Unheard(peer.id))
            if now >= peer.ask_at:
                self._ping(peer, now)
            again = peer.ask_at
        if peer.standing is Standing.TRUSTED:
            if now < (due := peer.alive_at + peer.patience):
                return min(again, due)
            self._suspect(peer, Cause.SILENT, now)
        elif peer.standing is Standing.SUSPECT and now >= peer.end()[0]:
            self._give_up(peer, peer.end()[1], now)
        return min(again, peer.end()[0]) if peer.standing is Standing.SUSPECT else again

    def _ping(self, peer: _Peer, now: float) -> None:
        self._effects.append(Ping(peer.id))
        peer.pinged_at = now

    def _suspect(self, peer: _Peer, cause: Cause, now: float) -> None:
        if peer.standing is Standing.TRUSTED or (peer.standing is Standing.SUSPECT and cause > peer.cause):
            peer.standing, peer.cause = Standing.SUSPECT, cause
            self._effects.append(Suspect(peer.id, cause, self._why(peer, cause, now)))
            self._look_by(now + INTERVAL)

    def _give_up(self, peer: _Peer, cause: Cause, now: float) -> None:
        was_dead = peer.standing is Standing.DEAD
        peer.standing, peer.cause = Standing.DEAD, cause
        if not was_dead:
            self._effects.append(Dead(peer.id, cause, self._why(peer, cause, now)))

    def _reconsider(self, peer: _Peer, now: float) -> None:
        """Trust a peer again, unless there is still evidence against it."""
        if not peer.is_linked or peer.stopped_at is not None or peer.has_exited:
            return
        if now < peer.alive_at + peer.patience:
            if peer.cause is Cause.SILENT:  # a false suspicion: take the link for the worst until it is measured better
                peer.patience, peer.jitter = SUSPECT_MOST, (SUSPECT_MOST - SUSPECT_LEAST) / 4
            peer.standing = Standing.TRUSTED
            self._effects.append(Trust(peer.id))

    def _forgive(self, seconds: float, now: float) -> None:
        """Shift all deadlines by the time in which this node did not listen, and ping peers that no keeper vouches for.

        Many members of one loaded machine are late at the same time; if each pinged all others, they would be later.
        """
        for host in self._hosts.values():
            host.heard_at = min(now, host.heard_at + seconds)
        for peer in self._peers.values():
            peer.heard_at = min(now, peer.heard_at + seconds)
            peer.vouched_at = min(now, peer.vouched_at + seconds)
            if peer.stopped_at is not None:
                peer.stopped_at = min(now, peer.stopped_at + seconds)
            is_vouched_for = peer.host.is_own and peer.has_keeper and now < peer.ask_at
            if peer.is_linked and not peer.has_exited and not is_vouched_for:
                self._ping(peer, now)

    def _look_by(self, at: float) -> None:
        self._look_at = min(self._look_at, at)
