"""The service of the coordinator, called by a stock gRPC client in another process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import sys
from typing import TYPE_CHECKING, cast

import pytest
from tests.support import forked
from tests.support.coordinators import coordinate
from tests.support.in_turn import in_turn
from tests.support.machines import end, new_lab
from tests.support.waiting import DEADLINE
from tools import generate_proto

from covey.base.errors import ConfigError
from covey.coordinator import coordinator_pb2 as pb
from covey.coordinator.records import RunRecord, Sizes
from covey.coordinator.service import CoordinatorService
from covey.coordinator.state_file import StateFile

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    from tests.support.machines import Lab, Machine

CLIENT = """
import os, sys, threading
import grpc
from covey.coordinator import coordinator_pb2 as pb
from covey.coordinator.coordinator_pb2_grpc import CoordinatorStub
from covey.coordinator.security import LoopbackSecurity

address = sys.argv[1]
security = LoopbackSecurity()
papers = security.papers("operator")
credentials = grpc.ssl_channel_credentials(papers.authorities, papers.key, papers.chain)
server = [("grpc.ssl_target_name_override", security.server_name)]
channel = grpc.secure_channel(address, credentials, server)
stub = CoordinatorStub(channel)

def refusal(method, request, stub=stub):
    try:
        found = getattr(stub, method)(request, timeout=500)
        if method == "RegisterWorker":
            found = next(found)
    except grpc.RpcError as error:
        return error.code().name
    return found

def asking(worker="w0", **other):
    asked = {"run": "train", "worker_id": worker, "life": worker.encode().ljust(16), "address": "127.0.0.1:5000"}
    asked["sizes"] = pb.Sizes(min_size=1, max_size=1)
    return pb.RegisterWorkerRequest(**asked | other)
"""


def program(machine: Machine, code: str, address: str) -> None:
    """Run a client to its end."""
    env = machine.env | {"GRPC_VERBOSITY": "NONE"}  # else gRPC writes of refused handshakes to standard error
    done = forked.run(
        [sys.executable, "-c", CLIENT + code, address], env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


@pytest.fixture
def machine(lab: Lab) -> Machine:
    return lab.machine()


@pytest.mark.thorough
def test_the_generated_code_is_what_the_proto_says() -> None:
    assert generate_proto.differing() == [], "run `python -m tools.generate_proto`"


def test_sixty_four_workers_that_register_at_once_get_sixty_four_ranks_that_a_restart_keeps(machine: Machine) -> None:
    register = """
sizes = pb.Sizes(min_size=64, max_size=64)
found, streams = {}, []

def register(number):
    request = asking(f"w{number}", run="many", sizes=sizes, address=f"127.0.0.1:{5000 + number}")
    stream = stub.RegisterWorker(request, timeout=500)
    streams.append(stream)
    for event in stream:
        if event.HasField("assignment"):
            found[number] = event.assignment
            return

threads = [threading.Thread(target=register, args=(number,)) for number in reversed(range(64))]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert {number: (each.rank, each.size, each.round, each.address) for number, each in found.items()} == {
    number: (number, 64, 1, "127.0.0.1:5000") for number in range(64)
}
(run,) = stub.GetStatus(pb.GetStatusRequest(run="many"), timeout=500).runs
assert [each.worker_id for each in run.workers] == [f"w{number}" for number in range(64)]
assert {each.state for each in run.workers} == {"active"}
channel.close()
"""
    process, address = coordinate(machine)
    program(machine, register, address)
    process.kill()
    process.wait(DEADLINE)
    process, address = coordinate(machine)
    program(machine, register, address)  # the same lives: each has the rank that it had
    process.send_signal(signal.SIGTERM)
    assert end(process) == (0, "", "")


def test_stock_clients_and_strangers(machine: Machine) -> None:
    process, address = coordinate(machine)
    program(
        machine,
        """
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

health = health_pb2_grpc.HealthStub(channel)
for name in ("", "covey.coordinator.Coordinator"):
    answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=500)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
request = reflection_pb2.ServerReflectionRequest(list_services="")
(answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=500)
assert "covey.coordinator.Coordinator" in {each.name for each in answer.list_services_response.service}

# A caller that has not proved to be this user can ask nothing, and change nothing.
everything = {
    "RegisterWorker": asking(),
    "UnregisterWorker": pb.UnregisterWorkerRequest(run="train", worker_id="w0", life=bytes(16)),
    "Heartbeat": pb.HeartbeatRequest(run="train", worker_id="w0", life=bytes(16)),
    "StartCheckpoint": pb.StartCheckpointRequest(run="train", path="there"),
    "EndCheckpoint": pb.EndCheckpointRequest(run="train", worker_id="w0", life=bytes(16), id="train-1"),
    "GetCheckpoint": pb.GetCheckpointRequest(run="train"),
    "GetStatus": pb.GetStatusRequest(),
}
assert set(everything) == {each.name for each in pb.DESCRIPTOR.services_by_name["Coordinator"].methods}
os.environ["COVEY_HOME"] += "-other"  # a machine with another key
other = security.papers("operator")
others = [
    grpc.insecure_channel(address),
    grpc.secure_channel(address, grpc.ssl_channel_credentials(papers.authorities), server),
    grpc.secure_channel(address, grpc.ssl_channel_credentials(papers.authorities, other.key, other.chain), server),
]
for wrong in others:
    for method, request in everything.items():
        assert refusal(method, request, CoordinatorStub(wrong)) == "UNAVAILABLE", method
    wrong.close()

