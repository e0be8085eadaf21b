"""Flight's frames, made by hand, are those that protobuf makes."""

from contextlib import suppress

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from ister.client.core.put_stream import decode_result
from ister.errors import CorruptDataError
from ister.wire.flight_data import decode_fields, encode_data

SCHEMA = pa.schema([("payload", pa.binary()), ("attributes", pa.map_(pa.string(), pa.string()))])


def flight_classes():
    file = descriptor_pb2.FileDescriptorProto(name="f.proto", package="f", syntax="proto3")
    shapes = {
        "Descriptor": [("type", 1, 5), ("cmd", 2, 12)],
        "FlightData": [
            ("flight_descriptor", 1, 11),
            ("data_header", 2, 12),
            ("app_metadata", 3, 12),
            ("data_body", 1000, 12),
        ],
        "PutResult": [("app_metadata", 1, 12)],
    }
    for name, fields in shapes.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            one = message.field.add(name=field, number=number, type=kind, label=1)
            if kind == 11:
                one.type_name = ".f.Descriptor"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"f.{name}"))
        for name in ("FlightData", "PutResult")
    ]


FlightData, PutResult = flight_classes()


@given(st.lists(st.binary(max_size=300), max_size=20), st.binary(min_size=1, max_size=300))
def test_a_batch_comes_back_out_of_its_frame(payloads, metadata):
    batch = pa.record_batch([payloads, [[("a", "b")]] * len(payloads)], schema=SCHEMA)
    data = FlightData.FromString(encode_data(batch.serialize(), metadata=metadata))
    assert data.app_metadata == metadata
    assert not data.HasField("flight_descriptor")
    whole = pa.ipc.read_message(batch.serialize())
    assert data.data_header == whole.metadata.to_pybytes()
    assert data.data_body == whole.body.to_pybytes()


def test_the_first_frame_has_the_schema_and_the_command():
    data = FlightData.FromString(encode_data(SCHEMA.serialize(), command=b"open"))
    assert data.flight_descriptor.type == 2
    assert data.flight_descriptor.cmd == b"open"
    assert data.data_header == pa.ipc.read_message(SCHEMA.serialize()).metadata.to_pybytes()
    assert data.data_body == b""


@given(st.binary(max_size=1000))
def test_an_answer_comes_out_of_its_frame(metadata):
    assert decode_result(PutResult(app_metadata=metadata).SerializeToString()) == metadata


@given(st.binary(max_size=50))
def test_whatever_arrives_is_an_answer_or_an_error(data):
    with suppress(CorruptDataError):
        assert isinstance(decode_result(data), bytes)


def test_a_message_of_countless_fields_is_refused_at_once():
    """Each is read by the interpreter: 30 MiB of them would stop a broker for half a minute."""
    assert decode_fields(b"\x08\x01" * 1000) == {}
    with pytest.raises(ValueError, match="fields"):
        decode_fields(b"\x08\x01" * 1001)
