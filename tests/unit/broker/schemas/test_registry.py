"""The registry: subjects and versions, what topics want, and two brokers at once."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ister.broker.schemas.registry import SchemaRegistry
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    TopicNameError,
    UnavailableError,
)
from ister.topic.schema_kinds import CompatibilityMode, ValidationPolicy
from ister.topic.schema_records import TopicConfig
from tests.support.cases import each
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata
from tests.support.waiting import eventually

ROOT = "/ister"
TOPIC = "/default/orders"
ENFORCE, WARN, NONE = ValidationPolicy.ENFORCE, ValidationPolicy.WARN, ValidationPolicy.NONE


def schema(*names, required=(), **more):
    properties = {name: {"type": "string"} for name in names}
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(required), **more}
    ).encode()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def metadata():
    store = MemoryMetadata()
    yield store
    store.close()


@pytest.fixture
def open_registry(metadata, clock):
    opened = []

    def open_it(**settings):
        registry = SchemaRegistry(metadata, root_prefix=ROOT, clock=clock, **settings)
        opened.append(registry)
        return registry

    yield open_it
    for registry in opened:
        registry.close()


@pytest.fixture
def registry(open_registry):
    # It looks at the store when it is woken, so that only what is meant to wakes it.
    return open_registry(refresh_seconds=600)


# -- subjects -------------------------------------------------------------------------------


def test_version_is_found_by_every_way(registry, clock):
    registered = registry.register(
        "orders", "json", schema("a"), description="d", created_by="me", tags=["x", "y"]
    )
    assert (registered.schema_id, registered.version, registered.is_new_version) == (1, 1, True)
    found = registry.latest("orders")
    assert found == registry.get(1) == registry.get(1, 1)
    assert [found] == registry.versions("orders")
    of_schema = (found.subject, found.schema_type, found.definition)
    assert of_schema == ("orders", "json_schema", schema("a"))
    assert (found.description, found.created_by, found.tags) == ("d", "me", ("x", "y"))
    assert found.created_at == clock.now_ns() // 1_000_000_000
    assert found.compatibility_mode is CompatibilityMode.BACKWARD
    assert found.fingerprint == registered.fingerprint


def test_same_schema_stays_the_version_that_it_is(registry):
    first = registry.register("orders", "json", schema("a"))
    second = registry.register("orders", "json", schema("a", "b"))
    assert (second.schema_id, second.version, second.is_new_version) == (1, 2, True)
    spelled = json.dumps(json.loads(schema("a")), indent=4).encode()
    again = registry.register("orders", "json_schema", spelled)
    assert (again.version, again.is_new_version) == (1, False)
    assert again.fingerprint == first.fingerprint
    assert registry.latest("orders").version == 2
    assert registry.get(1, 1).definition == schema("a")


@each("subject", ["/default/orders", "_index", "b/versions/1", "ö %"])
def test_subjects_of_any_name_have_ids_of_their_own(registry, subject):
    before = len(registry.subjects())
    registry.register("a", "string", b"")
    made = registry.register(subject, "bytes", b"")
    assert registry.latest(subject).schema_type == "bytes"
    assert registry.latest("a").schema_type == "string"
    found = {one.subject: one for one in registry.subjects()}
    assert len({one.schema_id for one in found.values()}) == len(found) > before
    one = found[subject]
    assert (one.schema_id, one.schema_type, one.version) == (made.schema_id, "bytes", 1)


def test_unknown_ones_are_not_found(registry):
    registry.register("orders", "string", b"")
    for call in (
        lambda: registry.latest("other"),
        lambda: registry.versions("other"),
        lambda: registry.get(99),
        lambda: registry.get(1, 2),
        lambda: registry.check_compatibility("other", "string", b""),
        lambda: registry.set_compatibility_mode("other", CompatibilityMode.NONE),
        lambda: registry.delete_version("other", 1),
        lambda: registry.delete_version("orders", 2),
        lambda: registry.configure_topic(TOPIC, "other", WARN, checks_payload=False),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert registry.find_id("other") is None


@each(
    ("arguments", "more"),
    [
        (("", "string", b""), {}),
        (("s", "nothing", b""), {}),
        (("s", "avro", b"{"), {}),
        (("s", "json", b'{"type": 5}'), {}),
        (("s", "proto", b""), {}),
        (("s", "string", b""), {"description": "x" * 5000}),
        (("s", "string", b""), {"created_by": "x" * 500}),
        (("s", "string", b""), {"tags": ["x" * 500]}),
        (("s", "string", b""), {"tags": ["x"] * 100}),
    ],
)
def test_nothing_is_left_of_what_is_refused(registry, metadata, arguments, more):
    with pytest.raises(InvalidRequestError):
        registry.register(*arguments, **more)
    assert metadata.range(ROOT) == []


def test_incompatible_version_is_refused_with_reasons(registry):
    registry.register("orders", "json", schema("a", required=["a"]))
    worse = schema("a", "b", required=["a", "b"])
    with pytest.raises(ConflictError, match="/b: is required") as caught:
        registry.register("orders", "json", worse)
    assert "version 1" in str(caught.value)
    assert caught.value.hint
    assert len(registry.versions("orders")) == 1
    assert registry.check_compatibility("orders", "json", worse)
    assert not registry.check_compatibility("orders", "json", worse, CompatibilityMode.NONE)
    registry.set_compatibility_mode("orders", CompatibilityMode.NONE)
    assert registry.register("orders", "string", b"").version == 2
    assert registry.latest("orders").compatibility_mode is CompatibilityMode.NONE
    # The latest version is what counts.
    registry.set_compatibility_mode("orders", CompatibilityMode.FULL)
    with pytest.raises(ConflictError, match="string"):
        registry.register("orders", "json", worse)


def test_deleted_version_is_gone_and_its_number_with_it(registry):
    for names in (["a"], ["a", "b"], ["a", "b", "c"]):
        registry.register("orders", "json", schema(*names))
    registry.delete_version("orders", 3)
    assert registry.latest("orders").version == 2
    assert [one.version for one in registry.versions("orders")] == [1, 2]
    with pytest.raises(NotFoundError):
        registry.get(1, 3)
    assert registry.register("orders", "json", schema("a", "b", "c")).version == 4
    # Without versions a subject keeps its id.
    registry.register("other", "string", b"")
    for version in (1, 2, 4):
        registry.delete_version("orders", version)
    for call in (lambda: registry.latest("orders"), lambda: registry.get(1)):
        with pytest.raises(NotFoundError):
            call()
    assert [one.subject for one in registry.subjects()] == ["other"]
    with pytest.raises(ConflictError, match="not found"):
        registry.bind_producer(TOPIC, "orders")
    # There is nothing to be compatible with.
    again = registry.register("orders", "number", b"")
    assert (again.schema_id, again.version, again.is_new_version) == (1, 5, True)


# -- many at once, and lost answers ---------------------------------------------------------


def at_once(work, rows):
    """What `work` gives for each row, all in threads of their own."""
    with ThreadPoolExecutor(len(rows)) as threads:
        return list(threads.map(work, rows))


def test_ids_and_versions_are_given_once_by_many_brokers(open_registry):
    brokers = [open_registry() for _ in range(4)]
    found = []

    def work(index):
        broker = brokers[index % len(brokers)]
        for number in range(5):
            own = broker.register(f"subject-{index}-{number}", "string", b"")
            found.append((own.schema_id, own.version))
            shared = broker.register("shared", "json", schema(f"p{index}", f"q{number}"))
            found.append((shared.schema_id, shared.version))

    at_once(work, range(8))
    assert len(set(found)) == len(found) == 80
    versions = [one.version for one in brokers[0].versions("shared")]
    assert versions == list(range(1, 41))
    assert len(brokers[0].subjects()) == 41


def test_same_schema_from_many_brokers_is_one_version(open_registry):
    brokers = [open_registry() for _ in range(4)] * 2
    answers = at_once(lambda broker: broker.register("orders", "json", schema("a")), brokers)
    assert {(one.schema_id, one.version) for one in answers} == {(1, 1)}
    assert sorted(one.is_new_version for one in answers) == [False] * 7 + [True]


@pytest.mark.parametrize("when", ["before", "after"])
def test_lost_answer_to_a_registration_is_found_out(registry, metadata, when):
    lost = []

    def lose(kind, key):
        if kind == "transact" and not lost:
            lost.append(key)
            raise CommitUnknownError("no answer")

    setattr(metadata, when, lose)
    registered = registry.register("orders", "json", schema("a"))
    assert lost
    assert (registered.schema_id, registered.version, registered.is_new_version) == (1, 1, True)
    assert len(registry.versions("orders")) == 1
    lost.clear()
    assert registry.register("orders", "json", schema("a", "b")).is_new_version
    assert [one.version for one in registry.versions("orders")] == [1, 2]
    lost.clear()
    registry.delete_version("orders", 1)
    assert [one.version for one in registry.versions("orders")] == [2]
    lost.clear()
    assert registry.bind_producer(TOPIC, "orders").version == 2
    assert registry.topic_config(TOPIC).subject == "orders"


def test_registration_that_lands_late_does_nothing(registry, metadata):
    metadata.delay_next_change()
    first = registry.register("orders", "json", schema("a"))
    metadata.deliver_delayed()
    assert first.is_new_version
    other = registry.register("other", "string", b"")
    assert (first.schema_id, other.schema_id) == (1, 2)
    assert len(registry.versions("orders")) == 1


def test_store_that_never_answers_is_told(registry, metadata):
    def fail(kind, key):
        if kind == "transact":
            raise CommitUnknownError("no answer")

    metadata.before = fail
    with pytest.raises(UnavailableError):
        registry.register("orders", "string", b"")


def test_lost_counter_gives_no_id_twice(registry, metadata):
    registry.register("a", "string", b"")
    registry.register("b", "string", b"")
    metadata.delete(f"{ROOT}/schemas/_global/next_schema_id")
    assert registry.register("c", "string", b"").schema_id == 3


def test_damage_is_told(registry, metadata):
    registry.register("orders", "string", b"")
    metadata.put(f"{ROOT}/schemas/orders/metadata", b"{}")
    with pytest.raises(CorruptDataError):
        registry.latest("orders")


# -- topics ---------------------------------------------------------------------------------


def test_first_producer_fixes_the_subject(registry):
    registry.register("orders", "json", schema("a"))
    registry.register("orders", "json", schema("a", "b"))
    registry.register("other", "json", schema("c"))
    assert registry.topic_config(TOPIC) is None
    bound = registry.bind_producer(TOPIC, "orders")
    assert (bound.schema_id, bound.version) == (1, 2)
    assert registry.topic_config(TOPIC) == TopicConfig(subject="orders", policy=WARN)
    assert registry.bind_producer(TOPIC, "orders", pinned_version=1).version == 1
    with pytest.raises(ConflictError, match="'orders'"):
        registry.bind_producer(TOPIC, "other")
    registry.bind_producer("/default/elsewhere", "other")
    # Somebody who may do that changes it.
    registry.configure_topic(TOPIC, "other", ENFORCE, checks_payload=True)
    registry.bind_producer(TOPIC, "other")
    with pytest.raises(ConflictError):
        registry.bind_producer(TOPIC, "orders")


def test_producer_needs_a_version_that_is_there(registry, metadata):
    registry.register("orders", "json", schema("a"))
    registry.register("orders", "json", schema("a", "b"))
    for wanted in ({"pinned_version": 3}, {"pinned_version": 0}, {"min_version": 3}):
        with pytest.raises(ConflictError, match="its latest is 2"):
            registry.bind_producer(TOPIC, "orders", **wanted)
    with pytest.raises(ConflictError, match="not found"):
        registry.bind_producer(TOPIC, "missing")
    assert registry.topic_config(TOPIC) is None, "a producer that is refused fixes nothing"
    assert registry.bind_producer(TOPIC, "orders", min_version=2).version == 2
    assert registry.bind_producer(TOPIC, "orders", min_version=1).version == 2


def test_two_brokers_bind_one_subject(open_registry):
    brokers = [open_registry() for _ in range(4)]
    for index in range(4):
        brokers[0].register(f"s{index}", "string", b"")

    def work(index):
        try:
            return brokers[index].bind_producer(TOPIC, f"s{index}").subject
        except ConflictError:
            return None

    [bound] = [one for one in at_once(work, range(4)) if one is not None]
    assert brokers[0].topic_config(TOPIC).subject == bound


def test_policy_needs_a_subject(registry):
    registry.register("orders", "string", b"")
    with pytest.raises(ConflictError, match="no schema subject"):
        registry.update_policy(TOPIC, ENFORCE, checks_payload=True)
    registry.bind_producer(TOPIC, "orders")
    registry.update_policy(TOPIC, ENFORCE, checks_payload=True)
    assert registry.topic_config(TOPIC) == TopicConfig(
        subject="orders", policy=ENFORCE, checks_payload=True
    )


def test_names_that_are_none_are_refused(registry):
    registry.register("orders", "string", b"")
    for call in (
        lambda: registry.topic_config("orders"),
        lambda: registry.bind_producer("orders", "orders"),
        lambda: registry.configure_topic("//", "orders", WARN, checks_payload=False),
        lambda: registry.forget_topic("a/b/c"),
    ):
        with pytest.raises(TopicNameError):
            call()


def test_deleted_topic_is_forgotten(registry):
    registry.register("orders", "string", b"")
    registry.configure_topic(TOPIC, "orders", ENFORCE, checks_payload=False)
    registry.configure_topic(f"{TOPIC}-2", "orders", ENFORCE, checks_payload=False)
    registry.forget_topic(TOPIC)
    assert registry.topic_config(TOPIC) is None
    assert registry.is_unchecked(TOPIC)
    assert not registry.is_unchecked(f"{TOPIC}-2")
    registry.forget_topic(TOPIC)


# -- messages -------------------------------------------------------------------------------

GOOD, BAD = b'{"a": "x"}', b'{"a": 5}'


@pytest.fixture
def orders(registry):
    registry.register("orders", "json", schema("a", required=["a"]))
    registry.register("other", "string", b"")
    return registry


@each("checks_payload", [True, False])
@each("policy", [NONE, WARN, ENFORCE])
@each(
    ("schema_id", "version", "payload", "reason"),
    [
        (1, 1, GOOD, None),
        (1, None, GOOD, None),
        (None, None, GOOD, "no schema id"),
        (99, 1, GOOD, "schema id 99 not found"),
        (1, 9, GOOD, "no version 9"),
        (1, 0, GOOD, "no version 0"),
        (2, 1, GOOD, "'other', not 'orders'"),
        (1, 1, BAD, "/a violates"),
    ],
)
def test_policies(orders, policy, checks_payload, schema_id, version, payload, reason):
    """Goal: none checks nothing, warn refuses nothing, enforce refuses every mismatch."""
    orders.configure_topic(TOPIC, "orders", policy, checks_payload=checks_payload)
    is_mismatch = policy is not NONE and reason is not None and (payload is GOOD or checks_payload)
    before = orders.count_mismatches()

    def send():
        orders.check_message(TOPIC, schema_id=schema_id, schema_version=version, payload=payload)

    for _ in range(2):
        if policy is ENFORCE and is_mismatch:
            with pytest.raises(InvalidRequestError, match="does not match") as caught:
                send()
            assert reason in str(caught.value)
            assert caught.value.topic == TOPIC
        else:
            send()
    assert orders.count_mismatches() - before == (2 if is_mismatch else 0)
    assert orders.is_unchecked(TOPIC) == (policy is NONE)


def test_topic_that_wants_nothing_is_not_looked_at(orders, metadata):
    def fail(kind, key):
        raise AssertionError(kind)

    assert orders.is_unchecked(TOPIC)
    metadata.before = fail
    orders.check_message(TOPIC, schema_id=99, schema_version=9, payload=b"")
    metadata.before = lambda kind, key: None


def test_known_schema_needs_no_store(orders, metadata):
    orders.configure_topic(TOPIC, "orders", ENFORCE, checks_payload=True)
    orders.check_message(TOPIC, schema_id=1, schema_version=1, payload=GOOD)
    asked, refreshed, own = [], [], threading.get_ident()

    def record(kind, key):
        if threading.get_ident() == own:
            asked.append(kind)
        elif kind == "range":  # the cache's thread begins a refresh
            refreshed.append(key)

    metadata.before = record
    for _ in range(100):
        orders.check_message(TOPIC, schema_id=1, schema_version=1, payload=GOOD)
    assert asked == []
    # Nor is what does not exist asked for again and again.
    for _ in range(100):
        with pytest.raises(InvalidRequestError):
            orders.check_message(TOPIC, schema_id=77, schema_version=1, payload=GOOD)
    # A refresh forgets which ids are unknown; one may have begun before the calls were recorded.
    assert 1 <= len(asked) <= 2 + len(refreshed)


def test_warnings_are_logged_now_and_then(orders, clock, caplog):
    orders.configure_topic(TOPIC, "orders", WARN, checks_payload=True)
    with caplog.at_level(logging.WARNING, "ister.broker.schemas"):
        for _ in range(50):
            orders.check_message(TOPIC, schema_id=1, schema_version=1, payload=BAD)
        assert len(caplog.records) == 1
        clock.advance(60)
        orders.check_message(TOPIC, schema_id=1, schema_version=1, payload=BAD)
    assert [record.not_logged for record in caplog.records] == [0, 49]
    assert caplog.records[0].topic == TOPIC
    assert orders.count_mismatches() == 51


def test_store_that_is_away_harms_only_what_has_to_know(orders, metadata):
    orders.configure_topic("/default/strict", "orders", ENFORCE, checks_payload=False)
    orders.configure_topic("/default/lenient", "orders", WARN, checks_payload=False)

    def fail(kind, key):
        raise UnavailableError("away")

    metadata.before = fail
    try:
        with pytest.raises(UnavailableError):
            orders.check_message("/default/strict", schema_id=1, schema_version=1, payload=GOOD)
        orders.check_message("/default/lenient", schema_id=1, schema_version=1, payload=GOOD)
        orders.check_message("/default/any", schema_id=1, schema_version=1, payload=GOOD)
    finally:
        metadata.before = lambda kind, key: None
    assert orders.count_mismatches() == 0


def test_changes_of_other_brokers_are_seen(open_registry):
    one, other = open_registry(refresh_seconds=600), open_registry(refresh_seconds=600)
    one.register("orders", "json", schema("a"))
    one.configure_topic(TOPIC, "orders", ENFORCE, checks_payload=False)
    eventually(lambda: not other.is_unchecked(TOPIC))
    other.check_message(TOPIC, schema_id=1, schema_version=1, payload=GOOD)
    one.register("orders", "json", schema("a", "b"))
    other.check_message(TOPIC, schema_id=1, schema_version=2, payload=GOOD)  # known at once
    one.delete_version("orders", 1)

    def is_refused():
        try:
            other.check_message(TOPIC, schema_id=1, schema_version=1, payload=GOOD)
        except InvalidRequestError:
            return True
        return False

    eventually(is_refused)
    one.update_policy(TOPIC, NONE, checks_payload=False)
    eventually(lambda: other.is_unchecked(TOPIC))


def test_damaged_setting_of_one_topic_harms_no_other(orders, open_registry, metadata, caplog):
    orders.configure_topic(TOPIC, "orders", ENFORCE, checks_payload=False)
    metadata.put(f"{ROOT}/schemas/_topics/default/broken", b"not json")
    fresh = open_registry(refresh_seconds=600)
    assert not fresh.is_unchecked(TOPIC)
    assert fresh.is_unchecked("/default/broken")
    assert any("cannot be read" in record.getMessage() for record in caplog.records)
