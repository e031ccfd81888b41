"""Secrets: what is derived from them, which passphrases will do, and join codes in the hands of people."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.in_turn import in_turn

from covey.base.errors import ConfigError
from covey.wire.secret import (
    ClusterSecret,
    check_cluster_name,
    decode_join_code,
    encode_join_code,
    from_passphrase,
    is_weak,
    looks_like_join_code,
    new_passphrase,
)

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=40)
PORTS = st.integers(1, 65535)
SEEDS = st.lists(
    st.one_of(
        st.builds("{}:{}".format, st.ip_addresses(v=4), PORTS),
        st.builds("[{}]:{}".format, st.ip_addresses(v=6), PORTS),
    ),
    max_size=7,
)
SECRETS = st.builds(ClusterSecret, NAMES, st.binary(min_size=32, max_size=32))
SECRET = ClusterSecret("home", bytes(range(100, 132)))
CODE = encode_join_code(SECRET, ["192.168.7.9:47700", "[2001:db8::5]:1"])


def meaning(code: str) -> str:
    return code.lower().replace("-", "").replace("o", "0").replace("i", "1").replace("l", "1")


def test_each_purpose_and_each_name_has_a_key_of_its_own() -> None:
    keys = {ClusterSecret(name, SECRET.key).derive(purpose) for name in ("a", "b") for purpose in ("mdns", "door")}
    assert len(keys) == 4
    assert SECRET.key not in keys


def test_keys_are_derived_as_hkdf_says() -> None:
    extracted = hmac.digest(b"covey/1", SECRET.key, "sha256")
    assert SECRET.derive("door") == hmac.digest(extracted, b"covey/1/door/home\x01", "sha256")


def test_a_secret_does_not_show_in_messages_and_survives_pickling() -> None:
    text = repr(SECRET) + str(SECRET) + f"{[SECRET]}"
    assert SECRET.key.hex() not in text
    assert repr(SECRET.key) not in text
    assert pickle.loads(pickle.dumps(SECRET)) == SECRET


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33), "x" * 32])
def test_a_secret_has_32_bytes(key: bytes) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        ClusterSecret("home", key)


@pytest.mark.parametrize("name", ["", "a" * 41, "Home", "a b", "../x", "ä", "a\n", "a.b"])
def test_names_that_could_be_mistaken_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 40 of the characters"):
        check_cluster_name(name)


@in_turn(
    passphrase=[
        "",
        "correct horse",
        "to be or not to be",
        "a b c d e",
        "a1 b2 c3 d4 e5 f6",
        "password password password password",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "12345678901234567890",
        "abcdefghijklmnopqrstuvwxyz",
        "abababababababababababab",
    ]
)
def test_an_easy_passphrase_is_refused_and_a_good_one_offered(passphrase: str) -> None:
    with pytest.raises(ConfigError, match="too easy to guess") as caught:
        from_passphrase("home", passphrase, random=secrets.token_bytes)
    offered = str(caught.value).rpartition("for example: ")[2]
    assert not is_weak(offered)


def test_a_passphrase_gives_the_same_secret_wherever_it_is_typed() -> None:
    typed = from_passphrase("home", "correct horse battery staple", random=secrets.token_bytes)
    again = from_passphrase("home", "  correct horse  battery staple\n", random=secrets.token_bytes)
    elsewhere = from_passphrase("lab", "correct horse battery staple", random=secrets.token_bytes)
    assert typed == again
    assert typed.key != elsewhere.key
    salt = b"covey/1/passphrase/home"
    slow = hashlib.scrypt(b"correct horse battery staple", salt=salt, n=2**17, r=8, p=1, maxmem=2**28, dklen=32)
    assert typed == ClusterSecret("home", slow)


@given(st.binary(min_size=7, max_size=7))
@example(bytes(7))
@example(b"\xff" * 7)
def test_passphrases_are_six_words_that_depend_on_all_the_chance_they_got(chance: bytes) -> None:
    words = new_passphrase(lambda size: chance[:size]).split()
    number = int.from_bytes(chance, "big")
    assert len(words) == 6
    for place in range(6):
        changed = (number ^ 1 << (9 * place + 8)).to_bytes(7, "big")
        others = new_passphrase(lambda size, changed=changed: changed[:size]).split()  # type: ignore[misc]
        assert [one != other for one, other in zip(words, others, strict=True)] == [at == place for at in range(6)]


@given(SECRETS, SEEDS, st.one_of(st.just(b""), st.binary(min_size=32, max_size=32)))
def test_a_join_code_brings_back_name_key_seeds_and_owner(
    secret: ClusterSecret, seeds: list[str], owner: bytes
) -> None:
    code = encode_join_code(secret, seeds, owner)
    assert decode_join_code(code) == (secret, tuple(seeds), owner, ())
    assert decode_join_code(code.upper().replace("-", "\n ")) == (secret, tuple(seeds), owner, ())
    assert decode_join_code(f'  "{code.replace("0", "O").replace("1", "l")}"\n') == (secret, tuple(seeds), owner, ())
    assert code.startswith("covey1-")
    assert set(code) <= set(ALPHABET + "-o")


def test_every_wrong_letter_and_every_swap_is_recognised_as_a_typing_error() -> None:
    seen = 0
    for at in range(len("covey1-"), len(CODE)):
        mistyped = [CODE[:at] + letter + CODE[at + 1 :] for letter in ALPHABET + "u" if CODE[at] != "-"]
        mistyped.append(CODE[:at] + CODE[at + 1 : at + 2] + CODE[at] + CODE[at + 2 :])
        for code in mistyped:
            if meaning(code) != meaning(CODE):
                with pytest.raises(ConfigError, match="this join code has a typing error"):
                    decode_join_code(code)
                seen += 1
    assert seen > 32 * 90


@given(SECRETS, SEEDS, st.data())
def test_no_join_code_with_one_slip_is_taken_for_another(
    secret: ClusterSecret, seeds: list[str], data: st.DataObject
) -> None:
    code = encode_join_code(secret, seeds)
    at = data.draw(st.integers(0, len(code) - 2))
    letter = data.draw(st.sampled_from(ALPHABET + "u"))
    for mistyped in (
        code[:at] + letter + code[at + 1 :],
        code[:at] + code[at + 1] + code[at] + code[at + 2 :],
        code[:at] + letter + code[at:],
        code[:at] + code[at + 1 :],
    ):
        if meaning(mistyped) != meaning(code):
            with pytest.raises(ConfigError, match=r"typing error|incomplete|not a join code"):
                decode_join_code(mistyped)


def test_a_join_code_cut_short_is_recognised_as_incomplete() -> None:
    for end in range(len("covey1-"), len(CODE)):
        if meaning(CODE[:end]) != meaning(CODE):
            with pytest.raises(ConfigError, match="incomplete"):
                decode_join_code(CODE[:end])


@given(st.text())
@example("")
@example("correct horse battery staple")
@example("http://covey1-abc")
@example("cov")
def test_other_text_is_no_join_code(text: str) -> None:
    if not looks_like_join_code(text):
        with pytest.raises(ConfigError, match="this is not a join code"):
            decode_join_code(text)


@given(st.text(ALPHABET + "-", max_size=400))
def test_whatever_follows_the_prefix_is_a_code_or_an_error_that_says_so(text: str) -> None:
    with pytest.raises(ConfigError, match=r"typing error|incomplete"):
        decode_join_code("covey1-" + text)


def test_a_refused_join_code_is_not_repeated_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        decode_join_code(CODE[:-1])
    assert CODE[10:20] not in str(caught.value)


@pytest.mark.parametrize(
    "seed",
    [
        "host:1",
        "1.2.3.4",
        "1.2.3.4:0",
        "1.2.3.4:65536",
        "::1:5",
        "[::1:5",
        "[1.2.3.4]:5",
        "[fe80::1%eth0]:5",
        "1.2.3.4:+5",
    ],
)
def test_a_seed_that_is_not_numbers_cannot_be_in_a_join_code(seed: str) -> None:
    with pytest.raises(ConfigError, match="cannot be in a join code"):
        encode_join_code(SECRET, [seed])


def test_a_join_code_holds_no_more_than_seven_seeds() -> None:
    seeds = [f"[2001:db8:1:2:3:4:5:{host}]:47700" for host in range(8)]
    longest, owner = ClusterSecret("n" * 40, SECRET.key), bytes(range(32))
    assert decode_join_code(encode_join_code(longest, seeds[:7], owner)) == (longest, tuple(seeds[:7]), owner, ())
    with pytest.raises(ConfigError, match="at most 7"):
        encode_join_code(SECRET, seeds)


RELAYS = ["relay.example.org:47690", "[fd00::7]:9000"]


def test_a_join_code_carries_relays_and_one_without_them_is_as_it_was() -> None:
    secret = ClusterSecret("lab", bytes(range(32)))
    code = encode_join_code(secret, ["10.0.0.1:47700"], bytes(32), RELAYS)
    assert decode_join_code(code) == (secret, ("10.0.0.1:47700",), bytes(32), tuple(RELAYS))
    assert decode_join_code(encode_join_code(secret, (), b"", ["10.0.0.9"])).relays == ("10.0.0.9:47690",)
    assert encode_join_code(secret, ["10.0.0.1:47700"], bytes(32), ()) == encode_join_code(
        secret, ["10.0.0.1:47700"], bytes(32)
    )


def test_in_a_long_join_code_relays_come_before_seeds() -> None:
    secret, seeds = ClusterSecret("x" * 40, bytes(32)), [f"[fd00::{each}]:47700" for each in range(1, 8)]
    relays = [f"{'a' * 60}.io:1", f"{'b' * 60}.io:2"]
    decoded = decode_join_code(encode_join_code(secret, seeds, bytes(32), relays))
    assert decoded.relays == tuple(relays)
    assert decoded.seeds == tuple(seeds[: len(decoded.seeds)])


@pytest.mark.parametrize("relays", [["a:1", "b:2", "c:3"], ["a" * 65], ["a:b"], ["\u00e4.org"]])
def test_relays_that_cannot_be_in_a_join_code_are_refused(relays: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"relay|join code"):
        encode_join_code(ClusterSecret("lab", bytes(32)), (), b"", relays)
