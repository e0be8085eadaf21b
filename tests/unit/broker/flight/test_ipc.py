"""Columns out of Flight's messages, whoever made them."""

import random
import struct
from contextlib import suppress

import pytest

from tests.support.cases import each

pytest.importorskip("pyarrow")

import pyarrow as pa

from ister import kernels
from ister.base.limits import MIB
from ister.broker.flight.ipc import PlainRows, read_batch, read_schema
from ister.errors import InvalidRequestError, MessageTooLargeError
from ister.wire.flight_data import FlightData, encode_data, encode_fields

BATCH = pa.record_batch(
    {
        "payload": pa.array([b"a" * 100, b"", b"b" * 50_000], pa.binary()),
        "routing_key": pa.array(["k", None, "l"], pa.string()),
        "attributes": pa.array([[("a", "b")], [], None], pa.map_(pa.string(), pa.string())),
    }
)


def message(batch, codec=None, metadata=b""):
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return encode_data(reader.read_next_message().serialize(), metadata=metadata)


@each("codec", [None, "lz4", "zstd"])
def test_batch_comes_out_as_it_went_in(codec):
    data = FlightData(message(BATCH, codec, metadata=b"about it"))
    found = read_batch(data, BATCH.schema, bytes_max=MIB)
    found.validate(full=True)
    assert found.equals(BATCH)
    assert bytes(data.metadata) == b"about it"


def test_schema_comes_out_as_it_went_in():
    data = FlightData(encode_data(BATCH.schema.serialize(), command=b"where to"))
    assert read_schema(data) == BATCH.schema
    assert data.command == b"where to"


def test_columns_are_not_copied():
    encoded = message(BATCH)
    before = pa.total_allocated_bytes()
    found = read_batch(FlightData(encoded), BATCH.schema, bytes_max=MIB)
    assert pa.total_allocated_bytes() - before < 10_000
    assert found.num_rows == 3


def test_one_kind_of_message_is_not_taken_for_another():
    schema = FlightData(encode_data(BATCH.schema.serialize()))
    with pytest.raises(InvalidRequestError, match="a schema where a record batch belongs"):
        read_batch(schema, BATCH.schema, bytes_max=MIB)
    with pytest.raises(InvalidRequestError, match="a record batch where a schema belongs"):
        read_schema(FlightData(message(BATCH)))
    with pytest.raises(InvalidRequestError):
        read_schema(FlightData(b""))


def test_message_without_columns_has_none():
    assert read_batch(FlightData(b""), BATCH.schema, bytes_max=MIB) is None


@each("codec", ["lz4", "zstd"])
def test_batch_that_says_in_its_metadata_that_it_is_compressed_is_not_inflated(codec):
    """As Arrow 0.17 wrote it, which Arrow still takes: the header has nothing about compression."""
    large = pa.record_batch({"payload": pa.array([bytes(16 * MIB)] * 4, pa.binary())})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec, metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(sink, large.schema, options=options) as writer:
        writer.write_batch(large, custom_metadata={"ARROW:experimental_compression": codec})
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    found = reader.read_next_message()
    header = bytearray(found.metadata.to_pybytes())
    view = memoryview(header)
    slot = _field_slot(view, _field_at(view, struct.unpack_from("<I", view)[0], 2), 3)
    struct.pack_into("<H", header, slot, 0)
    data = FlightData(encode_fields((2, bytes(header)), (1000, found.body.to_pybytes())))
    before = pa.total_allocated_bytes()
    with pytest.raises(InvalidRequestError):
        read_batch(data, large.schema, bytes_max=8 * MIB)
    assert pa.total_allocated_bytes() - before < MIB


def _field_slot(view, table, field):
    """Where a table of a flatbuffer says where its field is."""
    return table - struct.unpack_from("<i", view, table)[0] + 4 + 2 * field


def _field_at(view, table, field):
    """The table that a field of a table is."""
    place = table + struct.unpack_from("<H", view, _field_slot(view, table, field))[0]
    return place + struct.unpack_from("<I", view, place)[0]


