"""Producer names belong to whoever used them first: claims, bounds, release, and what survives."""

import pytest

from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.broker.publish.producer_names import ProducerNames
from ister.broker.topics.broker_records import BrokerRecords
from ister.errors import PermissionDeniedError, UnavailableError
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata

TOPIC = TopicName.parse("/default/orders")
SHOP, OTHER = "service:shop", "service:other"


class Counting(BrokerRecords):
    """Records that say how often they were asked."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.writes = []

    def _change(self, key, change):
        self.writes.append(key)
        super()._change(key, change)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def records():
    store = MemoryMetadata(SystemClock())
    yield Counting(store, root_prefix="/danube")
    store.close()


@pytest.fixture
def names(records, clock):
    return ProducerNames(records, TOPIC, clock=clock)


def test_name_belongs_to_the_first_principal(names):
    names.claim("shop", SHOP)
    names.claim("shop", SHOP)
    with pytest.raises(PermissionDeniedError, match="'shop' belongs to another principal"):
        names.claim("shop", OTHER)
    with pytest.raises(PermissionDeniedError):
        names.check(["free", "shop"], OTHER)
    names.check(["free", "shop"], SHOP)
    names.claim("free", OTHER)


def test_ownership_survives_a_restart_and_a_take_over(records, clock, names):
    names.claim("shop/ä %", SHOP)
    again = ProducerNames(records, TOPIC, clock=clock)
    with pytest.raises(PermissionDeniedError):
        again.claim("shop/ä %", OTHER)
    again.claim("shop/ä %", SHOP)
    ProducerNames(records, TopicName.parse("/default/others"), clock=clock).claim("shop/ä %", OTHER)
    # Also one that another broker claims after this one has read what is there.
    again.claim("late", OTHER)
    with pytest.raises(PermissionDeniedError):
        names.claim("late", SHOP)
    records.delete_topic(TOPIC)
    ProducerNames(records, TOPIC, clock=clock).claim("shop/ä %", OTHER)


def test_nothing_is_written_per_message(records, clock, names):
    for _ in range(1000):
        names.claim("shop", SHOP)
    assert len(records.writes) == 1
    assert names.is_settled("shop", SHOP)
    assert not names.is_settled("shop", OTHER)
    clock.advance(86_400)
    assert not names.is_settled("shop", SHOP)
    for _ in range(1000):
        names.claim("shop", SHOP)
    assert len(records.writes) == 2


def test_owner_goes_on_while_the_store_does_not_answer(records, clock, names, monkeypatch):
    names.claim("shop", SHOP)
    clock.advance(86_400)
    asked = []

    def refuse(*args):
        asked.append(args)
        raise UnavailableError("no answer")

    monkeypatch.setattr(records, "refresh_producer", refuse)
    for _ in range(100):
        names.claim("shop", SHOP)
    assert len(asked) == 1
    clock.advance(60)
    names.claim("shop", SHOP)
    assert len(asked) == 2


def test_released_name_is_free(records, clock, names):
    names.claim("shop", SHOP)
    assert names.release("shop") == SHOP
    assert names.release("shop") is None
    assert ProducerNames(records, TOPIC, clock=clock).release("shop") is None
    names.claim("shop", OTHER)
    with pytest.raises(PermissionDeniedError):
        names.claim("shop", SHOP)


def test_principal_that_makes_up_names_forgets_its_own_alone(records, clock):
    names = ProducerNames(records, TOPIC, clock=clock, names_max=10)
    names.claim("shop", SHOP)
    for number in range(100):
        clock.advance(1)
        names.claim(f"made-up-{number}", OTHER)
    found = records.producer_names(TOPIC)
    assert {name for name, one in found.items() if one.principal == SHOP} == {"shop"}
    assert {name for name, one in found.items() if one.principal == OTHER} == {
        f"made-up-{number}" for number in range(90, 100)
    }
    again = ProducerNames(records, TOPIC, clock=clock, names_max=10)
    again.claim("newest", OTHER)
    assert "made-up-90" not in records.producer_names(TOPIC)
    with pytest.raises(PermissionDeniedError):
        again.claim("shop", OTHER)


def test_without_authentication_nothing_is_checked_or_written(records, names):
    names.claim("shop", SHOP)
    names.claim("shop", "")
    names.check(["shop"], "")
    assert names.is_settled("anything", "")
    assert len(records.writes) == 1
