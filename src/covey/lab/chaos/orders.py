"""Faults that wait for a moment in a process, such as a restore. The first process that fits takes the order's file."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS_FOLDER: Final = "orders"
MOMENTS: Final = ("join", "restore", "change", "split", "async", "messages", "large", "all_reduce")
"""When a process is about to do this."""


class Order(msgspec.Struct, frozen=True):
    """A fault that a process inflicts on itself."""

    moment: str
    target: str
    """`any`, `first` (rank 0), `fresh` (a newcomer) or `old` (not a newcomer)."""
    signal: int
    delay: float
    """Seconds after the moment."""
    seconds: float = 0.0
    """How long the process is stopped; the sender of the order continues it."""


def give(folder: str, number: int, order: Order) -> None:
    """Leave an order for the first process that it fits."""
    draft = os.path.join(folder, ORDERS_FOLDER, f".{number}")
    with open(draft, "wb") as file:
        file.write(msgspec.json.encode(order))
    os.rename(draft, os.path.join(folder, ORDERS_FOLDER, f"{number}.{order.moment}"))


def take(folder: str, moment: str, *, rank: int, is_fresh: bool) -> Order | None:
    """Take and return an order that fits this process in this moment; None if there is none."""
    orders = os.path.join(folder, ORDERS_FOLDER)
    for name in _waiting(orders, f".{moment}"):
        with contextlib.suppress(OSError):  # another process took it
            with open(os.path.join(orders, name), "rb") as file:
                order = msgspec.json.decode(file.read(), type=Order)
            if _fits(order, rank, is_fresh=is_fresh):
                os.rename(os.path.join(orders, name), os.path.join(orders, f".taken-{name}-{os.getpid()}"))
                return order
    return None


def are_waiting(folder: str) -> bool:
    """Tell whether there are orders that no process has taken."""
    return bool(_waiting(os.path.join(folder, ORDERS_FOLDER)))


def withdraw(folder: str) -> int:
    """Remove the orders that no process took; return how many."""
    orders, count = os.path.join(folder, ORDERS_FOLDER), 0
    for name in _waiting(orders):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(orders, name))
            count += 1
    return count


def _waiting(orders: str, moment: str = "") -> Sequence[str]:
    try:
        return sorted(name for name in os.listdir(orders) if name.endswith(moment) and name[0] != ".")
    except FileNotFoundError:
        return ()


def _fits(order: Order, rank: int, *, is_fresh: bool) -> bool:
    match order.target:
        case "first":
            return rank == 0
        case "fresh":
            return is_fresh
        case "old":
            return rank >= 0 and not is_fresh
    return True
