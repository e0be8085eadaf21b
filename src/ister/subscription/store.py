"""Subscriptions in the metadata store: their options, their consumers, their cursors.

    /subscriptions/<ns>/<topic>/<sub>/options     what it is; JSON, below
    /subscriptions/<ns>/<topic>/<sub>/progress    Progress: the cursor, and the rest in `delivery`
    /subscriptions/<ns>/<topic>/planned           settings of subscriptions that do not exist yet

    {"kind": "shared", "failure_policy": {…}, "max_unacked_messages": null, "created_ms": 0,
     "incarnation": "…", "consumers": {"<name>": {"id": 1, "filters": ["eu-*"], "seen_ms": 0}},
     "receipt_key": "…", "created_by": "user:ada", "principals": ["service:billing"]}

`created_by` is missing where it is not known, `principals` where all may use it. Fields that this
version does not know are kept.

    {"incarnation": "…", "subscriptions": {"<sub>": {"failure_policy": {…},
     "max_unacked_messages": 5}}}

Danube's tools set failure policies before anyone subscribes. Such settings are planned: the
subscription has them from its first message on, and they are planned no longer.

Owns: these three keys. Does not own: cursors without options beside them, such as those of Spark's
streams: they are not subscriptions of a broker.

Invariants:

- options and cursor are created and deleted in one transaction: a subscription without a cursor
  would start at the end again after a restart, and skip what it had not acknowledged;
- planned settings of a subscription are removed in the transaction that creates it with them;
- every change compares the key with what was read and, where a topic has an owner in the metadata
  store, the owner's epoch: a broker that lost ownership changes nothing;
- a cursor only moves forward, unless it is forced to (seek);
- records of another incarnation of the topic are ignored.

A crash leaves a transaction done or not done. Thread-safe.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.base.structs import known
from ister.bucket.cursors import DELIVERY, clip_progress
from ister.bucket.names import TopicKeys
from ister.bucket.ownership import OwnedTopic
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    TopicNameError,
)
from ister.format.records import Progress, decode_progress, encode_progress
from ister.metadata.base import Compare, Delete, KeyValue, MetadataStore, Operation, Put
from ister.metadata.transact import transact, unchanged
from ister.subscription.policy import FailurePolicy, SubscriptionKind
from ister.subscription.receipts import new_key
from ister.subscription.saved_state import SavedState

_log = logging.getLogger("ister.subscription.store")

SUBSCRIPTION_NAME_CHARACTERS_MAX: Final = 120
"""As many as a part of a topic's name has."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
# Progress records may have 100 KiB and more.
_PAGE: Final = 64
# Planned settings of a topic are one value in the metadata store.
_PLANNED_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConsumer:
    """A consumer of a subscription, attached or not."""

    id: int
    filters: tuple[str, ...] = ()
    seen_ms: int = 0
    """When it last attached or detached, in milliseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSubscription:
    """A subscription as it is stored."""

    name: str
    kind: SubscriptionKind
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    window: int | None = None
    """Its own `max_unacked_messages`; None for the broker's."""
    consumers: Mapping[str, StoredConsumer] = field(default_factory=dict)
    """By their names."""
    cursor: int
    """The first offset that is not acknowledged."""
    saved: SavedState | None = None
    """What `Delivery.saved` returned."""
    incarnation: str
    """Of the topic."""
    created_ms: int = 0
    receipt_key: str = field(default="", repr=False)
    """The key of `Receipts`; "" in records of earlier versions."""
    created_by: str = ""
    """The principal that created it; "" if that is not known."""
    principals: tuple[str, ...] | None = None
    """The principals that may use it; None for all that may consume the topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSettings:
    """Settings of a subscription that does not exist yet; None for the default."""

    policy: FailurePolicy | None = None
    window: int | None = None
    """`max_unacked_messages`."""


class _Settings(msgspec.Struct, omit_defaults=True):
    """Planned settings of a subscription as they are stored."""

    failure_policy: dict[str, object] | None = None
    max_unacked_messages: int | None = None


class _Planned(msgspec.Struct):
    """Planned settings of a topic's subscriptions as they are stored."""

    incarnation: str
    subscriptions: dict[str, _Settings] = {}


