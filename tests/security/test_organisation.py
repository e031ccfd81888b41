"""Nodes that need a certificate of an organisation besides the secret: what is not accepted, and that it is needed."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.authorities import Authority
from tests.support.machines import end, heard, new_lab

from covey.base.errors import ConfigError
from covey.net.keys.organisation import Organisation, PemFiles
from covey.wire import messages

if TYPE_CHECKING:
    from pathlib import Path

JOB = """
import os, time
import covey

with covey.join() as group:
    print("the sum is", group.all_reduce(10**group.rank), flush=True)
    while not os.path.exists("enough"):  # the others find the run while it goes on
        time.sleep(0.05)
"""
ONE, OTHER = bytes(32), bytes(31) + b"1"


def of(files: dict[str, str]) -> Organisation:
    found = PemFiles.of(*files.values())
    assert found is not None
    return Organisation(found)


def test_papers_are_for_one_node_and_of_one_authority(tmp_path: Path) -> None:
    acme, rogue = Authority(tmp_path, "acme"), Authority(tmp_path, "rogue")
    keys = (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048))
    here = of(acme.issue("here"))
    for number, key in enumerate(keys):
        papers = of(acme.issue(f"there{number}", key=key)).papers(ONE)
        assert here.objection(ONE, papers) == ""
        assert "is not for this node" in here.objection(OTHER, papers)
        again = messages.decode_handshake(messages.encode(messages.with_papers(welcome(), papers)))
        assert isinstance(again, messages.Welcome)
        assert again.papers == papers
    assert "is missing" in here.objection(ONE, None)
    for wrong in (
        of(rogue.issue("there")),
        of(acme.issue("late", days=-1.0)),
        of(acme.issue("signer", usage=ExtendedKeyUsageOID.CODE_SIGNING)),
    ):
        assert "is not accepted" in here.objection(ONE, wrong.papers(ONE))
    assert here.objection(ONE, of(acme.issue("client", usage=ExtendedKeyUsageOID.CLIENT_AUTH)).papers(ONE)) == ""
    garbage = messages.Papers((b"garbage",), b"")
    assert "is not accepted" in here.objection(ONE, garbage)


def welcome() -> messages.Welcome:
    return messages.Welcome(0, messages.Card(ONE, bytes(16), "n", "h", 1, messages.Contact("h", (), "")))


def test_papers_are_what_the_page_says(tmp_path: Path) -> None:
    acme = Authority(tmp_path, "acme")
    found = of(acme.issue("here")).papers(ONE)
    (own,) = (x509.load_der_x509_certificate(each) for each in found.certificates)
    key = own.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    key.verify(found.signature, b"covey/1/papers" + ONE, ec.ECDSA(hashes.SHA256()))


def test_the_holder_of_a_certificate_cannot_sign_others(tmp_path: Path) -> None:
    acme = Authority(tmp_path, "acme")
    here = of(acme.issue("here"))
    holder = acme.issue("holder")
    false = Authority(tmp_path, "holder")  # names itself as the holder, and signs with the holder's key
    false.key = serialization.load_pem_private_key((tmp_path / "acme-holder.key").read_bytes(), None)
    files = false.issue("victim")
    with open(files["tls_cert"], "ab") as chain, open(holder["tls_cert"], "rb") as above:
        chain.write(above.read())
    assert "is not accepted" in here.objection(ONE, of(files).papers(ONE))


def test_a_key_that_cannot_sign_and_a_chain_that_is_too_long_are_errors(tmp_path: Path) -> None:
    acme = Authority(tmp_path, "acme")
    files = acme.issue("here")
    with open(files["tls_cert"], "ab") as chain:
        chain.write((tmp_path / "acme-ca.pem").read_bytes() * messages.CERTIFICATES_LIMIT)
    with pytest.raises(ConfigError, match="more than 6 certificates"):
        of(files)
    assert of(acme.issue("small", key=ed25519.Ed25519PrivateKey.generate())).papers(ONE).signature
    assert isinstance(x509.load_pem_x509_certificate((tmp_path / "acme-small.pem").read_bytes()), x509.Certificate)


def test_a_node_with_the_secret_and_without_a_certificate_is_in_no_run() -> None:
    with new_lab() as lab:
        acme, rogue = Authority(lab.folder, "acme"), Authority(lab.folder, "rogue")
        key = secrets.token_bytes(32)
        one, two, three, four = (lab.machine(name, "lab", key) for name in ("one", "two", "three", "four"))
        (lab.folder / "job.py").write_text(JOB)
        runs = []
        for machine, name in ((one, "one"), (two, "two")):
            files = acme.issue(name)
            words = [word for file, path in files.items() for word in (f"--{file.replace('_', '-')}", path)]
            runs.append(machine.start("-m", "covey", "run", "train", "--size", "2", *words, "job.py"))
        without = three.node("train", size=2, timeout=10.0)
        false = four.node("train", size=2, timeout=10.0, settings=rogue.issue("one"))
        for node, reason in ((without, "is missing"), (false, "is not accepted")):
            assert heard(node) == "joining"
            code, _, err = end(node)
            assert code == 1
            assert reason in err, err
        (lab.folder / "enough").touch()
        for run in runs:
            code, out, err = end(run)
            assert code == 0, err
            assert "the sum is 11" in out
