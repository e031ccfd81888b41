"""Every sentence of `docs/security.md` has tests that could fail, and the numbers of the code.

`tests/sentences.py` says how they are listed.
"""

from __future__ import annotations

import hashlib
import re
import typing
from pathlib import Path

import pytest
from tests import sentences

from covey.base.text import TEXT_LIMIT
from covey.coordinator import refusal
from covey.gateway.server import CONNECTIONS_EACH
from covey.gateway.service import CALLS_OF_A_PROGRAM, Limits
from covey.net.audit import audit_log
from covey.net.discovery import mdns, sieve
from covey.net.host import descriptors
from covey.net.keys import clusters
from covey.proto import pairing, relay_table
from covey.proto import store as store_rules
from covey.proto.calling import incoming, outgoing
from covey.runtime.joining import situation
from covey.runtime.links import acceptor as acceptor
from covey.runtime.links import limits as allowance
from covey.runtime.links import limits as arrivals
from covey.runtime.links import link
from covey.runtime.peers import hints, mesh, node_links, problems, reach, relay_registration, relays
from covey.runtime.peers import remote_process as early
from covey.runtime.relaying import pipe, server
from covey.runtime.state import audit
from covey.wire import calls, decoding, formation, membership, messages, seal, secret

SECURITY = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
GATEWAY = Limits()
PAIRING = "Pairing by six digits"
DO, BOUNDS, AUDIT = "What strangers can make a node do", "Bounds", "The audit log"


def section(heading: str) -> str:
    return SECURITY.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def plain(text: str) -> str:
    return " ".join(text.split())


