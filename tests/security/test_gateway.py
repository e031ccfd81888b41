"""What a gateway refuses: strangers, programs that pose as others, and callers that break the order of messages.

Whatever one caller does, another one's operations work, and the gateway holds no more memory than it says.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.security.test_coordinator import become_another_user, options
from tests.security.test_coordinator_frames import COURSES, GROWTH_BYTES, resident_bytes, speak
from tests.support import pipes
from tests.support.authorities import Authority
from tests.support.coordinators import coordinate
from tests.support.gateways import coordinate_with_gateway, gateway_address, run_client, start_client
from tests.support.machines import end, heard, new_lab
from tests.support.sets import first
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machines import Lab

MIB = 1 << 20
WORKING = """
alice = Program("alice", json.loads(sys.argv[2])["alice"], size=1, run="of alice")
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    found, _ = alice.do("AllReduce", np.arange(300_000.0))
    print(json.dumps(float(found.sum())), flush=True)
alice.leave()
"""
"""A program that works, whatever the others do."""
POSING = """
papers = json.loads(sys.argv[2])
stolen = bytes.fromhex(sys.argv[3])

def outcome(who):
    stub = GatewayStub(connect(sys.argv[1], papers[who]))
    asked = pb.RegisterRequest(program="alice", size=1, run="other")
    named = refusal(stub.Register, asked, timeout=500)
    left = refusal(stub.Leave, pb.LeaveRequest(session=stolen), timeout=500)
    pieces = [pb.Piece(start=pb.Start(session=stolen, dtype="int8", shape=[1])), pb.Piece(chunk=b"1")]
    return [each[0] for each in (named, left, refusal(stub.AllReduce, iter(pieces), timeout=500))], named[1]

print(json.dumps({who: outcome(who) for who in papers}), flush=True)
"""


def files(papers: dict[str, str]) -> list[str]:
    return [papers["tls_ca"], papers["tls_cert"], papers["tls_key"]]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


def test_only_holders_of_a_certificate_are_heard_and_a_program_belongs_to_its_own(lab: Lab) -> None:
    machine, acme, rogue = lab.machine(), Authority(lab.folder, "acme"), Authority(lab.folder, "rogue")
    served, alice, bob = acme.issue("gateway", "served"), acme.issue("alice"), acme.issue("bob")
    _, _, gateway = coordinate_with_gateway(machine, "127.0.0.1:0", *options(served))
    code = (
        'alice = Program("alice", json.loads(sys.argv[2]), size=1)\nprint(json.dumps(alice.session.hex()), flush=True)'
    )
    program = start_client(machine, f"{code}\nsys.stdin.read()\nalice.leave()", gateway, json.dumps(files(alice)))
    session = heard(program)
    mallory = rogue.issue("alice", "mallory")
    stranger = [files(alice)[0], *files(mallory)[1:]]  # trusts the gateway, which does not trust it
    posing = {"bob": files(bob), "mallory": stranger}
    told = heard(start_client(machine, POSING, gateway, json.dumps(posing), session))
    assert told["bob"][0] == ["PERMISSION_DENIED", "NOT_FOUND", "NOT_FOUND"], told
    assert "was registered by subject CN=alice" in told["bob"][1]
    assert told["mallory"][0] == ["UNAVAILABLE"] * 3, "nothing of a stranger's calls is heard"
    context = ssl.create_default_context(cafile=alice["tls_ca"])  # without a certificate of its own
    context.set_alpn_protocols(["h2"])
    host, _, port = gateway.rpartition(":")
    with speak(context, (host, int(port)), b"") as sock:
        sock.settimeout(DEADLINE)
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            sock.recv(1)
    assert end(program)[0] == 0, "alice was not served any more"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_no_other_user_reaches_a_gateway_at_a_unix_socket(lab: Lab) -> None:
    lab.folder.chmod(0o755)
    gateway = (machine := lab.machine()).start("-m", "covey", "gateway", "--listen", f"unix:{lab.folder}/g/s")
    address = gateway_address(gateway)
    assert Path(lab.folder, "g").stat().st_mode & 0o777 == 0o700
    child = os.fork()
    if not child:
        import socket

        status = 1
        with contextlib.suppress(BaseException):
            become_another_user()
            try:
                socket.socket(socket.AF_UNIX).connect(address.removeprefix("unix:"))
            except PermissionError:
                status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "another user was let in"
    run_client(machine, "Program('mine').leave()", address)


BREAKING = """
def status(function, *args, **named):
    return refusal(function, *args, **named)[0]

