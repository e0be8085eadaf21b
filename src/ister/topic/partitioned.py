"""A partitioned topic in this process: each message goes to one of its partitions.

    routing key        hash of the key, as with Danube's clients and `ister.client`
    none, `append`     in turn
    none, rows         hash of the payload

Rows are divided by what is in them, not by their place in a batch: a batch that is repeated, in
whatever order, has the same rows for each partition. That is what lets Spark's sink append the rows
of each partition once.

Owns: which partition a message goes to. Does not own: the partitions, which are topics.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Unpack
from zlib import crc32

from ister.base.model import AckLevel
from ister.base.partitions import partition_of
from ister.errors import InvalidRequestError
from ister.topic.append import MessageFields
from ister.topic.arguments import as_timeout
from ister.topic.table import render_topics
from ister.topic.topic import Topic

if TYPE_CHECKING:
    import pyarrow as pa


class PlacedMessage(NamedTuple):
    """The partition and offset of a message."""

    topic: Topic
    """The partition."""
    offset: int


class PartitionedTopic:
    """Appends to the partitions of a topic. Thread-safe. Made by `Log.partitioned`.

    To read, use the partitions: each has its own order.
    """

    def __init__(self, name: str, partitions: Sequence[Topic]) -> None:
        self.name = name
        self.partitions = tuple(partitions)
        """In the order of their numbers."""
        self._turn = 0
        self._lock = threading.Lock()

    def append(
        self, payload: bytes | bytearray | memoryview, **fields: Unpack[MessageFields]
    ) -> PlacedMessage:
        """Accepts a message as `Topic.append` does, in the partition of its routing key.

        Messages without a routing key go to the partitions in turn.

        Returns:
            The partition and the offset; `partition.wait(offset)` waits for durability.

        Raises:
            As `Topic.append`.
        """
        routing_key = fields.get("routing_key")
        if routing_key is None:
            with self._lock:
                number = self._turn
                self._turn = (number + 1) % len(self.partitions)
        else:
            if not isinstance(routing_key, str):
                raise InvalidRequestError(
                    f"routing_key must be str, not {type(routing_key).__name__}"
                )
            number = partition_of(routing_key, len(self.partitions))
        topic = self.partitions[number]
        return PlacedMessage(topic, topic.append(payload, **fields))

    def publish(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        level: AckLevel | str | None = None,
        timeout: float | None = None,
        **fields: Unpack[MessageFields],
    ) -> PlacedMessage:
        """Like `append`, and waits as `Topic.publish` does."""
        self.partitions[0].resolve_level(level)
        timeout = as_timeout(timeout)
        placed = self.append(payload, **fields)
        placed.topic.wait(placed.offset, level, timeout)
        return placed

    def append_arrow(self, batch: pa.RecordBatch) -> list[tuple[Topic, range]]:
        """Accepts the rows of a record batch as `Topic.append_arrow` does, divided by routing key.

        Rows without a routing key are divided by their payloads. The rows of one partition are
        accepted together; those of two partitions are not.

        Returns:
            Each partition that got rows, and their offsets.

        Raises:
            As `Topic.append_arrow`; partitions that came before are appended to then.
        """
        return [
            (self.partitions[number], self.partitions[number].append_arrow(rows))
            for number, rows in split_rows(batch, len(self.partitions))
        ]

    def flush(self, timeout: float | None = None) -> None:
        """Makes everything appended so far durable, in each partition.

        Raises:
            As `Topic.flush`.
        """
        for topic in self.partitions:
            topic.flush(timeout)

    def __repr__(self) -> str:
        return f"<PartitionedTopic {self.name} partitions={len(self.partitions)}>"

    def _repr_html_(self) -> str:
        return render_topics(f"Partitioned topic {self.name}", self.partitions)


def split_rows(batch: pa.RecordBatch, partitions: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Divides rows among partitions; keeps the order of the rows.

    Args:
        batch: Rows with a column `payload`, and optionally `routing_key`.
        partitions: The number of partitions.

    Returns:
        The number of each partition that gets rows, and its rows.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.compute as pc  # noqa: PLC0415

    at = batch.schema.get_field_index("routing_key")
    payload = batch.schema.get_field_index("payload")
    if partitions == 1 or payload < 0 or not batch.num_rows:
        # Rows without a payload are refused when they are appended.
        yield 0, batch
        return
    keys = batch.column(at) if at >= 0 else pa.nulls(batch.num_rows)
    coded = keys.cast(pa.string()).dictionary_encode()
    of_keys = [partition_of(key, partitions) for key in coded.dictionary.to_pylist()]
    numbers = pa.array(of_keys, pa.int32()).take(coded.indices)
    if numbers.null_count:
        is_keyless = numbers.is_null()
        of_payloads = pa.array(
            [
                crc32(_as_bytes(value)) % partitions
                for value in batch.column(payload).filter(is_keyless).to_pylist()
            ],
            pa.int32(),
        )
        numbers = pc.replace_with_mask(numbers, is_keyless, of_payloads)
    for number in sorted(pc.unique(numbers).to_pylist()):
        yield number, batch.filter(pc.equal(numbers, number))


def _as_bytes(value: object) -> bytes:
    """The bytes of a payload; b"" for other values, which are refused when they are appended."""
    if isinstance(value, str):
        return value.encode()
    return value if isinstance(value, bytes) else b""
