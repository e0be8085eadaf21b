"""Dead letters as a queue for operators: count, show, requeue, drop.

A dead-letter topic is a log like any other, and nothing is ever deleted from its middle. A letter
is pending until it is resolved: requeued (published to the topic that it failed in) or dropped. The
offsets of resolved letters are a cursor of the topic:

    /subscriptions/<ns>/<topic>/~dead-letters/progress     as a subscription's, see `AckFloor`

No subscription can have that name. As a cursor it is deleted with its topic, and is moved back
where a topic has lost messages and assigns their offsets again.

Owns: that cursor, which letters are selected, the order of steps. Does not own: the attributes of a
dead letter (`ister.broker.dispatch.dead_letters`), how messages are shown (`Browser`), rights
(`ister.broker.services.dead_letters`).

Letters that no broker has signed are shown as unverified, and are requeued only to a topic that the
operator names, without their producer name: whoever may produce to the dead-letter topic could have
written them.

Requeueing is at least once. Letters are published in batches of `_BATCH`, and a batch is recorded
as resolved when all of its messages are acknowledged at the topic's level. A crash between these
steps leaves one batch published and pending: the next run publishes it once more. A run that finds
everything recorded publishes nothing twice.

A call handles a bounded number of letters for a bounded time, and returns in `next` where to
continue; None if it is done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import WeakValueDictionary

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.base.model import JsonObject, StreamMessage
from ister.broker.dispatch.dead_letters import (
    LetterOrigin,
    LetterSigner,
    own_attributes,
    read_origin,
    restore_message,
)
from ister.broker.observe.browse import LIMIT_MAX, Browser
from ister.broker.observe.query_threads import QueryThreads
from ister.broker.tasks import run_to_completion
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import ElsewhereError, Topics
from ister.bucket.cursors import DELIVERY
from ister.bucket.names import TopicKeys
from ister.errors import (
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)
from ister.format.records import Progress, decode_progress, encode_progress
from ister.metadata.base import Absent, Compare, MetadataStore, Put, RevisionIs
from ister.metadata.transact import transact
from ister.subscription.floor import RANGES_MAX, AckFloor
from ister.topic.message import Message
from ister.topic.topic import Topic
from ister.wire.errors import http_error

Takes = Callable[[Message], bool]
"""Whether a message is wanted."""

CURSOR_NAME: Final = "~dead-letters"
"""Names the cursor; not a valid name of a subscription."""

_BATCH: Final = 100
_BATCH_BYTES: Final = 8 * MIB
_LETTERS_MAX: Final = 1_000
_COUNTED_MAX: Final = 100_000
_SECONDS: Final = 5.0
_REASONS_MAX: Final = 5
_OTHER: Final = "not a dead letter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selects pending letters; all conditions have to match."""

    ranges: Sequence[tuple[int, int]] = ()
    """Offsets from the first of each pair up to, not including, the second; all if empty."""
    reason: str = ""
    """Text in the reason, case-insensitive."""
    topic: str = ""
    """The topic in which it failed."""
    subscription: str = ""
    start: int = 0
    end: int | None = None

    def bounds(self, visible: int) -> tuple[int, int]:
        """The first offset that may match, and the one behind the last."""
        start, end = self.start, visible if self.end is None else min(self.end, visible)
        if self.ranges:
            start = max(start, min(first for first, _ in self.ranges))
            end = min(end, max(last for _, last in self.ranges))
        return start, end

    def takes(self, message: Message) -> bool:
        """Whether a message matches."""
        offset = message.offset
        if self.ranges and not any(first <= offset < last for first, last in self.ranges):
            return False
        if not (self.reason or self.topic or self.subscription):
            return True
        origin = _origin_of(message)
        return (
            origin is not None
            and self.reason.lower() in origin.reason.lower()
            and self.topic in ("", origin.topic)
            and self.subscription in ("", origin.subscription)
        )


