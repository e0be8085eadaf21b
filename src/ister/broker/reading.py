"""The reading side of a subscription: messages leave the log, wait in memory, and are read again.

    log ─ reader ─► offered to the machine, bytes held ─► taken by a consumer's stream
                                                     └── read again where they are not held

Owns: the readers of one subscription, and the bytes that wait for their consumers. Does not own:
which message goes to whom (`ister.subscription.delivery`), streams, the cursor.

All of it runs on the broker's loop. Reading is a task that exists while a consumer is attached. A
message's bytes are held from reading to the first sending, within a bound, and are read again for
every later one. Nothing here survives a crash, and nothing has to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from ister import threads
from ister.broker.policies import Rate
from ister.errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    FencedError,
    IsterError,
    OffsetOutOfRangeError,
    UnavailableError,
)
from ister.limits import MIB
from ister.model import StreamMessage
from ister.subscription.delivery import Delivery
from ister.subscription.policy import SubscriptionKind
from ister.topic.aio import AsyncReader
from ister.topic.message import Message
from ister.topic.topic import Topic

__all__ = ["Reading", "key_of"]

_log = logging.getLogger("ister.broker.reading")

_FETCH_MESSAGES: Final = 512
_FETCH_BYTES: Final = 4 * MIB
# Bytes of messages that were read and not sent yet, per subscription.
_HELD_BYTES_MAX: Final = 16 * MIB
_KEY_CHARACTERS_MAX: Final = 256
_RETRY_SECONDS: Final = 1.0
_DAMAGE_RETRY_SECONDS: Final = 5.0


class Reading:
    """What one subscription reads and holds. Used on the broker's loop alone.

    Args:
        topic: What is read.
        delivery: The machine that messages are offered to.
        name: The subscription's, for the log.
        rate: How many messages may be read a second.
        pump: Carries out what the machine decides; called after it has changed.
        on_passed_over: Told how many messages were passed over, because they are not there.
        on_end: Told that reading has ended with an error.
        on_fenced: Told that another broker has the topic.
    """

    def __init__(
        self,
        topic: Topic,
        delivery: Delivery,
        *,
        name: str,
        rate: Rate,
        pump: Callable[[], None],
        on_passed_over: Callable[[int], None],
        on_end: Callable[[IsterError], None],
        on_fenced: Callable[[], None],
    ) -> None:
        self._topic = topic
        self._delivery = delivery
        self._name = name
        self._rate = rate
        self._pump = pump
        self._on_passed_over = on_passed_over
        self._on_end = on_end
        self._on_fenced = on_fenced
        self._loop = asyncio.get_running_loop()
        self._is_keyed = delivery.kind is SubscriptionKind.KEY_SHARED
        self.held: dict[int, Message] = {}
        """Messages that were read and not sent yet, by offset."""
        self.held_bytes = 0
        self._is_full = False
        self.wanted = asyncio.Event()
        """Set while there is something to read for."""
        self.task: asyncio.Task[None] | None = None
        """Who reads; None while no consumer is attached."""
        self._generation = 0
        self._retriever: AsyncReader | None = None
        self._is_closed = False

    # -- when -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to read, if nobody does."""
        if self.task is None or self.task.done():
            # The one before may have ended by an error while other consumers were here.
            self.task = self._loop.create_task(self._read())

    def stop(self) -> None:
        """Reads no more; what is held is let go."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
            self._release()

    def restart(self) -> None:
        """Goes on from where the machine is now, after a seek."""
        self._generation += 1
        self._release()
        if self.task is not None:
            # It may be waiting at the end of the topic for what is appended next.
            self.task.cancel()
            self.task = self._loop.create_task(self._read())

    def note_changed(self) -> None:
        """The machine, or what is held, has changed: reads if there is something to read for."""
        if self.held_bytes >= _HELD_BYTES_MAX:
            self._is_full = True
        elif self.held_bytes < _HELD_BYTES_MAX // 2:
            # Not before: it would read a few messages at a time.
            self._is_full = False
        if self._delivery.wanted() > 0 and (not self._is_full or self._is_keyed):
            self.wanted.set()
        else:
            self.wanted.clear()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ends reading for good; the task that has to be waited for before `close`."""
        self._is_closed = True
        if self.task is None:
            return []
        self.task.cancel()
        return [self.task]

    def close(self) -> None:
        """Lets go of the readers."""
        if self._retriever is not None:
            self._retriever.close()

    # -- what is held -----------------------------------------------------------------------

    def discard(self, offset: int) -> None:
        """A message is not going to be sent."""
        held = self.held.pop(offset, None)
        if held is not None:
            self.held_bytes -= held.size_bytes

    def discard_done(self) -> None:
        """Lets go of what the machine has passed over."""
        for offset in [one for one in self.held if not self._delivery.holds(one)]:
            self.discard(offset)

    def _release(self) -> None:
        self.held.clear()
        self.held_bytes = 0

    async def message(self, offset: int) -> Message | None:
        """A message that leaves now; None if nobody has it any more."""
        held = self.held.pop(offset, None)
        if held is not None:
            self.held_bytes -= held.size_bytes
            return held
        return await self._retrieve(offset)

    async def _retrieve(self, offset: int) -> Message | None:
        """Reads one message again, for a redelivery."""
        while True:
            reader = self._retriever
            try:
                if reader is None:
                    reader = self._topic.aio.reader(offset)
                else:
                    # Whoever comes meanwhile makes a reader of its own.
                    self._retriever = None
                    reader.core.seek(offset)
                # This one or none: it must not wait for messages to come.
                reader.core.limit(offset + 1)
                found = await reader.next_batch(1)
                if self._retriever is None and not self._is_closed:
                    self._retriever = reader
                else:
                    reader.close()
                is_it = bool(found) and found[0].offset == offset
                if not is_it:
                    # Damage that `cloud_reader.on_damage: skip` leaves out.
                    self._give_up(offset)
                return found[0] if is_it else None
            except OffsetOutOfRangeError:
                if reader is not None:
                    reader.close()
                self._give_up(offset)
                return None
            except (CorruptDataError, UnavailableError) as error:
                if reader is not None:
                    reader.close()
                if isinstance(error, CorruptDataError):
                    _log.error("a message cannot be read", extra={"error": str(error)})
                await asyncio.sleep(_RETRY_SECONDS)
            except BaseException:
                # The stream has ended meanwhile.
                if reader is not None:
                    reader.close()
                raise

    def _give_up(self, offset: int) -> None:
        """Nobody can deliver a message any more: it is done, whatever state it is in."""
        _log.warning(
            "a message that was to be sent again is no longer kept",
            extra={"topic": self._topic.name, "offset": offset},
        )
        self._delivery.ack(offset, end=offset + 1, now=self._loop.time())
        self._on_passed_over(1)
        self._pump()

    # -- reading on -------------------------------------------------------------------------

    async def _read(self) -> None:
        """Reads what the machine wants, while there are consumers."""
        reader: AsyncReader | None = None
        try:
            while True:
                await self.wanted.wait()
                delivery, generation = self._delivery, self._generation
                start = delivery.next_offset
                try:
                    if reader is None:
                        reader = self._topic.aio.reader(start)
                    elif reader.core.next_offset != start:
                        reader.core.seek(start)
                    count = max(1, min(delivery.wanted(), self._fetch_max))
                    damaged = reader.core.damage_left_out
                    messages = await reader.next_batch(count, self._fetch_bytes)
                    damaged = reader.core.damage_left_out - damaged
                    if delay := self._rate.reserve(len(messages), self._loop.time()):
                        await asyncio.sleep(delay)
                except OffsetOutOfRangeError as error:
                    self._pass_over(start, error)
                    continue
                except (CorruptDataError, UnavailableError, CapacityError) as error:
                    # The message is not passed over: whoever repairs the topic gets it delivered.
                    _log.error("a subscription cannot read on", extra={"error": str(error)})
                    if reader is not None:
                        reader.close()
                        reader = None
                    await asyncio.sleep(_DAMAGE_RETRY_SECONDS)
                    continue
                if generation == self._generation and messages:
                    self._offer(messages, damaged)
                    self._pump()
        except ClosedError:
            # The topic's writer has stopped, or it is being closed: consumers have to come again.
            self._on_end(UnavailableError("the topic was closed", topic=self._topic.name))
        except FencedError:
            self._on_fenced()
        except Exception as error:  # noqa: BLE001 - the streams end; consumers reconnect
            threads.record("ister-dispatch", error, topic=self._topic.name)
            self._on_end(UnavailableError("the subscription stopped", topic=self._topic.name))
        finally:
            if reader is not None:
                reader.close()

    @property
    def _fetch_bytes(self) -> int:
        """Bytes to read at once: what is held stays within its bound, but for one message."""
        if self._is_keyed:
            return _FETCH_BYTES
        return min(_FETCH_BYTES, max(1, _HELD_BYTES_MAX - self.held_bytes))

    @property
    def _fetch_max(self) -> int:
        """Messages to read at once: with a rate, so few that each part of it is waited for."""
        rate = self._rate.per_second
        return min(_FETCH_MESSAGES, max(1, rate // 10)) if rate else _FETCH_MESSAGES

    def _pass_over(self, start: int, error: OffsetOutOfRangeError) -> None:
        """Goes on behind messages that retention has taken, and says so."""
        resume = max(error.earliest, 0) if start < error.earliest else error.next
        _log.error(
            "messages are no longer kept that a subscription has not seen",
            extra={
                "topic": self._topic.name,
                "subscription": self._name,
                "start": start,
                "end": resume,
            },
        )
        self._on_passed_over(max(0, resume - start))
        self._release()
        self._delivery.seek(resume, now=self._loop.time())
        self._pump()

    def _offer(self, messages: Sequence[Message], damaged: int) -> None:
        """Takes messages in; `damaged` ones are left out by `cloud_reader.on_damage: skip`."""
        delivery = self._delivery
        for number, message in enumerate(messages):
            if message.offset != messages[0].offset + number:
                # Messages may be left out in the middle, too.
                self._offer(messages[:number], damaged)
                self._offer(messages[number:], damaged)
                return
        if messages[0].offset > delivery.next_offset:
            if damaged:
                self._on_passed_over(messages[0].offset - delivery.next_offset)
                _log.error(
                    "damaged messages are left out",
                    extra={"start": delivery.next_offset, "end": messages[0].offset},
                )
            # Else they were left out of their object on purpose: compaction keeps what counts.
            delivery.pass_over(messages[0].offset)
        if self._is_keyed:
            offered = [(message.offset, _key_of(message)) for message in messages]
        else:
            offered = [(message.offset, "") for message in messages]
        delivery.offer(offered, now=self._loop.time())
        for message in messages:
            # Those acknowledged before, or for nobody, are not going to be sent. Where messages go
            # out in order reading pauses in time; keys that wait are read again when it is time.
            has_room = not self._is_keyed or self.held_bytes < _HELD_BYTES_MAX
            if has_room and delivery.holds(message.offset):
                self.held[message.offset] = message
                self.held_bytes += message.size_bytes


def _key_of(message: Message) -> str:
    """What key-shared subscriptions go by."""
    try:
        record = message.record
    except CorruptDataError:
        return ""  # whoever gets it finds out
    return key_of(record)


def key_of(record: StreamMessage) -> str:
    """The key that decides who gets a message: its beginning, if somebody made it long.

    Filters look at every character of it, on the loop: 64 of them at a MiB took 18 seconds.
    """
    return (record.routing_key or record.producer_name)[:_KEY_CHARACTERS_MAX]