@each("codec", ["lz4", "zstd"])
def test_batch_that_would_be_too_large_is_not_inflated(codec):
    large = pa.record_batch({"payload": pa.array([bytes(16 * MIB)] * 4, pa.binary())})
    data = FlightData(message(large, codec))
    assert len(data.body) < MIB
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(MessageTooLargeError):
        read_batch(data, large.schema, bytes_max=32 * MIB)
    assert pa.default_memory_pool().max_memory() == before
    assert read_batch(data, large.schema, bytes_max=65 * MIB).equals(large)


@each("what", ["schema", None, "lz4", "zstd"])
def test_damaged_messages_are_refused_or_read(what):
    """Goal: nothing but an error of ours. Method: bytes of header and body changed at random."""
    is_schema, chance = what == "schema", random.Random(1)
    encoded = encode_data(BATCH.schema.serialize()) if is_schema else message(BATCH, what)
    for _ in range(3000):
        damaged = bytearray(encoded)
        for _ in range(chance.choice((1, 1, 3, 20))):
            damaged[chance.randrange(min(len(damaged), 1200))] = chance.randrange(256)
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            data = FlightData(bytes(damaged))
        except ValueError:
            continue
        for read in (
            lambda data=data: read_batch(data, BATCH.schema, bytes_max=MIB),
            lambda data=data: read_schema(data),
        ):
            with suppress(InvalidRequestError, MessageTooLargeError):
                read()


# -- rows that are payloads alone --------------------------------------------------------------


def plain(payloads, kind=None):
    return pa.record_batch({"payload": pa.array(payloads, kind or pa.binary())})


@each("kind", [pa.binary(), pa.large_binary()])
def test_payloads_alone_are_found_without_arrow(kind):
    kernels.load()
    plain_rows = PlainRows(plain([], kind).schema)
    for count in (1, 1, 3, 1000, 2):
        payloads = [b"%d" % number * count for number in range(count)]
        for batch in (plain(payloads, kind), plain([b"not this", *payloads], kind).slice(1)):
            data = FlightData(message(batch))
            rows = plain_rows.read(data)
            assert rows.payloads() == payloads
            buffers = read_batch(data, batch.schema, bytes_max=MIB).get_total_buffer_size()
            assert buffers <= rows.size_bytes <= buffers + 16


@each("is_first", [True, False])
@each(
    "other",
    [
        lambda: message(plain([b"a", None])),
        lambda: message(plain([])),
        lambda: message(plain([b"a" * 1000]), "zstd"),
        lambda: message(BATCH),
        lambda: encode_data(BATCH.schema.serialize()),
        lambda: b"",
    ],
)
def test_other_rows_are_left_to_arrow(other, is_first):
    plain_rows = PlainRows(plain([]).schema)
    if not is_first:
        assert plain_rows.read(FlightData(message(plain([b"a", b"b"])))) is not None
    assert plain_rows.read(FlightData(other())) is None
    assert plain_rows.read(FlightData(message(plain([b"a", b"b"])))).payloads() == [b"a", b"b"]


@each("schema", [BATCH.schema, pa.schema([("payload", pa.string())])])
def test_other_columns_are_left_to_arrow(schema):
    assert PlainRows(schema).read(FlightData(message(plain([b"a"])))) is None


@each("is_first", [True, False])
def test_damaged_rows_are_found_only_where_arrow_finds_the_same(is_first):
    """Goal: whatever the bytes are, no payload lies outside of them, and none is another."""
    kernels.load()
    rng = random.Random(15)
    found_count = 0
    for count in (2, 40):
        batch = plain([b"%d" % number * number for number in range(count)])
        good = message(batch)
        plain_rows = PlainRows(batch.schema)
        for _ in range(3000):
            damaged = bytearray(good)
            for _ in range(rng.choice((1, 1, 2, 5))):
                damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 255, rng.randrange(256)))
            if is_first:
                plain_rows = PlainRows(batch.schema)
            with suppress(ValueError):
                data = FlightData(bytes(damaged))
                rows = plain_rows.read(data)
                if rows is not None:
                    found_count += 1
                    known = read_batch(data, batch.schema, bytes_max=MIB)
                    known.validate(full=True)
                    assert rows.payloads() == known.column(0).to_pylist()
    assert found_count > 100
