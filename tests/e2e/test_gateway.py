"""Programs without covey are ranks through a gateway: their results, and what a loss looks like on both sides."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import pipes
from tests.support.gateways import coordinate_with_gateway, gateway_address, run_client, start_client
from tests.support.machines import end, heard, new_lab
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.support.machines import Lab, Machine

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gateway"
NODE_PACKAGES = ROOT / ".venv" / "node" / "node_modules"

SHARED = """
import ml_dtypes
KINDS = ["float32", "bfloat16", "int16", "bool", "complex64"]
SHAPES = [(), (0,), (3, 5), (70_001,), (2, 1, 300_000)]

def data(rank, kind, shape):
    dtype = np.dtype(kind)
    values = (np.arange(int(np.prod(shape))) * (rank + 2)) % 23 - 11
    return (values > 0 if kind == "bool" else values.astype(dtype)).reshape(shape)

def cases():
    for kind in KINDS:
        for shape in SHAPES:
            yield kind, shape, "or" if kind == "bool" else "sum"

def combined(kind, shape, op):
    '''The result of three ranks: all values are small whole numbers, so every order of adding gives the same.'''
    first, *others = (data(rank, kind, shape) for rank in range(3))
    for other in others:
        first = np.asarray(first | other if op == "or" else first + other)
    return first
"""
RANK = (
    """
import sys
import numpy as np
import covey
"""
    + SHARED
    + """
with covey.WorkerNode(covey.WorkerNodeConfig(coordinator=sys.argv[1], worker_id="a0", size=3, timeout=500)) as node:
    group = node.group
    assert (group.rank, group.size) == (0, 3)
    for kind, shape, op in cases():
        mine = np.array(data(0, kind, shape))
        assert group.all_reduce(mine, op=op).tobytes() == combined(kind, shape, op).tobytes(), (kind, shape)
        for root in range(3):
            mine = np.array(data(0, kind, shape))
            group.reduce(mine, root, op=op)
            assert mine.tobytes() == (combined(kind, shape, op) if root == 0 else data(0, kind, shape)).tobytes()
            mine = np.array(data(0, kind, shape))
            assert group.broadcast(mine, root).tobytes() == data(root, kind, shape).tobytes(), (kind, shape)
        rows = np.empty((3, *shape), np.dtype(kind))
        group.all_gather(data(0, kind, shape), out=rows)
        assert [row.tobytes() for row in rows] == [data(rank, kind, shape).tobytes() for rank in range(3)]
    group.barrier()
    for kind, shape, _ in cases():
        group.send(data(0, kind, shape), 1, tag=5)
        assert group.recv(2, tag=6).tobytes() == data(2, kind, shape).tobytes()
    group.send_object({"not": "an array"}, 1, tag=9)
    group.send(np.arange(3), 1, tag=10)
    group.barrier()
"""
)
PROGRAMS = (
    SHARED
    + """
def play(name, expected):
    program = Program(name, size=3)
    assert (program.rank, program.size) == (expected, 3), program.joined
    rank = program.rank
    for number, (kind, shape, op) in enumerate(cases()):
        cuts = [4097, 1 << 20, 2 << 20] if np.prod(shape) > 100 else [1, 7]
        mine, cut = data(rank, kind, shape), cuts[number % len(cuts)]
        found, told = program.do("AllReduce", mine, chunk=cut, op=op)
        assert found.tobytes() == combined(kind, shape, op).tobytes(), (kind, shape)
        assert (told.dtype, tuple(told.shape), list(told.contributors)) == (kind, shape, [0, 1, 2])
        for root in range(3):
            found, _ = program.do("Reduce", mine, op=op, root=root)
            if root == rank:
                assert found.tobytes() == combined(kind, shape, op).tobytes()
            else:
                assert found is None or not found.size
            found, _ = program.do("Broadcast", mine, root=root, is_sent=root == rank)
            if root == rank:
                assert found is None or not found.size
            else:
                assert found.tobytes() == data(root, kind, shape).tobytes(), (kind, shape)
        found, told = program.do("AllGather", mine)
        assert tuple(told.shape) == (3, *shape)
        assert [row.tobytes() for row in found] == [data(each, kind, shape).tobytes() for each in range(3)]
    program.barrier()
    for kind, shape, _ in cases():
        if rank == 1:
            found, told = program.receive(source=0, tag=5)
            assert found.tobytes() == data(0, kind, shape).tobytes() and told.dtype == kind
        else:
            program.stub.Send(program.pieces(data(2, kind, shape), to=0, tag=6), timeout=500)
    if rank == 1:
        assert refusal(program.receive, tag=9)[0] == "FAILED_PRECONDITION"
        found, told = program.receive()
        assert (found.tolist(), told.source, told.tag) == ([0, 1, 2], 0, 10)
    program.barrier()
    program.leave()

