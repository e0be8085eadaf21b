"""Where Flight's threads meet the broker's loop: topics, bounds, schemas.

Flight serves each call in a thread of its own. Topics are found and made on the loop, where they
are served; messages then go straight into the log from the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.time_searches import TimeSearches
from ister.broker.topics import Topics
from ister.config import Config
from ister.errors import InvalidRequestError, UnavailableError
from ister.model import AckLevel, Codec
from ister.topic.sequences import SequencedTopic

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.topic.batches import AppendedBatch, StagedBatch

__all__ = ["BrokerSource"]

_OPEN_SECONDS: Final = 60.0

Answer = TypeVar("Answer")


class BrokerSource:
    """The broker's topics, for Flight. Thread-safe; not to be called on the loop."""

    def __init__(
        self, topics: Topics, schemas: SchemaRegistry, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._topics = topics
        self._schemas = schemas
        self._loop = loop
        self._ending = threading.Event()

    @property
    def config(self) -> Config:
        """The settings of which clients are told a part."""
        return self._topics.config

    @property
    def searches(self) -> TimeSearches:
        """Where searches for a time run."""
        return self._topics.searches

    def open(
        self,
        name: str,
        *,
        create: bool = False,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
    ) -> SequencedTopic:
        """A topic with a log; made where it is missing, if `create` says so."""
        topic = self._topics.find_open(name)
        if topic is None:
            topic = self._on_loop(
                self._topics.get_or_create(name, is_reliable=True, ack=ack, codec=codec)
                if create
                else self._topics.get(name)
            )
        if topic.sequenced is None:
            raise InvalidRequestError(
                "the topic is not reliable: it has no log", topic=name, hint="use gRPC"
            )
        return topic.sequenced

    def names(self) -> list[str]:
        """The names of all topics that have a log."""
        return self._topics.log.topics()

    def append_staged(self, name: str, staged: StagedBatch) -> AppendedBatch:
        """As `Log.append_staged`."""
        self.open(name)
        return self._topics.log.append_staged(name, staged)

    def admit(self, topic: SequencedTopic, batch: pa.RecordBatch) -> None:
        """Has rows wait for the topic's rate, and refuses those that its schema or size forbids."""
        name = topic.topic.name
        served = self._topics.find_open(name)
        if served is None or served.sequenced is not topic:
            raise UnavailableError("the topic is opened again", topic=name)
        served.check_batch(batch)
        if not self._schemas.is_unchecked(name):
            self._check_schemas(name, batch)
        rate, rows = served.publish_rate, batch.num_rows
        while rate.per_second and rows > 0:
            # In parts: others come in between.
            part = min(rows, max(1, rate.per_second // 10))
            delay = rate.reserve(part, self._loop.time())
            if delay and self._ending.wait(delay):
                raise UnavailableError("the broker is ending", topic=name)
            rows -= part

    def note(self, topic: SequencedTopic, batch: pa.RecordBatch) -> None:
        """Counts rows that were appended."""
        served = self._topics.find_open(topic.topic.name)
        if served is not None:
            served.counters.note_batch(batch)

    def publishing(self, topic: SequencedTopic) -> AbstractContextManager[None]:
        """Counts a producer for as long as it publishes."""
        served = self._topics.find_open(topic.topic.name)
        return served.counters.publishing() if served is not None else nullcontext()

    def _check_schemas(self, name: str, batch: pa.RecordBatch) -> None:
        columns = batch.schema.names
        for row in range(batch.num_rows):
            values = {
                column: batch.column(column)[row].as_py() if column in columns else None
                for column in ("schema_id", "schema_version", "payload")
            }
            self._schemas.check_message(
                name,
                schema_id=values["schema_id"],
                schema_version=values["schema_version"],
                payload=values["payload"] or b"",
            )

    def end(self) -> None:
        """Has nobody wait any more."""
        self._ending.set()

    def _on_loop(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_OPEN_SECONDS)
        except TimeoutError as error:
            future.cancel()
            raise UnavailableError("the topic could not be opened in time") from error
