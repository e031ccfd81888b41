"""The evidence about one member and its machine: when it was heard, vouched for and stopped, and what follows.

`proto.health` explains the rules; it collects the evidence and acts on it.
"""

from __future__ import annotations

import enum
import math
from typing import Final, NamedTuple

from covey.base.settings import SETTINGS


class Silences(NamedTuple):
    """How long a peer may be silent, in seconds; each member has its own. The settings of these names are the first."""

    heartbeat: float = SETTINGS["heartbeat"].default
    """Without a message for so long, a peer is pinged. A quiet pair exchanges some four small messages a second."""
    host_silence: float = SETTINGS["host_silence"].default
    """Without any sign from a machine for so long, it is dead: with half a second for messages on the way and for this
    node's own timers, the default notices a pulled cable in under 5 s."""
    process_silence: float = SETTINGS["process_silence"].default
    """The same for one process, if nothing shows that its machine is dead: longer than ordinary code keeps an
    interpreter from running other threads."""

    @property
    def repeat(self) -> float:
        """The time between pings while none is answered: on a bad link each is another chance."""
        return self.heartbeat / 2

    @property
    def suspect_least(self) -> float:
        """The silence that makes a peer suspected on a perfect link: four pings had no answer and the fifth is sent.

        A message that is lost, or stalls for 200 ms as on Wi-Fi, does not matter.
        """
        return 3 * self.heartbeat

    @property
    def suspect_most(self) -> float:
        """The same on the worst link, and on one that was never measured.

        It leaves time before `host_silence` to dial anew: after an outage TCP waits as long again before it
        retransmits, a new connection does not.
        """
        return self.host_silence * 2 / 3

    def suspect_after(self, round_trip: float, jitter: float) -> float:
        """Return the silence that makes a peer suspected, from the mean and mean deviation of its round trip.

        Answers may take four mean deviations (RFC 6298) more than usual, within bounds.
        """
        return min(self.suspect_least + round_trip + 4 * jitter, self.suspect_most)


DEFAULT_SILENCES: Final = Silences()
REPORT_EVERY: Final = 0.5
"""Seconds between the reports of a keeper."""
STOPPED_SILENCE: Final = 0.5
"""Seconds that a process may be stopped: a debugger that attaches stops it for a moment. A stopped process should be
known within a second, and the keeper needs part of that to notice."""
ASK_VOUCHED: Final = 10.0
"""Seconds without a message after which a peer on this machine is pinged while its keeper vouches for it. Processes of
one machine cannot be cut off from each other, and the kernel tells the keeper more than an answer would. With a hundred
of them, pings twice a second for every pair would take both cores of a small machine."""
FRESH: Final = 6 * REPORT_EVERY
"""Seconds for which a keeper's "alive, busy" replaces such an answer. Six reports of a keeper can be lost."""
VOUCHED: Final = 300.0
"""Seconds of silence that a keeper's "alive, busy" explains; after that a process is taken to hang for good."""


class ProcessState(enum.IntEnum):
    """What a keeper reports about a process."""

    BUSY = 1
    """It is alive, whether or not it sends messages."""
    STOPPED = 2
    """A signal or a debugger has stopped it."""
    EXITED = 3
    """It has ended. A later life of the same node proves that too."""


class PeerOpinion(enum.Enum):
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


class HostEvidence:
    """The signs of life of one machine."""

    def __init__(self, name: str, now: float, *, is_own: bool) -> None:
        self.name, self.heard_at, self.is_own = name, now, is_own
        self.gives_signs = False
        """Whether it gives signs while its members are busy: reports of a keeper, acknowledgements of its kernel."""

    def gave_sign(self, at: float) -> None:
        """Note a sign that is not a member's message. Silence of this node's own machine would mean nothing."""
        self.heard_at, self.gives_signs = max(self.heard_at, at), not self.is_own