def stream(method, *parts, timeout=500):
    return refusal(getattr(program.stub, method), iter(parts), timeout=timeout)

def raw(*parts):
    call = program.channel.stream_stream("/covey.gateway.Gateway/AllReduce")
    return status(call, iter(parts), timeout=500)

def begun(**other):
    given = {"session": program.session, "dtype": "float64", "shape": [4]} | other
    return pb.Piece(start=pb.Start(**given))

def part(data):
    return pb.Piece(chunk=data)

program = Program("bad", size=1, run="of bad")
assert program.joined.max_bytes == 1 << 24
whole = part(bytes(32))
expected = {
    "no start": ("INVALID_ARGUMENT", [whole]),
    "nothing at all": ("INVALID_ARGUMENT", []),
    "an empty piece": ("INVALID_ARGUMENT", [pb.Piece()]),
    "a result": ("INVALID_ARGUMENT", [pb.Piece(result=pb.Result())]),
    "two starts": ("INVALID_ARGUMENT", [begun(), begun()]),
    "another session": ("NOT_FOUND", [begun(session=bytes(16)), whole]),
    "a short session": ("NOT_FOUND", [begun(session=b"x"), whole]),
    "too much": ("INVALID_ARGUMENT", [begun(), whole, part(b"x")]),
    "too little": ("INVALID_ARGUMENT", [begun(), part(bytes(31))]),
    "no such dtype": ("INVALID_ARGUMENT", [begun(dtype="float80"), whole]),
    "no such op": ("INVALID_ARGUMENT", [begun(op="median"), whole]),
    "an op that the dtype has not": ("INVALID_ARGUMENT", [begun(op="xor"), whole]),
    "dimensions": ("INVALID_ARGUMENT", [begun(shape=[1] * 33)]),
    "huge": ("RESOURCE_EXHAUSTED", [begun(shape=[1 << 40])]),
    "an overflow": ("RESOURCE_EXHAUSTED", [begun(shape=[(1 << 64) - 1] * 32)]),
    "huge and empty": ("INVALID_ARGUMENT", [begun(shape=[0, 1 << 40])]),
    "a chunk above the limit": ("INVALID_ARGUMENT", [begun(shape=[1 << 20]), part(bytes((2 << 20) + 1))]),
    "a message above the limit": ("RESOURCE_EXHAUSTED", [begun(shape=[1 << 20]), part(bytes(3 << 20))]),
    "no bool": ("INVALID_ARGUMENT", [begun(dtype="bool", shape=[2]), part(b"\\x01\\x02")]),
    "in order": ("OK", [begun(), whole]),
}
for what, (wanted, parts) in expected.items():
    found = stream("AllReduce", *parts)
    assert found[0] == wanted, (what, found)
    assert wanted in ("OK", "RESOURCE_EXHAUSTED") or found[2]["covey-error"] == "RefusalError", (what, found)
assert stream("Broadcast", begun(root=7), whole)[0] == "INVALID_ARGUMENT", "chunks of a rank that is not the root"
assert stream("Broadcast", begun(root=7))[0] == "INVALID_ARGUMENT", "no such root"
assert stream("Reduce", begun(root=1 << 31), whole)[0] == "INVALID_ARGUMENT"
assert stream("Send", begun(to=9), whole)[0] == "INVALID_ARGUMENT"
for garbage in (b"", b"\\x12", b"\\x12" + b"\\xff" * 6, b"\\x12\\x05abc", b"\\xff" * 100, b"\\x0a\\x02\\x12\\x40"):
    assert raw(garbage) == "INVALID_ARGUMENT", garbage
    assert raw(begun().SerializeToString(), garbage) == "INVALID_ARGUMENT", garbage

# One collective at a time: the second is refused, and the first ends when it stands still for too long.
release = threading.Event()

def stalled():
    yield begun()
    release.wait()

