"""Danube's metadata as JSON: subscriptions taken over from it, and topics handed back to it.

    /topics/<ns>/<topic>/delivery                           "Reliable"
    /topics/<ns>/<topic>/subscriptions/<sub>                subscription_name, subscription_type,
                                                            consumer_id, consumer_name
    /topics/<ns>/<topic>/subscriptions/<sub>/cursor         the last acknowledged offset
    /topics/<ns>/<topic>/subscriptions/<sub>/failure_policy
    /topics/<ns>/<topic>/subscriptions/<sub>/dispatch_config
    /namespaces/<ns>/topics/<ns>/<topic>                    null
    <root>/storage/topics/<ns>/<topic>/segments/<start, 20 digits>, …/segments/cur, …/state

Danube 0.8 and later keeps these keys in an embedded store, earlier versions in etcd. A file has all
of them in one JSON object, key by key, or is the output of `etcdctl get --prefix -w json`.

Owns: these shapes, both directions. Does not own: how subscriptions are stored here
(`ister.subscription.store`), objects (`ister.bucket`).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ister.base.clock import Clock
from ister.base.metrics import Metrics
from ister.base.model import JsonObject, TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.directory import list_topics
from ister.bucket.names import TopicKeys, segment_name
from ister.errors import DataGapError, InvalidRequestError, NotFoundError, UnsupportedOperationError
from ister.format.descriptor import ObjectDescriptor
from ister.metadata.base import MetadataStore
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy, SubscriptionKind
from ister.subscription.store import StoredSubscription, SubscriptionStore

_KEY: Final = re.compile(
    r".*?/topics/(?P<topic>[^/]+/[^/]+)/subscriptions/(?P<name>[^/]+)"
    r"(?:/(?P<part>cursor|failure_policy|dispatch_config))?"
)
_KINDS: Final = tuple(SubscriptionKind)
"""In the order of Danube's numbers."""
_BACKOFFS: Final = {"Fixed": Backoff.FIXED, "Exponential": Backoff.EXPONENTIAL}
_POISONS: Final = {
    "DeadLetter": PoisonPolicy.DEAD_LETTER,
    "Block": PoisonPolicy.BLOCK,
    "Drop": PoisonPolicy.DROP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DanubeSubscription:
    """A subscription by Danube's metadata."""

    topic: TopicName
    name: str
    kind: SubscriptionKind
    acked: int | None
    """The last acknowledged offset; None if none was."""
    policy: FailurePolicy
    window: int | None


def parse_metadata(data: bytes) -> dict[str, object]:
    """The keys and values of a file.

    Raises:
        InvalidRequestError: It is in neither form.
    """
    try:
        fields = json.loads(data)
        if isinstance(fields, dict) and isinstance(fields.get("kvs"), list):
            return {
                base64.b64decode(item["key"], validate=True).decode(): json.loads(
                    base64.b64decode(item.get("value", "")) or b"null"
                )
                for item in fields["kvs"]
            }
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise InvalidRequestError(f"not metadata of Danube: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("not metadata of Danube: no JSON object")
    return fields


def find_subscriptions(metadata: Mapping[str, object]) -> list[DanubeSubscription]:
    """The subscriptions in Danube's metadata, by topic and name.

    Raises:
        InvalidRequestError: A value is not what it should be; names its key.
    """
    parts: dict[tuple[str, str], dict[str, object]] = {}
    for key, value in metadata.items():
        if match := _KEY.fullmatch(key):
            found = parts.setdefault((match["topic"], match["name"]), {})
            found[match["part"] or "options"] = value
    return [_subscription(topic, name, parts[topic, name]) for topic, name in sorted(parts)]


def _subscription(topic: str, name: str, parts: Mapping[str, object]) -> DanubeSubscription:
    try:
        options = _object(parts.get("options"))
        number = _number("subscription type", options.get("subscription_type", 0), len(_KINDS))
        acked = _number("cursor", parts.get("cursor"), 1 << 63)
        config = _object(parts.get("dispatch_config"))
        window = _number("max_unacked_messages", config.get("max_unacked_messages"), 1 << 32)
        return DanubeSubscription(
            topic=TopicName.parse(f"/{topic}"),
            name=name,
            kind=_KINDS[number or 0],
            acked=acked,
            policy=_policy(_object(parts.get("failure_policy"))),
            window=window or None,
        )
    except InvalidRequestError as error:
        error.path = f"/topics/{topic}/subscriptions/{name}"
        raise


def _number(what: str, value: object, end: int) -> int | None:
    if value is None or (isinstance(value, int) and 0 <= value < end):
        return value
    raise InvalidRequestError(f"{what} {value!r:.40}")


def _object(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{value!r:.40} is not an object")
    return value


def _policy(fields: Mapping[str, object]) -> FailurePolicy:
    names = {"backoff_strategy": "backoff", "poison_policy": "poison"}
    values: dict[str, object] = {names.get(name, name): value for name, value in fields.items()}
    for name, known in (("backoff", _BACKOFFS), ("poison", _POISONS)):
        if name in values:
            if values[name] not in known:
                raise InvalidRequestError(f"{name} {values[name]!r:.40}")
            values[name] = known[str(values[name])]
    return FailurePolicy.from_json(values)


class Migration:
    """Takes subscriptions over from Danube, and hands topics back. Thread-safe.

    `metadata`: the log's metadata store; stays open.
    `root_prefix`: of all its keys, and of Danube's keys of segments.
    """

    def __init__(self, metadata: MetadataStore, *, root_prefix: str, clock: Clock) -> None:
        self._metadata = metadata
        self._root = root_prefix
        self._clock = clock
        self._store = SubscriptionStore(metadata, root_prefix=root_prefix, clock=clock)

    def topics(self) -> list[TopicName]:
        """All topics of the log."""
        return [TopicName.parse(name) for name in list_topics(self._metadata, self._root)]

    def _open(self, topic: TopicName, hint: str | None = None) -> tuple[Catalog, str]:
        """A topic's catalog and incarnation."""
        keys = TopicKeys(self._root, topic)
        catalog = Catalog(self._metadata, keys, clock=self._clock, metrics=Metrics())
        record = catalog.record()
        if record is None or not record[0].is_open:
            raise NotFoundError(f"topic {topic} does not exist", topic=str(topic), hint=hint)
        return catalog, record[0].incarnation

    def import_subscription(
        self, found: DanubeSubscription, *, without_cursor: str | None, dry_run: bool
    ) -> int:
        """Creates a subscription where Danube's was; one that exists stays unchanged.

        `without_cursor`: where one begins that has acknowledged nothing: `earliest` or `latest`;
        None to refuse it.
        Returns its cursor: the first offset that is not acknowledged.

        Raises:
            NotFoundError: The topic does not exist, or the subscription has no cursor.
            AlreadyExistsError: A cursor of that name is in use by something else.
        """
        topic = found.topic
        catalog, incarnation = self._open(topic, "take its objects over first: `ister recover`")
        known = self._store.load(topic, incarnation).get(found.name)
        if known is not None:
            return known.cursor
        if found.acked is not None:
            cursor = found.acked + 1
        elif without_cursor is not None:
            first, last, _ = catalog.ends()
            oldest, newest = (0, 0) if first is None or last is None else (first.start, last.end)
            cursor = oldest if without_cursor == "earliest" else newest
        else:
            raise NotFoundError(
                f"subscription {found.name} has no cursor: it has acknowledged nothing",
                topic=str(topic),
                hint="pass --without-cursor earliest or latest",
            )
        if dry_run:
            return cursor
        return self._store.create(
            topic,
            found.name,
            kind=found.kind,
            cursor=cursor,
            incarnation=incarnation,
            owned=None,
            policy=found.policy,
            window=found.window,
        ).cursor

    def export_topic(self, name: TopicName) -> JsonObject:
        """The keys that Danube 0.9 and later has of a topic, with their values.

        Raises:
            NotFoundError: The topic does not exist.
            UnsupportedOperationError: An object is not where Danube finds it.
            DataGapError: Offsets are missing between objects.
        """
        catalog, incarnation = self._open(name)
        path = f"{name.namespace}/{name.topic}"
        storage = f"{self._root}/storage/topics/{path}/"
        keys: JsonObject = {
            f"/namespaces/{name.namespace}/topics/{path}": None,
            f"/topics/{path}/delivery": "Reliable",
        }
        last: ObjectDescriptor | None = None
        for described, _ in catalog.descriptors():
            if last is not None and last.end != described.start:
                raise DataGapError(
                    "no object holds the offset",
                    start=last.end,
                    end=described.start,
                    topic=str(name),
                )
            last = described
            keys[f"{storage}segments/{described.start:020d}"] = _segment(name, described)
        if last is not None:
            keys[f"{storage}segments/cur"] = {"start": f"{last.start:020d}"}
            # Danube goes on behind this offset; without it, it may count from 0 again.
            keys[f"{storage}state"] = {
                "sealed": True,
                "last_committed_offset": last.end - 1,
                "broker_id": 0,
                "timestamp": self._clock.now_ns() // 1_000_000_000,
            }
        for stored in self._store.load(name, incarnation).values():
            keys |= _subscription_keys(f"/topics/{path}/subscriptions/{stored.name}", stored)
        return keys


def _segment(name: TopicName, described: ObjectDescriptor) -> JsonObject:
    segment_id = segment_name(described.object_id)
    if segment_id is None:
        raise UnsupportedOperationError(
            f"{described.object_id} is not in the layout segments",
            topic=str(name),
            offset=described.start,
            hint="Danube reads the objects that Ister writes with storage.cloud.layout: segments",
        )
    return {
        "segment_id": segment_id,
        "start_offset": described.start,
        "end_offset": described.end - 1,
        "size": described.size_bytes,
        "etag": described.etag,
        "created_at": described.created_at,
        "completed": True,
        "offset_index": [list(entry) for entry in described.offset_index] or [[described.start, 0]],
    }


def _subscription_keys(key: str, stored: StoredSubscription) -> JsonObject:
    policy = stored.policy
    keys: JsonObject = {
        key: {
            "subscription_name": stored.name,
            "subscription_type": _KINDS.index(stored.kind),
            "consumer_id": None,
            "consumer_name": "",
        },
        f"{key}/failure_policy": {
            "max_redelivery_count": policy.max_redelivery_count,
            "ack_timeout_ms": policy.ack_timeout_ms,
            "base_redelivery_delay_ms": policy.base_redelivery_delay_ms,
            "max_redelivery_delay_ms": policy.max_redelivery_delay_ms,
            "backoff_strategy": _name_of(_BACKOFFS, policy.backoff),
            "dead_letter_topic": policy.dead_letter_topic,
            "poison_policy": _name_of(_POISONS, policy.poison),
        },
    }
    if stored.cursor > 0:
        keys[f"{key}/cursor"] = stored.cursor - 1
    if stored.window is not None:
        keys[f"{key}/dispatch_config"] = {"max_unacked_messages": stored.window}
    return keys


def _name_of(names: Mapping[str, object], value: object) -> str:
    return next(name for name, known in names.items() if known is value)
