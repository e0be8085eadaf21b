"""Danube's scenarios of the schema registry, with its own client, and where its broker errs.

registering and reading     schema_registry_basic
compatibility               schema_compatibility
messages with schemas       schema_validation_policy
versions of producers       schema_version_selection
what topics want            topic_schema_config
"""

import asyncio
import io
import json
from contextlib import asynccontextmanager

import fastavro
import grpc
import pytest
from danube import DispatchStrategy
from danube.schema import CompatibilityMode, SchemaType

from ister import wire
from ister.wire import danube, danube_admin, danube_schema
from tests.servers.broker import BrokerProcess
from tests.support.danube import Danube, connect, refused, topic_for
from tests.support.protos import compile_proto

INVALID, MISSING, PRECONDITION = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
)
MESSAGE = compile_proto('syntax = "proto3"; message M { string a = 1; }')
JSON, AVRO, PROTO = SchemaType.JSON_SCHEMA, SchemaType.AVRO, SchemaType.PROTOBUF
USER = {
    "type": "record",
    "name": "User",
    "fields": [{"name": "name", "type": "string"}, {"name": "age", "type": "int"}],
}


@pytest.fixture
def subject(request):
    """A subject that no other test uses."""
    return topic_for(request).rpartition("/")[2]


def schema(required=(), **types):
    """A JSON Schema of an object."""
    properties = {name: {"type": kind} for name, kind in types.items()}
    return {"type": "object", "properties": properties, "required": list(required)}


class Session:
    """A client, and what these tests do with it."""

    def __init__(self, session: Danube) -> None:
        self.danube = session
        self.schemas = session.client.schema()
        self.raw = wire.stub(session.channel, "danube_schema.SchemaRegistry")

    async def register(self, subject, definition, kind=JSON):
        if not isinstance(definition, bytes):
            definition = json.dumps(definition).encode()
        builder = self.schemas.register_schema(subject).with_type(kind)
        return await builder.with_schema_data(definition).execute()

    async def producer(self, topic, subject=None, *, name="producer", version=None, least=None):
        builder = self.danube.client.new_producer().with_topic(topic).with_name(name)
        builder.with_dispatch_strategy(DispatchStrategy.RELIABLE)
        if version is not None:
            builder.with_schema_version(subject, version)
        elif least is not None:
            builder.with_schema_min_version(subject, least)
        elif subject is not None:
            builder.with_schema_subject(subject)
        producer = builder.build()
        self.danube._producers.append(producer)
        await producer.create()
        return producer

    async def made(self, topic):
        """The topic, with a log."""
        await self.danube.create_topic(topic)
        return topic

    async def configure(self, topic, subject, policy, *, payload=False):
        await self.danube.create_topic(topic)
        done, _ = await self.schemas.configure_topic_schema(topic, subject, policy, payload)
        assert done

    async def send(self, topic, payload, *, schema_id=None, version=None):
        """A message as another client might make it, with any schema at all."""
        created = await self.danube.raw_producers.CreateProducer(
            danube.ProducerRequest(
                request_id=1,
                producer_name="raw",
                topic_name=topic,
                dispatch_strategy=danube.DispatchStrategy.Reliable,
            )
        )
        message = danube.StreamMessage(
            request_id=2,
            msg_id=danube.MsgID(producer_id=created.producer_id, topic_name=topic),
            payload=payload,
            publish_time=1,
            producer_name="raw",
        )
        if schema_id is not None:
            message.schema_id = schema_id
        if version is not None:
            message.schema_version = version
        return await self.danube.raw_producers.SendMessage(message)


@asynccontextmanager
async def opened(broker):
    async with connect(broker) as session:
        yield Session(session)


@pytest.fixture
def session(broker):
    return opened(broker)


# -- registering and reading ----------------------------------------------------------------


