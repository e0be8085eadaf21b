"""Storage per topic under the names of the design documents, for those who think in them.

    factory = WalStorageFactory(load_config("ister.yml"))
    storage = factory.for_topic("/default/orders")
    offset = storage.append_message("/default/orders", message)
    for message in storage.create_reader("/default/orders", StartPosition.at(0)): ...

`WalStorageFactory` is a `Log`, and `WalStorage` a `Topic` with whole records (`StreamMessage`)
going in and out; nothing here has logic of its own. One storage per topic, however often it is
asked for; uploads, retention and the lease start with the factory and stop with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from ister.clock import Clock, SystemClock
from ister.config import Config
from ister.errors import InvalidRequestError
from ister.format.records import Progress
from ister.model import AckLevel, StreamMessage
from ister.tier.cursors import load_progress, save_progress
from ister.topic.log import Log
from ister.topic.message import Message
from ister.topic.reader import Reader
from ister.topic.topic import Topic

__all__ = ["StartPosition", "TopicStream", "WalStorage", "WalStorageFactory"]


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where a stream begins: at an offset, or with what is appended after the call."""

    offset: int | None = None

    @classmethod
    def latest(cls) -> Self:
        """Only what is appended from now on."""
        return cls(None)

    @classmethod
    def at(cls, offset: int) -> Self:
        """The message with this offset, and everything behind it."""
        return cls(offset)


class TopicStream:
    """A topic's records in order, from one offset to the live tail. Used by one thread."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        """The reader underneath."""

    def next_batch(
        self, max_messages: int = 4096, timeout: float | None = None
    ) -> list[StreamMessage]:
        """As `Reader.next_batch`, as whole records."""
        return [_restamped(m) for m in self.reader.next_batch(max_messages, timeout=timeout)]

    def __iter__(self) -> Iterator[StreamMessage]:
        """Every record, waiting at the tail for the next one."""
        for message in self.reader:
            yield _restamped(message)

    def close(self) -> None:
        """Ends the stream."""
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class WalStorage:
    """One topic's storage. Made by `WalStorageFactory.for_topic`. Thread-safe."""

    def __init__(self, log: Log, topic: Topic, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._acked: dict[str, int] = {}
        self.topic = topic
        """The topic underneath."""

    def append_message(self, topic_name: str, message: StreamMessage) -> int:
        """Accepts a record and returns its offset, in microseconds; `wait` for more.

        Raises:
            InvalidRequestError: The storage is another topic's.
            As `Topic.append`.
        """
        self._check_name(topic_name)
        return self.topic.append_record(message)

    def wait(self, offset: int, level: AckLevel | str | None = None) -> None:
        """As `Topic.wait`."""
        self.topic.wait(offset, level)

    def create_reader(self, topic_name: str, start: StartPosition) -> TopicStream:
        """A stream from `start` on: bucket, then local files, then memory, then live.

        Raises:
            InvalidRequestError: The storage is another topic's.
            As `Topic.reader`.
        """
        self._check_name(topic_name)
        return TopicStream(self.topic.reader("latest" if start.offset is None else start.offset))

    def ack_checkpoint(
        self, topic_name: str, up_to_offset: int, subscription: str = "checkpoint"
    ) -> int:
        """Records that everything up to and including an offset has been dealt with.

        While it moves, local files that it has yet to pass are kept; see `wal.retention`.

        Returns:
            The cursor: the first offset that has not been acknowledged.

        Raises:
            InvalidRequestError: The storage is another topic's, or the offset does not exist.
            FencedError: Another owner has the topic.
            UnavailableError: The metadata store does not answer.
        """
        self._check_name(topic_name)
        if not 0 <= up_to_offset < self.topic.wal.next:
            raise InvalidRequestError(
                f"offset {up_to_offset} has not been appended", topic=topic_name
            )
        tier, tiers = self.topic.tier, self._log.tiers
        if tier is None or tiers is None:
            cursor = max(self._acked.get(subscription, 0), up_to_offset + 1)
            self._acked[subscription] = cursor
            return cursor
        tier.check_owner()
        progress = Progress(
            offset=up_to_offset + 1,
            timestamp=self._clock.now_ns() // 1_000_000,
            incarnation=tier.owned.record.incarnation,
        )
        return save_progress(tier.owned, subscription, progress).offset

    def checkpoint(self, topic_name: str, subscription: str = "checkpoint") -> int | None:
        """The cursor that `ack_checkpoint` has recorded, or None."""
        self._check_name(topic_name)
        tier, tiers = self.topic.tier, self._log.tiers
        if tier is None or tiers is None:
            return self._acked.get(subscription)
        key = tier.owned.catalog.keys.progress(subscription)
        found = load_progress(tiers.metadata, key)
        incarnation = tier.owned.record.incarnation
        return None if found is None or found.incarnation != incarnation else found.offset

    def flush(self, topic_name: str) -> int:
        """Makes everything appended so far durable; returns the `synced` watermark."""
        self._check_name(topic_name)
        return self.topic.flush()

    def _check_name(self, topic_name: str) -> None:
        if _with_slash(topic_name) != self.topic.name:
            raise InvalidRequestError(
                f"this is the storage of {self.topic.name}, not of {topic_name}",
                topic=topic_name,
                hint="ask the factory for that topic's",
            )


class WalStorageFactory:
    """Storage for all topics of a process. Thread-safe."""

    def __init__(self, config: Config, *, clock: Clock | None = None, **seams: Any) -> None:  # noqa: ANN401
        """Opens the log of `config`; `seams` are those of `Log`."""
        self._clock: Clock = clock if clock is not None else SystemClock()
        self.log = Log(config, clock=self._clock, **seams)
        """The log underneath."""
        self._lock = threading.Lock()
        self._storages: dict[str, WalStorage] = {}

    def for_topic(self, topic_path: str, *, take_over: bool = False) -> WalStorage:
        """The storage of a topic, which is made where there is none; the same one every time.

        Args:
            topic_path: `/namespace/topic`; the first slash may be left out.
            take_over: As for `Log.topic`.

        Raises:
            As `Log.topic`.
        """
        name = _with_slash(topic_path)
        topic = self.log.topic(name, create=True, take_over=take_over)
        with self._lock:
            storage = self._storages.get(name)
            if storage is None or storage.topic is not topic:
                storage = self._storages[name] = WalStorage(self.log, topic, self._clock)
            return storage

    def flush_and_seal(self, topic_path: str) -> int:
        """Hands a topic over; see `Log.seal`."""
        name = _with_slash(topic_path)
        self._storages.pop(name, None)
        return self.log.seal(name)

    def delete_storage(self, topic_path: str) -> None:
        """Removes a topic with everything in it; see `Log.delete`."""
        name = _with_slash(topic_path)
        self._storages.pop(name, None)
        self.log.delete(name)

    def shutdown(self) -> None:
        """Stops everything and closes every topic."""
        self._storages.clear()
        self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def _with_slash(topic_path: str) -> str:
    return topic_path if topic_path.startswith("/") else f"/{topic_path}"


def _restamped(message: Message) -> StreamMessage:
    """The whole record, with the offset that the log gave it."""
    record = message.record
    if record.msg_id.topic_offset == message.offset:
        return record
    return replace(record, msg_id=replace(record.msg_id, topic_offset=message.offset))
