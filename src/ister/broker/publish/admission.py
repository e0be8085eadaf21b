"""Admission: the checks that a message passes before it is appended, for every way in.

    gRPC SendMessage ─┐
    Flight, rows ─────┼─► size ─► producer's name ─► schema ─► rate ─► the log
    staged rows ──────┤
    dead letters ─────┘   (size and rate: the broker publishes them itself)

Owns: which checks there are, and their order. Does not own: each check (`policies`,
`producer_names`, `ister.broker.schemas`), permissions (checked by the guard before), and the log's
own limits, which also apply without a broker.

All messages of a batch are checked before the first one is appended. A rate delays: a message waits
on the broker's loop, rows wait in their thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ister.base.limits import ENVELOPE_SIZE_BYTES_MAX
from ister.base.model import StreamMessage
from ister.broker.schemas.registry import SchemaRegistry
from ister.errors import CapacityError, MessageTooLargeError, UnavailableError
from ister.format.payloads import Payloads
from ister.topic.dedup import check_producer_name

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.broker.topics.served_topic import ServedTopic

# How long a message may wait for the topic's rate; beyond that it is refused, for a retry.
_RATE_SECONDS_MAX: Final = 5.0

Record = tuple[int | None, int | None, bytes]
"""Schema id, schema version, payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionBatch:
    """Messages that are published together: what the checks need to know about them."""

    count: int
    producer: str | None
    """The producer name that they are published under, which is claimed; None without one."""
    largest: Callable[[], int]
    """The size of the largest payload, in bytes."""
    names: Callable[[], Iterable[str]]
    """Other producer names that the messages carry."""
    records: Callable[[], Iterator[Record]]
    """What is checked against the topic's schema."""


def admission_of_message(message: StreamMessage) -> AdmissionBatch:
    """The batch of one message of a producer."""
    return AdmissionBatch(
        count=1,
        producer=message.producer_name or None,
        largest=lambda: len(message.payload),
        names=tuple,
        records=lambda: iter([(message.schema_id, message.schema_version, message.payload)]),
    )


def admission_of_rows(batch: pa.RecordBatch | Payloads, producer: str | None) -> AdmissionBatch:
    """The batch of a record batch, which is valid Arrow and has a column `payload`."""
    if isinstance(batch, Payloads):
        return AdmissionBatch(
            count=batch.num_rows,
            producer=producer,
            largest=lambda: max(batch.sizes()),
            names=tuple,
            records=lambda: ((None, None, payload) for payload in batch.payloads()),
        )
    columns = batch.schema.names

    def largest() -> int:
        import pyarrow.compute as pc  # noqa: PLC0415 - an extra

        return pc.max(pc.binary_length(batch.column("payload"))).as_py() or 0

    def names() -> Iterable[str]:
        if producer is not None or "producer_name" not in columns:
            return ()
        return [str(name) for name in batch.column("producer_name").unique().to_pylist() if name]

    def records() -> Iterator[Record]:
        for row in range(batch.num_rows):
            schema_id, version, payload = (
                batch.column(column)[row].as_py() if column in columns else None
                for column in ("schema_id", "schema_version", "payload")
            )
            if isinstance(payload, str):
                payload = payload.encode()
            yield schema_id, version, payload or b""

    return AdmissionBatch(
        count=batch.num_rows, producer=producer, largest=largest, names=names, records=records
    )