async def test_schemas_of_every_type_are_registered_and_read(session, subject):
    definitions = {
        JSON: json.dumps(schema(name="string", age="integer")).encode(),
        AVRO: json.dumps(USER).encode(),
        PROTO: b'syntax = "proto3"; message User { string name = 1; }',
        SchemaType.STRING: b"text",
        SchemaType.BYTES: b"anything",
        SchemaType.NUMBER: b"int64",
    }

    ids = {}
    for kind, definition in definitions.items():
        name = f"{subject}-{kind.value}"
        builder = session.schemas.register_schema(name).with_type(kind)
        builder.with_schema_data(definition).with_description("d").with_tags(["a", "b"])
        ids[kind] = await builder.execute()
        found = await session.schemas.get_latest_schema(name)
        assert (found.schema_id, found.version) == (ids[kind], 1)
        assert (found.subject, found.schema_type) == (name, kind.value)
        assert found.schema_definition == definition
        assert found.fingerprint.startswith("sha256:")
        assert await session.schemas.get_schema_by_id(ids[kind]) == found
        assert await session.schemas.get_schema_version(ids[kind], 1) == found
        raw = await session.raw.GetLatestSchema(danube_schema.GetLatestSchemaRequest(subject=name))
        assert (raw.description, raw.created_by, list(raw.tags)) == (
            "d",
            "danube-py",
            ["a", "b"],
        )
        assert raw.compatibility_mode == "backward"
        assert raw.created_at > 0
    assert len(set(ids.values())) == len(ids)
    # The Rust client registers these without a word of definition.
    for kind in ("string", "bytes"):
        answer = await session.raw.RegisterSchema(
            danube_schema.RegisterSchemaRequest(subject=f"{subject}-{kind}", schema_type=kind)
        )
        assert not answer.is_new_version


async def test_messages_carry_the_schema_of_their_producer(session, topic, subject):
    """Producers of one subject share it, one without a schema sends without, none is made up."""
    schema_id = await session.register(subject, schema(value="integer"))
    inbox = await session.danube.consumer(await session.made(topic))
    for number in (1, 2):
        producer = await session.producer(topic, subject, name=f"producer-{number}")
        await producer.send(json.dumps({"value": number}).encode())
    plain = await session.producer(topic, name="plain")
    await plain.send(b"\xff any bytes")
    *messages, bare = await inbox.take(3)
    assert [(m.schema_id, m.schema_version) for m in messages] == [(schema_id, 1)] * 2
    assert not bare.HasField("schema_id")
    assert not bare.HasField("schema_version")
    call = session.producer(f"{topic}-other", "nobody-knows-it")
    assert await refused(call) is PRECONDITION


async def test_versions_of_a_subject_share_its_id(session, subject):
    name = f"/default/{subject}"
    steps = ({}, {"email": "string"}, {"email": "string", "phone": "string"})
    ids = [await session.register(name, schema(name="string", **types)) for types in steps]
    # The first one again, written in another way.
    again = json.dumps(schema(name="string"), indent=1).encode()
    answer = await session.raw.RegisterSchema(
        danube_schema.RegisterSchemaRequest(
            subject=name, schema_type="json_schema", schema_definition=again
        )
    )
    assert (answer.version, answer.is_new_version) == (1, False)
    assert set(ids) == {answer.schema_id}
    assert await session.schemas.list_versions(name) == [1, 2, 3]
    old = await session.schemas.get_schema_version(ids[0], 1)
    assert json.loads(old.schema_definition_as_string()) == schema(name="string")
    raw = await session.raw.ListVersions(danube_schema.ListVersionsRequest(subject=name))
    assert [one.schema_id for one in raw.versions] == ids
    assert len({one.fingerprint for one in raw.versions}) == 3
    await session.schemas.set_compatibility_mode(name, CompatibilityMode.FULL)
    found = await session.raw.ListSubjects(danube_schema.ListSubjectsRequest())
    [mine] = [one for one in found.subjects if one.subject == name]
    assert (mine.schema_id, mine.schema_type, mine.latest_version) == (ids[0], "json_schema", 3)
    assert mine.compatibility_mode == "full"
    done, message = await session.schemas.delete_schema_version(name, 3)
    assert done
    assert message
    assert await session.schemas.list_versions(name) == [1, 2]
    assert await refused(session.schemas.get_schema_version(ids[0], 3)) is MISSING
    assert await refused(session.schemas.delete_schema_version(name, 3)) is MISSING


