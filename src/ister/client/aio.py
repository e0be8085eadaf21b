"""The client for asyncio.

    async with AsyncClient("127.0.0.1:6650") as client:
        async with client.producer("/default/orders", name="shop", create=True) as producer:
            sent = await producer.send(b"...")          # waits for room, not for the broker
            offset = await sent                         # the broker has it
        async with client.consumer("/default/orders", "billing", start="earliest") as consumer:
            async for message in consumer:
                consumer.ack(message)                   # await it for confirmation

Everything runs on the loop that uses it, without threads, except `read_arrow`. The logic is in
`ister.client.core`. Cancelling a call that waits does not take back what was accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TypedDict, Unpack

from ister import wire
from ister.base.limits import MIB
from ister.base.model import AckLevel, Start
from ister.base.serializers import JSON, AnySerializer
from ister.client.admin import AsyncAdmin
from ister.client.core.batches import Batch
from ister.client.core.consumer import ConsumerCore, ConsumerOptions
from ister.client.core.network import Network
from ister.client.core.producer import Outgoing, Post, ProducerCore, ProducerOptions
from ister.client.messages import ReceivedMessage, TopicMessage
from ister.client.options import TlsOptions, Token
from ister.client.ranges import ArrowRead, Locate, Reader, TopicRanges
from ister.errors import ClosedError, InvalidRequestError, IsterError, WaitTimeoutError
from ister.subscription.policy import SubscriptionKind
from ister.topic.arguments import as_timeout
from ister.topic.table import AsyncTopicTable, TopicTable

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger("ister.client")

# How long an `async with` block that ends with an error waits for acknowledgements.
_ERROR_EXIT_SECONDS: Final = 5.0


def _post(wake: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_soon(wake)


class SendOptions(TypedDict, total=False):
    """The options of all methods that send a message."""

    attributes: Mapping[str, str] | None
    """Message attributes, as key/value strings."""
    routing_key: str | None
    """Chooses the partition, and the consumer of a key-shared subscription."""
    key: str | None
    """Another name of `routing_key`."""
    schema_id: int | None
    """The schema of the payload."""
    schema_version: int | None
    """The version of that schema."""
    timeout: float | None
    """Seconds to wait for room; None to wait forever."""


_SEND_OPTIONS: Final = frozenset(SendOptions.__annotations__)


def check_limit(limit: float | None) -> None:
    """Raises InvalidRequestError if a limit is not a number of messages."""
    if limit is not None and not (isinstance(limit, int | float) and not math.isnan(limit)):
        raise InvalidRequestError(f"limit must be a number of messages, not {limit!r:.80}")


def outgoing(payload: bytes, options: SendOptions) -> Outgoing:
    """A message as the core takes it.

    Raises:
        TypeError: There is no such option: without this a misspelt key would be left out.
        InvalidRequestError: `key` and `routing_key` differ.
    """
    if not _SEND_OPTIONS.issuperset(options):
        unknown = min(set(options) - _SEND_OPTIONS)
        raise TypeError(
            f"unexpected option {unknown!r}; there are {', '.join(sorted(_SEND_OPTIONS))}"
        )
    routing_key, key = options.get("routing_key"), options.get("key")
    if key is not None:
        if routing_key is not None and routing_key != key:
            raise InvalidRequestError(
                "key and routing_key are two names of one option, and differ", hint="use one"
            )
        routing_key = key
    return (
        payload,
        options.get("attributes"),
        routing_key,
        options.get("schema_id"),
        options.get("schema_version"),
    )


def shown_sent(sent: object, core: ProducerCore, batch: Batch, row: int) -> str:
    """A message that was accepted, for `repr`: its offset, its error, or that it is on its way."""
    shown = "pending"
    if batch.is_done:
        try:
            shown = f"offset={core.outcome(batch, row)}"
        except IsterError as error:
            shown = f"failed={error.code}"
    return f"<{type(sent).__name__} {batch.topic} {shown}>"


class AsyncSentMessage:
    """A message that was accepted. Awaiting it, any number of times, gives its offset."""

    __slots__ = ("_batch", "_core", "_row")

    def __init__(self, core: ProducerCore, batch: Batch, row: int) -> None:
        self._core = core
        self._batch = batch
        self._row = row

    @property
    def topic(self) -> str:
        """The topic, or the partition, that the message goes to."""
        return self._batch.topic

    def done(self) -> bool:
        """Whether the message is acknowledged or was given up."""
        return self._batch.is_done

    async def offset(self) -> int:
        """Waits until the broker has acknowledged the message, and returns its offset.

        Raises:
            IsterError: The message was given up.
        """
        if not self._batch.is_done:
            done = asyncio.Event()
            if self._core.when_done(self._batch, done.set):
                try:
                    await done.wait()
                finally:
                    self._core.forget(self._batch, done.set)
        return self._core.outcome(self._batch, self._row)

    def __await__(self) -> Generator[object, None, int]:
        return self.offset().__await__()

    def __repr__(self) -> str:
        return shown_sent(self, self._core, self._batch, self._row)


class ProducerView:
    """What producers of both clients show."""

    def __init__(self, core: ProducerCore) -> None:
        self._core = core

    @property
    def topic(self) -> str:
        """The topic that messages go to."""
        return self._core.topic

    @property
    def name(self) -> str:
        """Producer name."""
        return self._core.name

    @property
    def pending_bytes(self) -> int:
        """Bytes of messages that are accepted and not acknowledged."""
        return self._core.pending_bytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic} name={self.name}>"


class AsyncProducer(ProducerView):
    """Publishes to a topic. Made by `AsyncClient.producer`; await it, or enter it, to open it."""

    def __init__(self, client: AsyncClient, core: ProducerCore) -> None:
        super().__init__(core)
        self._client = client
        self._is_open = False

    async def send(self, payload: object, **options: Unpack[SendOptions]) -> AsyncSentMessage:
        """Accepts a message; waits while `max_pending_bytes` are pending.

        Args:
            payload: The message body, as bytes; with a serializer, any value that it takes.
            **options: See `SendOptions`.

        Raises:
            InvalidRequestError: The payload, an attribute or the key has the wrong type.
            CapacityError: There was no room in time.
            ClosedError: The producer is closed.
            IsterError: The producer has failed and publishes nothing any more.
        """
        return await self._accept(
            outgoing(self._core.serialize(payload), options), options.get("timeout")
        )

    async def send_json(self, value: object, **options: Unpack[SendOptions]) -> AsyncSentMessage:
        """Accepts a message whose payload is a value as JSON; ignores the serializer.

        Args:
            value: What JSON can express: a dict, a list, a dataclass, a pydantic model, …
            **options: As for `send`.

        Raises:
            InvalidRequestError: The value cannot be encoded as JSON.
            As `send`.
        """
        return await self._accept(outgoing(JSON.serialize(value), options), options.get("timeout"))

    async def _accept(self, message: Outgoing, timeout: float | None) -> AsyncSentMessage:
        core, timeout = self._core, as_timeout(timeout)
        accepted = core.try_send(*message)
        if accepted is None:
            try:
                async with asyncio.timeout(timeout):
                    while (accepted := core.try_send(*message)) is None:
                        await core.wait_for_room()
            except TimeoutError:
                raise core.full(timeout) from None
        return AsyncSentMessage(core, *accepted)

    async def publish(self, payload: object, **options: Unpack[SendOptions]) -> int:
        """Sends a message like `send`, waits until it is acknowledged, and returns its offset."""
        return await (await self.send(payload, **options))

    async def publish_json(self, value: object, **options: Unpack[SendOptions]) -> int:
        """Like `publish`, with a value as JSON."""
        return await (await self.send_json(value, **options))

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until all messages accepted so far are acknowledged.

        Raises:
            WaitTimeoutError: It takes longer; the messages stay accepted.
            IsterError: A message failed whose error was not raised yet.
        """
        await self._core.flush(timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Flushes and closes the producer. May be called twice.

        Raises:
            As `flush`. The producer is closed anyway; unacknowledged messages are given up.
        """
        timeout = as_timeout(timeout)
        self._client.left(self)
        await self._core.close(timeout)

    async def _open(self) -> Self:
        if not self._is_open:
            await self._core.open()
            self._is_open = True
            self._client.joined(self)
        return self

    def __await__(self) -> Generator[object, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
            return
        try:
            await self.close(_ERROR_EXIT_SECONDS)
        except IsterError as failure:
            _log.warning("unacknowledged messages were given up", extra={"error": str(failure)})


class ConsumerView:
    """Properties that consumers of both clients share."""

    def __init__(self, core: ConsumerCore) -> None:
        self._core = core

    @property
    def topic(self) -> str:
        """The topic that messages come from."""
        return self._core.topic

    @property
    def subscription(self) -> str:
        """Subscription name."""
        return self._core.subscription

    @property
    def name(self) -> str:
        """Consumer name."""
        return self._core.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic} {self.subscription} name={self.name}>"


class AsyncAck:
    """An ack or nack in progress. Await it until the ack is confirmed, or the nack sent."""

    __slots__ = ("_core", "_message")

    def __init__(self, core: ConsumerCore, message: ReceivedMessage) -> None:
        self._core = core
        self._message = message

    def __await__(self) -> Generator[object, None, None]:
        return self._core.settled(self._message).__await__()

    def __repr__(self) -> str:
        return f"<AsyncAck {self._message.topic} offset={self._message.offset}>"


class AsyncConsumer(ConsumerView):
    """Receives a topic's messages. Made by `AsyncClient.consumer`; await it, or enter it, to open.

    A message that is not acknowledged is delivered again: after the subscription's ack timeout, or
    to the next consumer when this one is closed.
    """

    def __init__(self, client: AsyncClient, core: ConsumerCore) -> None:
        super().__init__(core)
        self._client = client
        self._is_open = False

    async def receive(self, timeout: float | None = None) -> ReceivedMessage:
        """Returns the next message.

        Raises:
            WaitTimeoutError: No message came in time.
            ClosedError: The consumer is stopped or closed.
            IsterError: The consumer has failed and receives nothing any more.
        """
        core, timeout = self._core, as_timeout(timeout)
        message = core.try_take()
        if message is None:
            try:
                async with asyncio.timeout(timeout):
                    while (message := core.try_take()) is None:
                        await core.wait_for_message()
            except TimeoutError:
                raise WaitTimeoutError(
                    f"no message for {timeout} seconds", topic=self.topic
                ) from None
        return message

    async def messages(
        self, *, limit: int | None = None, timeout: float | None = None
    ) -> AsyncIterator[ReceivedMessage]:
        """Yields messages as they arrive, until the consumer is stopped or closed.

        Args:
            limit: Stop after this many messages.
            timeout: Stop when no message arrives for this many seconds.

        Raises:
            IsterError: The consumer has failed and receives nothing any more.
        """
        given = 0
        check_limit(limit)
        while limit is None or given < limit:
            try:
                message = await self.receive(timeout)
            except (WaitTimeoutError, ClosedError):
                return
            yield message
            given += 1

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        return self.messages()

    def ack(self, message: ReceivedMessage) -> AsyncAck:
        """Acknowledges a message; acks are sent in the background, in batches.

        `await consumer.ack(message)` also waits until the broker has confirmed it; without
        `await`, `flush` and `close` wait for all of them.

        Raises:
            InvalidRequestError: Another consumer received the message.
            ClosedError: The consumer is closed.
        """
        self._core.ack(message)
        return AsyncAck(self._core, message)

    def nack(
        self, message: ReceivedMessage, *, delay: float | None = None, reason: str | None = None
    ) -> AsyncAck:
        """Rejects a message: it is delivered again, by the subscription's failure policy.

        `await consumer.nack(message)` also waits until it was sent to the broker.

        Args:
            message: A message that could not be processed.
            delay: Seconds until the redelivery, at least; by default the subscription's.
            reason: Stored with the message if it goes to a dead-letter topic.

        Raises:
            InvalidRequestError: Another consumer received the message, or the delay is invalid.
            ClosedError: The consumer is closed.
        """
        self._core.nack(message, delay=delay, reason=reason)
        return AsyncAck(self._core, message)

    def stop(self) -> None:
        """Ends `async for` and `receive` after the current message; call it on the loop.

        Messages that were received can still be acknowledged. For a graceful shutdown:

            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, consumer.stop)
            async for message in consumer: ...
        """
        self._core.stop()

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until the broker has confirmed every acknowledgement.

        Raises:
            WaitTimeoutError: It takes longer; the client keeps sending them.
            IsterError: The consumer has failed.
        """
        await self._core.flush(timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Flushes and closes the consumer. May be called twice.

        Raises:
            WaitTimeoutError: Acknowledgements were not confirmed in time. The consumer is closed
                anyway, and those messages may be delivered again.
        """
        timeout = as_timeout(timeout)
        self._client.left(self)
        await self._core.close(timeout)

    async def _open(self) -> Self:
        if not self._is_open:
            await self._core.open()
            self._is_open = True
            self._client.joined(self)
        return self

    def __await__(self) -> Generator[object, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
            return
        with contextlib.suppress(IsterError):
            await self.close(_ERROR_EXIT_SECONDS)


class AsyncReader:
    """Reads a topic without a subscription. Made by `AsyncClient.reader`; see `Reader`."""

    def __init__(self, topic: str, open_reader: Callable[[], Reader]) -> None:
        self.topic = topic
        """The topic that is read."""
        self._open_reader = open_reader
        self._opening = asyncio.Lock()
        self._reader: Reader | None = None

    @property
    def positions(self) -> dict[str, int]:
        """The offset of the next message, by topic or partition; empty before it is open."""
        return {} if self._reader is None else self._reader.positions

    @property
    def is_done(self) -> bool:
        """Whether it is stopped, closed, or at its end."""
        return self._reader is not None and self._reader.is_done

    async def read(self, timeout: float | None = None) -> list[TopicMessage]:
        """Returns the next messages, as many as come at once; see `Reader.read`."""
        reader = await self._opened()
        try:
            return await asyncio.to_thread(reader.read, timeout)
        except asyncio.CancelledError:
            reader.stop()
            raise

    async def __aiter__(self) -> AsyncIterator[TopicMessage]:
        reader = await self._opened()
        while not reader.is_done:
            for message in await self.read():
                yield message

    def stop(self) -> None:
        """Ends `async for` and `read` after the messages that were read."""
        if self._reader is not None:
            self._reader.stop()

    async def close(self) -> None:
        """Ends the reader and its connections. May be called twice."""
        if self._reader is not None:
            self._reader.stop()
            # After a cancellation, a thread may still read: then it cannot be closed.
            with contextlib.suppress(ValueError):
                await asyncio.to_thread(self._reader.close)

    async def _opened(self) -> Reader:
        async with self._opening:
            if self._reader is None:
                self._reader = await asyncio.to_thread(self._open_reader)
            return self._reader

    async def _open(self) -> Self:
        await self._opened()
        return self

    def __await__(self) -> Generator[object, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncReader {self.topic}>"


class AsyncClient:
    """A connection to brokers. Belongs to the loop that first uses it."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        token: Token | None = None,
        tls: TlsOptions | bool | None = None,
        timeout: float | None = None,
    ) -> None:
        """Makes a client; it connects when it is first used.

        Args:
            address: `host:port` of a broker, or several separated by commas; any that responds
                leads to the others.
            token: A bearer token or an API key; or a function that returns a fresh one whenever
                something is opened, for tokens that expire.
            tls: True, or the certificates to use; False or None for no encryption, unless the
                address starts with `https://`.
            timeout: How many seconds brokers may be unreachable until calls, messages and
                consumers fail; `math.inf` to retry forever. By default calls fail after 10 s,
                and messages and consumers are retried forever.

        Raises:
            ConfigError: The extra `ister[client]` is not installed, or a file cannot be read.
            InvalidRequestError: An address or the timeout is invalid.
        """
        self._network = Network(address, token=token, tls=tls, timeout=timeout)
        self.admin = AsyncAdmin(self._network)
        """Calls for operators."""
        self._post: Post = _post
        self._open: set[AsyncProducer | AsyncConsumer] = set()

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        create: bool = False,
        ack: AckLevel | None = None,
        max_batch_messages: int = 1000,
        max_batch_bytes: int = 1 * MIB,
        linger_ms: float = 20.0,
        max_pending_bytes: int = 64 * MIB,
        serializer: AnySerializer | None = None,
        timeout: float | None = None,
    ) -> AsyncProducer:
        """Makes a producer, which publishes each message to a topic exactly once.

        Only one producer may use a name at a time: the next one that publishes under it fences
        the one before.

        Args:
            topic: Topic name; of a partitioned topic, each message goes to a partition, in turn
                or by its routing key.
            name: Producer name; a unique one by default.
            create: Create the topic if it does not exist.
            ack: Ack level of the topic if it is created; the broker's default.
            max_batch_messages: Messages in a batch, at most.
            max_batch_bytes: Bytes in a batch, at most; a larger message is sent alone.
            linger_ms: How long a batch waits for more messages while another one is in flight.
            max_pending_bytes: Bytes that may be accepted and not acknowledged.
            serializer: Encodes the values that are sent: `json`, `text`, `bytes`,
                or a `Serializer`; only bytes can be sent without one.
            timeout: Overrides the client's timeout.

        Raises:
            InvalidRequestError: An argument is invalid.
            NotFoundError: The topic does not exist (raised when the producer is opened).
            IsterError: The broker refused, or none responded in time (when it is opened).
        """
        options = ProducerOptions(
            topic=topic,
            name=name,
            create=create,
            ack=ack,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            linger_ms=linger_ms,
            max_pending_bytes=max_pending_bytes,
            serializer=serializer,
            timeout=self._network.timeout if timeout is None else timeout,
        )
        return AsyncProducer(self, ProducerCore(self._network, options, post=self._post))

    def consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        kind: SubscriptionKind | str = SubscriptionKind.EXCLUSIVE,
        start: Start = "earliest",
        key_filters: Sequence[str] = (),
        create: bool = False,
        buffer_bytes: int = 32 * MIB,
        serializer: AnySerializer | None = None,
        timeout: float | None = None,
    ) -> AsyncConsumer:
        """Makes a consumer, which receives each message of a topic at least once.

        Args:
            topic: Topic name; all partitions of a partitioned topic.
            subscription: Subscription name; created if it does not exist.
            name: Consumer name; a unique one by default.
            kind: `exclusive`, `shared`, `failover` or `key_shared`.
            start: Where a new subscription starts: `earliest` (default), `latest`, an offset, or a
                time with its time zone (a future time means `latest`). An existing one continues
                at its position.
            key_filters: Routing keys to receive, with `*` and `?`; for `key_shared`.
            create: Create the topic if it does not exist.
            buffer_bytes: Bytes to prefetch.
            serializer: Decodes `message.value`: `json`, `text`, `bytes`, or a
                `Serializer`.
            timeout: Overrides the client's timeout.

        Raises:
            InvalidRequestError: An argument is invalid.
            NotFoundError: The topic does not exist (raised when the consumer is opened).
            IsterError: The broker refused, or none responded in time (when it is opened).
        """
        options = ConsumerOptions(
            topic=topic,
            subscription=subscription,
            name=name,
            kind=kind,
            start=start,
            key_filters=key_filters,
            create=create,
            buffer_bytes=buffer_bytes,
            serializer=serializer,
            timeout=self._network.timeout if timeout is None else timeout,
        )
        return AsyncConsumer(self, ConsumerCore(self._network, options, post=self._post))

    async def read_arrow(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        end: int | datetime | None = None,
        columns: Sequence[str] | None = None,
    ) -> AsyncIterator[pa.RecordBatch]:
        """Yields a range of a topic as Arrow record batches: `async for batch in …`.

        Arguments and errors are those of `Client.read_arrow`. Threads wait for the batches, as
        Arrow Flight's reader blocks.
        """
        read = await asyncio.to_thread(self._arrow_read(topic, start, end, columns))
        batches = read.batches()
        try:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                yield batch
        finally:
            # After a cancellation, a thread may still run the generator: it cannot be closed.
            with contextlib.suppress(ValueError):
                batches.close()

    def table(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        end: int | datetime | None = None,
        columns: Sequence[str] | None = None,
    ) -> AsyncTopicTable:
        """A range of a topic as a table: `await client.table(topic).to_pandas()`.

        Each use reads the range again. Arguments are those of `Client.read_arrow`. Call it in the
        client's loop.
        """
        import pyarrow as pa  # noqa: PLC0415 - an extra

        arrow_read = self._arrow_read(topic, start, end, columns)

        def open_reader() -> pa.RecordBatchReader:
            read = arrow_read()
            return pa.RecordBatchReader.from_batches(read.schema, read.batches())

        return AsyncTopicTable(
            TopicTable(topic, open_reader),
            lambda: self.read_arrow(topic, start, end=end, columns=columns),
        )

    def _arrow_read(
        self, topic: str, start: Start, end: int | datetime | None, columns: Sequence[str] | None
    ) -> Callable[[], ArrowRead]:
        """Makes what opens a range of a topic, in a thread other than the loop's."""
        return partial(
            ArrowRead,
            topic,
            start,
            end,
            columns,
            locate=self._locate(),
            open_flight=self._network.open_flight,
            timeout=self._network.timeout,
        )

    def _locate(self) -> Locate:
        """Locates topics, from other threads than the loop's."""
        loop, network = asyncio.get_running_loop(), self._network

        def locate(topic: str) -> list[tuple[str, str]]:
            return asyncio.run_coroutine_threadsafe(network.locate_flight(topic), loop).result()

        return locate

    def reader(
        self,
        topic: str,
        start: Start = "earliest",
        *,
        follow: bool = True,
        last: int | None = None,
        serializer: AnySerializer | None = None,
        timeout: float | None = None,
    ) -> AsyncReader:
        """Reads a topic without a subscription: `async for message in client.reader(…)`.

        Arguments and errors are those of `Client.reader`. Await it, or enter it, to open it.
        Threads wait for the messages, as Arrow Flight's reader blocks.
        """
        locate, network = self._locate(), self._network

        def open_ranges(columns: Sequence[str]) -> TopicRanges:
            return TopicRanges(
                topic,
                start,
                None,
                columns,
                locate=locate,
                open_flight=network.open_flight,
                timeout=network.timeout if timeout is None else as_timeout(timeout),
                follow=follow,
                last=last,
            )

        return AsyncReader(topic, partial(Reader, topic, open_ranges, serializer))

    async def topics(self, namespace: str = "default") -> list[str]:
        """The names of the topics of a namespace, partitions among them.

        Raises:
            NotFoundError: There is no such namespace.
            IsterError: It is refused, or no broker has answered in time.
        """
        request = wire.danube_admin.NamespaceRequest(name=namespace)
        found = await self._network.call(wire.services.NamespaceAdmin.GetNamespaceTopics, request)
        return list(found.topics)

    def joined(self, one: AsyncProducer | AsyncConsumer) -> None:
        """Remembers an open producer or consumer, to close it with the client."""
        self._open.add(one)

    def left(self, one: AsyncProducer | AsyncConsumer) -> None:
        """Forgets a closed producer or consumer."""
        self._open.discard(one)

    async def close(self, timeout: float | None = None) -> None:
        """Closes all producers and consumers, then the connections. May be called twice.

        Raises:
            As `AsyncProducer.close` and `AsyncConsumer.close`; everything is closed anyway.
        """
        outcomes = await asyncio.gather(
            *(one.close(timeout) for one in list(self._open)), return_exceptions=True
        )
        await self._network.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
            return
        with contextlib.suppress(IsterError):
            await self.close(_ERROR_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._network!r}>"