together(lambda: play("p1", 1), lambda: play("p2", 2))
"""
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


@pytest.fixture
def machine(lab: Lab) -> Machine:
    return lab.machine()


def test_every_operation_of_programs_gives_what_ranks_with_covey_get(machine: Machine) -> None:
    _, coordinator, gateway = coordinate_with_gateway(machine, f"unix:{machine.folder}/g/s")
    rank = machine.start("-c", RANK, coordinator)
    run_client(machine, PROGRAMS, gateway)
    assert end(rank) == (0, "", "")


LOSING = """
program = Program("p1", size=2)
print(json.dumps(program.rank), flush=True)
errors = []
for line in sys.stdin:
    order = line.strip()
    if order == "sum":
        found, _ = program.do("AllReduce", np.arange(4.0))
        print(json.dumps(found.tolist()), flush=True)
    elif order == "late":
        print(json.dumps(refusal(program.do, "AllReduce", np.arange(4.0), timeout=1)), flush=True)
    elif order == "fails":
        told = refusal(program.do, "AllReduce", np.arange(4.0))
        again = refusal(program.barrier)
        print(json.dumps([*told, *again[::2], *refusal(list, program.registration)[::2]]), flush=True)
    elif order == "again":
        program = Program("p1", size=2)
        print(json.dumps(program.rank), flush=True)
"""
COVEY_RANK = """
import json, sys
import numpy as np
import covey
node = covey.WorkerNode(covey.WorkerNodeConfig(coordinator=sys.argv[1], worker_id="a0", timeout=500, size=2))
node.start()
print(json.dumps(node.rank), flush=True)
for line in sys.stdin:
    try:
        print(json.dumps(node.group.all_reduce(np.arange(4.0)).tolist()), flush=True)
    except covey.PeerLostError as error:
        print(json.dumps([error.rank, str(error)]), flush=True)
    except covey.DeadlineError as error:
        print(json.dumps(["late", list(error.late)]), flush=True)
    if line.strip() == "again":
        node.close()
        node.start()
        print(json.dumps(node.rank), flush=True)
"""


def order(process: subprocess.Popen[str], words: str) -> None:
    pipes.stdin(process).write(f"{words}\n")
    pipes.stdin(process).flush()


def test_a_lost_rank_is_a_status_for_the_program_and_a_lost_program_is_a_lost_rank(machine: Machine) -> None:
    _, coordinator, gateway = coordinate_with_gateway(machine, f"unix:{machine.folder}/g/s")
    rank, program = machine.start("-c", COVEY_RANK, coordinator), start_client(machine, LOSING, gateway)
    assert (heard(rank), heard(program)) == (0, 1)
    order(rank, "sum")
    order(program, "sum")
    assert heard(rank) == heard(program) == [0.0, 2.0, 4.0, 6.0]
    order(program, "fails")
    rank.kill()
    status, text, details, *later = heard(program)
    assert (status, "rank 0" in text) == ("ABORTED", True), text
    assert (details["covey-error"], details["covey-remedy"]) == ("PeerLostError", "REGROUP")
    assert details["covey-ranks"] == "0"
    assert later[0] in ("ABORTED", "NOT_FOUND"), "the group is over; perhaps the registration is, too"
    assert (later[2], later[3]["covey-error"], later[3]["covey-group"]) == ("ABORTED", "PeerLostError", "none")
    # The next round, with the same ranks; then the program is lost.
    rank = machine.start("-c", COVEY_RANK, coordinator)
    order(program, "again")
    assert (heard(rank), heard(program)) == (0, 1)
    order(rank, "sum")
    order(program, "sum")
    assert heard(rank) == heard(program) == [0.0, 2.0, 4.0, 6.0]
    order(rank, "again")
    program.kill()
    lost, reason = heard(rank)
    assert (lost, "program 'p1' has ended" in reason) == (1, True), reason
    # Nothing of the lost program is left: another one by its name is in the next round.
    program = start_client(machine, LOSING, gateway)
    assert (heard(rank), heard(program)) == (0, 1)
    order(program, "late")
    status, _, details = heard(program)
    assert (status, details.get("covey-ranks"), details["covey-group"]) == ("DEADLINE_EXCEEDED", "0", "over"), details


def standing_alone(folder: Path) -> dict[str, str]:
    """Make the modules of a program without covey, as protoc does; return the variables to run it with."""
    source = ROOT / "src" / "covey" / "gateway"
    shutil.copy(source / "gateway_pb2.py", folder)
    stubs = (source / "gateway_pb2_grpc.py").read_text()
    (folder / "gateway_pb2_grpc.py").write_text(stubs.replace("from covey.gateway import", "import"))
    for path in EXAMPLE.iterdir():
        shutil.copy(path, folder)
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def trained(machine: Machine, folder: Path, ranks: int, **env: str) -> tuple[int, list[str], str]:
    """Run the example; return the exit code, what each rank found, by rank, and the errors."""
    done = machine.covey("run", "-n", str(ranks), str(folder / "start.sh"), **standing_alone(folder), **env)
    found = re.findall(r"rank (\d) of \d: ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    return done.returncode, [text for _, text in sorted(found)], done.stderr


def test_a_program_in_python_without_covey_trains_with_two_ranks_to_the_same_bits(
    machine: Machine, tmp_path: Path
) -> None:
    code, found, errors = trained(machine, tmp_path, 3)
    assert (code, len(found), len(set(found))) == (0, 3, 1), (found, errors)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")
def test_a_program_in_javascript_made_from_the_proto_alone_trains_with_the_others(
    machine: Machine, tmp_path: Path
) -> None:
    assert NODE_PACKAGES.is_dir(), "run `make .venv/.node`"
    env = {
        "NODE_PATH": str(NODE_PACKAGES),
        "GATEWAY_PROTO": str(ROOT / "proto" / "covey" / "gateway" / "gateway.proto"),
    }
    code, found, errors = trained(machine, tmp_path, 4, **env)
    assert (code, len(found), len(set(found))) == (0, 4, 1), (found, errors)
    code, found, errors = trained(machine, tmp_path, 4, **env, END_AT="5")
    assert (code, found) == (3, []), (found, errors)
    assert errors.count("rank 3") >= 2, errors
    assert "program 'node' has ended, or its connection broke" in errors


def test_a_gateway_of_one_rank_ends_with_its_program(machine: Machine) -> None:
    path = f"unix:{machine.folder}/g/s"
    gateway = machine.start("-m", "covey", "gateway", "--listen", path)
    run_client(
        machine,
        """