async def test_statuses_say_what_is_wrong(session, topic, subject):
    """Danube answers INTERNAL to most of these."""

    schemas = session.schemas
    calls = {
        "unparsable JSON Schema": (session.register(subject, b"{"), INVALID),
        "no JSON Schema": (session.register(subject, {"type": 5}), INVALID),
        "no Avro": (session.register(subject, {"type": "x"}, AVRO), INVALID),
        "no Protobuf": (session.register(subject, b"\xff", PROTO), INVALID),
        "no name": (session.register("", schema()), INVALID),
        "too large": (session.register(subject, b'"' + b"x" * 300_000, AVRO), INVALID),
        "unknown type": (
            session.raw.RegisterSchema(
                danube_schema.RegisterSchemaRequest(subject=subject, schema_type="xml")
            ),
            INVALID,
        ),
        "latest": (schemas.get_latest_schema("missing"), MISSING),
        "by id": (schemas.get_schema_by_id(999_999), MISSING),
        "versions": (schemas.list_versions("missing"), MISSING),
        "check": (schemas.check_compatibility("missing", b"{}", JSON), MISSING),
        "delete": (schemas.delete_schema_version("missing", 1), MISSING),
        "mode": (
            schemas.set_compatibility_mode("missing", CompatibilityMode.NONE),
            MISSING,
        ),
        "bad mode": (
            session.raw.SetCompatibilityMode(
                danube_schema.SetCompatibilityModeRequest(
                    subject=subject, compatibility_mode="sideways"
                )
            ),
            INVALID,
        ),
        "bad policy": (schemas.configure_topic_schema(topic, subject, "maybe"), INVALID),
        "no topic": (schemas.get_topic_schema_config("/default/missing"), MISSING),
        "no topic to configure": (
            schemas.configure_topic_schema("/default/missing", subject, "warn"),
            MISSING,
        ),
        "no topic name": (schemas.get_topic_schema_config("missing"), INVALID),
    }
    found = {name: await refused(call) for name, (call, _) in calls.items()}
    assert found == {name: status for name, (_, status) in calls.items()}
    await session.danube.create_topic(topic)
    call = schemas.configure_topic_schema(topic, "missing", "warn")
    assert await refused(call) is MISSING
    assert await refused(schemas.update_topic_validation_policy(topic, "none")) is PRECONDITION


# -- compatibility --------------------------------------------------------------------------

NAMED = schema(["name"], name="string")
AGED = schema(["name", "age"], name="string", age="integer")
MAYBE = schema(["name"], name="string", email="string")
MUST = schema(["name", "email"], name="string", email="string")


def constant(value):
    return {"properties": {"kind": {"const": value}}}


@pytest.mark.parametrize(
    ("mode", "old", "new", "fits"),
    [
        ("BACKWARD", NAMED, MAYBE, True),
        ("BACKWARD", AGED, NAMED, False),
        ("BACKWARD", NAMED, MUST, False),
        ("FORWARD", MAYBE, NAMED, True),
        ("FORWARD", NAMED, MUST, False),
        ("FULL", AGED, {**AGED, "properties": {**AGED["properties"], "more": {}}}, True),
        ("FULL", AGED, NAMED, False),
        ("NONE", NAMED, schema(["age"], age="integer"), True),
        ("BACKWARD", NAMED, schema(["name"], name="integer"), False),
        # Danube takes a changed constant, with which the messages that are there are invalid.
        ("BACKWARD", constant("a"), constant("b"), False),
        ("BACKWARD", constant("a"), {"properties": {"kind": {"enum": ["a", "b"]}}}, True),
        ("NONE", constant("a"), constant("b"), True),
    ],
)
async def test_compatibility_modes(session, subject, mode, old, new, fits):
    await session.register(subject, old)
    done, _ = await session.schemas.set_compatibility_mode(subject, CompatibilityMode[mode])
    assert done
    if fits:
        await session.register(subject, new)
    else:
        assert await refused(session.register(subject, new)) is PRECONDITION
    assert await session.schemas.list_versions(subject) == ([1, 2] if fits else [1])


async def test_avro_and_protobuf_evolve(session, subject):
    field = {"name": "email", "type": "string"}
    message = 'syntax = "proto3"; message M {{ string a = 1; {} }}'

    await session.register(f"{subject}-avro", USER, AVRO)
    more = {**USER, "fields": [*USER["fields"], {**field, "default": ""}]}
    await session.register(f"{subject}-avro", more, AVRO)
    worse = {**more, "fields": [*more["fields"], {**field, "name": "phone"}]}
    assert await refused(session.register(f"{subject}-avro", worse, AVRO)) is PRECONDITION
    await session.register(f"{subject}-proto", compile_proto(message.format("")), PROTO)
    more = compile_proto(message.format("int32 b = 2;"))
    await session.register(f"{subject}-proto", more, PROTO)
    worse = message.format("string b = 2;")
    for one in (compile_proto(worse), worse.encode()):
        assert await refused(session.register(f"{subject}-proto", one, PROTO)) is PRECONDITION
    # As in Danube, texts are stored and not compared.
    await session.register(f"{subject}-text", message.format("int32 b = 2;").encode(), PROTO)
    await session.register(f"{subject}-text", worse.encode(), PROTO)


async def test_compatibility_is_asked_for_before_registering(session, subject):
    await session.register(subject, NAMED)

    async def ask(new, mode=None):
        return await session.schemas.check_compatibility(
            subject, json.dumps(new).encode(), JSON, mode
        )

    assert await ask(MAYBE) == (True, [])
    fits, errors = await ask(MUST)
    assert not fits
    assert any("email" in error for error in errors)
    assert await ask(MUST, CompatibilityMode.NONE) == (True, [])
    assert await session.schemas.list_versions(subject) == [1]


