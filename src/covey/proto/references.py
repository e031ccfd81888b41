"""Which nodes hold how many handles of the objects of one node, while nodes pass handles on to each other.

The owner of an object counts its handles by holder. It counts one itself when it gives a handle to a node (`give`). A
holder that passes a handle on tells the owner first (`shared`), and the node that gets it tells the owner, too, before
it uses the handle (`claimed`). The two travel on different connections and come in any order. What was shared and is
not claimed keeps the object alive. A claim shows the key of the object, which travels with its handles only: a node
that guesses the number of an object gets nothing.

A node may learn later than others that a newcomer has a seat, and be told of handles for it before. So what is shared
with, or claimed from, a seat that may be that of a newcomer counts like that of a member.

Messages of a pair of nodes arrive in order, so a holder's own handle is dropped (`dropped`) only after what it has
shared is counted. It follows:

- A node that holds a handle can use its object, and the object is kept. The one exception is a handle that was passed
  on by a node that the owner has lost before the claim came: if the object is freed meanwhile, that claim is refused,
  and so are calls with the handle.
- An object is freed once all handles are dropped, or their holders lost, and none is on its way.
- Counts of holders are never negative. A node that drops more handles than it had breaks the protocol.
"""

from __future__ import annotations

import hmac
from collections import Counter
from typing import TYPE_CHECKING

from covey.base.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable


class _Counts:
    """The handles of one object."""

    __slots__ = ("held", "key", "on_way")

    def __init__(self, owner: int, key: bytes) -> None:
        self.key = key
        self.held = Counter({owner: 1})
        """By holder."""
        self.on_way: Counter[tuple[int, int]] = Counter()
        """By giver and taker: handles that were shared and not claimed; negative if the claim came first."""

    @property
    def is_over(self) -> bool:
        return not (self.held or +self.on_way)

    def hold(self, holder: int, by: int) -> None:
        """Count handles of a holder."""
        self.held[holder] += by
        if not self.held[holder]:
            del self.held[holder]

    def move(self, giver: int, taker: int, by: int) -> None:
        """Count handles that were shared, or claimed."""
        self.on_way[giver, taker] += by
        if not self.on_way[giver, taker]:
            del self.on_way[giver, taker]


class ReferenceCounts:
    """The handles of the objects of one node. Nodes are seats, which are not used again."""

    def __init__(self, owner: int, may_be_node: Callable[[int], bool]) -> None:
        """`may_be_node` tells whether a seat is that of a node of the run, or may be: others get no entries.

        So no peer makes entries without end.
        """
        self._owner, self._may_be_node = owner, may_be_node
        self._objects: dict[int, _Counts] = {}
        self._refused: Counter[int] = Counter()
        """By taker: claims that were refused; the taker will drop those handles all the same."""
        self._gone: set[int] = set()
        self._last = 0

    def __len__(self) -> int:
        return len(self._objects)

    def export(self, key: bytes) -> int:
        """Note a new object, of which the owner holds a handle; return its number."""
        self._last += 1
        self._objects[self._last] = _Counts(self._owner, key)
        return self._last

    def key(self, target: int) -> bytes:
        """Return the key of an object; b"" if it was released."""
        counts = self._objects.get(target)
        return b"" if counts is None else counts.key

    def holds(self, target: int, peer: int) -> bool:
        """Tell whether a node holds a handle of an object."""
        counts = self._objects.get(target)
        return counts is not None and counts.held[peer] > 0

    def give(self, target: int, peer: int) -> bool:
        """Count a handle that the owner gives to a node; False if the object was released."""
        counts = self._objects.get(target)
        if counts is not None and peer not in self._gone:
            counts.hold(peer, 1)
        return counts is not None

    def returned(self, target: int, giver: int) -> bool:
        """Count a handle that a holder gave to the owner; False if the giver holds none.

        One that the owner gave to itself is counted already.
        """
        return self.holds(target, giver) and (giver == self._owner or self.give(target, self._owner))

    def shared(self, target: int, giver: int, taker: int) -> None:
        """Note that a holder passes a handle on."""
        if self.holds(target, giver) and taker not in self._gone and self._may_be_node(taker):
            self._objects[target].move(giver, taker, 1)

    def withdrawn(self, target: int, giver: int, taker: int) -> list[int]:
        """Note that a handle that was shared is not passed on after all; return the objects that are free now."""
        is_counted = giver not in self._gone and taker not in self._gone and self._may_be_node(taker)
        if target in self._objects and is_counted:
            self._objects[target].move(giver, taker, -1)
        return self._free([target])

    def claimed(self, target: int, giver: int, taker: int, key: bytes) -> None:
        """Count a handle that was passed on, for the node that got it.

        A wrong key is the fault of the node that has passed it on, so the claim is refused, and no more. One of a node
        that is gone comes too late: nothing would drop that handle any more.
        """
        if taker in self._gone:
            return
        counts = self._objects.get(target)
        if counts is None or not hmac.compare_digest(counts.key, key):
            self._refused[taker] += 1
            return
        counts.hold(taker, 1)
        if giver not in self._gone and self._may_be_node(giver):
            counts.move(giver, taker, -1)

    def dropped(self, target: int, peer: int, references: int = 1, key: bytes = b"") -> list[int]:
        """Note that a node has dropped handles, which had this key; return the objects that are free now.

        Those of a node that is gone were dropped when it was lost.

        Raises:
            RemoteProtocolError: it never had so many.
        """
        if peer in self._gone:
            return []
        counts = self._objects.get(target)
        if key and (counts is None or not hmac.compare_digest(counts.key, key)) and self._refused[peer] >= references:
            self._refused[peer] -= references
            return []
        if counts is None or counts.held[peer] < references:
            raise RemoteProtocolError(f"{references} handles of object {target} are dropped, and so many never were")
        counts.hold(peer, -references)
        return self._free([target])

    def lost(self, peer: int) -> list[int]:
        """Drop the handles of a node that is gone for good, and those on the way from and to it.

        Return the objects that are free now.
        """
        self._gone.add(peer)
        for counts in self._objects.values():
            counts.held.pop(peer, None)
            for pair in [pair for pair in counts.on_way if peer in pair]:
                del counts.on_way[pair]
        del self._refused[peer]
        return self._free(list(self._objects))

    def clear(self) -> None:
        """Forget all objects."""
        self._objects.clear()

    def _free(self, targets: list[int]) -> list[int]:
        free = [target for target in targets if target in self._objects and self._objects[target].is_over]
        for target in free:
            del self._objects[target]
        return free
