"""Record batches of producers into topics.

    batches ─► checked, decoded ─► admission ─► deduplication ─► log ─► topic's level ─► answer

Owns: what Kafka's producers are told, their ids, their sequences (31 bits, which begin again).
Does not own: batches (`records`), which messages a topic admits (`ister.broker.publish.admission`),
deduplication (`ister.topic.dedup`).

A request is appended when its turn comes, and answered when its messages have reached the level of
their topics; so the requests of a connection wait for the disk together, and are answered in their
order. All batches of a partition are checked before the first one is appended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias, TypedDict

from kio.schema.errors import ErrorCode

from ister.base import failpoints
from ister.broker.kafka.protocol import Entity, KafkaError, Request, code_of
from ister.broker.kafka.records import Batch, Stored, decode_batches, to_stored
from ister.broker.kafka.topics import KafkaTopics, log_of
from ister.broker.publish.admission import AdmissionBatch
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import ServedTopic
from ister.errors import ConflictError, IsterError
from ister.metadata.base import MetadataStore, Put
from ister.metadata.transact import transact, unchanged
from ister.topic.append import RecordParts
from ister.topic.dedup import SequencedTopic, sequenced_producer_id
from ister.topic.read_only import ReadOnlyTopic

ACKS: Final = (0, 1, -1)
_SEQUENCES: Final = 1 << 31
_IDS_AT_ONCE: Final = 1000
_SECONDS_MAX: Final = 300.0


class ProducerIds:
    """Numbers of producers, no two alike in a cluster; taken from the metadata store in lots."""

    def __init__(self, metadata: MetadataStore, key: str) -> None:
        self._metadata = metadata
        self._key = key
        self._next = self._end = 0
        self._taking = asyncio.Lock()

    async def take(self) -> int:
        """Another number.

        Raises:
            UnavailableError: The metadata store does not answer.
        """
        async with self._taking:
            if self._next == self._end:
                self._end = await asyncio.to_thread(self._reserve)
                self._next = self._end - _IDS_AT_ONCE
            self._next += 1
            return self._next

    def _reserve(self) -> int:
        def attempt() -> int | None:
            found = self._metadata.get(self._key)
            end = (0 if found is None else int(found.value)) + _IDS_AT_ONCE
            put = Put(self._key, b"%d" % end)
            done = self._metadata.transact([unchanged(self._key, found)], [put])
            return None if done is None else end

        error = ConflictError("producer ids keep changing", path=self._key)
        return transact(attempt, error, attempts=20)


class _Appended(NamedTuple):
    """What was appended to a partition, or why it was not."""

    code: ErrorCode
    message: str | None = None
    topic: ServedTopic | None = None
    start: int = -1
    last: int = -1


_AllAppended: TypeAlias = list[tuple[str, list[tuple[int, _Appended]]]]
"""By topic and partition, as asked for."""


class Producing:
    """Serves Produce and InitProducerId."""

    def __init__(self, names: KafkaTopics, guard: Guard, ids: ProducerIds) -> None:
        self._names = names
        self._guard = guard
        self._ids = ids
        self._size_max = names.topics.config.broker.kafka.max_request_bytes

    async def produce(self, request: Request) -> Awaitable[Entity]:
        """Appends what a request brings; the answer follows when it is as safe as it should be."""
        began, body = time.monotonic(), request.body
        refusal: KafkaError | None = None
        if body.transactional_id is not None:
            refusal = no_transactions()
        elif body.acks not in ACKS:
            refusal = KafkaError(ErrorCode.invalid_required_acks)
        appended: _AllAppended = []
        for topic in body.topic_data:
            partitions = [
                (one.index, await self._try_append(topic.name, one, refusal))
                for one in topic.partition_data
            ]
            appended.append((topic.name, partitions))
        return self._answer(request, appended, began)

    async def _answer(
        self,
        request: Request,
        appended: _AllAppended,
        began: float,
    ) -> Entity:
        timeout = min(_SECONDS_MAX, max(0.0, request.body.timeout.total_seconds()))
        make, topics = request.make, []
        has_failed = False
        for name, partitions in appended:
            answers = []
            for number, one in partitions:
                done = one
                if one.code is ErrorCode.none and request.body.acks:
                    done = await _wait(one, timeout, began)
                has_failed = has_failed or done.code is not ErrorCode.none
                answers.append(
                    make(
                        "PartitionProduceResponse",
                        index=number,
                        error_code=done.code,
                        base_offset=done.start,
                        record_errors=(),
                        error_message=done.message,
                    )
                )
            topics.append(
                make("TopicProduceResponse", name=name, partition_responses=tuple(answers))
            )
        if not request.body.acks:
            if has_failed:
                # There is no answer to say it in; Kafka closes the connection, too.
                raise KafkaError(ErrorCode.unknown_server_error, "a request with acks=0 failed")
            return None
        return make("ProduceResponse", responses=tuple(topics))

    async def _try_append(self, name: str, data: Entity, refusal: KafkaError | None) -> _Appended:
        topic: ServedTopic | None = None
        try:
            if refusal is not None:
                raise refusal
            path = self._names.path_of(name)
            self._names.check(Permission.PRODUCE, path)
            batches = decode_batches(data.records or b"", size_max=self._size_max)
            if not batches:
                raise KafkaError(ErrorCode.invalid_record, "there are no records")
            topic = await self._names.open_or_create(path, data.index)
            return await self._append(topic, batches)
        except IsterError as error:
            if topic is not None:
                topic.counters.count_refused(code_of(error).name)
            return _Appended(code_of(error), error.message)

    async def _append(self, topic: ServedTopic, batches: Sequence[Batch]) -> _Appended:
        log = log_of(topic)
        if isinstance(log, ReadOnlyTopic):
            raise log.refused_error()
        stored = [[to_stored(record) for record in batch.records] for batch in batches]
        principal = str(current_principal()) if self._guard.is_on else ""
        for batch, messages in zip(batches, stored, strict=True):
            name = None if batch.producer_id < 0 else f"kafka-{batch.producer_id}"
            await self._names.topics.admission.admit(
                topic, _admission_of(messages, name), principal
            )
        start = last = -1
        for batch, messages in zip(batches, stored, strict=True):
            if batch.producer_id < 0:
                append = partial(log.appender.append_records, _parts_of(topic, messages))
                offsets = await topic.when_room(append)
                first, end = offsets.start, offsets.stop
            else:
                first, end = await self._append_numbered(topic, batch, messages)
            start = first if start < 0 else start
            last = max(last, end - 1)
            topic.counters.count_messages([len(one.payload) for one in messages])
        failpoints.reach("broker.after_append")
        return _Appended(ErrorCode.none, None, topic, start, last)

    async def _append_numbered(
        self, topic: ServedTopic, batch: Batch, messages: Sequence[Stored]
    ) -> tuple[int, int]:
        """Appends those records of a producer that are not in the topic; where all of them are."""
        sequenced = topic.sequenced
        assert sequenced is not None  # noqa: S101 - for mypy: it has a log
        producer, epoch = f"kafka-{batch.producer_id}", batch.producer_epoch
        if not sequenced.is_ready:
            await asyncio.to_thread(sequenced.prepare)
        last = sequenced.last(producer)
        if last is not None and epoch > last[0] and batch.base_sequence:
            raise _out_of_order()
        sequence = _whole_sequence(batch.base_sequence, epoch, last)
        parts = _parts_of(topic, messages, producer, epoch, sequence)
        numbers: _Numbers = {"producer": producer, "epoch": epoch, "sequence": sequence}
        try:
            found = await topic.when_room(partial(sequenced.try_append_records, parts, **numbers))
            if found is None:
                # It needs a search of the log, or the table is in use.
                append = partial(sequenced.append_records, parts, **numbers)
                found = await asyncio.to_thread(append)
        except ConflictError as error:
            raise _refusal(sequenced, numbers, error) from error
        return found.start, found.end

    async def init_producer(self, request: Request) -> Entity:
        """Answers InitProducerId: a number of its own for each producer."""
        code, number, epoch = ErrorCode.none, -1, -1
        try:
            if request.body.transactional_id is not None:
                raise no_transactions()
            self._guard.check_anywhere(current_principal(), Permission.PRODUCE)
            number, epoch = await self._ids.take(), 0
        except IsterError as error:
            code = code_of(error)
            if code is ErrorCode.topic_authorization_failed:
                code = ErrorCode.cluster_authorization_failed
            elif code is ErrorCode.not_leader_or_follower:
                code = ErrorCode.coordinator_not_available
        return request.make(
            "InitProducerIdResponse", error_code=code, producer_id=number, producer_epoch=epoch
        )


def no_transactions() -> KafkaError:
    """The refusal of transactions, with a code that clients do not retry."""
    return KafkaError(
        ErrorCode.transactional_id_authorization_failed, "transactions are not supported"
    )


def _out_of_order() -> KafkaError:
    return KafkaError(ErrorCode.out_of_order_sequence_number, "messages were left out")


class _Numbers(TypedDict):
    producer: str
    epoch: int
    sequence: int


def _refusal(sequenced: SequencedTopic, numbers: _Numbers, error: ConflictError) -> IsterError:
    """A conflict of sequences in Kafka's words."""
    epoch, sequence = numbers["epoch"], numbers["sequence"]
    last = sequenced.last(numbers["producer"])
    if last is None:
        return error
    if epoch < last[0]:
        return KafkaError(ErrorCode.invalid_producer_epoch, "a newer producer has this id")
    if epoch == last[0] and sequence > last[1]:
        return _out_of_order()
    return KafkaError(ErrorCode.duplicate_sequence_number, "it was appended long ago")