class _Options(msgspec.Struct):
    """The options as they are stored."""

    kind: SubscriptionKind
    failure_policy: dict[str, object]
    max_unacked_messages: int | None
    incarnation: str
    consumers: dict[str, StoredConsumer] = {}
    created_ms: int = 0
    receipt_key: str = ""
    created_by: str = ""
    principals: tuple[str, ...] | None = None


def check_subscription_name(name: str) -> str:
    """Returns a subscription's name."""
    if (
        not isinstance(name, str)
        or not _NAME.fullmatch(name)
        or len(name) > SUBSCRIPTION_NAME_CHARACTERS_MAX
    ):
        raise InvalidRequestError(
            f"subscription name {name!r:.130}",
            hint=f"1 to {SUBSCRIPTION_NAME_CHARACTERS_MAX} ASCII letters, digits, '_', '.' and '-'",
        )
    return name


class SubscriptionStore:
    """The subscriptions of all topics; see the module header. Thread-safe.

    With `owned`, changes are made as the topic's owner; without, only concurrent changes are
    detected. Every method raises UnavailableError if the metadata store does not respond; changes
    raise FencedError if another node owns the topic, and ConflictError if others keep changing it.
    """

    def __init__(self, metadata: MetadataStore, *, root_prefix: str, clock: Clock) -> None:
        self._metadata = metadata
        self._root = root_prefix
        self._clock = clock

    # -- reading ----------------------------------------------------------------------------

    def load(self, topic: TopicName, incarnation: str) -> dict[str, StoredSubscription]:
        """The subscriptions of a topic, by name.

        One whose options cannot be read is left out, and reported. One whose cursor cannot be read
        begins at 0: messages come twice, and none is lost.

        """
        prefix = self._keys(topic).subscriptions
        found = {item.key: item for item in self._metadata.range(prefix)}
        loaded: dict[str, StoredSubscription] = {}
        for key, item in found.items():
            if not key.endswith("/options"):
                continue
            name = key.removeprefix(prefix).removesuffix("/options")
            try:
                options = _decode_options(item)
                if options.incarnation == incarnation:
                    progress = found.get(f"{prefix}{name}/progress")
                    loaded[name] = _subscription(name, options, item, progress)
            except CorruptDataError as error:
                # One bad subscription must not keep the topic from the others.
                _log.error("unreadable subscription", extra={"error": str(error)})
        return loaded

    def highest_cursor(self, topic: TopicName) -> int:
        """The highest cursor of a topic of a log without a bucket; 0 without one."""
        return max((one.cursor for one in self.load(topic, "").values()), default=0)

    def topics(self) -> list[TopicName]:
        """Returns all topics that have a subscription, of any incarnation; sorted by namespace."""
        prefix = f"{self._root}/subscriptions/"
        names: dict[TopicName, None] = {}
        start: str | None = None
        while page := self._metadata.range(prefix, start=start, limit=_PAGE):
            for item in page:
                parts = item.key.removeprefix(prefix).split("/")
                if len(parts) == 4 and parts[3] == "options":
                    try:
                        names[TopicName.parse(f"/{parts[0]}/{parts[1]}")] = None
                    except TopicNameError:
                        continue
            start = page[-1].key + "\0"
        return list(names)

    def planned(self, topic: TopicName, name: str, incarnation: str) -> PlannedSettings | None:
        """The planned settings of a subscription; None if there are none."""
        check_subscription_name(name)
        key = _planned_key(self._keys(topic))
        found = _decode_planned(key, self._metadata.get(key), incarnation)
        return _settings(key, found.subscriptions.get(name))

    # -- changes ----------------------------------------------------------------------------

    def plan(
        self,
        topic: TopicName,
        name: str,
        settings: PlannedSettings,
        *,
        incarnation: str,
        owned: OwnedTopic | None,
    ) -> None:
        """Stores settings for a subscription that does not exist yet; None leaves one as it is.

        Raises:
            AlreadyExistsError: The subscription exists.
            CapacityError: Too many subscriptions of the topic have planned settings.
        """
        keys = self._keys(topic)
        options_key, key = _options_key(keys, name), _planned_key(keys)

        def attempt() -> bool | None:
            options, found = self._metadata.get(options_key), self._metadata.get(key)
            if options is not None and _decode_options(options).incarnation == incarnation:
                raise AlreadyExistsError(
                    f"the subscription {name!r} exists already", topic=str(topic)
                )
            planned = _decode_planned(key, found, incarnation)
            known = planned.subscriptions.setdefault(name, _Settings())
            if len(planned.subscriptions) > _PLANNED_MAX:
                raise CapacityError(
                    f"{_PLANNED_MAX} subscriptions that do not exist yet have settings already",
                    topic=str(topic),
                    hint="subscribe first",
                )
            if settings.policy is not None:
                known.failure_policy = dict(settings.policy.to_json())
            if settings.window is not None:
                known.max_unacked_messages = settings.window
            return self._transact(
                owned,
                [unchanged(options_key, options), unchanged(key, found)],
                [Put(key, msgspec.json.encode(planned))],
            )

        transact(attempt, ConflictError("the planned settings keep changing", path=key))

    def create(
        self,
        topic: TopicName,
        name: str,
        *,
        kind: SubscriptionKind,
        cursor: int,
        incarnation: str,
        owned: OwnedTopic | None,
        policy: FailurePolicy | None = None,
        window: int | None = None,
        created_by: str = "",
    ) -> StoredSubscription:
        """Creates a subscription with its cursor, or returns the existing one unchanged.

        `policy` and `window` are by default those that were planned.

        Raises:
            AlreadyExistsError: A cursor of that name is in use by something else.
            CorruptDataError: It exists, and cannot be read.
        """
        keys = self._keys(topic)
        options_key, progress_key = _options_key(keys, name), keys.progress(name)
        planned_key = _planned_key(keys)
        made = StoredSubscription(
            name=name,
            kind=SubscriptionKind(kind),
            cursor=cursor,
            incarnation=incarnation,
            created_ms=self._now_ms(),
            receipt_key=new_key(),
            created_by=created_by,
        )

        def attempt() -> StoredSubscription | None:
            options, progress = self._metadata.get(options_key), self._metadata.get(progress_key)
            if options is not None:
                known = _decode_options(options)
                if known.incarnation == incarnation:
                    return _subscription(name, known, options, progress)
            elif progress is not None:
                _check_is_free(progress, incarnation)
            found = self._metadata.get(planned_key)
            planned = _decode_planned(planned_key, found, incarnation)
            settings = planned.subscriptions.pop(name, None)
            known_settings = _settings(planned_key, settings) or PlannedSettings()
            new = replace(
                made,
                policy=policy or known_settings.policy or FailurePolicy(),
                window=known_settings.window if window is None else window,
            )
            operations: list[Operation] = [
                Put(options_key, _encode_options(new, {})),
                Put(progress_key, self._encode(new.cursor, None, incarnation)),
            ]
            if settings is not None:
                operations.append(
                    Put(planned_key, msgspec.json.encode(planned))
                    if planned.subscriptions
                    else Delete(planned_key)
                )
            is_done = self._transact(
                owned,
                [
                    unchanged(options_key, options),
                    unchanged(progress_key, progress),
                    unchanged(planned_key, found),
                ],
                operations,
            )
            return new if is_done else None

        return transact(attempt, _conflict(options_key))

    def save_options(
        self, topic: TopicName, stored: StoredSubscription, *, owned: OwnedTopic | None
    ) -> None:
        """Writes everything but the cursor: kind, policy, window, consumers."""
        key = _options_key(self._keys(topic), stored.name)

        def attempt() -> bool | None:
            options = self._metadata.get(key)
            fields = self._require(topic, stored.name, options, stored.incarnation)
            data = _encode_options(stored, fields)
            if options is not None and options.value == data:
                return True
            return self._transact(owned, [unchanged(key, options)], [Put(key, data)])

        transact(attempt, _conflict(key))

    def renew_key(
        self, topic: TopicName, stored: StoredSubscription, *, owned: OwnedTopic | None
    ) -> StoredSubscription:
        """Gives a subscription a new key: acknowledgements under the old one do not count."""
        renewed = replace(stored, receipt_key=new_key())
        self.save_options(topic, renewed, owned=owned)
        return renewed

    def save_cursor(
        self,
        topic: TopicName,
        name: str,
        *,
        cursor: int,
        saved: SavedState | None,
        incarnation: str,
        owned: OwnedTopic | None,
        force: bool = False,
    ) -> int:
        """Moves a cursor forward, or with `force` anywhere; one that is further already stays.

        Returns the cursor that the store has now.
        """
        keys = self._keys(topic)
        options_key, key = _options_key(keys, name), keys.progress(name)

        def attempt() -> int | None:
            progress = self._metadata.get(key)
            known = _read_progress(progress, incarnation)
            compares = [unchanged(key, progress)]
            if known is None or DELIVERY not in known.more:
                # Damaged, or not ours: then it has to be a subscription by its options.
                options = self._metadata.get(options_key)
                self._require(topic, name, options, incarnation)
                compares.append(unchanged(options_key, options))
            wanted = cursor if known is None or force else max(cursor, known.offset)
            value = self._encode(wanted, saved, incarnation, known)
            return wanted if self._transact(owned, compares, [Put(key, value)]) else None

        return transact(attempt, ConflictError("the cursor keeps changing", path=key))

    def clip(self, topic: TopicName, end: int, *, owned: OwnedTopic | None) -> list[str]:
        """Removes offsets at or above a topic's end; as `clip_progress`."""
        return clip_progress(self._metadata, self._keys(topic).subscriptions, end, owned=owned)

    def delete(self, topic: TopicName, name: str, *, owned: OwnedTopic | None) -> bool:
        """Removes a subscription with its cursor; whether there was one."""
        keys = self._keys(topic)
        options_key, progress_key = _options_key(keys, name), keys.progress(name)
        was_there = False

        def attempt() -> bool | None:
            nonlocal was_there
            options, progress = self._metadata.get(options_key), self._metadata.get(progress_key)
            if options is None:
                return was_there
            was_there = True
            compares = [unchanged(options_key, options), unchanged(progress_key, progress)]
            return self._transact(owned, compares, [Delete(options_key), Delete(progress_key)])

        return transact(attempt, _conflict(options_key))

    def delete_all(self, topic: TopicName) -> None:
        """Removes every subscription and every cursor of a topic that is deleted."""
        prefix = self._keys(topic).subscriptions
        # Doing it twice is harmless.
        transact(
            lambda: self._metadata.delete_prefix(prefix),
            ConflictError("the subscriptions cannot be removed", path=prefix),
        )

    # -- inside -----------------------------------------------------------------------------

    def _keys(self, topic: TopicName) -> TopicKeys:
        return TopicKeys(self._root, topic)

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000

    def _transact(
        self, owned: OwnedTopic | None, compares: list[Compare], operations: list[Operation]
    ) -> bool | None:
        """True if it was done; None if a compare failed."""
        if owned is not None:
            return owned.transact(compares, operations) or None
        return None if self._metadata.transact(compares, operations) is None else True

    def _encode(
        self, cursor: int, saved: SavedState | None, incarnation: str, known: Progress | None = None
    ) -> bytes:
        """A progress record; one of ours always has the field `delivery`."""
        more = {} if known is None else known.more
        return encode_progress(
            Progress(
                offset=cursor,
                timestamp=max(self._now_ms(), 0 if known is None else known.timestamp),
                incarnation=incarnation,
                more={**more, DELIVERY: dict(saved or {})},
            )
        )

    def _require(
        self, topic: TopicName, name: str, options: KeyValue | None, incarnation: str
    ) -> dict[str, object]:
        fields = {} if options is None else _load_options(options)
        if fields.get("incarnation") != incarnation:
            raise NotFoundError(
                f"there is no subscription {name!r}", topic=str(topic), hint="subscribe first"
            )
        return fields


