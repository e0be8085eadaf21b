"""The storage API of Danube's design on top of `Log` and `Topic`, for its scenarios."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from ister.base.clock import SystemClock
from ister.base.model import StreamMessage
from ister.errors import InvalidRequestError
from ister.format.records import Progress, decode_progress, encode_progress
from ister.metadata.base import Absent, Put, RevisionIs
from ister.topic.log import Log


@dataclass(frozen=True)
class StartPosition:
    """Where a stream begins: at an offset, or (None) with what is appended after the call."""

    offset: int | None = None

    @classmethod
    def latest(cls) -> Self:
        return cls(None)

    @classmethod
    def at(cls, offset: int) -> Self:
        return cls(offset)


class TopicStream:
    """A topic's records in order, from one offset to the live tail."""

    def __init__(self, reader) -> None:
        self.reader = reader

    def next_batch(
        self, max_messages: int = 4096, timeout: float | None = None
    ) -> list[StreamMessage]:
        return [_restamped(m) for m in self.reader.next_batch(max_messages, timeout=timeout)]

    def __iter__(self) -> Iterator[StreamMessage]:
        return map(_restamped, self.reader)

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WalStorage:
    """One topic's storage. Made by `WalStorageFactory.for_topic`."""

    def __init__(self, log: Log, topic, clock) -> None:
        self._log = log
        self._clock = clock
        self.topic = topic
        self.wait = topic.wait

    def append_message(self, topic_name: str, message: StreamMessage) -> int:
        return self.topic.appender.append_record(message)

    def create_reader(self, topic_name: str, start: StartPosition) -> TopicStream:
        return TopicStream(self.topic.reader("latest" if start.offset is None else start.offset))

    def ack_checkpoint(
        self, topic_name: str, up_to_offset: int, subscription: str = "checkpoint"
    ) -> int:
        """Moves a subscription's cursor forward; returns the first offset that is not acknowledged.

        Written as brokers write it: in a transaction of the topic's owner.
        """
        if not 0 <= up_to_offset < self.topic.watermarks.next:
            raise InvalidRequestError(f"offset {up_to_offset} has not been appended")
        bucket = self.topic.bucket
        bucket.check_owner()
        key = bucket.owned.catalog.keys.progress(subscription)
        found = self._log.stores.metadata.get(key)
        cursor = up_to_offset + 1
        if found is not None:
            known = decode_progress(found.value, key=key)
            if known.incarnation == bucket.owned.record.incarnation:
                cursor = max(cursor, known.offset)
        progress = Progress(
            offset=cursor,
            timestamp=self._clock.now_ns() // 1_000_000,
            incarnation=bucket.owned.record.incarnation,
        )
        compare = Absent(key) if found is None else RevisionIs(key, found.revision)
        assert bucket.owned.transact([compare], [Put(key, encode_progress(progress))])
        return cursor

    def checkpoint(self, topic_name: str, subscription: str = "checkpoint") -> int | None:
        """The cursor that `ack_checkpoint` has recorded, or None."""
        owned = self.topic.bucket.owned
        key = owned.catalog.keys.progress(subscription)
        found = self._log.stores.metadata.get(key)
        progress = None if found is None else decode_progress(found.value, key=key)
        is_ours = progress is not None and progress.incarnation == owned.record.incarnation
        return progress.offset if is_ours else None

    def flush(self, topic_name: str) -> int:
        return self.topic.flush()


class WalStorageFactory:
    """Storage for all topics of a process; one object per topic, however often it is asked for."""

    def __init__(self, config, *, clock=None, **seams) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self.log = Log(config, clock=self._clock, **seams)
        self._lock = threading.Lock()
        self._storages: dict[str, WalStorage] = {}

    def for_topic(self, topic_path: str, *, take_over: bool = False) -> WalStorage:
        name = _with_slash(topic_path)
        topic = self.log.topic(name, create=True, take_over=take_over)
        with self._lock:
            storage = self._storages.get(name)
            if storage is None or storage.topic is not topic:
                storage = self._storages[name] = WalStorage(self.log, topic, self._clock)
            return storage

    def flush_and_seal(self, topic_path: str) -> int:
        name = _with_slash(topic_path)
        self._storages.pop(name, None)
        return self.log.seal(name)

    def delete_storage(self, topic_path: str) -> None:
        name = _with_slash(topic_path)
        self._storages.pop(name, None)
        self.log.delete(name)

    def shutdown(self) -> None:
        self._storages.clear()
        self.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _with_slash(topic_path: str) -> str:
    return topic_path if topic_path.startswith("/") else f"/{topic_path}"


def _restamped(message) -> StreamMessage:
    """The whole record, with the offset that the log gave it."""
    record = message.record
    return replace(record, msg_id=replace(record.msg_id, topic_offset=message.offset))
