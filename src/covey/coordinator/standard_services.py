"""The services that gRPC's own tools expect of every server: health, and reflection in both of its versions.

`grpc.reflection.v1` has the messages of `v1alpha` under another name, and grpcio-reflection has only that one.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

OLD, NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
REFLECTION: Final = f"{NEW}.ServerReflection"


async def add_standard_services(server: Any, name: str) -> Any:
    """Add health, which is returned and says that the service `name` serves, and reflection."""
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for each in ("", name):
        await checks.set(each, health_pb2.HealthCheckResponse.SERVING)
    _describe_reflection()
    names = (name, health.SERVICE_NAME, reflection.SERVICE_NAME, REFLECTION)
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(REFLECTION, {"ServerReflectionInfo": handler}),)
    )
    return checks


def _describe_reflection() -> None:
    """Let clients that ask for the description of reflection v1 get it, too."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(REFLECTION)
    except KeyError:
        renamed = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(renamed)
        renamed.name, renamed.package = "grpc/reflection/v1/reflection.proto", NEW
        for message in renamed.message_type:
            for field in filter(lambda field: field.type_name, message.field):
                field.type_name = field.type_name.replace(f".{OLD}.", f".{NEW}.")
        for service in renamed.service:
            for method in service.method:
                method.input_type = method.input_type.replace(f".{OLD}.", f".{NEW}.")
                method.output_type = method.output_type.replace(f".{OLD}.", f".{NEW}.")
        renamed.ClearField("options")
        pool.AddSerializedFile(renamed.SerializeToString())
