"""The client for asyncio.

    async with AsyncClient("127.0.0.1:6650") as client:
        async with client.producer("/default/orders", name="shop", create=True) as producer:
            sent = await producer.send(b"...")          # waits for room, not for the broker
            offset = await sent                         # the broker has it
        async with client.consumer("/default/orders", "billing", start="earliest") as consumer:
            async for message in consumer:
                consumer.ack(message)

Everything runs on the loop that uses it; there is no thread. No logic of its own: see `producing`,
`consuming` and `admin`. Cancelling a call that waits takes back nothing that was accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from ister.client.admin import AdminCalls
from ister.client.batches import Batch
from ister.client.consuming import ConsumerCore, ConsumerOptions
from ister.client.messages import ReceivedMessage
from ister.client.network import Network
from ister.client.options import TlsOptions, Token
from ister.client.producing import ProducerCore, ProducerOptions
from ister.errors import ClosedError, IsterError, WaitTimeoutError
from ister.limits import MIB
from ister.model import AckLevel, Start
from ister.subscription.policy import SubscriptionKind

__all__ = ["AsyncClient", "AsyncConsumer", "AsyncProducer", "AsyncSentMessage"]

_log = logging.getLogger("ister.client")

# What is not acknowledged when a block ends with an error is waited for so long.
_ERROR_EXIT_SECONDS: Final = 5.0


def _post(wake: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_soon(wake)


class AsyncSentMessage:
    """A message that was accepted. Await it for its offset, as often as you like."""

    __slots__ = ("_batch", "_core", "_row")

    def __init__(self, core: ProducerCore, batch: Batch, row: int) -> None:
        self._core = core
        self._batch = batch
        self._row = row

    @property
    def topic(self) -> str:
        """Where it goes: the topic, or the partition of one."""
        return self._batch.topic

    def done(self) -> bool:
        """Whether it has an offset, or never will have one."""
        return self._batch.is_done

    async def offset(self) -> int:
        """Its offset, once the broker has acknowledged it.

        Raises:
            IsterError: It was given up, and why.
        """
        if not self._batch.is_done:
            done = asyncio.Event()
            if self._core.when_done(self._batch, done.set):
                try:
                    await done.wait()
                finally:
                    self._core.forget(self._batch, done.set)
        return self._core.outcome(self._batch, self._row)

    def __await__(self) -> Generator[Any, None, int]:
        return self.offset().__await__()


class AsyncProducer:
    """Publishes to a topic. Made by `AsyncClient.producer`; await it, or enter it, to open it."""

    def __init__(self, client: AsyncClient, core: ProducerCore) -> None:
        self._client = client
        self._core = core
        self._is_open = False

    @property
    def topic(self) -> str:
        """Where messages go."""
        return self._core.topic

    @property
    def name(self) -> str:
        """Who they are from."""
        return self._core.name

    @property
    def pending_bytes(self) -> int:
        """Bytes of messages that are accepted and not acknowledged."""
        return self._core.pending_bytes

    async def send(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
        timeout: float | None = None,
    ) -> AsyncSentMessage:
        """Accepts a message; waits while too much is pending.

        Args:
            payload: The message.
            attributes: Goes with it.
            routing_key: Chooses the partition, and the consumer of a key-shared subscription.
            schema_id: The schema of the payload.
            schema_version: Its version.
            timeout: How long to wait for room; None for ever.

        Raises:
            InvalidRequestError: It is not a message.
            CapacityError: There was no room in time.
            ClosedError: The producer is closed.
            IsterError: Nothing can be published any more, and why.
        """
        core = self._core
        message = (payload, attributes, routing_key, schema_id, schema_version)
        accepted = core.try_send(*message)
        if accepted is None:
            try:
                async with asyncio.timeout(timeout):
                    while (accepted := core.try_send(*message)) is None:
                        await core.wait_for_room()
            except TimeoutError:
                raise core.full(timeout) from None
        return AsyncSentMessage(core, *accepted)

    async def publish(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        schema_id: int | None = None,
        schema_version: int | None = None,
    ) -> int:
        """`send`, and wait: the offset of the message once it is acknowledged."""
        return await (
            await self.send(
                payload,
                attributes=attributes,
                routing_key=routing_key,
                schema_id=schema_id,
                schema_version=schema_version,
            )
        )

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until each message that was accepted so far is acknowledged.

        Raises:
            WaitTimeoutError: It takes longer; the messages stay accepted.
            IsterError: One has failed, and nobody was told yet.
        """
        await self._core.flush(timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Flushes, and ends. May be called twice.

        Raises:
            As `flush`; it is closed all the same, and what is not acknowledged is given up.
        """
        self._client.left(self)
        await self._core.close(timeout)

    async def _open(self) -> Self:
        if not self._is_open:
            await self._core.open()
            self._is_open = True
            self._client.joined(self)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
            return
        try:
            await self.close(_ERROR_EXIT_SECONDS)
        except IsterError as failure:
            _log.warning("messages were given up", extra={"error": str(failure)})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic} name={self.name}>"


class AsyncConsumer:
    """Gets a topic's messages. Made by `AsyncClient.consumer`; await it, or enter it, to open it.

    What it gives and is never acknowledged comes again: after the ack timeout of the subscription,
    or to the next consumer when this one is closed.
    """

    def __init__(self, client: AsyncClient, core: ConsumerCore) -> None:
        self._client = client
        self._core = core
        self._is_open = False

    @property
    def topic(self) -> str:
        """Where messages come from."""
        return self._core.topic

    @property
    def subscription(self) -> str:
        """On whose behalf."""
        return self._core.subscription

    @property
    def name(self) -> str:
        """Which of the subscription's consumers."""
        return self._core.name

    async def receive(self, timeout: float | None = None) -> ReceivedMessage:
        """The next message.

        Raises:
            WaitTimeoutError: None came in time.
            ClosedError: The consumer is closed.
            IsterError: There will be no more, and why.
        """
        core = self._core
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
        """Messages as they come, until the consumer is closed.

        Args:
            limit: Ends after so many.
            timeout: Ends when there is none for so many seconds.

        Raises:
            IsterError: There will be no more, and why.
        """
        given = 0
        while limit is None or given < limit:
            try:
                message = await self.receive(timeout)
            except (WaitTimeoutError, ClosedError):
                return
            yield message
            given += 1

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        return self.messages()

    def ack(self, message: ReceivedMessage) -> None:
        """Says that a message is done with. The broker is told soon; `flush` waits for that.

        Raises:
            InvalidRequestError: The message is another consumer's.
            ClosedError: The consumer is closed.
        """
        self._core.ack(message)

    def nack(
        self, message: ReceivedMessage, *, delay: float | None = None, reason: str | None = None
    ) -> None:
        """Has a message come again, by the rules of the subscription.

        Args:
            message: One that could not be dealt with.
            delay: After how many seconds at the earliest; the subscription's default.
            reason: Goes with it into a dead-letter topic.

        Raises:
            InvalidRequestError: The message is another consumer's, or the delay is none.
            ClosedError: The consumer is closed.
        """
        self._core.nack(message, delay=delay, reason=reason)

    async def flush(self, timeout: float | None = None) -> None:
        """Waits until the broker has confirmed every acknowledgement.

        Raises:
            WaitTimeoutError: It takes longer; they go on being sent.
            IsterError: The consumer has failed.
        """
        await self._core.flush(timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Flushes, and ends. May be called twice.

        Raises:
            WaitTimeoutError: Acknowledgements were not confirmed in time; it is closed all the
                same, and those messages may come again.
        """
        self._client.left(self)
        await self._core.close(timeout)

    async def _open(self) -> Self:
        if not self._is_open:
            await self._core.open()
            self._is_open = True
            self._client.joined(self)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
            return
        with contextlib.suppress(IsterError):
            await self.close(_ERROR_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic} {self.subscription} name={self.name}>"


class AsyncClient(AdminCalls):
    """Brokers, as far as they can be reached. Belongs to the loop that first uses it."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        token: Token | None = None,
        tls: TlsOptions | bool | None = None,
        timeout: float | None = None,
    ) -> None:
        """Connects when it is first needed.

        Args:
            address: `host:port` of a broker, or several with commas between them; any one that
                answers leads to the others.
            token: A bearer token or an API key; or a function that gives one whenever something is
                opened, for tokens that expire.
            tls: True, or which certificates to use; False or None for none, unless the address
                begins with `https://`.
            timeout: How long brokers may be out of reach, in seconds, until calls, messages and
                consumers fail; None for ever.

        Raises:
            ConfigError: The extra `ister[client]` is not installed, or a file cannot be read.
            InvalidRequestError: An address or the timeout is none.
        """
        super().__init__(Network(address, token=token, tls=tls, timeout=timeout))
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
        timeout: float | None = None,
    ) -> AsyncProducer:
        """Publishes to a topic, each message once.

        A name belongs to one program at a time: the next one that publishes under it takes it
        over, and the one before is refused from then on.

        Args:
            topic: Where to; all partitions of a partitioned one, in turn or by routing key.
            name: Who publishes; one that nobody else has by default.
            create: Make the topic if it does not exist.
            ack: Its level then; the broker's default.
            max_batch_messages: Messages that go together, at the most.
            max_batch_bytes: The same in bytes; a larger message goes alone.
            linger_ms: How long a message waits for others while some are on their way.
            max_pending_bytes: How much may be accepted and not acknowledged.
            timeout: In place of the client's.

        Raises:
            InvalidRequestError: A value makes no sense.
            NotFoundError: When it is opened: there is no such topic.
            IsterError: When it is opened: it is refused, or no broker has answered in time.
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
            timeout=self._network.timeout if timeout is None else timeout,
        )
        return AsyncProducer(self, ProducerCore(self._network, options, post=_post))

    def consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str | None = None,
        kind: SubscriptionKind | str = SubscriptionKind.EXCLUSIVE,
        start: Start = "latest",
        key_filters: Sequence[str] = (),
        create: bool = False,
        buffer_bytes: int = 32 * MIB,
        timeout: float | None = None,
    ) -> AsyncConsumer:
        """Gets the messages of a topic, each at least once.

        Args:
            topic: Where from; all partitions of a partitioned one.
            subscription: On whose behalf; made where it does not exist.
            name: Which of its consumers; one that nobody else has by default.
            kind: `exclusive`, `shared`, `failover` or `key_shared`.
            start: Where a new subscription begins: `earliest`, `latest`, an offset, or a point in
                time, with its time zone; one that is still to come is as `latest`.
            key_filters: Routing keys to take, with `*` and `?`; for `key_shared`.
            create: Make the topic if it does not exist.
            buffer_bytes: How much to have ready before it is asked for.
            timeout: In place of the client's.

        Raises:
            InvalidRequestError: A value makes no sense.
            NotFoundError: When it is opened: there is no such topic.
            IsterError: When it is opened: it is refused, or no broker has answered in time.
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
            timeout=self._network.timeout if timeout is None else timeout,
        )
        return AsyncConsumer(self, ConsumerCore(self._network, options, post=_post))

    def joined(self, one: AsyncProducer | AsyncConsumer) -> None:
        """Something of this client was opened; it is closed with the client."""
        self._open.add(one)

    def left(self, one: AsyncProducer | AsyncConsumer) -> None:
        """It was closed."""
        self._open.discard(one)

    async def close(self, timeout: float | None = None) -> None:
        """Closes all producers and consumers, then the connections. May be called twice.

        Raises:
            As `AsyncProducer.close` and `AsyncConsumer.close`; everything is closed all the same.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self.close()
            return
        with contextlib.suppress(IsterError):
            await self.close(_ERROR_EXIT_SECONDS)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._network!r}>"
