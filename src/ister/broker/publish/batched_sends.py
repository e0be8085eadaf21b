"""Handles SendMessage calls in batches: appended by topic, committed once, answered together.

    calls that arrived together ─► checked one by one ─► appended, one lock per topic
                                                     ─► one wait per topic ─► answered

Owns: the fast path of a message, on which only the disk is waited for. Does not own: the checks
(`admission`, the guard), the log. Calls that have to wait for anything else are deferred to
`ProducerService.SendMessage`: a topic that is not open, a new producer, a schema, a publish rate, a
sequence, the level `tiered`, a full buffer.

Used by any thread. Which one commits is the engine's choice: see `Appended`.

Invariant: a call is answered after its message has reached the topic's ack level, and never if the
topic has another owner by then. A crash leaves what the log leaves: messages that were not answered
may be stored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from ister.base import failpoints, threads
from ister.base.model import AckLevel
from ister.broker.dispatch.encoder import encode_answer
from ister.broker.rpc.batch_calls import BatchCall
from ister.broker.rpc.handlers import status_of
from ister.broker.security.guard import Guard, entered
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import Topics
from ister.errors import CapacityError, ClosedError, IsterError
from ister.topic.append import RecordParts
from ister.topic.topic import Topic
from ister.wire import danube

SEQUENCE_ATTRIBUTE: Final = "ister-sequence"


class _TopicBatch:
    """The messages of a batch that go to one topic, and their calls; an `Appended`."""

    __slots__ = ("_last", "_log", "_topic", "answers", "calls", "records")

    def __init__(self, topic: ServedTopic, log: Topic) -> None:
        self._topic = topic
        self._log = log
        self._last = -1
        self.calls: list[BatchCall] = []
        self.records: list[RecordParts] = []
        self.answers: list[bytes] = []

    def append(self) -> bool:
        """Appends the messages; returns whether their calls are still to be answered."""
        try:
            self._last = self._log.appender.append_records(self.records)[-1]
        except (CapacityError, ClosedError):
            # This may pass: the ordinary form waits, or opens the topic again.
            for call in self.calls:
                call.defer()
            return False
        except IsterError as error:
            self._refuse(error)
            return False
        self._topic.counters.count_messages([len(payload) for _, payload, _, _ in self.records])
        self.records.clear()
        failpoints.reach("broker.after_append")
        if self._log.ack is AckLevel.MEMORY:
            self._answer(None)
            return False
        return True

    def wait(self) -> None:
        error: IsterError | None = None
        try:
            self._log.wait(self._last)
        except IsterError as failed:
            error = failed
        self._finish(error)

    def notify(self) -> None:
        try:
            is_waiting = self._log.appender.notify(self._last, self._finish)
        except IsterError as error:
            self._finish(error)
            return
        if not is_waiting:
            self._finish(None)

    def _finish(self, error: IsterError | None) -> None:
        """Answers or refuses the calls; called in the thread that committed."""
        try:
            if error is None and self._log.bucket is not None:
                self._log.bucket.check_owner()
        except IsterError as fenced:
            error = fenced
        try:
            self._answer(error)
        except Exception as failed:  # noqa: BLE001 - a bug: recorded, and sent to the clients
            threads.record("ister-sends", failed, topic=self._topic.name)
            for call in self.calls:
                call.refuse(failed)

    def _answer(self, error: IsterError | None) -> None:
        if error is not None:
            self._refuse(error)
            return
        failpoints.reach("broker.before_answer")
        calls = self.calls
        self._topic.counters.count_sends(len(calls), time.monotonic() - calls[0].arrived)
        calls[0].answer_all(calls, self.answers)

    def _refuse(self, error: IsterError) -> None:
        self._topic.counters.count_refused(status_of(error).name, len(self.calls))
        for call in self.calls:
            call.refuse(error)


class BatchedSends:
    """Handles SendMessage calls. Thread-safe.

    Requests larger than `size_max` bytes are deferred.
    """

    def __init__(self, topics: Topics, guard: Guard, *, size_max: int) -> None:
        self._topics = topics
        self._guard = guard
        self._size_max = size_max
        self._parse = danube.StreamMessage.FromString

    def accept(self, calls: Sequence[BatchCall]) -> list[_TopicBatch]:
        """Answers, refuses or defers each of these calls, or returns it among those to commit."""
        batches: dict[str, _TopicBatch] = {}
        for call in calls:
            try:
                if not self._check(call, batches):
                    call.defer()
            except Exception as error:  # noqa: BLE001 - sent to its client
                call.refuse(error)
        return [batch for batch in batches.values() if batch.append()]

    def _check(self, call: BatchCall, batches: dict[str, _TopicBatch]) -> bool:
        """Adds a message that may be appended at once to the batch of its topic.

        Returns:
            False if the call has to be deferred.
        """
        data = call.data
        if len(data) > self._size_max:
            return False
        try:
            request = self._parse(data)
        except Exception:  # noqa: BLE001 - protobuf has several; the ordinary form explains them
            return False
        identity = request.msg_id
        name = identity.topic_name
        principal = self._principal(call, name)
        topic = self._topics.find_open(name)
        if topic is None or topic.topic is None:
            return False
        producer, payload = request.producer_name, request.payload
        attributes: dict[str, str] = {}
        if request.attributes:
            attributes = dict(request.attributes)
            if SEQUENCE_ATTRIBUTE in attributes:
                return False
        if not (
            topic.topic.ack is not AckLevel.TIERED
            and topic.producers.has(identity.producer_id, producer, call.arrived)
            and self._topics.admission.is_immediate(topic, producer, principal, len(payload))
        ):
            return False
        record = self._record(topic.topic, request, attributes)
        if record is None:
            return False
        batch = batches.get(name)
        if batch is None:
            batch = batches[name] = _TopicBatch(topic, topic.topic)
        batch.calls.append(call)
        batch.records.append(record)
        batch.answers.append(encode_answer(request.request_id))
        return True

    def _record(
        self, topic: Topic, request: danube.StreamMessage, attributes: dict[str, str]
    ) -> RecordParts | None:
        """Returns a message as the topic stores it.

        Returns None if it cannot be stored: the ordinary form explains that, and counts it.
        """
        identity, records = request.msg_id, topic.appender.records
        try:
            record = (
                records.head(
                    request.request_id,
                    identity.producer_id,
                    identity.topic_name,
                    identity.broker_addr,
                ),
                request.payload,
                request.publish_time,
                records.tail(
                    request.producer_name,
                    request.subscription_name,
                    attributes,
                    schema_id=request.schema_id if request.HasField("schema_id") else None,
                    schema_version=(
                        request.schema_version if request.HasField("schema_version") else None
                    ),
                    routing_key=request.routing_key if request.HasField("routing_key") else None,
                ),
            )
            topic.appender.check_record(record)
        except IsterError:
            return None
        return record

    def _principal(self, call: BatchCall, topic: str) -> str:
        """Returns the principal that publishes; "" if authentication is off."""
        caller, guard = call.caller, self._guard
        if caller is None:
            return ""
        with entered(caller):
            guard.check(caller.principal, Permission.PRODUCE, topic=topic)
        return str(caller.principal) if guard.is_on else ""
