"""The gRPC service of the registry: rights, and what is refused with which status."""

import asyncio

import grpc
import pytest

from ister.base.clock import SystemClock
from ister.broker.rpc.handlers import Refused
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.rights import Permission
from ister.broker.services.schemas import SchemaService
from ister.errors import NotFoundError, PermissionDeniedError
from ister.wire import danube_schema
from tests.support.cases import each
from tests.support.memory_metadata import MemoryMetadata

TOPIC = "/default/orders"


class FakeGuard:
    """Notes what was asked for, and refuses all of it when told to."""

    def __init__(self):
        self.asked = []
        self.is_closed = False
        self.seen = ()
        """Topics that the caller may see; None for all."""

    def check(self, principal, permission, *, topic=None, namespace=None, action=None, detail=""):
        self._note(permission, None if topic is None else str(topic))

    def check_anywhere(self, principal, permission, *, action=None):
        self._note(permission, "anywhere")

    def allows(self, principal, permission, *, topic=None):
        return topic in self.seen and permission is Permission.LOOKUP

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
        "ConfigureTopicSchema", topic_name=TOPIC, schema_subject="orders", validation_policy="warn"
    ),
    request("UpdateTopicValidationPolicy", topic_name=TOPIC, validation_policy="warn"),
]


def ask(service, call):
    name, message = call
    return asyncio.run(getattr(service, name)(message, None))


def name_of(call):
    return call[0]


@pytest.mark.parametrize("call", READS, ids=name_of)
def test_reading_needs_no_more_than_to_see_a_topic_with_the_subject(service, guard, call):
    """Danube wants ManageSchema, so that a consumer cannot read what its messages look like."""
    listed = [(Permission.LOOKUP, "anywhere")] if call[0] == "ListSubjects" else []
    guard.seen = (TOPIC,)
    guard.is_closed = not listed
    if listed:
        assert [one.subject for one in ask(service, call).subjects] == [TOPIC]
    else:
        with pytest.raises(PermissionDeniedError):
            ask(service, call)
    guard.is_closed = False
    ask(service, OF_TOPICS[0])
    guard.asked.clear()
    answer = ask(service, call)
    assert not listed or {one.subject for one in answer.subjects} == {TOPIC, "orders"}
    assert guard.asked == listed
    guard.seen = (None,)
    ask(service, call)
    assert guard.asked == listed * 2


def test_an_id_says_nothing_to_those_who_may_not_read_its_subject(service, guard):
    guard.is_closed = True
    for number in (1, 99):
        with pytest.raises(PermissionDeniedError):
            ask(service, request("GetSchema", schema_id=number))
    assert guard.asked == [(Permission.LOOKUP, None)] * 2
    guard.seen = (TOPIC,)
    assert ask(service, request("GetSchema", schema_id=2)).subject == TOPIC


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


@each("call", [*READS, *OF_SUBJECTS, *OF_TOPICS, request("GetTopicSchemaConfig", topic_name=TOPIC)])
def test_nothing_happens_without_the_right(service, guard, call):
    guard.is_closed = True
    with pytest.raises(PermissionDeniedError):
        ask(service, call)


def test_every_call_of_the_service_is_here():
    calls = {name for name, _ in (*READS, *OF_SUBJECTS, *OF_TOPICS)} | {"GetTopicSchemaConfig"}
    assert calls == {
        name.removesuffix("Request") for name in vars(danube_schema) if name.endswith("Request")
    }


@each("call", [request("RegisterSchema", subject="orders", schema_type="string"), OF_TOPICS[1]])
def test_what_does_not_fit_the_state_is_a_failed_precondition(service, call):
    with pytest.raises(Refused) as caught:
        ask(service, call)
    assert caught.value.status is grpc.StatusCode.FAILED_PRECONDITION


def test_config_of_a_topic_whose_subject_has_no_version_left(service):
    ask(service, OF_TOPICS[0])
    ask(service, OF_SUBJECTS[2])
    answer = ask(service, request("GetTopicSchemaConfig", topic_name=TOPIC))
    assert (answer.schema_subject, answer.schema_id) == ("orders", 1)
