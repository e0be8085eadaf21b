"""The reading side of a subscription: reads messages ahead, holds them, and reads some again.

    log ─ reader ─► offered to `Delivery`, message held ─► taken by a consumer's stream
                                                      └── read again if it is not held

Owns: the readers of one subscription, and the messages in memory that wait for consumers. Does not
own: which message goes to which consumer (`ister.subscription.delivery`), streams, the cursor.

All of it runs on the broker's loop. Reading is a task that exists while a consumer is attached.

A message is read once if memory allows it: it is held from reading to sending, and then kept for a
redelivery until it is acknowledged. Both are bounded; messages that do not fit, or have waited for
long, are released and read again when they are due. Neighbours that are due are read together, and
a single message is read alone, at the position that the sizes of the frames before it give, so that
no more is read than is sent. Reading ahead is limited to as many bytes as have been sent, so that
at most half of what is read is released unsent.

Nothing here survives a crash, and nothing has to.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ister.base import threads
from ister.base.limits import KIB, MIB
from ister.broker.dispatch.encoder import key_of
from ister.broker.dispatch.frame_sizes import FrameSizes
from ister.broker.dispatch.memory_budget import Budget
from ister.broker.dispatch.outbox import Outbox, Sent
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
from ister.format.frame import FRAME_HEADER_SIZE
from ister.subscription.delivery import Delivery
from ister.subscription.policy import SubscriptionKind
from ister.topic.aio import AsyncReader
from ister.topic.message import Message, without_chunk
from ister.topic.topic import Topic

_log = logging.getLogger("ister.broker.dispatch.prefetch")

_FETCH_MESSAGES: Final = 512
_FETCH_BYTES: Final = 4 * MIB
# Bytes of messages that were read and not sent yet, per subscription.
_HELD_BYTES_MAX: Final = 16 * MIB
# Bytes of messages that were sent and not acknowledged, per subscription.
_KEPT_BYTES_MAX: Final = 4 * MIB
# Memory of a message in addition to its bytes.
_MESSAGE_BYTES: Final = 512
# The first read, when it is not known how much the consumers take.
_FIRST_BYTES: Final = 64 * KIB
# What a stream writes at once at the most, unless a message is larger.
_BATCH_BYTES: Final = 1 * MIB
_AHEAD_BYTES_MIN: Final = 256 * KIB
# Messages that are due are read together if the others between them take no more bytes than they
# do; from objects also if these are few, because a request costs as much as many bytes.
_AGAIN_BYTES: Final = 1 * MIB
_GAP_BYTES: Final = 32 * KIB
# Messages are released if no consumer has taken one for this long.
_IDLE_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0
_DAMAGE_RETRY_SECONDS: Final = 5.0


class Prefetcher:
    """Reads and holds the messages of one subscription. Used only on the broker's loop.

    `pump` carries out the instructions of `delivery`, and is called after it has changed.
    `on_passed_over` gets the number of messages passed over because they are gone, `on_end` the
    error that has ended reading; `on_fenced` is called if another broker has the topic.
    """

    def __init__(
        self,
        topic: Topic,
        delivery: Delivery,
        *,
        name: str,
        budget: Budget,
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
        self._share = budget.share(self.release)
        self._reads = budget.reads
        self._is_keyed = delivery.kind is SubscriptionKind.KEY_SHARED
        self.held: dict[int, Message] = {}
        """Messages in memory that are to be sent, by offset."""
        self.held_bytes = 0
        self.kept: OrderedDict[int, Message] = OrderedDict()
        """Messages in memory that were sent and are not acknowledged, in the order of sending."""
        self.kept_bytes = 0
        self._unheld: dict[int, int] = {}
        self._unheld_bytes = 0
        self._due: list[int] = []
        self._sizes = FrameSizes()
        self._sent_bytes = 0
        self._size_mean = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reader: AsyncReader | None = None
        self._is_fetching = False
        self._is_full = False
        self.wanted = asyncio.Event()
        """Set while messages are wanted."""
        self.task: asyncio.Task[None] | None = None
        """The task that reads; None while no consumer is attached."""
        self._generation = 0
        self._retriever: AsyncReader | None = None
        self._retrieving = asyncio.Lock()
        self._is_closed = False

    # -- when -------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts reading, unless it has started."""
        if self.task is None or self.task.done():
            # The one before may have ended by an error while other consumers were here.
            self.task = self._loop.create_task(self._read())

    def stop(self) -> None:
        """Stops reading. Held messages stay for a while, for a consumer that reconnects."""
        if self.task is not None:
            self._cancel(self.task)
            self.task = None
            self._watch_idle()

    def restart(self) -> None:
        """Reads from where `delivery` is now, after a seek."""
        self._generation += 1
        self._forget()
        if self.task is not None:
            # It may be waiting at the end of the topic for what is appended next.
            self._cancel(self.task)
            self.task = self._loop.create_task(self._read())

    def _cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        if self._is_fetching:
            # The thread reads on, and its messages would come with the reader's next call,
            # wherever that is to begin.
            self._close_reader()

    def update(self) -> None:
        """Reads on if messages are wanted; called after `delivery` or the held messages changed."""
        # Released messages count: they are read again before anything new.
        ahead = self.held_bytes + self._unheld_bytes
        limit = min(self._held_max, max(_AHEAD_BYTES_MIN, self._sent_bytes))
        if ahead >= limit:
            self._is_full = True
        elif ahead < limit // 2:
            # Not before: it would read a few messages at a time.
            self._is_full = False
        if self._delivery.wanted() > 0 and (
            not self._is_full or self._delivery.has_idle_consumer()
        ):
            self.wanted.set()
        else:
            self.wanted.clear()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ends reading for good; returns the task to wait for before `close`."""
        self._is_closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self.task is None:
            return []
        self.task.cancel()
        return [self.task]

    def close(self) -> None:
        """Closes the readers, and releases all messages."""
        self._forget()
        self._close_reader()
        self._close_retriever()
        self._share.close()

    def _open_reader(self, start: int) -> AsyncReader:
        reader = self._topic.aio.reader(start)
        reader.core.span = self._sizes.span
        reader.turns = self._reads
        return reader

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _close_retriever(self) -> None:
        if self._retriever is not None:
            self._retriever.close()
            self._retriever = None

    # -- what is held -----------------------------------------------------------------------

    def expect(self, offset: int) -> None:
        """Marks a message as due: if it is not in memory, it is read together with others."""
        if offset not in self.held and offset not in self.kept:
            self._add_due(offset)

    def _add_due(self, offset: int) -> None:
        """Adds a message to those to be read, once."""
        due = self._due
        at = bisect_left(due, offset)
        if at == len(due) or due[at] != offset:
            due.insert(at, offset)

    def discard(self, offsets: Iterable[int]) -> None:
        """Releases messages that are done, or are not going to be sent."""
        kept = self.kept
        for offset in offsets:
            if (sent := kept.pop(offset, None)) is not None:
                self.kept_bytes -= sent.size_bytes + _MESSAGE_BYTES
            self._take(offset)
        self._count()

    def discard_done(self) -> None:
        """Releases messages that `delivery` no longer holds."""
        self.discard([one for one in self.held if not self._delivery.holds(one)])
        self.discard([one for one in self._unheld if not self._delivery.holds(one)])

    def _take(self, offset: int) -> Message | None:
        """Removes a message from those to be sent; returns it if it is in memory."""
        held = self.held.pop(offset, None)
        if held is not None:
            self.held_bytes -= held.size_bytes + _MESSAGE_BYTES
            return held
        if self._unheld:
            self._unheld_bytes -= self._unheld.pop(offset, 0)
        due = self._due
        if due and (at := bisect_left(due, offset)) < len(due) and due[at] == offset:
            del due[at]
        return None

    def _hold(self, message: Message) -> None:
        """Holds a message until it is sent; `_count` comes later."""
        self.held[message.offset] = message
        self.held_bytes += message.size_bytes + _MESSAGE_BYTES

    def _count(self) -> None:
        # A message has its bytes, and so has the chunk that it came with. A reader has another one.
        readers = sum(
            one.core.held_bytes for one in (self._reader, self._retriever) if one is not None
        )
        self._share.set(2 * (self.held_bytes + self.kept_bytes) + readers)

    @property
    def _held_max(self) -> int:
        return min(_HELD_BYTES_MAX, self._share.allowance // 2)

    @property
    def _kept_max(self) -> int:
        return min(_KEPT_BYTES_MAX, self._share.allowance // 8)

    def batch_bytes(self, outbox: Outbox[Sent], offset: int) -> int:
        """The bytes to hand to a stream at once: a part of what it has written, within bounds.

        What a stream has been handed cannot be released, so a consumer that has read little gets
        little. The next message, at `offset`, is always included, whatever its size.
        """
        room = min(outbox.memory.written_bytes // 4, self._share.allowance // 16, _BATCH_BYTES)
        message = self.held.get(offset) or self.kept.get(offset)
        size = self._sizes.of(offset) if message is None else message.size_bytes
        return max(_FIRST_BYTES, room, size)

    def _keep(self, message: Message) -> Message:
        """Keeps a sent message for a redelivery, without its chunk; `_release_kept` comes later."""
        size = message.size_bytes
        self._sent_bytes += size
        kept = self.kept
        if (
            size <= self._kept_max
            and message.offset not in kept
            and self._delivery.holds(message.offset)
        ):
            message = kept[message.offset] = without_chunk(message)
            self.kept_bytes += size + _MESSAGE_BYTES
        return message

    def _release_kept(self) -> None:
        """Releases the messages that were sent first, beyond the bound."""
        self._share.is_idle = False
        kept, kept_max = self.kept, self._kept_max
        while self.kept_bytes > kept_max:
            self.kept_bytes -= kept.popitem(last=False)[1].size_bytes + _MESSAGE_BYTES

    def release(self) -> None:
        """Releases all messages: they are read again when they are due."""
        for offset, message in self.held.items():
            size = message.size_bytes + _MESSAGE_BYTES
            self._unheld[offset] = size
            self._unheld_bytes += size
            if self._delivery.is_sent(offset):
                self._add_due(offset)
        self.held.clear()
        self.held_bytes = 0
        self.kept.clear()
        self.kept_bytes = 0
        self._count()
        # What is read now has to be worth it anew.
        self._sent_bytes = 0
        if not self._is_fetching:
            # It may have a chunk at hand.
            self._close_reader()
        self._close_retriever()

    def _forget(self) -> None:
        """Drops everything, because `delivery` restarts."""
        for container in (self.held, self.kept, self._unheld, self._due, self._sizes):
            container.clear()
        self.held_bytes = self.kept_bytes = self._unheld_bytes = self._sent_bytes = 0
        self._count()

    def _watch_idle(self) -> None:
        if self._idle_timer is None and not self._is_closed:
            self._share.is_idle = True
            self._idle_timer = self._loop.call_later(_IDLE_SECONDS, self._on_idle_timer)

    def _on_idle_timer(self) -> None:
        self._idle_timer = None
        if self._share.is_idle:
            # No consumer has taken anything since.
            self.release()
        if self.held or self.kept:
            self._watch_idle()
        # A consumer may have been stuck for so long that the others may read past its messages.
        self._pump()

    async def message(self, offset: int) -> Message | None:
        """Returns a message that is being sent; None if it no longer exists."""
        message = self._take(offset) or self.kept.get(offset) or await self._retrieve(offset)
        if message is not None:
            message = self._keep(message)
            self._release_kept()
            self._count()
        return message

    def leave(self, offsets: Iterable[int]) -> list[Message]:
        """Returns messages in memory that a stream is about to write."""
        kept, keep = self.kept, self._keep
        messages = [keep(self._take(offset) or kept[offset]) for offset in offsets]
        self._release_kept()
        self._count()
        return messages

    async def _retrieve(self, offset: int) -> Message | None:
        """Reads a message again, together with neighbours that are due."""
        async with self._retrieving:
            found = self._take(offset) or self.kept.get(offset)
            if found is not None:
                return found  # it came with the one before it
            end = self._end_of_run(offset)
            messages = await self._read_again(offset, end)
            if not messages or messages[0].offset != offset:
                if messages is not None:
                    # Damage that `cloud_reader.on_damage: skip` leaves out.
                    self._give_up(offset)
                return None
            for message in messages[1:]:
                due = self._due
                at = bisect_left(due, message.offset)
                if at < len(due) and due[at] == message.offset:
                    self._take(message.offset)
                    self._hold(message)
            self._count()
            return messages[0]

    def _end_of_run(self, offset: int) -> int:
        """The end of the range to read with a message, because others in it are due."""
        due, sizes = self._due, self._sizes
        is_in_object = offset < self._topic.local_start
        end, size = offset + 1, sizes.of(offset)
        useful = total = size
        for at in range(bisect_right(due, offset), len(due)):
            other = due[at]
            if other < end:
                continue
            if (other - end) * FRAME_HEADER_SIZE > _AGAIN_BYTES:
                break  # without adding up all that wait in between
            gap = sizes.span(end, other)
            size = sizes.of(other)
            if gap is None or not size or total + gap + size > _AGAIN_BYTES:
                break
            useful += size
            is_small = is_in_object and gap <= _GAP_BYTES
            if total + gap + size > 2 * useful and not is_small:
                break
            total += gap + size
            end = other + 1
        return end

    async def _read_again(self, start: int, end: int) -> list[Message] | None:
        """Reads a range again; None if its first message no longer exists."""
        while True:
            reader, self._retriever = self._retriever, None
            found: list[Message] = []
            try:
                if reader is None:
                    reader = self._open_reader(start)
                while (at := start + len(found)) < end:
                    # These or none: it must not wait for messages to come.
                    reader.core.seek(at)
                    reader.core.limit(end)
                    more = await reader.next_batch(end - at, _FETCH_BYTES)
                    found += more
                    if not more or found[-1].offset != start + len(found) - 1:
                        break  # some are not there
            except OffsetOutOfRangeError:
                if reader is not None:
                    reader.close()
                if found:
                    return found
                self._give_up(start)
                return None
            except (CorruptDataError, UnavailableError) as error:
                if reader is not None:
                    reader.close()
                if found:
                    return found
                if isinstance(error, CorruptDataError):
                    _log.error("cannot read message", extra={"error": str(error)})
                end = start + 1
                await asyncio.sleep(_RETRY_SECONDS)
            except BaseException:
                # The stream has ended meanwhile.
                if reader is not None:
                    reader.close()
                raise
            else:
                if self._is_closed:
                    reader.close()
                else:
                    self._retriever = reader
                return found

    def _give_up(self, offset: int) -> None:
        """Counts a message that no longer exists as done."""
        _log.warning(
            "message to be redelivered was deleted by retention",
            extra={"topic": self._topic.name, "offset": offset},
        )
        self._delivery.ack(offset, end=offset + 1, now=self._loop.time())
        self._on_passed_over(1)
        self._pump()

    # -- reading on -------------------------------------------------------------------------

    async def _read(self) -> None:
        """Reads what `delivery` wants, until cancelled."""
        try:
            while True:
                await self.wanted.wait()
                delivery, generation = self._delivery, self._generation
                start = delivery.next_offset
                if (end := _end_of_gap(self._topic, start)) is not None:
                    # At once: a reader waits for the next message, and the cursor with it.
                    delivery.pass_over(end)
                    self._pump()
                    continue
                try:
                    if self._reader is None:
                        self._reader = self._open_reader(start)
                    elif self._reader.core.next_offset != start:
                        self._reader.core.seek(start)
                    reader = self._reader
                    wanted = max(1, delivery.wanted())
                    damaged = reader.core.damage_left_out
                    self._is_fetching = True
                    try:
                        messages = await reader.next_batch(
                            min(wanted, self._fetch_max), self._fetch_bytes(wanted)
                        )
                    finally:
                        self._is_fetching = False
                    damaged = reader.core.damage_left_out - damaged
                    if delay := self._rate.reserve(len(messages), self._loop.time()):
                        await asyncio.sleep(delay)
                except OffsetOutOfRangeError as error:
                    self._pass_over(start, error)
                    continue
                except (CorruptDataError, UnavailableError, CapacityError) as error:
                    # The message is not passed over: it is delivered once the topic is repaired.
                    _log.error(
                        "subscription cannot read the topic; retrying", extra={"error": str(error)}
                    )
                    self._close_reader()
                    await asyncio.sleep(_DAMAGE_RETRY_SECONDS)
                    continue
                if generation == self._generation:
                    if damaged:
                        self._tell_damage(damaged, start)
                    if messages:
                        self._offer(messages)
                        self._pump()
                del messages  # not while it waits: they may have been sent, or released
        except ClosedError:
            # The topic's writer has stopped, or it is being closed: consumers have to reconnect.
            self._close_reader()
            self._on_end(UnavailableError("the topic was closed", topic=self._topic.name))
        except FencedError:
            self._close_reader()
            self._on_fenced()
        except Exception as error:  # noqa: BLE001 - the streams end; consumers reconnect
            self._close_reader()
            threads.record("ister-dispatch", error, topic=self._topic.name)
            self._on_end(UnavailableError("the subscription stopped", topic=self._topic.name))

    def _fetch_bytes(self, wanted: int) -> int:
        """Bytes to read at once: at most what is wanted, and what has been sent so far.

        The held messages stay within their bound, except for one message.
        """
        size = min(
            _FETCH_BYTES,
            max(_FIRST_BYTES, self._sent_bytes),
            max(_FIRST_BYTES, int(wanted * self._size_mean)),
        )
        ahead = self.held_bytes + self._unheld_bytes
        return min(size, max(_FIRST_BYTES if self._is_keyed else 1, self._held_max - ahead))

    @property
    def _fetch_max(self) -> int:
        """Messages to read at once: with a rate, so few that each part of it is waited for."""
        rate = self._rate.per_second
        return min(_FETCH_MESSAGES, max(1, rate // 10)) if rate else _FETCH_MESSAGES

    def _pass_over(self, start: int, error: OffsetOutOfRangeError) -> None:
        """Skips messages that retention has deleted, and logs it."""
        resume = max(error.earliest, 0) if start < error.earliest else error.next
        _log.error(
            "retention deleted messages that the subscription had not received",
            extra={
                "topic": self._topic.name,
                "subscription": self._name,
                "start": start,
                "end": resume,
            },
        )
        self._on_passed_over(max(0, resume - start))
        self._forget()
        self._delivery.seek(resume, now=self._loop.time())
        self._pump()

    def _tell_damage(self, count: int, start: int) -> None:
        """Counts offsets of damage, from `start` on, that `on_damage: skip` left out."""
        self._on_passed_over(count)
        _log.error("damaged messages skipped", extra={"start": start, "offsets": count})

    def _offer(self, messages: Sequence[Message]) -> None:
        """Offers messages to `delivery`.

        Offsets before and between them were left out of their object on purpose, because compaction
        keeps what counts, or because they are damaged (`on_damage: skip`).
        """
        delivery = self._delivery
        messages = list(messages)  # those from a file are created on each access
        first = messages[0].offset
        for number, message in enumerate(messages):
            if message.offset != first + number:
                # Messages may be left out in the middle, too.
                self._offer(messages[:number])
                self._offer(messages[number:])
                return
        if first > delivery.next_offset:
            delivery.pass_over(first)
        if self._is_keyed:
            offered = [(message.offset, key_of(message)) for message in messages]
        else:
            offered = [(message.offset, "") for message in messages]
        delivery.offer(offered, now=self._loop.time())
        sizes = [message.size_bytes for message in messages]
        self._sizes.forget_below(delivery.cursor)
        self._sizes.record(first, sizes)
        self._size_mean = sum(sizes) / len(sizes) + FRAME_HEADER_SIZE
        held_max = self._held_max
        for message in messages:
            # Messages that are acknowledged, or match no filter, are not sent. With key_shared,
            # messages beyond the bound are read again when they are due; other kinds stop reading
            # in time.
            if not delivery.holds(message.offset):
                continue
            if not self._is_keyed:
                self._hold(message)
            elif self.held_bytes < held_max:
                # It may wait for its key long after the others of its chunk have left.
                self._hold(without_chunk(message))
        self._count()
        self._watch_idle()


def _end_of_gap(topic: Topic, offset: int) -> int | None:
    """The first offset after a given-up range that has `offset`; None if no range is known."""
    last = topic.bucket.owned.last if topic.bucket is not None else None
    gaps = topic.wal.gaps
    if last is not None and last.kept and not last.messages:
        gaps = (*gaps, (last.start, last.end))
    return next((end for start, end in gaps if start <= offset < end), None)
