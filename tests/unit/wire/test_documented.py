"""The tags, fields, sizes and limits in `docs/wire.md` are those of the code."""

from __future__ import annotations

import ast
import hashlib
import hmac
import re
import struct
import typing
from pathlib import Path
from typing import Any

from tests.support.in_turn import in_turn

from covey.base.text import TEXT_LIMIT
from covey.net.discovery import host_rendezvous
from covey.net.lanes import ring
from covey.proto import health, message, message_link, relay_table, views
from covey.proto import matching as message_matching
from covey.proto import membership as agreement
from covey.proto.calling import outgoing
from covey.proto.calling.tags import CALL_TAG, parts_tag
from covey.proto.message_link import MessageSizes
from covey.runtime.collectives import executor as executor
from covey.runtime.lanes import dialler as lane_dialler
from covey.runtime.links import link
from covey.runtime.pairing.inviter import pairing_ports
from covey.wire import (
    beacon,
    calls,
    checkpoint,
    decoding,
    door,
    formation,
    header,
    membership,
    messages,
    pairing,
    relay,
    seal,
    signed,
    store,
)
from covey.wire import message_header as framed

ROOT = Path(__file__).parents[3]
WIRE = (ROOT / "docs" / "wire.md").read_text()
WORDS = " ".join(WIRE.split())


