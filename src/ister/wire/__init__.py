"""What brokers and clients exchange: messages, services, errors as statuses, Flight's contract.

    danube          Danube's client protocol         danube_schema   its schema registry
    danube_admin    its administration               ister_api       what Ister adds
    services        every RPC, as a typed value

The first four are namespaces of message classes: `danube.StreamMessage(…)`. `make protos` writes
the files that they are loaded and type-checked from: `services.binpb`, `*_pb2.pyi`, `services.py`.

These names are loaded when they are first used: gRPC and protobuf are an extra, and the modules
beside them (`ister.wire.contract`) do without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ister.wire import services
    from ister.wire.protos import (
        Rpc,
        Stream,
        danube,
        danube_admin,
        danube_schema,
        describe_service,
        ister_api,
        message_class,
        stub,
    )

__all__ = [
    "Rpc",
    "Stream",
    "danube",
    "danube_admin",
    "danube_schema",
    "describe_service",
    "ister_api",
    "message_class",
    "services",
    "stub",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "services":
        return importlib.import_module(f"{__name__}.services")
    found: object = getattr(importlib.import_module(f"{__name__}.protos"), name)
    globals()[name] = found
    return found