# -- messages with schemas ------------------------------------------------------------------


def avro(record):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(USER), record)
    return out.getvalue()


PAYLOADS = {
    "json": (
        JSON,
        schema(["text"], text="string", flag="boolean", list="array"),
        [b'{"text": "a"}', b'{"text": "b", "flag": true}', b'{"text": "c", "list": ["d"]}'],
        b'{"flag": true}',
    ),
    "avro": (AVRO, USER, [avro({"name": "alice", "age": 30})], b'{"name": "alice", "age": 30}'),
    "string": (SchemaType.STRING, b"x", ["INFO: é".encode()], b"\xff\xfe"),
    "bytes": (SchemaType.BYTES, b"x", [b"\x00\xff\xab\xcd\xef"], None),
    "number": (SchemaType.NUMBER, b"int64", [bytes(8)], b"12"),
    "protobuf": (PROTO, MESSAGE, [b"\x0a\x01x"], b"\x08\x01"),
}


@pytest.mark.parametrize("kind", PAYLOADS)
async def test_payloads_are_looked_into(session, topic, subject, kind):
    kind, definition, good, bad = PAYLOADS[kind]
    schema_id = await session.register(subject, definition, kind)
    await session.configure(topic, subject, "enforce", payload=True)
    producer = await session.producer(topic, subject)
    inbox = await session.danube.consumer(topic)
    for payload in good:
        await producer.send(payload)
    messages = await inbox.take(len(good))
    assert [message.payload for message in messages] == good
    assert {message.schema_id for message in messages} == {schema_id}
    if bad is not None:
        assert await refused(producer.send(bad)) is INVALID
        await inbox.expect_silence()


async def test_enforcing_topic_refuses_what_does_not_fit(session, topic, subject):
    schema_id = await session.register(subject, schema(["a"], a="string"))
    other = await session.register(f"{subject}-other", schema(b="string"))
    await session.configure(topic, subject, "enforce", payload=True)
    inbox = await session.danube.consumer(topic)
    good = b'{"a": "x"}'
    for more in (
        {},
        {"schema_id": 999_999, "version": 1},
        {"schema_id": schema_id, "version": 9},
        {"schema_id": other, "version": 1},
    ):
        assert await refused(session.send(topic, good, **more)) is INVALID
    fitting = {"schema_id": schema_id, "version": 1}
    assert await refused(session.send(topic, b'{"a": 5}', **fitting)) is INVALID
    assert await refused(session.send(topic, b"not json", **fitting)) is INVALID
    await session.send(topic, good, **fitting)
    # Nothing of what was refused is in the topic.
    assert (await inbox.one(ack=True)).payload == good
    await inbox.expect_silence()


async def test_warning_topic_takes_everything(session, topic, subject):
    """Danube refuses an unknown id, and a payload that does not fit, even where it should warn."""

    schema_id = await session.register(subject, schema(["a"], a="string"))
    await session.configure(topic, subject, "warn", payload=True)
    inbox = await session.danube.consumer(topic)
    await session.send(topic, b"0")
    await session.send(topic, b"1", schema_id=999_999, version=1)
    await session.send(topic, b"2", schema_id=schema_id, version=9)
    await session.send(topic, b"3", schema_id=schema_id, version=1)
    assert [message.payload for message in await inbox.take(4)] == [b"0", b"1", b"2", b"3"]


async def test_policy_changes_at_once(session, topic, subject):
    await session.register(subject, schema(["a"], a="string"))
    producer = await session.producer(topic, subject)
    await producer.send(b"not json")
    config = await session.schemas.get_topic_schema_config(topic)
    assert (config.schema_subject, config.validation_policy) == (subject, "warn")
    assert not config.enable_payload_validation
    done, _ = await session.schemas.update_topic_validation_policy(topic, "ENFORCE", True)
    assert done
    assert await refused(producer.send(b"not json")) is INVALID
    await session.schemas.update_topic_validation_policy(topic, "none", True)
    await producer.send(b"not json")


# -- versions of producers ------------------------------------------------------------------


async def test_producer_writes_with_the_version_that_it_chose(session, topic, subject):
    types = {}
    for name in "abc":
        types[name] = "string"
        await session.register(subject, schema(**types))
    inbox = await session.danube.consumer(await session.made(topic))
    chosen = [
        ({"version": 1}, 1),
        ({"version": 3}, 3),
        ({"least": 2}, 3),
        ({"least": 3}, 3),
        ({}, 3),
    ]
    for number, (choice, _) in enumerate(chosen):
        producer = await session.producer(topic, subject, name=f"p{number}", **choice)
        await producer.send(b'{"a": "x"}')
    messages = await inbox.take(len(chosen))
    assert [m.schema_version for m in messages] == [version for _, version in chosen]