def section(heading: str) -> str:
    return WIRE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def table(heading: str, first: str) -> list[list[str]]:
    """Return the rows of the table in a section whose head begins with `first`."""
    lines = section(heading).splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"| {first} |".replace("|  |", "| |")))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def named(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def documented_fields(cell: str) -> list[str]:
    text = re.sub(r"\([^)]*\)", "", cell).partition(":")[0]
    return [re.sub(r"[ -]", "_", name.strip()) for name in text.split(",") if name.strip()]


def fields_of(kind: Any) -> list[str]:
    return [name.removeprefix("is_") for name in kind.__struct_fields__]


def by_name(union: Any) -> dict[str, Any]:
    return {kind.__name__: kind for kind in typing.get_args(union)}


def tags_of(rows: list[list[str]]) -> dict[str, int]:
    """Return what is documented: message and tag; two of them may share a row."""
    found: dict[str, int] = {}
    for row in rows:
        tags, names = row[0].split(", "), named(row[1])
        assert len(tags) == len(names)
        found |= dict(zip(names, map(int, tags), strict=True))
    return found


def test_every_message_of_a_link_is_listed_with_its_tag() -> None:
    known = by_name(messages.HandshakeMessage) | by_name(messages.Control)
    assert tags_of(table("Links", "tag")) == {name: kind.__struct_config__.tag for name, kind in known.items()}


def test_every_message_about_views_is_listed_with_its_tag_and_fields() -> None:
    known, rows = by_name(membership.Membership), table("Views", "tag")
    assert tags_of(rows) == {name: kind.__struct_config__.tag for name, kind in known.items()}
    for row in rows:
        assert documented_fields(row[2]) == fields_of(known[named(row[1])[0]]), row


def test_what_messages_about_views_are_made_of_is_listed_with_its_fields() -> None:
    rows = {row[0].strip("`"): row[1] for row in table("Views", "")}
    fates = rows.pop("fate")
    assert re.findall(r"(\d) (\w+)", fates) == [(str(int(fate)), fate.name) for fate in membership.Fate]
    kinds = ("State", "Verdict", "View", "Successor", "Record", "Bound")
    assert list(rows) == list(kinds)
    for kind in kinds:
        assert documented_fields(rows[kind]) == fields_of(getattr(membership, kind)), kind


def test_every_question_to_a_store_is_listed_with_its_tag_and_fields() -> None:
    known = by_name(store.Change) | by_name(store.Body)
    rows = table("Key-value stores", "tag") + table("Key-value stores", "tag ")
    assert tags_of(rows) == {name: kind.__struct_config__.tag for name, kind in known.items()}
    for row in rows:
        for name in named(row[1]):
            assert documented_fields(row[2]) == fields_of(known[name]), row


def test_every_message_about_checkpoints_is_listed_with_its_tag_and_fields() -> None:
    known, rows = by_name(checkpoint.CheckpointMessage), table("Checkpoints", "tag")
    assert tags_of(rows) == {name: kind.__struct_config__.tag for name, kind in known.items()}
    for row in rows:
        assert documented_fields(row[2]) == fields_of(known[named(row[1])[0]]), row


def test_every_message_of_a_relay_is_listed_with_its_tag_and_fields() -> None:
    known, rows = by_name(relay.RelayMessage), table("Relays", "tag")
    assert tags_of(rows) == {name: kind.__struct_config__.tag for name, kind in known.items()}
    for row in rows:
        assert documented_fields(row[2]) == fields_of(known[named(row[1])[0]]), row


def test_every_message_of_pairing_is_listed_with_its_tag_and_fields() -> None:
    known, rows = by_name(pairing.PairingMessage), table("Pairing", "tag")
    assert tags_of(rows) == {name: kind.__struct_config__.tag for name, kind in known.items()}
    for row in rows:
        assert documented_fields(row[2]) == fields_of(known[named(row[1])[0]]), row


def test_every_message_about_calls_is_listed_with_its_tag_and_fields() -> None:
    known, rows = by_name(calls.CallMessage), table("Calls", "tag")
    assert tags_of(rows) == {name: kind.__struct_config__.tag for name, kind in known.items()}
    for row in rows:
        assert documented_fields(row[2]) == fields_of(known[named(row[1])[0]]), row
    assert calls.CallPayload.__struct_fields__ == ("inline", "sizes", "handles")


def test_the_kinds_of_failed_calls_and_the_tags_and_limits_of_calls_are_as_written() -> None:
    names = ["raised", "unknown name", "wrong arguments", "too large", "past the deadline", "cancelled"]
    names += ["the node leaves", "a result that cannot be sent"]
    kinds = (
        calls.RAISED,
        calls.UNKNOWN_FUNCTION,
        calls.ARGUMENTS,
        calls.TOO_LARGE,
        calls.DEADLINE_PASSED,
        calls.CANCELLED,
    )
    listed = ", ".join(
        f"{kind} {name}" for kind, name in zip((*kinds, calls.CLOSING, calls.NO_RESULT), names, strict=True)
    )
    assert f"The kind of a failure is {listed}." in WORDS
    assert CALL_TAG == message_matching.RESERVED_TAGS == 2**62
    assert parts_tag(5, is_answer=False) == 2**62 + 5
    assert parts_tag(5, is_answer=True) == 2**62 + 2**61 + 5
    assert f"At most {outgoing.CALLS_LIMIT} calls" in WORDS
    assert f"at most {calls.CREDIT_LIMIT} items of a stream" in WORDS
    assert f"up to {calls.CALL_INLINE_BYTES >> 10} KiB in all" in WORDS


def test_the_header_of_a_transfer_has_the_documented_bytes() -> None:
    rows = table("Transfers of collectives", "bytes")
    sizes = [int(row[0]) for row in rows]
    assert sum(sizes) == header.TRANSFER_HEADER_BYTES == 64
    formats = (
        header.HEADER_PREFIX,
        header.HEADER_SUFFIX,
        decoding.FRAME_LENGTH,
        seal.RECORD_LENGTH,
        framed._FIXED_PART,
    )
    assert {each.format[0] for each in formats} == {"<"}, "numbers are little-endian"
    codes = re.findall(
        r"\d*[a-zA-Z]", header.HEADER_PREFIX.format.replace("xxx", "3x") + header.HEADER_SUFFIX.format.lstrip("<")
    )
    assert sizes == [struct.calcsize("<" + code) for code in codes]
    zeros = ["x" in code for code in codes]
    assert [row[1].startswith("zero") for row in rows] == zeros
    assert rows[0][1] == f"`{header.MAGIC.decode('latin1')}`".replace("\x01", "\\x01")
    flags = [row[1] for row in rows].index(next(row[1] for row in rows if row[1].startswith("flags")))
    assert sum(sizes[:flags]) == header.FLAGS_AT
    assert f"{header.CHANGE_PENDING}: CHANGE_PENDING" in rows[flags][1]
    assert f"Phase {executor.COMMIT_PHASE} is the commit barrier" in WORDS


def test_every_frame_of_messages_is_listed_with_its_kind() -> None:
    rows = {row[1]: int(row[0]) for row in table("Messages", "kind")}
    kinds = ("EAGER", "RTS", "CTS", "DATA", "CREDIT", "ACK", "RESUME", "END")
    assert rows == {name: getattr(framed, name) for name in kinds}
    assert f"a message of up to {MessageSizes().eager_bytes >> 10} KiB (`eager_bytes`)" in WORDS
    assert f"counting {message.HEADER_COST} bytes for each header" in WORDS


def test_the_keys_of_an_announcement_are_those_that_are_made() -> None:
    made = beacon.make(b"k" * 32, b"n" * beacon.BEACON_NONCE_BYTES, 9, ["192.0.2.1", "2001:db8::1"])
    assert [name for row in table("Multicast", "key") for name in named(row[0])] == [
        name.decode() for name in (b"v", b"n", b"p", b"4", b"6", b"t")
    ]
    assert set(made) == {b"v", b"n", b"p", b"4", b"6", b"t"}
    for said in (
        f"service `{beacon.SERVICE}`", f"version, `{beacon.BEACON_VERSION.decode()}`",
        f"{beacon.BEACON_NONCE_BYTES} random bytes in",
        f"at most {beacon.ANNOUNCED_ADDRESSES} in all", f"the first {beacon.BEACON_TAG_BYTES} bytes of HMAC-SHA256",
        f"the label is `{beacon._TAG_LABEL.decode()}`",
    ):  # fmt: skip
        assert said in WORDS


def test_an_announcement_is_tagged_as_the_page_says() -> None:
    key, nonce, four, six = b"k" * 32, b"n" * 16, bytes((192, 0, 2, 1)), bytes.fromhex("20010db8" + 23 * "0" + "1")
    made = beacon.make(key, nonce, 47000, ["192.0.2.1", "2001:db8::1"])
    assert (made[b"4"], made[b"6"], made[b"p"], made[b"n"]) == (four, six, b"47000", nonce.hex().encode())
    said = b"covey/1/mdns-tag\x011" + nonce + (47000).to_bytes(2, "big") + b"\x04" + four + b"\x10" + six
    assert made[b"t"].decode() == hmac.digest(key, said, "sha256")[:16].hex()


def test_the_purposes_of_links_are_those_of_the_code() -> None:
    """What Hellos are made with: a word, one of two words, or the `purpose` of a mesh."""
    found = set()
    for path in [each for room in ("runtime", "agent") for each in (ROOT / "src" / "covey" / room).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            values: list[ast.expr] = []
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "Hello":
                values = [keyword.value for keyword in node.keywords if keyword.arg == "purpose"] or [node.args[2]]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ClusterMesh":
                values = [keyword.value for keyword in node.keywords if keyword.arg == "purpose"]
            elif isinstance(node, ast.FunctionDef):  # the default of `ClusterMesh`
                defaults = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                values = [value for argument, value in defaults if argument.arg == "purpose" and value is not None]
            either = [each for value in values if isinstance(value, ast.IfExp) for each in (value.body, value.orelse)]
            found |= {value.value for value in (*values, *either) if isinstance(value, ast.Constant)}
    assert {named(row[0])[0] for row in table("Links", "purpose")} == found


def test_a_hello_and_a_welcome_have_a_charter_and_a_hello_the_settings() -> None:
    assert messages.Hello.__struct_fields__[-4:] == ("charter", "settings", "papers", "versions")
    assert messages.Welcome.__struct_fields__[-3:] == ("charter", "papers", "versions")


def test_what_a_here_tells_is_as_written() -> None:
    fields = ("terms", "member", "hears", "phase", "names", "lineage", "generation", "endings")
    assert formation.Here.__struct_fields__ == fields
    assert f"({', '.join(phase.name.lower() for phase in formation.Phase)})" in WORDS
    assert formation.FoundingMember.__struct_fields__[:4] == ("id", "life", "name", "host")
    assert formation.Ending.__struct_fields__ == ("lineage", "is_finished")


NUMBERS = (
    f"starts with {door.CHALLENGE_BYTES + door.DOOR_ANSWER_BYTES} bytes",
    f"{door.CHALLENGE_BYTES} random bytes C",
    "purpose (" + ", ".join(f"{int(purpose)} {purpose.name.lower()}" for purpose in door.Purpose) + ")",
    f"{door.BOUND_BYTES} bytes B",
    f'"{door._DOOR_LABEL.decode()}" C purpose B',
    f"both are limited to {decoding.HANDSHAKE_LIMIT} bytes",
    f"The handshake has {link.HANDSHAKE_SECONDS:.0f} s",
    f"A frame is a length ({decoding.FRAME_LENGTH.size} bytes) and a msgpack message "
    f"(at most {decoding.CONTROL_LIMIT >> 20} MiB)",
    f"Names are up to {messages.NAME_LIMIT} printable ASCII characters",
    f"the first line of its message, up to {messages.REASON_LIMIT} characters",
    f"up to {TEXT_LIMIT} characters (calls and first causes {8 * TEXT_LIMIT})",
    ", ".join(f"{int(vouch)} {vouch.name.lower()}" for vouch in health.ProcessState),
    f"length of the plaintext ({seal.RECORD_LENGTH.size} bytes), ciphertext, tag ({seal.SEAL_TAG_BYTES} bytes)",
    f"AES-{8 * seal.SEAL_KEY_BYTES}-GCM",
    f"up to {formation.MAX_ENDINGS} lineages that are over",
    f"A lineage is {formation.LINEAGE_BYTES - formation.RANDOM_BYTES} bytes of milliseconds since 1970, big-endian, "
    f"and {formation.RANDOM_BYTES} random bytes",
    f"another `lineage` ({formation.LINEAGE_BYTES} bytes)",
    f"At most {messages.MAX_MEMBERS} members, {membership.MAX_GROUPS} groups in a promise, "
    f"{membership.MAX_VERDICTS} verdicts in a view",
    f"A ballot more than 2^{agreement.MOST_BALLOTS_AHEAD.bit_length() - 1} above",
    f"Keys have up to {store.KEY_LIMIT} characters, values {store.VALUE_LIMIT >> 10} KiB, a message "
    f"{store.KEYS_LIMIT} keys and 1 MiB",
    f"carries a random id ({lane_dialler.LANE_BYTES} bytes) and "
    f"a random secret ({lane_dialler.LANE_SECRET_BYTES} bytes)",
    f"a token ({host_rendezvous.RUN_TOKEN_BYTES} random bytes that never travel)",
    f"small frames in lots of {message_link.ACK_BATCH >> 10} KiB",
    f"On a ring, payloads are padded to {ring.ALIGN} bytes",
    f"exchange frames of up to {relay.RELAY_LIMIT} bytes",
    f"exchange frames of up to {pairing.PAIRING_LIMIT} bytes",
    f"{pairing.PAIRING_NONCE_BYTES} random bytes, the first key of its machine",
    f"the label `{pairing._PAIRING_LABEL.decode()}`, the key of the applicant's machine",
    f"first free one of ports {pairing_ports()[0]} to {pairing_ports()[-1]}",
    f"version {relay.RELAY_SPEAKS.oldest}, {relay.RELAY_CHALLENGE_BYTES} random bytes",
    f"up to {relay.LISTED_TOKENS_LIMIT}, and later each new one",
    f"send `TakeCall` with these {relay.CALL_ID_BYTES} random bytes",
    f"every {relay_table.ASK_REGISTERED_EVERY:.0f} s from the relay on a registration; the node repeats it, and "
    f"{relay_table.REGISTRATION_SILENCE:.0f} s without a word end",
    f"A token is {relay.TOKEN_BYTES} random bytes",
    f"the label `{relay._RELAY_LABEL.decode()}`",
    f"A call that is not taken within {relay_table.WAITING_CALL_SECONDS:.0f} s",
)


@in_turn(said=NUMBERS)
def test_a_number_of_the_page_is_that_of_the_code(said: str) -> None:
    assert said in WORDS


def test_a_store_has_a_number_of_so_many_bits_and_calls_are_so_many_runs() -> None:
    hints = typing.get_type_hints(messages.Posting, include_extras=True)
    assert f"Its number ({limit(hints['store'])} random bits)" in WORDS
    (meta,) = typing.get_args(typing.get_type_hints(messages.Calls, include_extras=True)["runs"])[1:]
    assert f"up to {meta.max_length} runs of equal calls" in WORDS


def test_labels_of_proofs_are_as_written() -> None:
    """Each proof is made again here, from what the page says."""

    def mac(key: bytes, *parts: bytes) -> bytes:
        return hmac.new(key, b"".join(parts), hashlib.sha256).digest()

    token, said, nonce, lane = b"t" * 32, b"d" * 64, b"n" * 32, b"l" * 16
    assert door.dial_proof(token, said, b"hello") == mac(token, b"covey/1/dial", said, b"hello")
    assert door.accept_proof(token, said, nonce, b"answer") == mac(token, b"covey/1/accept", said, nonce, b"answer")
    for side in (b"dial", b"accept"):
        assert door.lane_proof(token, side, lane, 3) == mac(token, b"covey/1/lane/", side, lane, b"\x03")
        assert f'"covey/1/lane/{side.decode()}" id stream' in WORDS
    bound = door.bind(b"client hello")
    assert bound == hashlib.sha256(b"client hello").digest()[:15]
    answer = door.answer(token, b"c" * 16, door.Purpose.LANE, bound)
    assert answer == b"\x02" + bound + mac(token, b"covey/1/door", b"c" * 16, b"\x02" + bound)


def limit(kind: Any) -> int:
    """Return what a number must be below."""
    (meta,) = typing.get_args(kind)[1:]
    assert meta.lt & (meta.lt - 1) == 0
    return meta.lt.bit_length() - 1


def test_numbers_of_views_ballots_operations_and_generations_have_the_documented_limits() -> None:
    generation = typing.get_type_hints(membership.Successor, include_extras=True)["generation"]
    assert limit(membership.Ballot) == limit(membership.Sequence)
    assert limit(membership.Sequence) >= views.MOST_OPERATIONS.bit_length()
    said = (
        f"View numbers are below 2^{limit(membership.Number)}, ballots and numbers of operations below "
        f"2^{limit(membership.Ballot)}, generations below 2^{limit(generation)}"
    )
    assert said in WORDS


def test_the_owner_signs_the_documented_words() -> None:
    def measured(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    new, old, receiver, denied = b"n" * 32, b"o" * 32, b"r" * 32, (b"d" * 32, b"e" * 32)
    words = measured(b"covey/1/owner/rotation") + measured(b"home") + (7).to_bytes(8, "big") + (600).to_bytes(4, "big")
    words += hashlib.sha256(new).digest() + hashlib.sha256(old).digest() + measured(receiver)
    assert signed.rotation_words("home", 7, 600, new, old, receiver) == words
    charter = measured(b"covey/1/owner/charter") + measured(b"home") + (8).to_bytes(8, "big") + measured(b"otter")
    charter += measured(b"".join(map(measured, denied)))
    assert signed.charter_words("home", messages.Charter(8, "otter", denied, None)) == charter
    allowed = measured(measured(receiver))
    assert signed.charter_words("home", messages.Charter(8, "otter", denied, (receiver,))) == charter + allowed
    named = messages.Charter(8, "otter", denied, (receiver, old), names=("north-aaaa", ""))
    pairs = measured(receiver) + measured(b"north-aaaa") + measured(old) + measured(b"")
    names = measured(b"covey/1/owner/names") + measured(b"home") + (8).to_bytes(8, "big") + measured(pairs)
    assert signed.names_words("home", named) == names
