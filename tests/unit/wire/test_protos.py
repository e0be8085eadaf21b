"""The wire's descriptors: compiled from the sources beside them, and the same as Danube's own."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.protobuf import descriptor_pb2

from ister import wire
from ister.broker.rpc.methods import methods_of
from ister.wire import danube, protos, services
from tools.protos import main as compile_protos

_HOME = Path(wire.__file__).resolve().parent
# What Danube's server has and its Python client does not.
_NOT_IN_THE_CLIENT = {
    "danube": {
        "ListSegmentDescriptorsRequest",
        "ListSegmentDescriptorsResponse",
        "SegmentDescriptorProto",
        "StorageService",
    },
    "danube_schema": {
        "ListSubjects",
        "ListSubjectsRequest",
        "ListSubjectsResponse",
        "SubjectSummary",
    },
}


def client_files():
    names = {"danube": "DanubeApi_pb2", "danube_schema": "SchemaRegistry_pb2"}
    return {
        package: pytest.importorskip(f"danube.proto.{name}").DESCRIPTOR
        for package, name in names.items()
    }


def our_file(package):
    (found,) = (
        protos._pool.FindFileByName(name)
        for name in protos.SOURCES
        if protos._pool.FindFileByName(name).package == package
    )
    return found


# -- the generated files ----------------------------------------------------------------------


def test_generated_files_match_the_proto_files(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpc_tools compiles .proto files; it is in [dev]")
    assert {path.name for path in _HOME.glob("*.proto")} == set(protos.SOURCES)
    compile_protos(tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in made if name.endswith(".pyi")] == sorted(
        path.name for path in _HOME.glob("*.pyi")
    )
    for name in made:
        if name == protos.COMPILED:
            one, other = (
                descriptor_pb2.FileDescriptorSet.FromString((home / name).read_bytes())
                for home in (tmp_path, _HOME)
            )
            assert one == other, "run `make protos`"
        else:
            assert (tmp_path / name).read_text() == (_HOME / name).read_text(), "run `make protos`"


# -- against Danube's own ---------------------------------------------------------------------


def fields_of(message):
    """Everything about a message's fields that is seen on the wire."""
    return {
        field.number: (
            field.name,
            field.type,
            field.is_repeated,
            field.has_presence,
            field.message_type.full_name if field.message_type is not None else None,
            field.enum_type.full_name if field.enum_type is not None else None,
            field.containing_oneof.name if field.containing_oneof is not None else None,
        )
        for field in message.fields
    }


def enum_of(enum):
    return {value.number: value.name for value in enum.values}


def messages_of(messages):
    """All messages by full name, those inside of others too."""
    found = {}
    for message in messages:
        found[message.full_name] = message
        found |= messages_of(message.nested_types)
    return found


@pytest.mark.parametrize("package", ["danube", "danube_schema"])
def test_messages_enums_and_services_are_those_of_danubes_client(package):
    check_messages(package)
    check_enums(package)
    check_services(package)


def check_messages(package):
    theirs = messages_of(client_files()[package].message_types_by_name.values())
    ours = messages_of(our_file(package).message_types_by_name.values())
    extra = {f"{package}.{name}" for name in _NOT_IN_THE_CLIENT[package]}
    assert set(ours) - extra == set(theirs)
    assert len(theirs) >= 18
    for name, message in theirs.items():
        assert fields_of(ours[name]) == fields_of(message), name
        assert {o.name: [f.name for f in o.fields] for o in ours[name].oneofs} == {
            o.name: [f.name for f in o.fields] for o in message.oneofs
        }, name
        assert {e.full_name: enum_of(e) for e in ours[name].enum_types} == {
            e.full_name: enum_of(e) for e in message.enum_types
        }, name


def check_enums(package):
    theirs, ours = client_files()[package], our_file(package)
    assert {n: enum_of(e) for n, e in ours.enum_types_by_name.items()} == {
        n: enum_of(e) for n, e in theirs.enum_types_by_name.items()
    }


def check_services(package):
    def methods(file):
        return {
            f"{service.full_name}/{method.name}": (
                method.input_type.full_name,
                method.output_type.full_name,
                method.client_streaming,
                method.server_streaming,
            )
            for service in file.services_by_name.values()
            for method in service.methods
        }

    theirs, ours = methods(client_files()[package]), methods(our_file(package))
    extra = {
        name
        for name in ours
        if _NOT_IN_THE_CLIENT[package] & {name.rpartition("/")[2], name.split("/")[0].split(".")[1]}
    }
    assert {name: ours[name] for name in ours.keys() - extra} == theirs
    assert extra, "nothing is served beyond the client: the list above is out of date"


def test_a_message_of_one_is_read_by_the_other():
    api = pytest.importorskip("danube.proto.DanubeApi_pb2")
    ours = danube.StreamMessage(
        request_id=2**64 - 1,
        msg_id=danube.MsgID(
            producer_id=3, topic_name="/d/t", broker_addr="http://b", topic_offset=9
        ),
        payload=b"\x00\xff",
        publish_time=5,
        producer_name="p",
        subscription_name="s",
        attributes={"a": "b"},
        schema_id=0,
        routing_key="",
    )
    theirs = api.StreamMessage.FromString(ours.SerializeToString())
    assert theirs.HasField("schema_id")
    assert not theirs.HasField("schema_version")
    assert theirs.HasField("routing_key")
    assert theirs.msg_id.topic_offset == 9
    assert dict(theirs.attributes) == {"a": "b"}
    assert danube.StreamMessage.FromString(theirs.SerializeToString()) == ours


# -- in one process ---------------------------------------------------------------------------


def test_both_are_imported_into_one_process():
    pytest.importorskip("danube")
    for order in [("danube", "ister.wire"), ("ister.wire", "danube")]:
        check_imports(order)


def check_imports(order):
    program = "\n".join(
        [
            *(f"import {name}" for name in order),
            "from danube.proto import DanubeApi_pb2, SchemaRegistry_pb2",
            "from ister.wire import danube as ours",
            "data = DanubeApi_pb2.AckRequest(request_id=7).SerializeToString()",
            "assert ours.AckRequest.FromString(data).request_id == 7",
            "assert ours.AckRequest is not DanubeApi_pb2.AckRequest",
            "print('both')",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "both\n"), done.stderr


# -- what the namespaces hold -----------------------------------------------------------------


def test_a_stub_has_a_callable_for_every_method_of_the_right_shape():
    calls = []

    class Channel:
        def __getattr__(self, shape):
            def make(path, *, request_serializer, response_deserializer):
                calls.append((shape, path))
                return lambda request: response_deserializer(request_serializer(request))

            return make

    made = wire.stub(Channel(), "danube.ConsumerService")
    assert sorted(vars(made)) == ["Ack", "Nack", "ReceiveMessages", "Subscribe"]
    assert ("unary_stream", "/danube.ConsumerService/ReceiveMessages") in calls
    assert ("unary_unary", "/danube.ConsumerService/Ack") in calls
    assert made.Ack(danube.AckRequest(request_id=3)).request_id == 3
    services.Delivery.Consume.on(Channel())
    assert ("stream_stream", "/ister.Delivery/Consume") in calls


def test_a_service_without_one_of_its_methods_is_not_served():
    half = SimpleNamespace(TopicLookup=lambda request, context: None)
    with pytest.raises(AttributeError):
        methods_of("danube.Discovery", half)