def standing():
    while True:
        call = program.stub.AllReduce(stalled(), timeout=500)
        while call.is_active():
            if stream("AllReduce", begun(), whole)[0] == "FAILED_PRECONDITION":
                return call

assert status(list, standing()) == "DEADLINE_EXCEEDED"
release.set()

# A program that reads nothing of a large result loses it, and its next call works; so after calls that are given up.
large = np.zeros(1 << 21)
slow = program.stub.AllReduce(program.pieces(large), timeout=500)
next(slow)
while (found := stream("AllReduce", begun(), whole))[0] == "FAILED_PRECONDITION":
    pass
assert found[0] == "OK", found
slow.cancel()
for _ in range(20):
    program.stub.AllReduce(program.pieces(large), timeout=500).cancel()
while (found := stream("AllReduce", begun(), whole))[0] == "FAILED_PRECONDITION":
    pass
assert found[0] == "OK", found

# Registrations: what is asked is checked, and there are only so many.
register = lambda **asked: refusal(program.stub.Register, pb.RegisterRequest(**asked), timeout=500)
assert register(program="bad", size=1)[0] == "ALREADY_EXISTS"
for asked in (
    *({"program": name} for name in ("", "x" * 101, "a\\nb")),
    *({"program": "x", "timeout_seconds": seconds} for seconds in (-1.0, float("nan"), 301.0)),
    {"program": "x", "size": 5000},
    {"program": "x", "on_loss": "ignore"},
):
    assert register(**asked)[0] == "INVALID_ARGUMENT", asked
others = [Program(f"other{number}", size=1, run=f"of {number}") for number in range(2)]
assert register(program="one too many", size=1)[0] == "RESOURCE_EXHAUSTED"
for other in others:
    other.leave()

# Calls that are left open are bounded, and none of them keeps others of this program from being answered at the end.
release.clear()
left_open = [program.stub.AllReduce(stalled(), timeout=500) for _ in range(60)]
outcomes = [status(list, each) for each in left_open]
assert set(outcomes) <= {"FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}, outcomes
release.set()
program.leave()
"""


@pytest.mark.parametrize("seeds", first(1, [1, 3]))
def test_a_caller_that_breaks_the_order_gets_a_status_and_harms_no_other(lab: Lab, seeds: int) -> None:
    machine, acme = lab.machine(), Authority(lab.folder, "acme")
    served, alice, bad = acme.issue("gateway", "served"), acme.issue("alice"), acme.issue("bad")
    _, coordinator = coordinate(machine)
    small = ("--max-bytes", "16MiB", "--max-programs", "4", "--stall", "1")
    gateway = machine.start(
        *("-m", "covey", "gateway", "--listen", "127.0.0.1:0", "--coordinator", coordinator, *small, *options(served))
    )
    address = gateway_address(gateway)
    working = start_client(machine, WORKING, address, json.dumps({"alice": files(alice)}))
    assert heard(working) == "ready"

    def works() -> bool:
        pipes.stdin(working).write("again\n")
        pipes.stdin(working).flush()
        return bool(heard(working) == sum(range(300_000)))

    assert works()
    before = resident_bytes(gateway.pid)
    for _ in range(seeds):
        breaking = BREAKING.replace('Program("bad", ', f'Program("bad", {files(bad)!r}, ')
        breaking = breaking.replace('Program(f"other{number}", ', f'Program(f"other{{number}}", {files(bad)!r}, ')
        run_client(machine, breaking, address)
        assert works(), "another program is not served any more"
    context = ssl.create_default_context(cafile=bad["tls_ca"])
    context.load_cert_chain(bad["tls_cert"], bad["tls_key"])
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for seed in range(seeds):
            for course in COURSES:
                stack.enter_context(speak(context, (host, int(port)), course(random.Random(seed))))
                grown = resident_bytes(gateway.pid) - before
                assert grown < GROWTH_BYTES + 4 * 16 * MIB, f"{course.__name__}: it has grown by {grown / MIB:.0f} MiB"
        assert works(), "another program is not served any more"
    assert end(working)[0] == 0
    gateway.send_signal(signal.SIGTERM)
    assert end(gateway)[0] == 0
