"""Which nodes get a link: the check of a Hello or Welcome after TLS has proved the node's key. On the control loop."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import AuthError
from covey.net.keys.identity import short_id
from covey.wire import messages
from covey.wire.formation import LIFE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.peers.problems import Problems
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.peers.rules import Rules

TAKEOVER_SECONDS: Final = 1.0
"""How long an earlier life of a node has to answer a ping when a later one asks for a link. If the link with the
earlier life rests, dialling it shows whether it lives."""


class AdmissionHost(Protocol):
    """What admission needs to know of its mesh."""

    @property
    def card(self) -> messages.Card: ...

    @property
    def met(self) -> Mapping[bytes, RemoteProcess]: ...

    def part(self, remote: RemoteProcess) -> None: ...

    def identity_refused(self, error: AuthError) -> None: ...


class Admission:
    """Writes this node's Hello and judges those of others."""

    def __init__(
        self, host: AdmissionHost, rules: Rules, problems: Problems, *, purpose: str, run: str, lanes: str
    ) -> None:
        self._host, self._rules, self._problems = host, rules, problems
        self._purpose, self._run, self._lanes = purpose, run, lanes

    def hello(self) -> messages.Hello:
        """Return what this node says first on a link that it dials."""
        return messages.Hello(
            version=messages.VERSION,
            nonce=secrets.token_bytes(32),
            purpose=self._purpose,
            run=self._run,
            rank=-1,
            size=0,
            lanes=self._lanes,
            card=self._host.card,
            charter=self._rules.charter,
        )

    def is_this_process(self, card: messages.Card) -> bool:
        """Tell whether a card is this node's own, in this life."""
        return messages.key_of(card) == messages.key_of(self._host.card)

    def judge(self, hello: messages.Hello, *, source: str) -> messages.Welcome | messages.Refusal:
        """Return the answer to a node that dialled from address `source`."""
        if self.is_this_process(hello.card):
            return messages.Welcome(-1, self._host.card, self._purpose)  # the dialling side notices
        self._heard_charter(hello)
        if reason := self._objection(hello.card, source):
            return messages.Refusal(reason, retry=False)
        if hello.purpose == "rank":
            reason = "nodes of this run agree on their ranks; a launcher cannot set them"
            self._problems.refuse(hello.card, reason, source)
            return messages.Refusal(reason, retry=False)
        return messages.Welcome(-1, self._host.card, self._purpose, self._rules.charter)

    def incompatible(self, hello: messages.Hello, reason: str, *, source: str) -> None:
        """Note that a node at address `source` was refused, because it speaks no version that this one speaks."""
        self._problems.refuse(hello.card, reason, source)

    def welcomed(self, welcome: messages.Welcome, source: str) -> bool:
        """Tell whether this node wants a link with a node that it dialled at address `source` and that accepts it."""
        self._heard_charter(welcome)
        return not self._objection(welcome.card, source)

    def _heard_charter(self, hello: messages.Hello | messages.Welcome) -> None:
        if hello.charter is not None:
            self._rules.heard(hello.charter, hello.card.name)

    def _objection(self, card: messages.Card, source: str) -> str:
        """Return why a node that holds the secret gets no link, or ""; note the refusal."""
        if reason := self._rules.objection(card):
            pass
        elif not card.contact.addresses or len(card.life) != LIFE_BYTES:
            reason = "the card is not filled in"
        elif card.id == self._host.card.id:
            reason = self._same_identity(card)
        elif (old := self._host.met.get(card.id)) is not None and old.card.life != card.life:
            if card.life > old.card.life and old.unanswered_seconds() > TAKEOVER_SECONDS:
                self._host.part(old)  # the earlier life does not answer any more
            elif old.is_resting:
                old.wake()
                return f"whether {_in_use(old.card)} is being found out"  # mostly it is not, so this is no trouble
            else:
                old.ping()
                reason = _in_use(old.card)
        if reason:
            self._problems.refuse(card, reason, source)
        return reason

    def _same_identity(self, card: messages.Card) -> str:
        """Refuse a node with this node's key: the folder was copied. The process that started later has to go."""
        own = self._host.card
        if card.life < own.life:
            self._host.identity_refused(AuthError(
                f"this node's identity is in use by process {card.pid} on {card.host_name} "
                f"({card.contact.addresses[0].ip}). Was the configuration folder copied from there? Remove the "
                "`identities` folder in this copy, and a new identity is made."
            ))  # fmt: skip
        return _in_use(card if card.life < own.life else own)


def _in_use(card: messages.Card) -> str:
    where = card.contact.addresses[0].ip if card.contact.addresses else "?"
    return f"identity {short_id(card.id)} is in use by process {card.pid} on {card.host_name} ({where})"