def _options_key(keys: TopicKeys, name: str) -> str:
    return f"{keys.subscriptions}{check_subscription_name(name)}/options"


def _planned_key(keys: TopicKeys) -> str:
    # No subscription's key: those have one more part.
    return f"{keys.subscriptions}planned"


def _conflict(key: str) -> ConflictError:
    return ConflictError("the subscription keeps changing", path=key)


def _check_is_free(progress: KeyValue, incarnation: str) -> None:
    """Whether a cursor without options may be replaced: only one of a topic that is gone."""
    known = _read_progress(progress, incarnation)
    if known is not None:
        raise AlreadyExistsError(
            "a cursor of that name is in use, and not by a subscription of the broker",
            path=progress.key,
            hint="choose another name; streams and checkpoints keep cursors as well",
        )


def _read_progress(found: KeyValue | None, incarnation: str) -> Progress | None:
    """A cursor; None if there is none, it is another incarnation's, or it cannot be read."""
    if found is None:
        return None
    try:
        known = decode_progress(found.value, key=found.key)
    except CorruptDataError as error:
        _log.error("unreadable cursor", extra={"error": str(error)})
        return None
    return known if known.incarnation == incarnation and known.offset >= 0 else None


def _subscription(
    name: str, options: _Options, found: KeyValue, progress: KeyValue | None
) -> StoredSubscription:
    known = _read_progress(progress, options.incarnation)
    if known is None:
        _log.error("a subscription without a cursor starts at 0", extra={"key": found.key})
    saved = None if known is None else known.more.get(DELIVERY)
    try:
        policy = FailurePolicy.from_json(options.failure_policy)
    except InvalidRequestError as error:
        raise CorruptDataError(f"not a subscription: {error}", path=found.key) from error
    return StoredSubscription(
        name=name,
        kind=options.kind,
        policy=policy,
        window=options.max_unacked_messages,
        consumers=options.consumers,
        cursor=0 if known is None else known.offset,
        saved=saved if isinstance(saved, dict) and saved else None,
        incarnation=options.incarnation,
        created_ms=options.created_ms,
        receipt_key=options.receipt_key,
        created_by=options.created_by,
        principals=options.principals,
    )


