"""Kafka's requests, byte by byte, for tests that no client of Kafka's would do.

async with a_broker(tmp_path) as (_, _, listening), raw(listening) as client:
    answer = await client.ask(ApiKey.METADATA, 12, topics=None)
"""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from io import BytesIO
from typing import Any, get_args, get_origin

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from ister.broker.kafka.protocol import ApiKey
from ister.broker.server import Listening
from tests.support.waiting import PATIENCE_SECONDS

_NUMBERS = ("int8", "int16", "int32", "int64", "uint16", "float64")


def example(kind: type[Any], **fields: Any) -> Any:
    """A request with a value in every field: those that are given, wherever they are nested."""
    found = {
        one.name: fields[one.name] if one.name in fields else _value(one, fields)
        for one in dataclasses.fields(kind)
    }
    return kind(**found)


def _value(field: dataclasses.Field[Any], fields: dict[str, Any]) -> Any:
    nested = _nested(field.type)
    if nested is not None:
        if "tuple" in str(field.type):
            return (example(nested, **fields),)
        return example(nested, **fields) if dataclasses.is_dataclass(field.type) else None
    one = _plain(field.metadata.get("kafka_type", ""))
    return (one,) if get_origin(field.type) is tuple or "tuple[" in str(field.type) else one


def _nested(kind: Any) -> type[Any] | None:
    if dataclasses.is_dataclass(kind):
        return kind  # type: ignore[return-value]
    for one in get_args(kind):
        if (found := _nested(one)) is not None:
            return found
    return None


def _plain(name: str) -> Any:
    if name in _NUMBERS:
        return 0
    return {
        "bool": False,
        "string": "t",
        "bytes": b"x",
        "records": b"",
        "uuid": uuid.UUID(int=7),
        "timedelta_i32": timedelta(seconds=6),
        "timedelta_i64": timedelta(seconds=6),
    }[name]


def frame(key: int, version: int, correlation: int = 1, **fields: Any) -> bytes:
    """A request with its size in front."""
    kind: Any = load_request_schema(key, version)
    header: Any = kind.__header_schema__
    parts = {
        "request_api_key": key,
        "request_api_version": version,
        "correlation_id": correlation,
        "client_id": "test",
    }
    known = {one.name for one in dataclasses.fields(header)}
    file = BytesIO()
    entity_writer(header)(file, header(**{k: v for k, v in parts.items() if k in known}))
    entity_writer(kind)(file, example(kind, **fields))
    data = file.getvalue()
    return struct.pack(">i", len(data)) + data


class RawClient:
    """A connection that sends what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._correlation = 0

    async def ask(self, key: ApiKey, version: int, **fields: Any) -> Any:
        """The answer to a request."""
        self._correlation += 1
        self.writer.write(frame(key, version, self._correlation, **fields))
        return await self.answer(key, version, self._correlation)

    async def answer(self, key: int, version: int, correlation: int) -> Any:
        """The next answer, which is that to a certain request."""
        data = await self.receive()
        assert data is not None, "the broker has closed the connection"
        kind: Any = load_response_schema(key, version)
        header, size = entity_reader(kind.__header_schema__)(data, 0)
        assert header.correlation_id == correlation
        answer, used = entity_reader(kind)(data, size)
        assert size + used == len(data)
        return answer

    async def receive(self) -> bytes | None:
        """The next answer as bytes; None if the connection was closed."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                size = await self.reader.readexactly(4)
                return await self.reader.readexactly(struct.unpack(">i", size)[0])
            except (asyncio.IncompleteReadError, ConnectionError):
                return None


@asynccontextmanager
async def raw(listening: Listening) -> AsyncIterator[RawClient]:
    """A connection to a broker's port for Kafka's clients."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listening.kafka)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
