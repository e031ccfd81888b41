"""The exchange that a short code protects: the vectors of the draft, and what two ends with other inputs get."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.base.errors import AuthError
from covey.wire.pairing import CodeExchange, Half, confirmation, generator, joined, map_to_curve

if TYPE_CHECKING:
    from collections.abc import Callable

P = 2**255 - 19
SESSION = bytes.fromhex("7e4b4791d6a8ef019b936c79fb7f2c57")
CHANNEL = b"\x0bA_initiator\x0bB_responder"
SCALAR_A = bytes.fromhex("21b4f4bd9e64ed355c3eb676a28ebedaf6d8f17bdc365995b319097153044080")
SCALAR_B = bytes.fromhex("848b0779ff415f0af4ea14df9dd1d3c29ac41d836c7808896c4eba19c51ac40a")
SHARE_A = bytes.fromhex("1d13c89278cdadd826f6d8d7f887701430f8380ddc17611cdd6dc989ce0c9f32")
SHARE_B = bytes.fromhex("248cccf6d5cdc3646f0ad593f9e6cef4e69d4945f8372e623512ecea32185623")
KEY = bytes.fromhex(
    "6e19b875f7a561d6b3ca3dbb9ef42ac55de3e717881018204b8922b4d5e53bb2"
    "aa82c300bea7b65d2b671da71922ddf6472301b79bc270adfa8bf413285f2263"
)
LOW_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


def drawn(seed: int) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def scalar_then(scalar: bytes, seed: int = 1) -> Callable[[int], bytes]:
    """Return a source that gives this scalar first."""
    left, more = [scalar], drawn(seed)
    return lambda count: left.pop() if left else more(count)


def test_lengths_are_packed_as_in_the_draft() -> None:
    assert joined(b"1234", b"5", b"", b"678").hex() == "043132333401350003363738"
    assert joined(bytes(range(128)))[:3].hex() == "800100"
    assert joined(bytes(300))[:2].hex() == "ac02"
    assert (Half(b"123", b"PartyA").packed() + Half(b"234", b"PartyB").packed()).hex() == (
        "03313233065061727479410332333406506172747942"
    )


@in_turn(seed=range(4))
def test_the_point_of_a_code_is_that_of_the_draft_whatever_hides_it(seed: int) -> None:
    hashed = bytes.fromhex("03998087bdb1a2617bbe25ef5a7c18cd4f84f902328701790958755ee4aed1d3")
    point = "d04bf6d41f6a289632a2e929fa29bebd51092512a7829fdde7d314b62f05a73f"
    assert map_to_curve(hashed, drawn(seed)).hex() == point
    assert generator(b"Password", CHANNEL, SESSION, drawn(seed)).hex() == point


def test_shares_and_the_key_are_those_of_the_draft() -> None:
    one = CodeExchange(b"Password", CHANNEL, SESSION, random=scalar_then(SCALAR_A))
    other = CodeExchange(b"Password", CHANNEL, SESSION, random=scalar_then(SCALAR_B))
    assert (one.share, other.share) == (SHARE_A, SHARE_B)
    halves = Half(SHARE_A, b"ADa"), Half(SHARE_B, b"ADb")
    assert one.key(other.share, *halves) == other.key(one.share, *halves) == KEY


@in_turn(point=LOW_ORDER)
def test_a_point_that_would_make_the_key_known_is_refused(point: str) -> None:
    one = CodeExchange(b"123456", CHANNEL, SESSION, random=drawn(1))
    with pytest.raises(AuthError, match="not valid"):
        one.key(bytes.fromhex(point), Half(one.share, b""), Half(bytes.fromhex(point), b""))


@in_turn(seed=seeds(100))
def test_every_code_stands_for_a_point_of_the_curve(seed: int) -> None:
    """Never of its twist, and the formula agrees with the plain one, in which nothing is hidden."""
    hashed = drawn(seed)(32)
    number = int.from_bytes(hashed, "little") & (1 << 255) - 1
    first = -486662 * pow(1 + 2 * number**2, -1, P) % P
    is_square = pow(first**3 + 486662 * first**2 + first, (P - 1) // 2, P) == 1
    expected = first if is_square else (-first - 486662) % P
    assert int.from_bytes(map_to_curve(hashed, drawn(seed + 1)), "little") == expected
    assert pow(expected**3 + 486662 * expected**2 + expected, (P - 1) // 2, P) == 1


DIFFERENT = {
    "code": (b"123457", CHANNEL, SESSION),
    "a digit less": (b"12345", CHANNEL, SESSION),
    "who they are": (b"123456", b"others", SESSION),
    "session": (b"123456", CHANNEL, bytes(16)),
}


@in_turn(what=DIFFERENT)
def test_ends_that_differ_in_anything_have_other_keys(what: str) -> None:
    one = CodeExchange(b"123456", CHANNEL, SESSION, random=drawn(1))
    other = CodeExchange(*DIFFERENT[what], random=drawn(2))
    halves = Half(one.share, b"a"), Half(other.share, b"b")
    assert one.key(other.share, *halves) != other.key(one.share, *halves)


def test_ends_that_saw_other_bytes_have_other_keys() -> None:
    one, other = (CodeExchange(b"123456", CHANNEL, SESSION, random=drawn(seed)) for seed in (1, 2))
    first, second = Half(one.share, b"a"), Half(other.share, b"b")
    key = one.key(other.share, first, second)
    for changed in ((first._replace(data=b"c"), second), (first, second._replace(data=b"c")), (second, first)):
        assert other.key(one.share, *changed) != key


def test_a_confirmation_is_of_one_key_one_session_and_one_sender() -> None:
    half, other = Half(SHARE_A, b"ADa"), Half(SHARE_B, b"ADb")
    proof = confirmation(KEY, SESSION, half)
    assert len(proof) == 64
    assert proof not in (
        confirmation(bytes(64), SESSION, half),
        confirmation(KEY, bytes(16), half),
        confirmation(KEY, SESSION, other),
        confirmation(KEY, SESSION, half._replace(data=b"")),
    )
