"""Failure detection: each member judges the others by what it *received* from them, never by what it could send.

Any message on a peer's link is a sign of life; only a peer that was quiet for an interval is pinged. A peer on this
node's own machine is pinged rarely while its keeper vouches for it. A silent peer is first suspected, later dead. How
soon depends on other evidence:

- *Another sign from its machine* (of another member, of the keeper, an acknowledgement of its kernel) tells a busy
  process from a dead host. A host that can give such signs and gives none is dead after `host_silence`. A process on a
  host that is heard, or that never gave other signs, has `process_silence`: it may only be in a long C call.
- *The keeper*, which sees its processes in the kernel, vouches for a process that is alive and busy, and reports one
  that is stopped or has exited.
- *A link that rests* carries nothing until one of its ends has something to say. The leader of the view and some
  neighbours, whose links with the peer are awake, judge it instead.
- *The end of a link* proves nothing about the machine behind it, and a reset can be forged. It makes a peer suspected
  at once, and changes no deadline.

Time in which this node did not listen does not count as silence of its peers. A late tick reveals such time: the node
was suspended, or its interpreter was held. The node then suspects no peer, and shifts its deadlines by that time.

These are opinions, and a sign of life takes them back; only the exit of a process is final. All members agree on what
follows from an opinion (`proto.membership`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeAlias

from covey.proto.evidence import (
    ASK_VOUCHED,
    DEFAULT_SILENCES,
    FRESH,
    REPORT_EVERY,
    STOPPED_SILENCE,
    VOUCHED,
    Cause,
    HostEvidence,
    PeerEvidence,
    PeerOpinion,
    ProcessState,
    Silences,
)

__all__ = [
    "ASK_VOUCHED",
    "FRESH",
    "GRAIN",
    "LATE_TICK",
    "REPORT_EVERY",
    "STOPPED_SILENCE",
    "VOUCHED",
    "Cause",
    "Dead",
    "Effect",
    "Health",
    "PeerOpinion",
    "ProcessState",
    "SendPing",
    "Silences",
    "Suspect",
    "Trust",
    "Unheard",
]

BEAT: Final = 0.25
"""Longest time between ticks: the precision with which this node knows how long it did not listen."""
GRAIN: Final = 0.05
"""Shortest time between two checks of all peers, so that many are checked together."""
LATE_TICK: Final = 0.25
"""Seconds by which a tick of a listening node may be late: a loaded machine, a garbage collection."""
SLEPT: Final = 5.0
"""A tick later than this means that the machine was suspended and its network has to come up again: all deadlines start
anew. After shorter gaps they are only shifted; otherwise a node that is held up again and again would never notice a
loss."""


@dataclass(frozen=True, slots=True)
class SendPing:
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


Effect: TypeAlias = SendPing | Unheard | Suspect | Trust | Dead


class Health:
    """One member's opinions of its peers. Drain `effects` after every call; call `tick` at `next_deadline`, not before.

    `next_deadline` may come earlier after any call but `heard` and `round_trip`.
    """

    def __init__(self, host: str, now: float, silences: Silences = DEFAULT_SILENCES) -> None:
        """Begin without peers; `host` is the machine of this member, which is never silent."""
        self._own_host, self._silences = host, silences
        self._peers: dict[bytes, PeerEvidence] = {}
        self._hosts: dict[str, HostEvidence] = {}
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
            self._hosts[host] = HostEvidence(host, now, is_own=host == self._own_host)
        self._peers[peer_id] = PeerEvidence(peer_id, self._hosts[host], now, self._silences)
        self._look_by(now + self._silences.suspect_most)

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
            if peer.standing is not PeerOpinion.TRUSTED:
                self._reconsider(peer, now)

    def round_trip(self, peer_id: bytes, seconds: float) -> None:
        """Note the round trip of a ping."""
        if (peer := self._peers.get(peer_id)) is not None:
            peer.measured(seconds)

    def acknowledged(self, peer_id: bytes, at: float) -> None:
        """Note that the kernel of a peer's machine acknowledged bytes of its link, last `at` this time.

        A driver that can ask its own kernel for this (TCP_INFO) reports it with every `SendPing`: a host with one such
        report is expected to give more.
        """
        if (peer := self._peers.get(peer_id)) is not None:
            peer.host.gave_sign(at)

    def link_up(self, peer_id: bytes, now: float) -> None:
        """Note an authenticated link with a peer."""
        if (peer := self._peers.get(peer_id)) is not None:
            peer.is_linked, peer.is_resting = True, False
            self._look_by(now + self._silences.heartbeat)
            self.heard(peer_id, now)

    def link_rests(self, peer_id: bytes) -> None:
        """Note that the link with a peer rests: until `link_up`, its silence means nothing."""
        if (peer := self._peers.get(peer_id)) is not None:
            peer.is_linked, peer.is_resting = False, True

    def link_lost(self, peer_id: bytes, now: float) -> None:
        """Note that the link with a peer ended, or rested and could not be woken, and none has replaced it."""
        peer = self._peers.get(peer_id)
        if peer is not None and (peer.is_linked or peer.is_resting):
            if peer.is_resting:
                peer.heard_at = now  # it was not listened to
            peer.is_linked = peer.is_resting = False
            self._suspect(peer, Cause.LINK_LOST, now)

    def vouched(self, peer_id: bytes, vouch: ProcessState, now: float) -> None:
        """Take a keeper's report about a peer's process; expected every REPORT_EVERY, and at once after a change."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.has_exited:
            return
        peer.host.gave_sign(now)
        self._look_by(now + self._silences.host_silence)
        match vouch:
            case ProcessState.BUSY:
                peer.vouched_at, peer.stopped_at, peer.has_keeper = now, None, True
                if peer.standing is not PeerOpinion.TRUSTED:
                    self._reconsider(peer, now)
            case ProcessState.STOPPED if not peer.is_resting:
                if peer.stopped_at is None:
                    peer.stopped_at = now
                    self._look_by(now + STOPPED_SILENCE)
                self._suspect(peer, Cause.STOPPED, now)
            case ProcessState.EXITED:
                self._give_up(peer, Cause.EXITED, now)

    def tick(self, now: float) -> None:
        """Ping quiet peers and judge silent ones."""
        late = now - self.next_deadline()
        if late < 0:
            return
        self._beat_at = now + BEAT
        if late > LATE_TICK:
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
        return peer_id in self._peers and self._peers[peer_id].standing is not PeerOpinion.TRUSTED

    def standing(self, peer_id: bytes) -> PeerOpinion:
        """Return the opinion of a judged peer."""
        return self._peers[peer_id].standing

    def explain(self, peer_id: bytes, now: float) -> str:
        """Describe the opinion of a peer, its cause, and what follows."""
        peer = self._peers[peer_id]
        link = peer.describe_link()
        if peer.standing is PeerOpinion.TRUSTED:
            busy = f", vouched for {now - peer.vouched_at:.1f} s ago" if peer.vouched_at > peer.heard_at else ""
            if peer.is_resting:
                return "trusted: its link is idle, and other members listen to it"
            return f"trusted: last heard {now - peer.heard_at:.1f} s ago{busy}; {link}"
        text = f"{peer.standing.value}: {peer.why(peer.cause, now)}"
        if not peer.has_exited:
            text += (
                f"; last heard {now - peer.heard_at:.1f} s ago, its host {now - peer.host.heard_at:.1f} s ago; {link}"
            )
        if peer.standing is PeerOpinion.SUSPECT:
            text += f"; dead in {max(0.0, peer.end()[0] - now):.1f} s if nothing more is heard"
        if len(self._peers) > 1 and all(other.standing is not PeerOpinion.TRUSTED for other in self._peers.values()):
            text += "; no other peer is heard either: this machine may be cut off"
        return text

    # Judging

    def _look(self, peer: PeerEvidence, now: float) -> float:
        """Do what is due for a peer; return when to check it again if it sends nothing."""
        if peer.has_exited or peer.is_resting:
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
        if peer.standing is PeerOpinion.TRUSTED:
            if now < (due := peer.alive_at + peer.patience):
                return min(again, due)
            self._suspect(peer, Cause.SILENT, now)
        elif peer.standing is PeerOpinion.SUSPECT and now >= peer.end()[0]:
            self._give_up(peer, peer.end()[1], now)
        return min(again, peer.end()[0]) if peer.standing is PeerOpinion.SUSPECT else again

    def _ping(self, peer: PeerEvidence, now: float) -> None:
        self._effects.append(SendPing(peer.id))
        peer.pinged_at = now

    def _suspect(self, peer: PeerEvidence, cause: Cause, now: float) -> None:
        if peer.standing is PeerOpinion.TRUSTED or (peer.standing is PeerOpinion.SUSPECT and cause > peer.cause):
            peer.standing, peer.cause = PeerOpinion.SUSPECT, cause
            self._effects.append(Suspect(peer.id, cause, peer.why(cause, now)))
            self._look_by(now + self._silences.heartbeat)

    def _give_up(self, peer: PeerEvidence, cause: Cause, now: float) -> None:
        was_dead = peer.standing is PeerOpinion.DEAD
        peer.standing, peer.cause = PeerOpinion.DEAD, cause
        if not was_dead:
            self._effects.append(Dead(peer.id, cause, peer.why(cause, now)))

    def _reconsider(self, peer: PeerEvidence, now: float) -> None:
        """Trust a peer again, unless there is still evidence against it."""
        if not peer.is_linked or peer.stopped_at is not None or peer.has_exited:
            return
        if now < peer.alive_at + peer.patience:
            if peer.cause is Cause.SILENT:
                peer.distrust_link()
            peer.standing = PeerOpinion.TRUSTED
            self._effects.append(Trust(peer.id))

    def _forgive(self, seconds: float, now: float) -> None:
        """Shift all deadlines by the time in which this node did not listen, and ping peers that no keeper vouches for.

        Many members of one loaded machine are late at the same time; if each pinged all others, they would be later.
        """
        for host in self._hosts.values():
            host.heard_at = min(now, host.heard_at + seconds)
        for peer in self._peers.values():
            peer.shift(seconds, now)
            is_vouched_for = peer.host.is_own and peer.has_keeper and now < peer.ask_at
            if peer.is_linked and not peer.has_exited and not is_vouched_for:
                self._ping(peer, now)

    def _look_by(self, at: float) -> None:
        self._look_at = min(self._look_at, at)
