"""Topics as files and stores describe them, for commands that run without a broker."""

from __future__ import annotations

from collections.abc import Iterable

from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.broker.topics.broker_records import BrokerRecords
from ister.cli.errors_out import error_as_json
from ister.config import StorageConfig
from ister.metadata.base import MetadataStore
from ister.subscription.store import SubscriptionStore
from ister.topic.describe import SubscriptionView
from ister.topic.offline import OfflineTopic, Served, read_topic, read_topics
from ister.wire.views import TopicJson


def describe_topic(storage: StorageConfig, root: str | None, name: TopicName) -> OfflineTopic:
    """A topic; see `ister.topic.offline`."""
    return read_topic(storage, root, _StoredState(storage.metadata.root_prefix), name)


def describe_topics(
    storage: StorageConfig, root: str | None, namespace: str | None = None
) -> list[OfflineTopic]:
    """All topics, or those of a namespace; see `ister.topic.offline`."""
    return read_topics(storage, root, _StoredState(storage.metadata.root_prefix), namespace)


def to_json(facts: OfflineTopic) -> TopicJson:
    """A topic's fields for `--json`."""
    return facts.to_json(error_as_json)


class _StoredState:
    """What brokers have stored about topics."""

    def __init__(self, root_prefix: str) -> None:
        self._prefix = root_prefix

    def non_reliable(self, store: MetadataStore) -> Iterable[str]:
        return BrokerRecords(store, root_prefix=self._prefix).non_reliable()

    def read(self, store: MetadataStore, name: TopicName, incarnation: str) -> Served:
        record = BrokerRecords(store, root_prefix=self._prefix).topic(name)
        stored = SubscriptionStore(store, root_prefix=self._prefix, clock=SystemClock())
        return Served(
            is_reliable=record.is_reliable if record is not None else True,
            policies=record.policies if record is not None else {},
            subscriptions={
                one: SubscriptionView(
                    name=one,
                    type=known.kind.value,
                    max_unacked_messages=known.window,
                    failure_policy=known.policy.to_json(),
                )
                for one, known in stored.load(name, incarnation).items()
            },
        )