@dataclass(slots=True)
class _Group:
    """Pending letters of one subscription."""

    count: int = 0
    first_offset: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    unverified: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class DeadLetterQueue:
    """The dead letters of the topics of this broker. Used on the broker's loop."""

    def __init__(
        self,
        topics: Topics,
        browser: Browser,
        query_threads: QueryThreads,
        metadata: MetadataStore,
        *,
        clock: Clock,
    ) -> None:
        self._topics = topics
        self._browser = browser
        self._query_threads = query_threads
        self._metadata = metadata
        self._clock = clock
        self._root = topics.config.storage.metadata.root_prefix
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- reading ----------------------------------------------------------------------------

    async def count(self, name: str, selection: Selection, *, limit: int = 0) -> JsonObject:
        """Counts pending letters by the subscription that they come from.

        Args:
            name: The dead-letter topic.
            selection: Which letters are counted.
            limit: Stops after so many; 0 for no limit of its own.

        Returns:
            `pending` (all letters that are not resolved), `selected`, `groups`, `end` (the offset
            behind the last counted one) and `is_partial` (there may be more behind it).
        """
        topic, core = await self._find(name)
        floor = await self._load(topic, core)
        selected = 0
        found: dict[tuple[str, str], _Group] = {}
        at, end = self._bounds(core, floor, selection)
        limit = min(limit or _COUNTED_MAX, _COUNTED_MAX)
        until = self._clock.monotonic() + _SECONDS
        takes = _Pending(floor, selection, self._topics.signer, name)
        while at < end and selected < limit and self._clock.monotonic() < until:
            letters, at = await self._select(core, takes, at, end, limit - selected)
            for letter in letters:
                _count(found, letter, is_verified=letter.offset in takes.verified)
            selected += len(letters)
        visible = core.visible
        return {
            "topic": name,
            "pending": max(0, visible - floor.floor - floor.count_below(visible)),
            "selected": selected,
            "groups": [_group_json(key, group) for key, group in sorted(found.items())],
            "end": at,
            "is_partial": at < end,
        }

    async def show(self, name: str, selection: Selection, *, limit: int) -> JsonObject:
        """Shows pending letters like `Browser.read`, with origin and reason in `dead_letter`.

        `attributes` are those that the message had before it failed.
        """
        topic, core = await self._find(name)
        floor = await self._load(topic, core)
        start, end = self._bounds(core, floor, selection)
        takes = _Pending(floor, selection, self._topics.signer, name)
        found = await self._browser.read(
            name, start=min(start, end), end=end, limit=min(limit, LIMIT_MAX), takes=takes
        )
        messages = found["messages"]
        assert isinstance(messages, list)  # noqa: S101 - for mypy
        for view in messages:
            record = StreamMessage(attributes=view["attributes"])
            origin = read_origin(record)
            is_verified = view["offset"] in takes.verified
            view["dead_letter"] = None if origin is None else _origin_json(origin, is_verified)
            view["attributes"] = own_attributes(record)
        following = found["next"]
        is_done = not isinstance(following, int) or following >= end
        return {**found, "next": None if is_done else following}

    # -- resolving --------------------------------------------------------------------------

    async def requeue(
        self, name: str, selection: Selection, *, to: str = "", check: Callable[[str], None]
    ) -> JsonObject:
        """Publishes letters to the topic that they failed in, and resolves them.

        Args:
            name: The dead-letter topic.
            selection: Which letters.
            to: Another topic for all of them.
            check: Refuses topics that the caller may not publish to.

        Returns:
            `done` and `failed` (offset and error of letters that stay pending, such as those whose
            topic was deleted), `next`.

        Raises:
            PermissionDeniedError: By `check`; nothing of the batch was published.
            As `show`.
        """

        async def publish(letters: list[Message], verified: Set[int]) -> list[IsterError | None]:
            is_verified = [letter.offset in verified for letter in letters]
            known = list(zip(letters, is_verified, strict=True))
            targets = [_target_of(letter, to, is_verified=is_ours) for letter, is_ours in known]
            for target in {target for target in targets if isinstance(target, str)}:
                check(target)
            return await asyncio.gather(
                *(
                    self._publish(letter, target, is_verified=is_ours)
                    for (letter, is_ours), target in zip(known, targets, strict=True)
                )
            )

        return await run_to_completion(self._resolve(name, selection, publish))

    async def drop(self, name: str, selection: Selection) -> JsonObject:
        """Resolves letters without publishing them; returns as `requeue`."""

        async def leave(letters: list[Message], _: Set[int]) -> list[IsterError | None]:
            return [None] * len(letters)

        return await run_to_completion(self._resolve(name, selection, leave))

    async def _resolve(
        self,
        name: str,
        selection: Selection,
        handle: Callable[[list[Message], Set[int]], Awaitable[list[IsterError | None]]],
    ) -> JsonObject:
        topic, core = await self._find(name)
        done, failed, tried = 0, list[JsonObject](), 0
        until = self._clock.monotonic() + _SECONDS
        async with self._lock_of(name):
            floor = await self._load(topic, core)
            at, end = self._bounds(core, floor, selection)
            while at < end and tried < _LETTERS_MAX and self._clock.monotonic() < until:
                takes = _Pending(floor, selection, self._topics.signer, name)
                letters, at = await self._select(core, takes, at, end, _BATCH)
                if sum(1 for _ in floor.ranges()) + len(letters) > RANGES_MAX:
                    raise CapacityError(
                        f"more than {RANGES_MAX} ranges of resolved letters between pending ones",
                        topic=name,
                        hint="requeue or drop the oldest letters first",
                    )
                errors = await handle(letters, takes.verified)
                failpoints.reach("broker.after_requeue")
                taken = [
                    letter.offset
                    for letter, error in zip(letters, errors, strict=True)
                    if error is None
                ]
                floor = await asyncio.to_thread(self._save, topic, core, taken)
                done += len(taken)
                tried += len(letters)
                failed += [
                    {"offset": letter.offset, **http_error(error)}
                    for letter, error in zip(letters, errors, strict=True)
                    if error is not None
                ]
        return {"topic": name, "done": done, "failed": failed, "next": at if at < end else None}

    async def _publish(
        self, letter: Message, target: str | IsterError, *, is_verified: bool
    ) -> IsterError | None:
        if not isinstance(target, str):
            return target
        topics = self._topics
        message = restore_message(letter.record, target)
        if not is_verified:
            # A producer name belongs to a principal, which may not have published this.
            message = replace(message, producer_name="")
        try:
            try:
                # Not `get_or_create`: a topic that was deleted does not come back by this.
                await (await topics.get(target)).publish_dead_letter(message)
            except ElsewhereError as error:
                if topics.peers is None:
                    raise
                await topics.peers.publish_dead_letter(error.member, target, message)
        except IsterError as error:
            return error
        return None

    # -- letters ----------------------------------------------------------------------------

    async def _find(self, name: str) -> tuple[ServedTopic, Topic]:
        topic = await self._topics.get(name)
        if topic.topic is None:
            raise InvalidRequestError(
                "the topic is not reliable: it stores no messages", topic=name
            )
        return topic, topic.topic

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _bounds(self, core: Topic, floor: AckFloor, selection: Selection) -> tuple[int, int]:
        start, end = selection.bounds(core.visible)
        return max(start, floor.floor), end

    async def _select(
        self, core: Topic, takes: Takes, start: int, end: int, limit: int
    ) -> tuple[list[Message], int]:
        return await self._query_threads.run(self._select_here, core, takes, start, end, limit)

    def _select_here(
        self, core: Topic, takes: Takes, start: int, end: int, limit: int
    ) -> tuple[list[Message], int]:
        """Reads pending letters; returns them and the offset to continue at."""
        found: list[Message] = []
        room, until = _BATCH_BYTES, self._clock.monotonic() + _SECONDS
        try:
            with core.reader(start, end=end) as reader:
                while not reader.is_at_end and self._clock.monotonic() < until:
                    before = reader.next_offset
                    for message in reader.poll(_BATCH, MIB):
                        if takes(message):
                            found.append(message)
                            room -= message.size_bytes
                            if len(found) == limit or room <= 0:
                                return found, message.offset + 1
                    if reader.next_offset == before:
                        break
                return found, reader.next_offset
        except ClosedError as error:
            raise UnavailableError("the topic was closed meanwhile", topic=core.name) from error

    # -- the cursor -------------------------------------------------------------------------

    def _key(self, topic: ServedTopic) -> str:
        return TopicKeys(self._root, topic.parsed).progress(CURSOR_NAME)

    async def _load(self, topic: ServedTopic, core: Topic) -> AckFloor:
        floor, _ = await self._query_threads.run(self._read, topic, core)
        return floor

    def _read(self, topic: ServedTopic, core: Topic) -> tuple[AckFloor, Compare]:
        key = self._key(topic)
        found = self._metadata.get(key)
        if found is None:
            return AckFloor(core.earliest), Absent(key)
        known, floor = decode_progress(found.value, key=key), AckFloor()
        if known.incarnation == topic.incarnation:
            saved = known.more.get(DELIVERY)
            # Without ranges after messages were lost: see `clip_progress`.
            floor = AckFloor.from_json(saved) if isinstance(saved, dict) and saved else floor
            floor.ack_range(0, known.offset)
        floor.ack_range(0, core.earliest)
        return floor, RevisionIs(key, found.revision)

    def _save(self, topic: ServedTopic, core: Topic, offsets: Sequence[int]) -> AckFloor:
        """Records letters as resolved; returns all that are."""

        def attempt() -> AckFloor | None:
            floor, compare = self._read(topic, core)
            for offset in offsets:
                floor.ack(offset, None)
            progress = Progress(
                offset=floor.floor,
                timestamp=self._clock.now_ns() // 1_000_000,
                incarnation=topic.incarnation,
                more={DELIVERY: floor.to_json()},
            )
            change = Put(self._key(topic), encode_progress(progress))
            if (owned := topic.owned) is not None:
                is_done = owned.transact([compare], [change])
            else:
                is_done = self._metadata.transact([compare], [change]) is not None
            return floor if is_done else None

        error = "the record of resolved dead letters keeps changing"
        return transact(attempt, ConflictError(error, topic=topic.name))


