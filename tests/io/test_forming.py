"""How the ranks of a launcher come together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from covey.runtime.node import Node
from covey.testing.threads import run_threads
from covey.wire import messages

if TYPE_CHECKING:
    import pytest


def test_every_rank_tells_every_other_once_that_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    said: Counter[tuple[int, int]] = Counter()
    send = Node.send

    def count(node: Node, peer: int, message: Any) -> None:
        said[node.rank, peer] += isinstance(message, messages.Ready)
        send(node, peer, message)

    monkeypatch.setattr(Node, "send", count)
    run_threads(5, lambda group: group.barrier(), lanes="unix", timeout=20)
    assert said == {(rank, peer): 1 for rank in range(5) for peer in range(5) if rank != peer}