def test_every_sentence_of_the_page_is_listed_with_its_tests() -> None:
    assert "\n".join(sentences.faults("security")) == ""


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and its list, which a test may change."""
    for folder, name in (("docs", "page.md"), ("tests/claims", "page.txt")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).touch()
    (tmp_path / "docs" / "page.md").write_text(
        "# Page\n\nOne claim, over\ntwo lines. Another (`x`) claim.\n\n"
        "- **Label.** A third.\n- `b` is a fourth: a.\n\n| a | b |\n|---|---|\n| c | d |\n\n```\nsome  format\n```\n"
    )
    (tmp_path / "tests" / "test_x.py").write_text(
        "def test_x() -> None: ...\ndef helper() -> None: ...\n@pytest.mark.thorough\ndef test_left() -> None: ...\n"
    )
    left = "pytestmark = [pytest.mark.thorough, pytest.mark.alone]\ndef test_x() -> None: ...\n"
    (tmp_path / "tests" / "test_y.py").write_text(left)
    (tmp_path / "tests" / "claims" / "page.txt").write_text(LISTED)
    monkeypatch.setattr(sentences, "ROOT", tmp_path)
    sentences.tests_of.cache_clear()
    return tmp_path


HELD = "    test_x.py::test_x\n"
SAID = (
    "One claim, over two lines.", "Another (`x`) claim.", "A third.", "`b` is a fourth: a.", "| a | b |", "| c | d |",
    "some format",
)  # fmt: skip
LISTED = "".join(f"{sentence}\n{HELD}" for sentence in SAID)


def test_what_is_listed_in_full_has_no_faults(copy: Path) -> None:
    assert tuple(sentences.sentences("page")) == SAID
    assert sentences.faults("page") == []
    sentences.tests_of.cache_clear()


@pytest.mark.parametrize(("old", "new"), [
    ("two lines.", "three lines."), ("A third.", "A third. And more."), ("| c | d |", "| c | e |"),
    ("| c | d |", "| c | d |\n| e | f |"), ("some  format", "some other format"), ("Another (`x`) claim.", ""),
])  # fmt: skip
def test_a_sentence_that_is_added_or_changed_is_noticed(old: str, new: str, copy: Path) -> None:
    page = copy / "docs" / "page.md"
    assert old in page.read_text()
    page.write_text(page.read_text().replace(old, new))
    assert sentences.faults("page")
    sentences.tests_of.cache_clear()


@pytest.mark.parametrize(("old", "new"), [
    (HELD, ""), (HELD, "    test_x.py::test_y\n"), (HELD, "    test_x.py::helper\n"), (HELD, "    test_z.py::test_x\n"),
    (HELD, "    test_x.py::test_left\n"), (HELD, "    test_y.py::test_x\n"),
    (HELD, "    = because\n"), (HELD, HELD + "    = names\n"), (SAID[2], SAID[2] + "!"),
])  # fmt: skip
def test_a_sentence_without_a_test_is_noticed(old: str, new: str, copy: Path) -> None:
    listed = copy / "tests" / "claims" / "page.txt"
    listed.write_text(listed.read_text().replace(old, new, 1))
    assert sentences.faults("page")
    sentences.tests_of.cache_clear()


def test_a_passphrase_costs_what_the_page_says() -> None:
    (power,) = re.findall(r"scrypt \(N = 2\^(\d+)\)", plain(SECURITY))
    words = "marble ocean violin garden tractor pepper"
    key = hashlib.scrypt(
        words.encode(), salt=b"covey/1/passphrase/prey", n=2 ** int(power), r=8, p=1, maxmem=2**28, dklen=32
    )
    assert secret.from_passphrase("prey", words, random=bytes).key == key


def names_in(kind: type, found: set[str]) -> set[str]:
    """Return the names of all fields of a structure, those inside it included."""
    for name, hint in typing.get_type_hints(kind).items():
        found.add(name)
        for inner in (hint, *typing.get_args(hint)):
            if hasattr(inner, "__struct_fields__"):
                names_in(inner, found)
    return found


def test_what_lies_on_disk_of_a_run_has_only_these_fields() -> None:
    bound = names_in(membership.Bound, set())
    assert bound == {
        "generation", "record", "origin", "tie_breaker", "members", "view", "promised", "accepted_ballot", "accepted",
        "id", "life", "lineage", "number", "ranks", "verdicts", "successor", "is_finished", "group", "sequence", "fate",
        "pending", "format",
    }  # fmt: skip
    known = names_in(formation.Remembered, set())
    assert known == {"format", "open", "ended", "given_up", "lineage", "names", "is_ours", "is_finished"}
    assert f"up to {formation.MAX_OPEN} that may be running" in plain(SECURITY)


def test_the_bounds_are_those_of_the_code() -> None:
    dials = f"{allowance.SOCKETS}; {allowance.DIALS_RATE:.0f} a second after the first {allowance.DIALS_BURST:.0f}"
    assert mesh.LINKS_PER_KEY == node_links.LINKS_LIMIT
    rows = (
        f"{acceptor.NODE_STRANGERS_AT_ONCE}; {acceptor.GUESTS_AT_ONCE}",
        f"{acceptor.NODE_STRANGER_SECONDS:.0f}; {link.HANDSHAKE_SECONDS:.0f}",
        f"{arrivals.SOURCE_CONNECTIONS_RATE:.0f}; {arrivals.MEMBER_RATE:.0f}; {arrivals.UNPROVEN_RATE:.0f}",
        dials,
        f"{hints.HINTS_LIMIT}; {hints.HINTS_AT_ONCE}",
        f"{pairing.TRIES_FOR_CODE}; {pairing.FAILED_TRIES}",
        f"{sieve.PACKET_RATE:.0f} from one address, {sieve.ALL_PACKETS_RATE:.0f} in all",
        f"{mesh.VISITORS_LIMIT}; {mesh.LINKS_PER_KEY}",
        f"{messages.CHARTER_LIMIT}; {messages.WAITING_NODES_LIMIT}",
        f"{decoding.CONTROL_LIMIT >> 20} MiB; {8 * TEXT_LIMIT} characters",
        f"{messages.MAX_MEMBERS}; {membership.MAX_GROUPS}; {membership.MAX_VERDICTS}",
        f"{early.LIMIT_BYTES >> 20} MiB from each node",
        f"{incoming.HANDLERS}; {outgoing.CALLS_LIMIT}; {incoming.CALL_PAYLOAD_BYTES >> 30} GiB; {calls.DEPTH_LIMIT}",
        f"{refusal.REQUEST_BYTES >> 10} KiB; {refusal.MAX_RUNS}; {refusal.MAX_WORKERS}; {refusal.MAX_CALLS}; "
        f"{refusal.MAX_CONNECTIONS}",
        f"{GATEWAY.programs}; 4 of {GATEWAY.nbytes >> 20} MiB; {CALLS_OF_A_PROGRAM * GATEWAY.programs}; "
        f"{CONNECTIONS_EACH}",
        f"one in {acceptor.TOLD_SECONDS:.0f}, {problems.REFUSED_LOG_SECONDS:.0f}, {situation.NEXT_LOG_SECONDS:.0f} s",
    )
    table = [line.rpartition(" | ")[2].removesuffix(" |") for line in section(BOUNDS).strip().splitlines()[2:]]
    assert table == list(rows)
    of_pairing = plain(section(PAIRING))
    assert (pairing.TRIES_FOR_CODE, pairing.FAILED_TRIES) == (3, 9)
    assert (pairing.CODE_SECONDS, pairing.PAIRING_SECONDS) == (300, 1800)
    assert (pairing.RESTS.first, pairing.RESTS.most) == (1, 8)
    assert f"makes no progress for {pairing.CODE_ATTEMPT_SECONDS:.0f} seconds" in of_pairing
    crowd = (
        f"At most {pairing.CONNECTIONS_LIMIT} connections are open, {pairing.CONNECTIONS_OF_SOURCE} of them from one"
    )
    assert f"{crowd} source, each for {pairing.GUEST_SECONDS:.0f} seconds" in of_pairing
    words = plain(section(DO))
    assert hints.HINT_TRIES == 6
    assert hints.NAPS * hints.NAP_SECONDS == 3600
    assert f"{allowance.SOCKETS} sockets" in words
    assert f"{allowance.DIALS_RATE:.0f} a second after the first {allowance.DIALS_BURST:.0f}" in words
    assert (
        f"more than {sieve.PACKET_RATE:.0f} a second from one address or {sieve.ALL_PACKETS_RATE:.0f} in all" in words
    )
    assert f"{mdns.MOST_KNOWN} at most" in words
    assert f"The last {descriptors.MOST_SPARED}" in words
    assert (reach.REACH_RATE, reach.REACH_TOTAL_RATE) == (0.5, 4.0)
    assert f"After a burst of {arrivals.SOURCE_CONNECTIONS_BURST:.0f}, a source may open" in plain(SECURITY)
    assert clusters.GRACE == 10 * 60
    assert (seal.REKEY_SECONDS, seal.REKEY_RECORDS) == (15 * 60, 1 << 24)
    log = plain(section(AUDIT))
    assert f"at most {audit_log.AUDIT_TEXT_LIMIT} characters" in log
    assert f"rotated at {audit_log.AUDIT_FILE_BYTES >> 20} MiB, and {audit_log.OLD_FILES} old ones are kept" in log
    assert f"a source gets {audit.SOURCE_ENTRIES_BURST:.0f} entries, then one in five minutes" in log
    assert (
        f"all strangers together {audit.STRANGERS_BURST:.0f}, then one in {1 / audit.ENTRIES_TOTAL_RATE:.0f} s" in log
    )
    assert audit.SUMMARY_SECONDS == 1 / audit.SOURCE_ENTRIES_RATE == 300
    store = f"more than {store_rules.STORE_ENTRIES_LIMIT} entries of {store_rules.STORE_BYTES >> 20} MiB in all"
    assert f"{store}, nor wait on more than {store_rules.WAITING_BYTES_LIMIT >> 20} MiB of keys" in plain(SECURITY)


def test_the_numbers_about_relays_are_those_of_the_code() -> None:
    per_relay, words = relay_registration, plain(section("Relays"))
    taken = f"at most {per_relay.CALLS_AT_ONCE} of its calls at a time, and {per_relay.CALLS_RATE:.0f} a second"
    assert f"{taken} after the first {per_relay.CALLS_BURST:.0f}" in words
    assert (
        f"follows {per_relay.TOKENS_BURST:.0f} tokens that a relay names at once, and {per_relay.TOKENS_RATE:.0f}"
        in words
    )
    strangers = f"{server.RELAY_STRANGERS_AT_ONCE} connections that have not said what they want"
    assert (
        f"{strangers} for up to {server.RELAY_STRANGER_SECONDS:.0f} s, {server.STRANGERS_OF_SOURCE} of them from"
        in words
    )
    calls = (
        f"calls that wait for up to {relay_table.WAITING_CALL_SECONDS:.0f} s, "
        f"{relay_table.WAITING_CALLS_LIMIT} of them for one node"
    )
    assert f"{calls}, and {pipe.RELAYED_PIECE_BYTES >> 10} KiB that wait in each direction" in words
    assert f"uses at most {relays.OFFERS_LIMIT} such relays" in words