# What cannot be is refused, and changes nothing.
for wrong in (
    asking(worker=""), asking(worker="w" * 101), asking(worker="w\\n"), asking(run=""), asking(life=bytes(15)),
    asking(address="here"), asking(address="127.0.0.1:0"), asking(address=""), asking(name="n" * 1001),
    asking(sizes=pb.Sizes(min_size=2, max_size=1)), asking(sizes=pb.Sizes(min_size=1, max_size=5000)),
    asking(sizes=pb.Sizes(min_size=1, max_size=2, settle_seconds=float("nan"))), asking(sizes=pb.Sizes()),
    asking(assignment=pb.Assignment(round=1, rank=3, size=3)),
):
    assert refusal("RegisterWorker", wrong) == "INVALID_ARGUMENT", wrong
assert refusal("GetStatus", pb.GetStatusRequest(run="train")) == "NOT_FOUND"
assert refusal("RegisterWorker", asking(name="n" * 70000)) == "RESOURCE_EXHAUSTED"
stream = stub.RegisterWorker(asking(), timeout=500)
assert next(stream).assignment.rank == 0
beat = {"run": "train", "worker_id": "w0", "life": b"w0".ljust(16)}
for members in ((), (1,), (0, 0), tuple(range(2000))):
    view = pb.View(round=1, members=members)
    assert refusal("Heartbeat", pb.HeartbeatRequest(**beat, view=view)) == "INVALID_ARGUMENT", members
assert refusal("StartCheckpoint", pb.StartCheckpointRequest(run="train", path="there")) == "ABORTED"
refusal("Heartbeat", pb.HeartbeatRequest(**beat, view=pb.View(round=1, members=[0])))
assert next(stream).view.members == [0]
for path in ("", "a\\0b", "p" * 1001):
    assert refusal("StartCheckpoint", pb.StartCheckpointRequest(run="train", path=path)) == "INVALID_ARGUMENT"
started = refusal("StartCheckpoint", pb.StartCheckpointRequest(run="train", path="there"))
assert started.phase == pb.Checkpoint.PENDING
assert next(stream).checkpoint.path == "there"
assert refusal("Heartbeat", pb.HeartbeatRequest(**beat)).checkpoint.id == started.id
assert refusal("EndCheckpoint", pb.EndCheckpointRequest(**beat, id=started.id)).phase == pb.Checkpoint.DONE
assert next(stream).checkpoint.phase == pb.Checkpoint.DONE
assert not refusal("Heartbeat", pb.HeartbeatRequest(**beat)).HasField("checkpoint")
assert refusal("GetCheckpoint", pb.GetCheckpointRequest(run="train")).ended == ["w0"]
refusal("UnregisterWorker", pb.UnregisterWorkerRequest(**beat))
try:
    next(stream)
except grpc.RpcError as error:
    assert error.code().name == "NOT_FOUND"
else:
    raise AssertionError("the stream of a worker that has left goes on")
channel.close()
""",
        address,
    )
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process)
    assert (code, out) == (0, "")
    assert "refused a connection from 127.0.0.1:" in err
    assert all("refused a connection" in line for line in err.splitlines()), err


class Caller:
    """What gRPC tells of a call, as far as the service asks."""

    def peer(self) -> str:
        return "caller"

    def invocation_metadata(self) -> None:
        return None


@in_turn(turns=range(12))
def test_a_coordinator_that_stops_while_its_workers_change_does_stop(tmp_path: Path, turns: int) -> None:
    """The task that begins rounds can be cancelled, however many turns of the loop after it was woken."""

    async def work(state: StateFile) -> bool:
        async def take(number: int) -> None:
            for _ in range(number):
                await asyncio.sleep(0)

        sizes = Sizes(least=2, most=2, settle=0.0)
        service = CoordinatorService(state, lambda _peer: "machine", lambda _charter: None, sizes)
        rounds = asyncio.create_task(service.begin_rounds())
        await take(10)  # now it waits
        request = pb.RegisterWorkerRequest(run="train", worker_id="w", life=b"w" * 16, address="127.0.0.1:5000")
        stream = service.RegisterWorker(request, Caller())
        await anext(stream)  # wakes it
        await take(turns)
        rounds.cancel()
        await take(30)
        has_ended = rounds.done()
        await cast("AsyncGenerator[pb.RunEvent]", stream).aclose()  # wakes it again
        await take(30)
        return has_ended

    with contextlib.closing(StateFile(tmp_path / str(turns))) as state:
        assert asyncio.run(work(state)), "the task goes on"


def test_the_state_is_for_one_coordinator_and_a_damaged_file_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    state = StateFile(folder)
    with pytest.raises(ConfigError, match="another coordinator uses"):
        StateFile(folder)
    record = RunRecord("train", Sizes(2, 3, 1.5), round=4)
    state.save(record)
    state.save(RunRecord("other", Sizes(1, 1, 0.0)))
    state.forget("other")
    state.close()
    state = StateFile(folder)
    assert state.load() == [record]
    state.close()
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}
    with sqlite3.connect(folder / "coordinator.sqlite3") as connection:
        connection.execute("UPDATE runs SET record='{}'")
    connection.close()
    state = StateFile(folder)
    with pytest.raises(ConfigError, match="is damaged"):
        state.load()
    state.close()
    (folder / "coordinator.sqlite3").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="cannot be used"):
        StateFile(folder)
