"""The broker's own records: changed with a comparison, read with tolerance."""

import json

import pytest

from ister.base.model import TopicName
from ister.broker.topics.broker_records import BrokerRecords, ServedRecord
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    UnavailableError,
)
from tests.support.memory_metadata import MemoryMetadata

NAME = TopicName.parse("/default/t")
OTHER = TopicName.parse("/default/t2")


@pytest.fixture
def store():
    store = MemoryMetadata()
    yield store
    store.close()


@pytest.fixture
def records(store):
    return BrokerRecords(store, root_prefix="/danube")


def test_a_topic_is_kept_as_it_was_made(records):
    assert records.topic(NAME) is None
    wanted = ServedRecord(is_reliable=False, policies={"max_publish_rate": 3})
    assert records.create_topic(NAME, wanted) == wanted
    assert records.topic(NAME) == wanted
    assert records.topic(OTHER) is None


def test_a_topic_that_is_there_stays_as_it_is(records):
    first = records.create_topic(NAME, ServedRecord(is_reliable=False))
    assert records.create_topic(NAME, ServedRecord(is_reliable=True)) == first


def test_policies_are_replaced_and_the_rest_stays(records):
    records.create_topic(NAME, ServedRecord(is_reliable=False, policies={"max_publish_rate": 3}))
    records.set_topic_policies(NAME, {"max_message_size": 5})
    assert records.topic(NAME) == ServedRecord(is_reliable=False, policies={"max_message_size": 5})
    records.set_topic_policies(OTHER, {"max_message_size": 6})
    assert records.topic(OTHER) == ServedRecord(is_reliable=True, policies={"max_message_size": 6})


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff", b"[]", b"{}", b'{"policies": 7}', b'{"policies": {"max_cats": 1}}'],
    ids=repr,
)
def test_what_cannot_be_read_is_as_good_as_the_defaults(records, store, value):
    store.put("/danube/broker/topics/default/t", value)
    assert records.topic(NAME) == ServedRecord()
    store.put("/danube/namespaces/default", value)
    assert records.namespace_policies("default") == {}


def test_policies_of_a_newer_broker_are_passed_over(records, store):
    content = {"delivery": "reliable", "policies": {"max_cats": 1, "max_publish_rate": 2}}
    store.put("/danube/broker/topics/default/t", json.dumps(content).encode())
    assert records.topic(NAME).policies == {"max_publish_rate": 2}


# -- others, and lost answers -----------------------------------------------------------------


class Meddling:
    """A store in which somebody else changes a key just before each of the first changes."""

    def __init__(self, store, key, times, value=b'{"delivery": "non_reliable"}'):
        self._store, self._key, self._times, self._value = store, key, times, value
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def transact(self, compares, operations):
        self.calls += 1
        if self.calls <= self._times:
            self._store.put(self._key, self._value)
        return self._store.transact(compares, operations)


def test_a_change_is_made_on_top_of_somebody_elses(store):
    meddling = Meddling(store, "/danube/broker/topics/default/t", 2)
    records = BrokerRecords(meddling, root_prefix="/danube")
    records.set_topic_policies(NAME, {"max_publish_rate": 1})
    assert meddling.calls == 3
    # The other's change is in it.
    assert records.topic(NAME) == ServedRecord(is_reliable=False, policies={"max_publish_rate": 1})


def test_a_topic_that_somebody_else_makes_first_is_theirs(store):
    meddling = Meddling(store, "/danube/broker/topics/default/t", 1)
    records = BrokerRecords(meddling, root_prefix="/danube")
    assert records.create_topic(NAME, ServedRecord()) == ServedRecord(is_reliable=False)


def test_a_record_that_keeps_changing_is_given_up(store):
    meddling = Meddling(store, "/danube/broker/topics/default/t", 1000)
    records = BrokerRecords(meddling, root_prefix="/danube")
    with pytest.raises(ConflictError, match="keeps changing"):
        records.set_topic_policies(NAME, {})
    assert meddling.calls < 50


@pytest.mark.parametrize("has_happened", [True, False])
def test_a_lost_answer_is_looked_after(store, has_happened):
    class Losing(Meddling):
        def transact(self, compares, operations):
            self.calls += 1
            if self.calls == 1:
                if has_happened:
                    self._store.transact(compares, operations)
                raise CommitUnknownError("the answer was lost")
            return self._store.transact(compares, operations)

    records = BrokerRecords(Losing(store, "", 0), root_prefix="/danube")
    records.set_topic_policies(NAME, {"max_publish_rate": 1})
    assert records.topic(NAME).policies == {"max_publish_rate": 1}


def test_a_store_that_does_not_answer_is_told(store):
    def fail(kind, key):
        raise UnavailableError("gone")

    store.before = fail
    with pytest.raises(UnavailableError):
        BrokerRecords(store, root_prefix="/danube").topic(NAME)