def _decode_planned(key: str, found: KeyValue | None, incarnation: str) -> _Planned:
    """Planned settings; empty if they are another incarnation's, or cannot be read."""
    if found is not None:
        try:
            planned = msgspec.json.decode(found.value, type=known(_Planned))
            if planned.incarnation == incarnation:
                return planned
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # They must not keep anyone from subscribing.
            _log.error("unreadable planned settings", extra={"key": key, "error": str(error)})
    return _Planned(incarnation=incarnation)


def _settings(key: str, found: _Settings | None) -> PlannedSettings | None:
    if found is None:
        return None
    policy: FailurePolicy | None = None
    if found.failure_policy is not None:
        try:
            policy = FailurePolicy.from_json(found.failure_policy)
        except InvalidRequestError as error:
            _log.error("unreadable planned settings", extra={"key": key, "error": str(error)})
    return PlannedSettings(policy=policy, window=found.max_unacked_messages)


def _load_options(found: KeyValue) -> dict[str, object]:
    """Reads all fields of a subscription's options, also unknown ones."""
    try:
        return msgspec.json.decode(found.value, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError(f"not a subscription: {error}", path=found.key) from error


def _decode_options(found: KeyValue) -> _Options:
    try:
        return msgspec.json.decode(found.value, type=known(_Options))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError(f"not a subscription: {error}", path=found.key) from error


def _encode_options(stored: StoredSubscription, known: Mapping[str, object]) -> bytes:
    """Returns the JSON of a subscription's options; unknown fields are kept."""
    fields: dict[str, object] = {
        **known,
        "kind": stored.kind,
        "failure_policy": stored.policy.to_json(),
        "max_unacked_messages": stored.window,
        "consumers": stored.consumers,
        "created_ms": stored.created_ms,
        "incarnation": stored.incarnation,
        "receipt_key": stored.receipt_key,
    }
    if stored.created_by:
        fields["created_by"] = stored.created_by
    fields.pop("principals", None)
    if stored.principals is not None:
        fields["principals"] = stored.principals
    return msgspec.json.encode(fields)