async def test_version_that_is_not_there_is_refused(session, topic, subject):
    """By Danube's client, which looks for it, and by the broker itself."""
    await session.register(subject, schema(x="integer"))
    producers = wire.stub(session.danube.channel, "danube.ProducerService")
    for choice, wanted in (("version", "pinned_version"), ("least", "min_version")):
        with pytest.raises((grpc.aio.AioRpcError, ValueError)):
            await session.producer(topic, subject, **{choice: 99})
        request = danube.ProducerRequest(
            producer_name="p",
            topic_name=topic,
            schema_ref=danube.SchemaReference(subject=subject, **{wanted: 99}),
            dispatch_strategy=danube.DispatchStrategy.Reliable,
        )
        assert await refused(producers.CreateProducer(request)) is PRECONDITION


async def test_topic_whose_schema_has_no_version_left_is_described(session, topic, subject):
    await session.register(subject, schema(x="integer"))
    await session.producer(topic, subject)
    await session.raw.DeleteSchemaVersion(
        danube_schema.DeleteSchemaVersionRequest(subject=subject, version=1)
    )
    described = await session.danube.topics.DescribeTopic(
        danube_admin.DescribeTopicRequest(name=topic)
    )
    assert described.schema_subject == subject
    assert not described.HasField("schema_version")


# -- what topics want -----------------------------------------------------------------------


async def test_first_producer_fixes_the_subject(session, topic, subject):
    schema_id = await session.register(subject, schema(msg="string"))
    await session.register(f"{subject}-other", schema(b="integer"))
    await session.producer(topic)
    config = await session.schemas.get_topic_schema_config(topic)
    assert (config.schema_subject, config.schema_id) == ("", 0)
    await session.producer(topic, subject, name="first")
    await session.producer(topic, subject, name="second")
    call = session.producer(topic, f"{subject}-other", name="third")
    assert await refused(call) is PRECONDITION
    config = await session.schemas.get_topic_schema_config(topic)
    assert (config.schema_subject, config.schema_id) == (subject, schema_id)
    # One without a schema may come; its messages are judged one by one.
    plain = await session.producer(topic, name="plain")
    await plain.send(b"anything")


async def test_topic_can_be_given_another_subject(session, topic, subject):
    await session.register(subject, schema(a="string"))
    other = f"{subject}-other"
    schema_id = await session.register(other, schema(b="string"))
    await session.producer(topic, subject)
    done, _ = await session.schemas.configure_topic_schema(topic, other, "Enforce", True)
    assert done
    config = await session.schemas.get_topic_schema_config(topic)
    assert (config.schema_subject, config.validation_policy) == (other, "enforce")
    assert (config.enable_payload_validation, config.schema_id) == (True, schema_id)
    assert await refused(session.producer(topic, subject, name="late")) is PRECONDITION


async def test_new_topic_of_a_deleted_ones_name_wants_nothing(session, topic, subject):
    await session.register(subject, schema(a="string"))
    await session.configure(topic, subject, "enforce", payload=True)
    answer = await session.danube.topics.DeleteTopic(danube_admin.TopicRequest(name=topic))
    assert answer.success
    producer = await session.producer(topic)
    await producer.send(b"anything")
    config = await session.schemas.get_topic_schema_config(topic)
    assert config.schema_subject == ""


# -- life -----------------------------------------------------------------------------------


async def test_registry_survives_a_kill(tmp_path):
    with BrokerProcess(tmp_path) as broker:
        async with opened(broker) as session:
            schema_id = await session.register("orders", schema(["a"], a="string"))
            await session.register("orders", schema(["a"], a="string", b="string"))
            await session.schemas.set_compatibility_mode("orders", CompatibilityMode.FULL)
            await session.configure("/default/orders", "orders", "enforce", payload=True)
        await asyncio.to_thread(broker.crash)
        async with opened(broker) as session:
            found = await session.schemas.get_latest_schema("orders")
            assert found.schema_id == schema_id
            assert await session.schemas.list_versions("orders") == [1, 2]
            call = session.register("orders", schema(["a"], a="integer"))
            assert await refused(call) is PRECONDITION
            producer = await session.producer("/default/orders", "orders")
            await producer.send(b'{"a": "x"}')
            assert await refused(producer.send(b'{"a": 5}')) is INVALID
            assert await session.register("other", schema()) != schema_id
