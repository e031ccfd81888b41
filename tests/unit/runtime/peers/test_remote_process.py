"""What is believed of another node's addresses."""

from __future__ import annotations

import msgspec

from covey.runtime.peers.remote_process import RemoteProcess
from covey.wire import messages

OLD, NEW = (messages.Address("10.0.0.2", 47700, "eth0"),), (messages.Address("10.1.0.2", 47700, "eth1"),)
CARD = messages.Card(b"i" * 32, b"l" * 16, "north", "north", 7, messages.Contact("host", OLD, "/run/socket"), "1")


def test_a_node_tells_its_new_addresses_and_nothing_else_of_its_card_changes() -> None:
    remote = RemoteProcess(CARD, "candidate")
    said = msgspec.structs.replace(messages.moved(CARD, NEW), name="south", pid=8)
    assert remote.take_addresses(said)
    assert remote.card == messages.moved(CARD, NEW)
    assert not remote.take_addresses(said), "they are known by now"


def test_cards_of_other_nodes_and_lives_and_empty_ones_change_no_addresses() -> None:
    remote = RemoteProcess(CARD, "candidate")
    for other in (
        msgspec.structs.replace(messages.moved(CARD, NEW), id=b"j" * 32),
        msgspec.structs.replace(messages.moved(CARD, NEW), life=b"m" * 16),
        messages.moved(CARD, ()),
    ):
        assert not remote.take_addresses(other)
    assert remote.card == CARD
