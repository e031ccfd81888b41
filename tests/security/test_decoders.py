"""Everything that reads bytes of others: whatever they are, the answer is a value or one of the errors it promises.

`covey.lab.fuzz` has the readers and makes the inputs, always the same here; `make fuzz` looks further.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.attackers import new_cluster
from tests.support.seeds import examples

from covey.base import text
from covey.base.errors import AuthError, ConfigError, RemoteProtocolError
from covey.lab.fuzz import contract, values
from covey.lab.fuzz.contract import BrokenContractError, inputs
from covey.lab.fuzz.reached import Missed, ReachedCode
from covey.lab.fuzz.targets import Target, all_targets, message_decoders, modules
from covey.net.discovery import host_registry, sieve
from covey.net.discovery.host_registry import HostRegistry
from covey.net.discovery.interfaces import to_dial, usable_interfaces
from covey.net.keys import clusters, secret_sources
from covey.wire import beacon, decoding, door, message_header, messages, objects
from covey.wire.seal import ForgedError, Opener, Sealer
from covey.wire.secret import decode_join_code, encode_join_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY, LANE = bytes(range(32)), bytes(16)
TARGETS = {name: replace(each, seeds=functools.cache(each.seeds)) for name, each in all_targets().items()}
COUNT = 300
"""Changed inputs of each target, which reach all of it; `make fuzz` tries many more."""
fuzzed = settings(
    max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_of_bytes_keeps_its_contract(name: str) -> None:
    target, taken = TARGETS[name], 0
    count = examples(COUNT)
    for number, data in enumerate(inputs(target, count)):
        taken += contract.check(target, data, is_measured=number < count * 2 // 3)
    assert taken


# Whether the inputs get far enough.

UNREACHABLE: dict[tuple[str, str, str], str] = {
    ("call_values.py", 'with np.errstate(over="ignore"):', "true"): "it keeps back no exception",
    ("objects.py", "elif dataclasses.is_dataclass(value) and not isinstance(value, type):", "true"): (
        "what was decoded holds no dataclass; `encode` calls the same function"
    ),
    ("objects.py", "_check_all(getattr(value, field.name) for field in dataclasses.fields(value))", "never"): (
        "as above"
    ),
    ("objects.py", 'kind.__module__ == "builtins"', "true"): "the only odd type that is decoded is a datetime",
    **dict.fromkeys(
        (
            ("objects.py", "if not allow_pickle:", "true"),
            ("objects.py", "try:", "never"),
            ("objects.py", "return pickle.loads(body)", "never"),
            ("objects.py", "except Exception as error:  # unpickling runs code of classes, which may raise ", "never"),
            ("objects.py", 'raise RemoteProtocolError(f"the pickle cannot be loaded: {error!r}") from error', "never"),
        ),
        "a pickle that may do anything is not tried",
    ),
    **dict.fromkeys(
        (
            ("objects.py", "if not isinstance(allow_pickle, bool):", "false"),
            ("objects.py", "raise ConfigError(", "never"),
            ("objects.py", 'f"allow_pickle={allow_pickle!r} must be True or False: a pickle that may name s', "never"),
        ),
        "the receiver's own argument is wrong",
    ),
    ("secret.py", "if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:", "false"): (
        "what was decoded is bytes"
    ),
    ("manifest.py", "self.nbytes > MAX_BYTES", "true"): "the tags of so large a state take terabytes",
    ("manifest.py", 'raise RemoteProtocolError(f"a manifest of {self.nbytes} bytes")', "never"): "as above",
}
"""Of the readers: what no input reaches, by file, source and way, and why."""
SHOWN = 79
"""Characters of the source that count."""


def missed(targets: list[Target], count: int) -> tuple[ReachedCode, list[Missed]]:
    decoding._tags.cache_clear()  # which tests before this one may have filled
    reached = ReachedCode({str(module.__file__) for module in (*modules(), sieve, text)})
    for target in targets:
        made = list(inputs(target, count))
        with reached.watching():
            for data in made:
                with contextlib.suppress(*target.promised):
                    target.read(data)
    known = {(file, line[:SHOWN], way) for file, line, way in UNREACHABLE}
    found = reached.missed()
    return reached, [
        each for each in found if (each.module.rpartition("/")[2], each.line[:SHOWN], each.way) not in known
    ]


def test_the_inputs_reach_every_line_and_branch_of_the_readers() -> None:
    reached, unreached = missed(list(TARGETS.values()), COUNT)
    assert not unreached, "\n".join(f"{each.module}:{each.number} {each.line} {each.way}" for each in unreached)
    assert {str(module.__file__) for module in modules()} <= reached.files, "a module has no target"


def test_valid_inputs_alone_do_not_reach_every_branch() -> None:
    """So the test above measures something."""
    reached, unreached = missed([TARGETS["header"]], 0)
    assert [(each.function, each.line, each.way) for each in unreached if each.way != "never"] == [
        ("unpack", "len(data) != TRANSFER_HEADER_BYTES", "true"),
        ("unpack", "magic != MAGIC", "true"),
    ]
    assert len(reached.files) == 1


@pytest.mark.parametrize("read", message_decoders(), ids=lambda read: read.__name__)
def test_every_message_and_every_part_of_one_is_among_the_valid_inputs(read: Callable[[bytes], Any]) -> None:
    wanted = set().union(*(values.structs(kind) for kind in values.variants(values.return_type(read))))
    target, made = TARGETS[read.__name__.removeprefix("decode_")], list[set[type]]()
    for data in target.seeds():
        with contextlib.suppress(*target.promised):  # some are refused on purpose
            made.append(values.parts(read(data)))
    assert set().union(*made) == wanted


def test_every_decoder_of_messages_has_a_target() -> None:
    decoders = [
        each for module in modules() for each in vars(module).values() if isinstance(each, msgspec.msgpack.Decoder)
    ]
    assert {repr(each.type) for each in decoders} == {repr(values.return_type(read)) for read in message_decoders()}


# Whether a broken reader is noticed.

Patch = tuple[Any, str, Any]
decode_as_msgspec_does = msgspec.msgpack.Decoder(messages.Control).decode
BROKEN: dict[str, tuple[str, Patch]] = {
    "takes any length": (
        "frames",
        (decoding, "frame_length", lambda start, limit: int.from_bytes(start[:4], "little")),
    ),
    "takes any number of dimensions": ("message_header", (message_header, "MAX_MESSAGE_NDIM", 255)),
    "takes any shape": ("objects", (objects, "array_bytes", lambda code, shape: 24)),
    "takes any port": ("text_record", (beacon, "_PORT_TEXT", re.compile(rb".*"))),
    "looks up a purpose that is not there": ("door", (door, "Purpose", {1: 1, 2: 2, 3: 3}.__getitem__)),
    "lets the errors of msgspec pass": ("control", (messages, "decode_control", decode_as_msgspec_does)),
    "copies what it is given": (
        "handshake",
        (messages, "decode_handshake", lambda data: messages.Ping(len(data * 999))),
    ),
}


@pytest.mark.parametrize("mutant", BROKEN)
def test_the_fuzz_notices_a_reader_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, (owner, attribute, value) = BROKEN[mutant]
    made, target = list(inputs(TARGETS[name], COUNT)), TARGETS[name]
    monkeypatch.setattr(owner, attribute, value)
    if attribute.startswith("decode_"):
        target = replace(target, read=value)
    with pytest.raises(BrokenContractError):
        any(contract.check(target, data, is_measured=True) and False for data in made)


@pytest.mark.parametrize("decode", message_decoders(), ids=lambda decode: decode.__name__)
@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 200_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff" + b"x" * 1000,
        b"\x92\x0e\xdd\x7f\xff\xff\xff",
        b"\xdd\x00\x03\xff\xff" + b"\x90" * 262_143,
        b"\x92\x0a" + b"\xc0" * 262_000,
    ],
)
def test_lengths_that_promise_gigabytes_and_depths_that_never_end_cost_nothing(
    decode: Callable[[bytes], Any], bomb: bytes
) -> None:
    contract.check(TARGETS[decode.__name__.removeprefix("decode_")], bomb, is_measured=True)


def test_a_time_inside_an_object_is_no_object_of_ours() -> None:
    """msgspec decodes times by itself, and `encode` could not send one on."""
    time_of_msgpack = msgspec.msgpack.Ext(-1, bytes(4))
    for value in (time_of_msgpack, [1, time_of_msgpack], {"key": [time_of_msgpack]}):
        with pytest.raises(RemoteProtocolError):
            objects.decode(b"\x01" + msgspec.msgpack.encode(value))
    assert objects.decode(objects.encode([b"\xd6\xff", 1])) == [b"\xd6\xff", 1]


def test_an_array_as_a_key_is_no_object_of_ours() -> None:
    array = objects.encode(np.arange(3))[1:]
    with pytest.raises(RemoteProtocolError):
        objects.decode(b"\x01\x81" + array + b"\x01")


def mutations(valid: list[bytes]) -> st.SearchStrategy[bytes]:
    """Random bytes, and valid ones with a few changed, cut off or added."""

    def change(data: bytes, at: int, new: bytes, cut: int) -> bytes:
        at %= len(data) + 1
        return (data[:at] + new + data[at + len(new) :])[: max(0, len(data) - cut)]

    changed = st.builds(change, st.sampled_from(valid), st.integers(0, 500), st.binary(max_size=8), st.integers(0, 9))
    return st.binary(max_size=300) | changed


@fuzzed
@given(given_answer=st.binary(max_size=100), challenge=st.binary(min_size=16, max_size=16))
def test_the_door_does_not_open_to_a_guess(given_answer: bytes, challenge: bytes) -> None:
    with pytest.raises(AuthError):
        door.check(KEY, challenge, given_answer)


@fuzzed
@given(st.binary(min_size=16, max_size=16), st.integers(0, 255), st.integers(0, 8 * door.DOOR_ANSWER_BYTES - 1))
def test_the_door_notices_every_flipped_bit(challenge: bytes, purpose: int, bit: int) -> None:
    good = door.answer(KEY, challenge, purpose, bytes(15))  # type: ignore[arg-type]
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthError):
        door.check(KEY, challenge, bytes(flipped))
    if purpose in set(door.Purpose):
        assert door.check(KEY, challenge, good) == purpose
    else:
        with pytest.raises(AuthError):
            door.check(KEY, challenge, good)


@fuzzed
@given(st.binary(max_size=70))
def test_no_record_opens_but_the_one_that_was_sealed(data: bytes) -> None:
    sealed = bytearray(70)
    Sealer(KEY, LANE, 0, 0).seal(b"x" * 50, memoryview(sealed))
    opener = Opener(KEY, LANE, 0, 0)
    forged = bytearray(sealed)
    for at, byte in enumerate(data[:70]):
        forged[at] ^= byte
    if forged != sealed:
        with pytest.raises(ForgedError):
            opener.open(memoryview(forged), bytearray(50))


properties = st.dictionaries(
    st.sampled_from([b"v", b"n", b"p", b"4", b"6", b"t", b"x", b""]),
    st.none() | st.binary(max_size=40) | st.just(b"1"),
    max_size=5,
)


@fuzzed
@given(properties)
def test_no_announcement_matches_that_no_member_made(said: dict[bytes, bytes | None]) -> None:
    invented = beacon.read(KEY, said)
    assert invented is None or not invented.is_ours
    made: dict[bytes, bytes | None] = dict(beacon.make(KEY, bytes(16), 4711, ["10.0.0.1", "fd00::1"]))
    altered = made | {name: value for name, value in said.items() if name in made}
    read = beacon.read(KEY, altered)
    assert (read is not None and read.is_ours) == (altered == made)


@fuzzed
@given(st.data())
def test_a_join_code_with_any_slip_is_recognised(data: st.DataObject) -> None:
    code = encode_join_code(new_cluster("home").secret, ["10.0.0.1:47700", "[fd00::1]:47700"])
    at = data.draw(st.integers(0, len(code) - 1))
    letter = data.draw(st.characters(codec="utf-8"))
    spoiled = code[:at] + letter + code[at + 1 :]
    with contextlib.suppress(ConfigError):
        assert decode_join_code(spoiled) == decode_join_code(code)


@fuzzed
@given(st.text(max_size=400) | st.text(alphabet="covey1-0123456789abcdefghjkmnpqrstvwxyz", max_size=400))
def test_any_text_as_a_join_code_is_an_error_that_says_so(text: str) -> None:
    for whole in (text, f"covey1-{text}"):
        with pytest.raises(ConfigError):
            decode_join_code(whole)


@fuzzed
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_secret_is_taken_or_refused_for_a_reason(secret: str | bytes) -> None:
    if isinstance(secret, str):
        secret = secret[:14]  # what could pass as a passphrase takes half a second of scrypt
    with contextlib.suppress(ConfigError):
        secret_sources.parse_secret(secret, "prey")


@fuzzed
@given(data=mutations([b'{"port":1,"socket":"/s","pid":1}']))
def test_a_file_of_the_host_registry_is_read_or_passed_over(data: bytes) -> None:
    reader = object.__new__(HostRegistry)
    reader._host = "host"
    found = reader._parse(f"host-1{host_registry._SUFFIX}", data)
    assert found is None or 0 < found.port < 65536


@fuzzed
@given(data=st.data())
def test_a_damaged_cluster_file_is_an_error_that_says_what_to_do(home: Path, data: st.DataObject) -> None:
    path = clusters.save(new_cluster())
    path.write_bytes(data.draw(mutations([path.read_bytes()])))
    try:
        with contextlib.suppress(ConfigError):
            assert clusters.load("prey").name == "prey"
            clusters.known("prey")
    finally:
        path.unlink()


ips = (
    st.sampled_from(["127.0.0.1", "10.0.0.1", "::1", "fe80::1%x", "::ffff:127.0.0.1", "0.0.0.0", "1e9", ""]) | st.text()
)


@fuzzed
@given(st.lists(st.builds(messages.Address, ips, st.integers(-(2**63), 2**63 - 1), st.text(max_size=5)), max_size=8))
def test_addresses_of_others_are_numbers_and_never_names_to_look_up(addresses: list[messages.Address]) -> None:
    for same_host in (False, True):
        for ip, port, *_ in to_dial(usable_interfaces(), addresses, same_host):
            ipaddress.ip_address(ip)
            assert 0 < port < 65536
            assert same_host or not ipaddress.ip_address(ip).is_loopback