program = Program("alone")
assert (program.rank, program.size) == (0, 1)
assert program.do("AllReduce", np.arange(3.0))[0].tolist() == [0, 1, 2]
assert refusal(Program, "second")[0] == "RESOURCE_EXHAUSTED"

# Tools that know nothing of the protocol: health, and the description of the service by reflection v1.
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
name = "covey.gateway.Gateway"
answer = health_pb2_grpc.HealthStub(program.channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=500)
assert answer.status == health_pb2.HealthCheckResponse.SERVING
reflect = program.channel.stream_stream(
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    reflection_pb2.ServerReflectionRequest.SerializeToString,
    reflection_pb2.ServerReflectionResponse.FromString,
)
asked = [{"list_services": ""}, {"file_containing_symbol": name}]
asked.append({"file_containing_symbol": "grpc.reflection.v1.ServerReflection"})
listed, *described = reflect((reflection_pb2.ServerReflectionRequest(**each) for each in asked), timeout=500)
services = {each.name for each in listed.list_services_response.service}
assert services >= {name, "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}, services
files = [descriptor_pb2.FileDescriptorProto.FromString(each.file_descriptor_response.file_descriptor_proto[0])
         for each in described]
assert [each.service[0].name for each in files] == ["Gateway", "ServerReflection"]
assert "AllReduce" in [each.name for each in files[0].service[0].method]
program.leave()
""",
        gateway_address(gateway),
    )
    assert end(gateway)[0] == 0
    gateway = machine.start("-m", "covey", "gateway", "--listen", path)
    run_client(machine, "Program('alone')", gateway_address(gateway))
    assert end(gateway)[0] == 1, "the program ended without leaving"


def test_a_socket_is_taken_over_from_a_gateway_that_was_killed_and_from_no_other(machine: Machine) -> None:
    at = f"unix:{machine.folder}/g/s"
    first = machine.start("-m", "covey", "gateway", "--listen", at)
    assert gateway_address(first) == at
    refused = machine.covey("gateway", "--listen", at)
    assert (refused.returncode, "another process listens" in refused.stderr) == (2, True), refused.stderr
    first.kill()
    first.wait(DEADLINE)
    second = machine.start("-m", "covey", "gateway", "--listen", at)
    assert gateway_address(second) == at
    second.terminate()
    assert end(second)[0] == 0
    assert os.listdir(machine.folder / "g") == []


def test_what_cannot_work_is_an_error_that_says_what_to_do(machine: Machine) -> None:
    os.mkdir(machine.folder / "open", 0o755)
    os.mkdir(machine.folder / "mine", 0o700)
    (machine.folder / "mine" / "file").write_text("")
    for words, told in (
        ((), "which program to start"),
        (("--listen", "127.0.0.1:0"), "give --tls-ca, --tls-cert and --tls-key"),
        (("--listen", f"unix:{machine.folder}/open/s"), "no other user can enter"),
        (("--listen", f"unix:{machine.folder}/{'x' * 100}"), "too long for a unix socket"),
        (("--listen", f"unix:{machine.folder}/mine/file"), "is no socket"),
        (("--listen", "nowhere"), "write host:port"),
        (("--listen", f"unix:{machine.folder}/mine/s", "--max-bytes", "1"), "must be bytes"),
    ):
        done = machine.covey("gateway", *words)
        assert (done.returncode, told in done.stderr) == (2, True), (words, done.stderr)
