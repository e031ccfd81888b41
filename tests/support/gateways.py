"""Gateways beside a coordinator, and programs of their clients, which know only gRPC and the generated modules."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from tests.support import forked, pipes
from tests.support.coordinators import coordinate
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    import subprocess

    from tests.support.machines import Machine

CLIENT = """
import json, os, sys, threading, time
import grpc
import numpy as np
from covey.gateway import gateway_pb2 as pb
from covey.gateway.gateway_pb2_grpc import GatewayStub

LIMITS = [("grpc.max_receive_message_length", 4 << 20), ("grpc.use_local_subchannel_pool", 1)]

def connect(address, papers=()):
    if not papers:
        return grpc.insecure_channel(address, LIMITS)
    ca, certificate, key = (open(path, "rb").read() for path in papers)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), LIMITS)

def refusal(function, *args, **named):
    '''Return the status of a call that fails, its text and its details.'''
    try:
        found = function(*args, **named)
        list(found) if hasattr(found, "__iter__") else found
    except grpc.RpcError as error:
        return error.code().name, error.details(), dict(error.trailing_metadata() or ())
    return "OK", "", {}

class Program:
    def __init__(self, name, papers=(), address=sys.argv[1], **asked):
        self.channel = connect(address, papers)
        self.stub = GatewayStub(self.channel)
        self.registration = self.stub.Register(pb.RegisterRequest(program=name, **asked), timeout=500)
        self.joined = next(self.registration).joined
        self.session, self.rank, self.size = self.joined.session, self.joined.rank, self.joined.size

    def pieces(self, array, chunk=1 << 20, is_sent=True, **start):
        given = {"session": self.session, "dtype": array.dtype.name, "shape": array.shape} | start
        yield pb.Piece(start=pb.Start(**given))
        data = array.tobytes() if is_sent else b""
        for begin in range(0, len(data), chunk):
            yield pb.Piece(chunk=data[begin : begin + chunk])

    def do(self, method, array, timeout=500, **how):
        '''Return the array of an answer, or None if there are no chunks, and what the answer says.'''
        return self.read(getattr(self.stub, method)(self.pieces(array, **how), timeout=timeout))

    def receive(self, timeout=500, **which):
        return self.read(self.stub.Receive(pb.ReceiveRequest(session=self.session, **which), timeout=timeout))

    def read(self, answer):
        told = next(answer).result
        data = b"".join(piece.chunk for piece in answer)
        if not data and np.prod(told.shape):
            return None, told
        import ml_dtypes
        return np.frombuffer(data, np.dtype(told.dtype)).reshape(told.shape), told

    def barrier(self, timeout=500):
        self.stub.Barrier(pb.BarrierRequest(session=self.session), timeout=timeout)

    def leave(self):
        self.stub.Leave(pb.LeaveRequest(session=self.session), timeout=500)
        assert list(self.registration) == []
        self.channel.close()

def together(*functions):
    '''Call functions on threads, and raise what one of them raises.'''
    errors = []
    def call(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=call, args=(each,)) for each in functions]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    if errors:
        raise errors[0]
"""
"""What the programs of tests begin with."""


def coordinate_with_gateway(machine: Machine, at: str, *options: str) -> tuple[subprocess.Popen[str], str, str]:
    """Start a coordinator with a gateway; return its process, its address, and that of the gateway."""
    process, address = coordinate(machine, "--gateway", at, *options)
    return process, address, gateway_address(process)


def gateway_address(process: subprocess.Popen[str]) -> str:
    """Return where a gateway says that it listens."""
    line = pipes.stdout(process).readline()
    found = re.search(r"gateway listens at (\S+)\.$", line.strip())
    assert found, (line, pipes.stderr(process).read())
    return found[1]


def run_client(machine: Machine, code: str, *arguments: str) -> None:
    """Run a program of clients to its end; its asserts are those of the test."""
    done = forked.run(
        [sys.executable, "-c", CLIENT + code, *arguments],
        env=machine.env | {"GRPC_VERBOSITY": "NONE"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def start_client(machine: Machine, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program of clients, with which a test talks."""
    return machine.start("-c", CLIENT + code, *arguments, GRPC_VERBOSITY="NONE")