class _Pending:
    """Takes messages of a topic that are selected and not resolved, and verifies them."""

    def __init__(
        self, floor: AckFloor, selection: Selection, signer: LetterSigner, topic: str
    ) -> None:
        self.verified: set[int] = set()
        """Offsets of those that a broker has written."""
        self._floor, self._selection = floor, selection
        self._signer, self._topic = signer, topic

    def __call__(self, message: Message) -> bool:
        if self._floor.is_acked(message.offset) or not self._selection.takes(message):
            return False
        record = _record_of(message)
        if record is not None and self._signer.verify(record, self._topic):
            self.verified.add(message.offset)
        return True


def _record_of(message: Message) -> StreamMessage | None:
    try:
        return message.record
    except CorruptDataError:
        return None


def _origin_of(message: Message) -> LetterOrigin | None:
    record = _record_of(message)
    return None if record is None else read_origin(record)


def _target_of(letter: Message, to: str, *, is_verified: bool) -> str | IsterError:
    """The topic that a letter is requeued to, or why there is none."""
    if _record_of(letter) is None:
        return CorruptDataError("the message cannot be decoded", offset=letter.offset)
    origin = _origin_of(letter)
    if not to and origin is None:
        return InvalidRequestError(
            "the message has no attribute x-original-topic",
            hint="it was not published as a dead letter; name a topic to requeue it to",
        )
    if not to and not is_verified:
        return InvalidRequestError(
            "no broker of this cluster has written this dead letter",
            hint="its origin may be forged; drop it, or name a topic to requeue it to",
        )
    return to or ("" if origin is None else origin.topic)