class Admission:
    """Runs the checks. Thread-safe, except `admit` and `claim`, which need the broker's loop."""

    def __init__(self, schemas: SchemaRegistry | None = None) -> None:
        """Prepares the checks.

        `schemas` is None for a broker without schemas.
        """
        self._schemas = schemas

    # -- on the loop ------------------------------------------------------------------------

    async def admit(self, topic: ServedTopic, batch: AdmissionBatch, principal: str | None) -> None:
        """Checks messages, and waits for the topic's rate.

        `principal` is the publisher; "" without authentication, None for the broker itself.

        Raises:
            As `check`, and CapacityError if the wait would be too long.
        """
        if self.is_quick(topic, batch.producer, principal):
            self.check(topic, batch, principal)
        else:
            await asyncio.to_thread(self.check, topic, batch, principal)
        await _wait_on_loop(topic, batch.count)

    async def claim(self, topic: ServedTopic, name: str, principal: str) -> None:
        """Claims a producer name for a principal, before its first message."""
        if not topic.names.is_settled(name, principal):
            await asyncio.to_thread(topic.names.claim, name, principal)

    def is_quick(self, topic: ServedTopic, producer: str | None, principal: str | None) -> bool:
        """Whether `check` can run on the loop: it calls no store, and checks no schema."""
        if principal is None:
            return True
        is_settled = producer is None or topic.names.is_settled(producer, principal)
        return is_settled and not self.has_schema(topic)

    # -- in any thread ----------------------------------------------------------------------

    def is_immediate(self, topic: ServedTopic, producer: str, principal: str, size: int) -> bool:
        """Whether `admit` would let a message of `size` bytes in, without waiting for anything."""
        size_max = topic.policies.max_message_size
        return (
            not topic.publish_rate.per_second
            and (not size_max or size <= size_max)
            and self.is_quick(topic, producer or None, principal)
        )

    def check(self, topic: ServedTopic, batch: AdmissionBatch, principal: str | None) -> None:
        """Refuses messages that must not enter the topic; ignores the rate. May block.

        Raises:
            MessageTooLargeError: A payload is over the topic's limit.
            PermissionDeniedError: A producer name belongs to another principal.
            InvalidRequestError: A producer name is invalid, or the topic enforces its schema and
                a message does not fit.
        """
        size_max = topic.policies.max_message_size
        if size_max and batch.count and (size := batch.largest()) > size_max:
            raise MessageTooLargeError(
                f"message too large: {size} bytes",
                topic=topic.name,
                hint=f"the topic's policy max_message_size is {size_max}",
            )
        if principal is None:
            return
        if batch.producer is not None:
            topic.names.claim(batch.producer, principal)
        else:
            names = batch.names()
            for name in names:
                check_producer_name(name)
            topic.names.check(names, principal)
        if self._schemas is not None and self.has_schema(topic):
            for schema_id, version, payload in batch.records():
                self._schemas.check_message(
                    topic.name, schema_id=schema_id, schema_version=version, payload=payload
                )

    def wait(
        self, topic: ServedTopic, count: int, *, now: Callable[[], float], pause: Pause
    ) -> None:
        """Waits for the topic's rate, in a thread.

        `pause` waits that many seconds, and returns True if the wait is cancelled.

        Raises:
            UnavailableError: The broker is ending, or the caller has disconnected.
        """
        rate = topic.publish_rate
        while rate.per_second and count > 0:
            # In parts, so that other producers can publish in between.
            part = min(count, max(1, rate.per_second // 10))
            delay = rate.reserve(part, now())
            if delay and pause(delay):
                rate.refund(part)
                raise UnavailableError(
                    "the broker is shutting down, or the caller has disconnected", topic=topic.name
                )
            count -= part

    def has_schema(self, topic: ServedTopic) -> bool:
        """Whether messages of a topic are checked against a schema."""
        return self._schemas is not None and not self._schemas.is_unchecked(topic.name)


Pause = Callable[[float], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedGate:
    """Checks rows that were staged in the bucket; an `ister.topic.batches.Gate`."""

    admission: Admission
    topic: ServedTopic
    principal: str
    now: Callable[[], float]
    pause: Pause

    @property
    def is_needed(self) -> bool:
        """Whether the topic has a size limit or a schema, or the caller is authenticated."""
        return bool(
            self.topic.policies.max_message_size
            or self.principal
            or self.admission.has_schema(self.topic)
        )

    def check(self, rows: pa.RecordBatch) -> None:
        """Checks the rows of a batch before the first one is appended."""
        self.admission.check(self.topic, admission_of_rows(rows, None), self.principal)

    def wait(self, count: int) -> None:
        """Waits for the topic's rate."""
        self.admission.wait(self.topic, count, now=self.now, pause=self.pause)


async def _wait_on_loop(topic: ServedTopic, count: int) -> None:
    """Waits for the topic's rate; refuses if the wait would be too long."""
    rate = topic.publish_rate
    delay = rate.reserve(count, asyncio.get_running_loop().time())
    if delay > _RATE_SECONDS_MAX:
        rate.refund(count)
        raise CapacityError(
            f"too many messages for the topic's rate of {rate.per_second} a second",
            topic=topic.name,
            hint="retry later; max_publish_rate is the limit",
        )
    if delay:
        try:
            await asyncio.sleep(delay)
        except asyncio.CancelledError:
            rate.refund(count)
            raise


def check_unlogged_size(message: StreamMessage, size_max: int, *, topic: str) -> None:
    """Checks the size of a message for a topic without a log; the log checks its own messages."""
    size = len(message.payload)
    if size > size_max:
        raise MessageTooLargeError(
            f"a message of {size} bytes",
            topic=topic,
            hint=f"at most {size_max}; storage.max_message_size sets the limit",
        )
    size = len(message.routing_key or "") + sum(
        len(name) + len(value) for name, value in message.attributes.items()
    )
    if size > ENVELOPE_SIZE_BYTES_MAX:
        raise MessageTooLargeError(
            f"a key and attributes of {size} bytes",
            topic=topic,
            hint=f"at most {ENVELOPE_SIZE_BYTES_MAX}; large data belongs into the payload",
        )
