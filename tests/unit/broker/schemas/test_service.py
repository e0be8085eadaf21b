"""The gRPC service of the registry: rights, and what is refused with which status."""

import asyncio

import grpc
import pytest

from ister.broker.rpc.handlers import Refused
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.rights import Permission
from ister.broker.services.schemas import SchemaService
from ister.clock import SystemClock
from ister.errors import NotFoundError, PermissionDeniedError
from ister.metadata.memory import MemoryMetadata
from ister.wire import danube_schema
from support.cases import each

TOPIC = "/default/orders"


class FakeGuard:
    """Notes what was asked for, and refuses all of it when told to."""

    def __init__(self):
        self.asked = []
        self.is_closed = False

    def check(self, principal, permission, *, topic=None, namespace=None, action=None, detail=""):
        self._note(permission, None if topic is None else str(topic))

    def check_anywhere(self, principal, permission, *, action=None):
        self._note(permission, "anywhere")

    def _note(self, permission, resource):
        self.asked.append((permission, resource))
        if self.is_closed:
            raise PermissionDeniedError("no")


class FakeTopics:
    async def get(self, name):
        if name != TOPIC:
            raise NotFoundError(f"topic {name} does not exist")
        return type("Topic", (), {"name": name})


@pytest.fixture
def guard():
    return FakeGuard()


@pytest.fixture
def service(guard):
    metadata = MemoryMetadata()
    with SchemaRegistry(metadata, root_prefix="/ister", clock=SystemClock()) as schemas:
        schemas.register("orders", "int", b"")
        schemas.register(TOPIC, "string", b"")
        yield SchemaService(schemas, FakeTopics(), guard)
    metadata.close()


def request(name, **fields):
    return name, getattr(danube_schema, f"{name}Request")(**fields)


READS = [
    request("GetSchema", schema_id=1),
    request("GetLatestSchema", subject="orders"),
    request("ListVersions", subject="orders"),
    request("ListSubjects"),
    request("CheckCompatibility", subject="orders", schema_type="int", new_schema_definition=b""),
]
OF_SUBJECTS = [
    request("RegisterSchema", subject="orders", schema_type="int"),
    request("SetCompatibilityMode", subject="orders", compatibility_mode="full"),
    request("DeleteSchemaVersion", subject="orders", version=1),
]
OF_TOPICS = [
    request(
        "ConfigureTopicSchema",
        topic_name=TOPIC,
        schema_subject="orders",
        validation_policy="warn",
    ),
    request("UpdateTopicValidationPolicy", topic_name=TOPIC, validation_policy="warn"),
]


def ask(service, call):
    name, message = call
    return asyncio.run(getattr(service, name)(message, None))


def name_of(call):
    return call[0]


@each("call", READS)
def test_reading_needs_no_more_than_looking_up(service, guard, call):
    """Danube wants ManageSchema, so that a consumer cannot read what its messages look like."""
    guard.asked.clear()
    ask(service, call)
    assert guard.asked == [(Permission.LOOKUP, "anywhere")]


@each("call", OF_SUBJECTS)
def test_changing_a_subject_is_a_right_in_the_cluster_or_on_its_topic(service, guard, call):
    guard.asked.clear()
    ask(service, call)
    assert guard.asked == [(Permission.MANAGE_SCHEMA, None)]
    name, message = call
    message = type(message).FromString(message.SerializeToString())
    message.subject = TOPIC
    if name == "RegisterSchema":
        message.schema_type = "string"
    ask(service, (name, message))
    assert guard.asked[1:] == [(Permission.MANAGE_SCHEMA, TOPIC)]


def test_changing_what_a_topic_wants_is_a_right_on_the_topic(service, guard):
    for call in OF_TOPICS:
        ask(service, call)
    assert guard.asked == [(Permission.MANAGE_SCHEMA, TOPIC)] * 2
    ask(service, request("GetTopicSchemaConfig", topic_name=TOPIC))
    assert guard.asked[2:] == [(Permission.LOOKUP, TOPIC)]


@each(
    "call",
    [*READS, *OF_SUBJECTS, *OF_TOPICS, request("GetTopicSchemaConfig", topic_name=TOPIC)],
)
def test_nothing_happens_without_the_right(service, guard, call):
    guard.is_closed = True
    with pytest.raises(PermissionDeniedError):
        ask(service, call)


def test_every_call_of_the_service_is_here():
    calls = {name for name, _ in (*READS, *OF_SUBJECTS, *OF_TOPICS)} | {"GetTopicSchemaConfig"}
    assert calls == {
        name.removesuffix("Request") for name in vars(danube_schema) if name.endswith("Request")
    }


@each(
    "call",
    [
        request("RegisterSchema", subject="orders", schema_type="string"),
        OF_TOPICS[1],
    ],
)
def test_what_does_not_fit_the_state_is_a_failed_precondition(service, call):
    with pytest.raises(Refused) as caught:
        ask(service, call)
    assert caught.value.status is grpc.StatusCode.FAILED_PRECONDITION


def test_config_of_a_topic_whose_subject_has_no_version_left(service):
    ask(service, OF_TOPICS[0])
    ask(service, OF_SUBJECTS[2])
    answer = ask(service, request("GetTopicSchemaConfig", topic_name=TOPIC))
    assert (answer.schema_subject, answer.schema_id) == ("orders", 1)