def _count(groups: dict[tuple[str, str], _Group], letter: Message, *, is_verified: bool) -> None:
    record = _record_of(letter)
    origin = None if record is None else read_origin(record)
    key = ("", "") if origin is None else (origin.topic, origin.subscription)
    group = groups.setdefault(key, _Group(first_offset=letter.offset))
    group.count += 1
    group.unverified += not is_verified
    group.reasons[_OTHER if origin is None else origin.reason] += 1
    if record is not None:
        at = record.publish_time
        group.oldest_ms = at if group.oldest_ms is None else min(at, group.oldest_ms)
        group.newest_ms = at if group.newest_ms is None else max(at, group.newest_ms)


def _group_json(key: tuple[str, str], group: _Group) -> JsonObject:
    return {
        "source_topic": key[0] or None,
        "source_subscription": key[1] or None,
        "count": group.count,
        "first_offset": group.first_offset,
        "oldest": group.oldest_ms,
        "newest": group.newest_ms,
        "unverified": group.unverified,
        "reasons": dict(group.reasons.most_common(_REASONS_MAX)),
    }


def _origin_json(origin: LetterOrigin, is_verified: bool) -> JsonObject:
    return {
        "topic": origin.topic,
        "subscription": origin.subscription,
        "offset": origin.offset,
        "attempt": origin.attempt,
        "reason": origin.reason,
        "hops": origin.hops,
        "dropped_attributes": origin.dropped_attributes,
        "is_verified": is_verified,
    }
