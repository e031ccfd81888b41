"""A rank in Python without covey: it knows only gRPC and what protoc makes of gateway.proto.

python -m grpc_tools.protoc -I proto/covey/gateway --python_out=. --grpc_python_out=. gateway.proto
"""

from __future__ import annotations

import math
import os
from array import array
from typing import TYPE_CHECKING

import grpc
from gateway_pb2 import BarrierRequest, LeaveRequest, Piece, RegisterRequest, Start
from gateway_pb2_grpc import GatewayStub

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS, SAMPLES, CHUNK = 20, 64, 1 << 20
truth = [1.0, -2.0, 3.0, 0.5]

gateway = GatewayStub(grpc.insecure_channel(os.environ["COVEY_GATEWAY"]))
registration = gateway.Register(RegisterRequest(program="python"))  # this rank lives as long as the stream
joined = next(registration).joined


def all_reduce(values: array[float]) -> array[float]:
    """Return the mean of the arrays of all ranks."""

    def request() -> Iterator[Piece]:
        start = Start(session=joined.session, dtype="float64", shape=[len(values)], op="mean")
        yield Piece(start=start)
        data = values.tobytes()
        for begin in range(0, len(data), CHUNK):
            yield Piece(chunk=data[begin : begin + CHUNK])

    answer = gateway.AllReduce(request(), timeout=60)
    return array("d", b"".join(piece.chunk for piece in answer))


inputs = [[math.sin((each + SAMPLES * joined.rank) * (k + 1)) for k in range(4)] for each in range(SAMPLES)]
weights = array("d", [0.0] * 4)
for _ in range(STEPS):
    errors = [sum(x * (w - t) for x, w, t in zip(row, weights, truth, strict=True)) for row in inputs]
    gradient = array(
        "d", [2 * sum(row[k] * error for row, error in zip(inputs, errors, strict=True)) / SAMPLES for k in range(4)]
    )
    mean = all_reduce(gradient)
    weights = array("d", [w - 0.5 * g for w, g in zip(weights, mean, strict=True)])
gateway.Barrier(BarrierRequest(session=joined.session))
print(f"rank {joined.rank} of {joined.size}: {weights.tobytes().hex()}", flush=True)
gateway.Leave(LeaveRequest(session=joined.session))