class PeerEvidence:
    """The evidence about one member."""

    def __init__(self, id: bytes, host: HostEvidence, now: float, silences: Silences) -> None:
        self.id, self.host, self._silences = id, host, silences
        self.standing = PeerOpinion.TRUSTED
        self.cause = Cause.SILENT
        """Why it is not trusted, unless it is."""
        self.is_linked = self.is_unheard = self.is_resting = False
        self.heard_at = now
        self.vouched_at = now
        self.has_keeper = False
        """Whether a keeper has ever vouched for it."""
        self.stopped_at: float | None = None
        self.pinged_at = -math.inf
        self.round_trip: float | None = None
        self.jitter = 0.0
        self.patience = silences.suspect_most
        """What `suspect_after` says."""

    @property
    def alive_at(self) -> float:
        """When it was last known to be alive."""
        return max(self.heard_at, min(self.vouched_at, self.heard_at + VOUCHED))

    @property
    def has_exited(self) -> bool:
        """Whether its process has ended for sure."""
        return self.cause is Cause.EXITED

    @property
    def ask_at(self) -> float:
        """When to ping it if no message comes before."""
        quiet_until = self.heard_at + self._silences.heartbeat
        if self.host.is_own and self.has_keeper:
            asked_or_heard_at = max(self.heard_at, self.pinged_at)
            quiet_until = max(quiet_until, min(self.vouched_at + FRESH, asked_or_heard_at + ASK_VOUCHED))
        return max(quiet_until, self.pinged_at + self._silences.repeat)

    def end(self) -> tuple[float, Cause]:
        """Return when it is dead if nothing more is received, and the cause."""
        ends = [(self.alive_at + self._silences.process_silence, Cause.SILENT)]
        if self.host.gives_signs:
            ends.append((self.host.heard_at + self._silences.host_silence, Cause.HOST_SILENT))
        if self.stopped_at is not None:
            ends.append((self.stopped_at + STOPPED_SILENCE, Cause.STOPPED))
        return min(ends)

    def measured(self, seconds: float) -> None:
        """Take the round trip of a ping into account."""
        if self.round_trip is None:  # as TCP does it, RFC 6298
            self.round_trip, self.jitter = seconds, seconds / 2
        else:
            self.jitter += (abs(seconds - self.round_trip) - self.jitter) / 4
            self.round_trip += (seconds - self.round_trip) / 8
        self.patience = self._silences.suspect_after(self.round_trip, self.jitter)

    def distrust_link(self) -> None:
        """Take the link for the worst until it is measured better: a suspicion was false."""
        least, most = self._silences.suspect_least, self._silences.suspect_most
        self.patience, self.jitter = most, (most - least) / 4

    def shift(self, seconds: float, now: float) -> None:
        """Shift its deadlines by a time in which this node did not listen."""
        self.heard_at = min(now, self.heard_at + seconds)
        self.vouched_at = min(now, self.vouched_at + seconds)
        if self.stopped_at is not None:
            self.stopped_at = min(now, self.stopped_at + seconds)

    def why(self, cause: Cause, now: float) -> str:
        """Describe a cause of suspicion."""
        match cause:
            case Cause.SILENT:
                hangs = self.vouched_at > self.heard_at + VOUCHED
                return f"silent for {now - self.heard_at:.1f} s{'; it is alive, so it hangs' if hangs else ''}"
            case Cause.LINK_LOST:
                return "its link ended"
            case Cause.STOPPED:
                return "its process is stopped (SIGSTOP, a debugger)"
            case Cause.HOST_SILENT:
                return f"nothing heard from its host {self.host.name} for {now - self.host.heard_at:.1f} s"
            case Cause.EXITED:
                return "its process has exited"

    def describe_link(self) -> str:
        """Describe the round trip of its link."""
        if self.round_trip is None:
            return "round trip not measured"
        return f"round trip {1e3 * self.round_trip:.3g} ms, give or take {1e3 * self.jitter:.2g} ms"