def _whole_sequence(sequence: int, epoch: int, last: tuple[int, int] | None) -> int:
    """The sequence that 31 bits of it stand for: the one next to the producer's last one."""
    if last is None or last[0] != epoch:
        return sequence
    expected, half = last[1] + 1, _SEQUENCES // 2
    whole = expected + (sequence - expected + half) % _SEQUENCES - half
    return whole if whole >= 0 else whole + _SEQUENCES


def _admission_of(messages: Sequence[Stored], producer: str | None) -> AdmissionBatch:
    return AdmissionBatch(
        count=len(messages),
        producer=producer,
        largest=lambda: max(len(one.payload) for one in messages),
        names=tuple,
        records=lambda: ((None, None, one.payload) for one in messages),
    )


def _parts_of(
    topic: ServedTopic,
    messages: Sequence[Stored],
    producer: str = "",
    epoch: int = 0,
    sequence: int | None = None,
) -> list[RecordParts]:
    """Messages as the log takes them; numbered from `sequence` on."""
    appender = log_of(topic).appender
    encoder, name = appender.records, topic.name
    identity = 0 if sequence is None else sequenced_producer_id(producer, epoch)
    head = encoder.head(0, identity, name, "")
    parts: list[RecordParts] = []
    for number, (payload, publish_time, routing_key, attributes) in enumerate(messages):
        if sequence is not None:
            head = encoder.head(sequence + number, identity, name, "")
        if routing_key is not None and not attributes:
            tail = encoder.keyed_tail(producer, routing_key)
        else:
            tail = encoder.tail(
                producer,
                "",
                attributes,
                schema_id=None,
                schema_version=None,
                routing_key=routing_key,
            )
        record = (head, payload, publish_time, tail)
        appender.check_record(record)
        parts.append(record)
    return parts


async def _wait(one: _Appended, timeout: float, began: float) -> _Appended:
    """Waits until what was appended has reached the level of its topic."""
    topic = one.topic
    assert topic is not None  # noqa: S101 - for mypy: it was appended
    try:
        left = began + timeout - time.monotonic()
        await log_of(topic).aio.wait(one.last, timeout=max(0.0, left))
    except IsterError as error:
        topic.counters.count_refused(code_of(error).name)
        return _Appended(code_of(error), error.message)
    failpoints.reach("broker.before_answer")
    topic.counters.count_sends(1, time.monotonic() - began)
    return one
