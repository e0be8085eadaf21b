"""Producer deduplication: a message that is sent again gets the offset that it has already.

A producer has a name, an epoch and a sequence: it numbers its messages one by one, and a send that
was not answered is sent again under the same number. The topic remembers the last number of each
producer and where the newest ones went.

    sequence   the next one            appended
               known                   nothing appended; the offset of the first time
               known in part           the rest is appended (a crash may have kept half a batch)
               one was left out        ConflictError, nothing appended
               in, but too long ago    ConflictError, nothing appended
    epoch      higher                  the producer starts again, with any sequence
               higher by too much      InvalidRequestError: `EPOCH_STEP_MAX` above the last one and
                                       the time in seconds is the limit
               lower                   ConflictError: a newer producer uses this name

Nothing is stored beside the log. A message of such a producer carries its identity (in Danube's
`producer_id`: a mark, the epoch, a check of the name), its sequence (in `request_id`) and the
producer's name; the newest messages of a topic are looked through before its first such send.
Compaction by key removes some of them, but never a producer's newest one. So sequences between two
that are there, or before the first, are in as well if the log lacks as many messages there, and
are given the offsets of these.

Owns: the table, how it is read from the log, the lock from judging a send to appending it. Does
not own: the append itself (`ister.topic.topic`), and durability: a send that is known may still be
on its way to the disk, so the answer waits for the offset as after any append.

Bounds: messages looked through, producers and runs of messages remembered per topic. A producer
that was silent for long may be dropped from the table; then any sequence is accepted from it, as
from a new one. A crash leaves nothing: the table is made from what the log has kept.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from ister.base.model import AckLevel, StreamMessage, TopicState
from ister.errors import CapacityError, ConflictError, InvalidRequestError
from ister.format.payloads import Payloads
from ister.topic.read_only import ReadOnlyTopic
from ister.topic.topic import Topic

if TYPE_CHECKING:
    import pyarrow as pa

EPOCH_MAX: Final = (1 << 32) - 1
"""Seconds since the Unix epoch fit, for those who have no better number."""
EPOCH_STEP_MAX: Final = 1 << 24
"""How far an epoch may be above the producer's last one, or above the Unix time: half a year in
seconds. So no single message can use up the epochs of a producer."""
SEQUENCE_MAX: Final = (1 << 63) - 1

# Messages looked through when a topic is first published to: more than one connection has
# unanswered, and read in a fraction of a second.
_SCAN_MESSAGES: Final = 65_536
# In the bucket, at most so many objects are scanned, and all that are not older than so many
# seconds: each takes a request, and a topic whose producers wait for each message has thousands of
# small ones. What a producer sends again after a fail-over is among the newest.
_SCAN_OBJECTS: Final = 64
_SCAN_SECONDS: Final = 60
_DEEPER: Final = 16
# Ranges without messages that are searched for one producer's sequences.
_GAPS_MAX: Final = 256
_PRODUCERS_MAX: Final = 4_096
_RUNS_MAX: Final = 16_384
_PRODUCER_BYTES_MAX: Final = 512

# producer_id: | mark, 8 bits | epoch, 32 bits | check of the name, 24 bits |
# The identity of a staged batch is 64 random bits: those that begin with the mark differ in the
# check of the name.
_MARK: Final = 0x49
_MARK_SHIFT: Final = 56
_EPOCH_SHIFT: Final = 24
_CHECK_MASK: Final = (1 << _EPOCH_SHIFT) - 1


# -- identities -----------------------------------------------------------------------------


def sequenced_producer_id(producer: str, epoch: int) -> int:
    """The id of a producer's messages in the log."""
    return _MARK << _MARK_SHIFT | epoch << _EPOCH_SHIFT | _check_of(producer)


def is_sequenced(producer_id: int) -> bool:
    """Whether an id is of the kind that `sequenced_producer_id` makes.

    Other messages must not carry one: they would be taken for a producer's when the table is made
    from the log.
    """
    return producer_id >> _MARK_SHIFT == _MARK


def find_sequenced(producer_ids: pa.Array) -> pa.Array:
    """Like `is_sequenced`, for a column of ids; a column of booleans."""
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.compute as pc  # noqa: PLC0415

    # With numbers of Python, Arrow would take ids for signed: those of batches may not fit.
    shift, mark = pa.scalar(_MARK_SHIFT, pa.uint64()), pa.scalar(_MARK, pa.uint64())
    return pc.equal(pc.shift_right(producer_ids, shift), mark)


def check_producer_name(name: str) -> None:
    """Refuses what cannot name a producer.

    Raises:
        InvalidRequestError: It is not a text, is too long, or has control characters.
    """
    try:
        size = len(name.encode())
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidRequestError("a producer's name is a text in Unicode") from error
    if not 0 < size <= _PRODUCER_BYTES_MAX:
        raise InvalidRequestError(
            f"a producer's name of {size} bytes", hint=f"1 up to {_PRODUCER_BYTES_MAX} bytes"
        )
    if not name.isprintable():
        # It would break lines of logs and tables, or reverse them.
        raise InvalidRequestError(
            f"producer name {name!r} has characters that are not printable",
            hint="line breaks, control and formatting characters are not allowed",
        )


def check_producer(producer: str, epoch: int) -> None:
    """Refuses what cannot name a producer, or its epoch."""
    check_producer_name(producer)
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= EPOCH_MAX:
        raise InvalidRequestError(
            f"a producer's epoch cannot be {epoch!r}", hint=f"a whole number up to {EPOCH_MAX}"
        )


@lru_cache(maxsize=_PRODUCERS_MAX)
def _check_of(producer: str) -> int:
    digest = hashlib.sha256(producer.encode()).digest()
    return int.from_bytes(digest[:4], "little") & _CHECK_MASK


def epoch_in(producer_id: int, producer: str) -> int | None:
    """The epoch in an id; None if it is not this producer's."""
    if not is_sequenced(producer_id) or producer_id & _CHECK_MASK != _check_of(producer):
        return None
    return producer_id >> _EPOCH_SHIFT & EPOCH_MAX


# -- the table ------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What is known of messages that a producer sends."""

    known: int
    """How many of them, always the first ones, are in the topic."""
    start: int
    """The offset of the first of those; 0 without any."""
    end: int
    """The offset after the last of those; 0 without any."""


class _TooOldError(ConflictError):
    """A send is in the topic, but its offset is not remembered any more."""


@dataclass(slots=True)
class _Run:
    """Messages whose sequences and offsets both increase by one."""

    sequence: int
    offset: int
    count: int


@dataclass(slots=True, eq=False)
class _Producer:
    epoch: int
    last: int
    """The newest sequence."""
    may_skip: bool
    """Whether a gap after `last` is a crash's doing, and no mistake."""
    runs: deque[_Run] = field(default_factory=deque)


class Sequences:
    """The producers of a topic. No I/O, not thread-safe, bounded."""

    def __init__(self, *, producers_max: int = _PRODUCERS_MAX, runs_max: int = _RUNS_MAX) -> None:
        self._producers_max = producers_max
        self._runs_max = runs_max
        self._producers: dict[str, _Producer] = {}  # the one longest silent first
        self._oldest_runs: deque[_Producer] = deque()  # whose run is the oldest, the next, ...

    def judge(self, producer: str, epoch: int, sequence: int, count: int = 1) -> Verdict:
        """Returns which of `count` messages from `sequence` on are in the topic.

        Raises:
            ConflictError: A newer producer has the name, a message was left out before these, or
                they are in the topic and their offsets are forgotten.
        """
        if not 0 <= sequence <= SEQUENCE_MAX - count or count < 1:
            raise InvalidRequestError(
                f"invalid sequences: {count} from {sequence!r}",
                hint=f"at least one, from 0 up to {SEQUENCE_MAX}",
            )
        found = self._producers.get(producer)
        if found is None or epoch > found.epoch:
            return Verdict(0, 0, 0)
        if epoch < found.epoch:
            raise ConflictError(
                f"producer {producer!r} was replaced: its epoch is {found.epoch}, not {epoch}",
                hint="a newer producer uses this name: stop, or use a higher epoch",
            )
        if sequence > found.last:
            if sequence > found.last + 1 and not found.may_skip:
                raise ConflictError(
                    f"producer {producer!r} has left out messages: sequence {sequence} came "
                    f"after {found.last}",
                    hint=f"send {found.last + 1} first, or begin a higher epoch",
                )
            return Verdict(0, 0, 0)
        known = min(count, found.last - sequence + 1)
        start = self._offset_of(producer, found, sequence)
        end = (
            start + 1 if known == 1 else self._offset_of(producer, found, sequence + known - 1) + 1
        )
        return Verdict(known, start, end)

    def record(self, producer: str, epoch: int, sequence: int, offset: int, count: int = 1) -> None:
        """Remembers messages that are in the topic, in the order of their offsets."""
        found = self._producers.pop(producer, None)
        if found is not None and epoch < found.epoch:
            self._producers[producer] = found  # left over in the log from before
            return
        if found is None or epoch > found.epoch or sequence != found.last + 1:
            if found is not None:
                found.runs.clear()
            found = _Producer(epoch, sequence - 1, may_skip=False)
        self._producers[producer] = found
        if len(self._producers) > self._producers_max:
            silent = next(iter(self._producers))
            self._producers.pop(silent).runs.clear()
        found.may_skip = False
        found.last = sequence + count - 1
        newest = found.runs[-1] if found.runs else None
        if newest is not None and newest.offset + newest.count == offset:
            newest.count += count
            return
        found.runs.append(_Run(sequence, offset, count))
        self._oldest_runs.append(found)
        if len(self._oldest_runs) > self._runs_max:
            forgotten = self._oldest_runs.popleft()
            if forgotten.runs:
                forgotten.runs.popleft()

    def allow_gaps(self) -> None:
        """Accepts any sequence from each producer next.

        For a topic whose level lets a crash take back what was acknowledged: its producers rightly
        go on behind that.
        """
        for producer in self._producers.values():
            producer.may_skip = True

    def last(self, producer: str) -> tuple[int, int] | None:
        """A producer's epoch and its newest sequence; None if it is not known."""
        found = self._producers.get(producer)
        return None if found is None else (found.epoch, found.last)

    @property
    def producers(self) -> int:
        """How many are known."""
        return len(self._producers)

    @property
    def runs(self) -> int:
        """How many runs of messages are remembered, at the most."""
        return len(self._oldest_runs)

    def _offset_of(self, producer: str, found: _Producer, sequence: int) -> int:
        for run in reversed(found.runs):  # what comes again is mostly among the newest
            if run.sequence <= sequence:
                return run.offset + sequence - run.sequence
        raise _TooOldError(
            f"sequence {sequence} of producer {producer!r} came so long ago that its offset is "
            "not known any more",
            hint=f"it is in the topic, unless it was sent under another epoch; "
            f"{found.last + 1} is next",
        )


# -- topics ---------------------------------------------------------------------------------


class Appended(NamedTuple):
    """Where the rows of a send are."""

    start: int
    """The first one's offset."""
    end: int
    """The offset after the last one. Messages of others may be between rows that came in two
    parts."""
    known: int
    """How many of them, the first ones, were in the topic already."""


class SequencedTopic:
    """A topic for producers that number their messages. Thread-safe.

    Make it when the topic is opened: what is in the topic then is what is looked through later.
    """

    def __init__(self, topic: Topic, *, scan_messages: int = _SCAN_MESSAGES) -> None:
        self.topic = topic
        self._end = topic.wal.next
        self._scan_messages = scan_messages
        self._sequences: Sequences | None = None
        self._is_deep = False
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether the log was searched; if not, the next call does that first."""
        return self._sequences is not None

    def prepare(self) -> None:
        """Looks through the log, unless that was done."""
        with self._lock:
            self._table()

    def last(self, producer: str) -> tuple[int, int] | None:
        """A producer's epoch and its newest sequence; None if it is not known. As `prepare`."""
        with self._lock:
            return self._table().last(producer)

    def _check(self, producer: str, epoch: int) -> None:
        check_producer(producer, epoch)
        if isinstance(self.topic, ReadOnlyTopic):
            # Before its sequence is judged: what the producer sent last may be on another disk.
            raise self.topic.refused_error()

    def append_record(
        self, message: StreamMessage, *, producer: str, epoch: int = 0, sequence: int
    ) -> int:
        """Accepts a message as `Appender.append_record` does, unless it is in; returns its offset.

        The message carries the producer's name, identity and sequence from then on, whatever was
        in these fields.

        Raises:
            ConflictError: As `Sequences.judge`.
            InvalidRequestError: A name, an epoch or a sequence is none, or an epoch is too high.
        """
        self._check(producer, epoch)
        with self._lock:
            verdict = self._judge(producer, epoch, sequence, 1)
            return self._append(message, verdict, producer, epoch, sequence)

    def try_append_record(
        self, message: StreamMessage, *, producer: str, epoch: int = 0, sequence: int
    ) -> int | None:
        """Like `append_record`, but returns None instead of waiting."""
        self._check(producer, epoch)
        if self._sequences is None or not self._lock.acquire(blocking=False):
            return None
        try:
            try:
                self._check_epoch(producer, epoch)
                verdict = self._table().judge(producer, epoch, sequence, 1)
            except _TooOldError:
                return None
            return self._append(message, verdict, producer, epoch, sequence)
        finally:
            self._lock.release()

    def _append(
        self, message: StreamMessage, verdict: Verdict, producer: str, epoch: int, sequence: int
    ) -> int:
        """Appends a message unless it is in the topic; the lock is held."""
        if verdict.known:
            return verdict.start
        identity = sequenced_producer_id(producer, epoch)
        offset = self.topic.appender.append_record(
            replace(
                message,
                request_id=sequence,
                producer_name=producer,
                msg_id=replace(message.msg_id, producer_id=identity),
            )
        )
        self._table().record(producer, epoch, sequence, offset)
        return offset

    def append_arrow(
        self, batch: pa.RecordBatch | Payloads, *, producer: str, epoch: int = 0, sequence: int
    ) -> Appended:
        """Accepts the rows of a batch as `Topic.append_arrow` does, those that are not in.

        `batch`: the rows. A column `producer_name` may say nothing else than the producer.
        `sequence`: the first row's; one more for each row after it.

        Raises:
            ConflictError: As `Sequences.judge`.
            InvalidRequestError: There is no row, or a name, an epoch or a sequence is none.
        """
        self._check(producer, epoch)
        with self._lock:
            verdict = self._judge(producer, epoch, sequence, batch.num_rows)
            return self._append_rows(batch, verdict, producer, epoch, sequence)

    def try_append_arrow(
        self, batch: pa.RecordBatch | Payloads, *, producer: str, epoch: int = 0, sequence: int
    ) -> Appended | None:
        """Like `append_arrow`, on an event loop: None where that would wait, or read the log."""
        self._check(producer, epoch)
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._sequences is None or not self.topic.appender.has_room(batch):
                return None
            self._check_epoch(producer, epoch)
            verdict = self._sequences.judge(producer, epoch, sequence, batch.num_rows)
            return self._append_rows(batch, verdict, producer, epoch, sequence)
        except (_TooOldError, CapacityError):
            return None  # `append_arrow` waits, looks further back, or says what is wrong
        finally:
            self._lock.release()

    def _append_rows(
        self,
        batch: pa.RecordBatch | Payloads,
        verdict: Verdict,
        producer: str,
        epoch: int,
        sequence: int,
    ) -> Appended:
        """Appends those rows that the verdict does not know; the lock is held."""
        known, start, end = verdict
        if known == batch.num_rows:
            return Appended(start, end, known)
        rows = batch.slice(known) if known else batch
        first, producer_id = sequence + known, sequenced_producer_id(producer, epoch)
        if isinstance(rows, Payloads):
            offsets = self.topic.appender.append_payloads(
                rows, producer_name=producer, producer_id=producer_id, first_request_id=first
            )
        else:
            _check_names(rows, producer)
            offsets = self.topic.append_arrow(
                rows, producer_name=producer, producer_id=producer_id, first_request_id=first
            )
        self._table().record(producer, epoch, first, offsets.start, len(offsets))
        return Appended(start if known else offsets.start, offsets.stop, known)

    def _judge(self, producer: str, epoch: int, sequence: int, count: int) -> Verdict:
        """The table's verdict; the lock is held."""
        self._check_epoch(producer, epoch)
        try:
            return self._table().judge(producer, epoch, sequence, count)
        except _TooOldError:
            # A crash may leave more unanswered messages than the first search covers: once, soon
            # after it, much more of the log is searched.
            behind = self.topic.wal.next - self._end
            if self._is_deep or behind > self._scan_messages * _DEEPER:
                raise
            self._is_deep = True
            self._sequences = self._read_log(self._scan_messages * _DEEPER, self.topic.wal.next)
            return self._sequences.judge(producer, epoch, sequence, count)

    def _check_epoch(self, producer: str, epoch: int) -> None:
        """Refuses an epoch that is far above all that a producer can have; the lock is held."""
        last = self._table().last(producer)
        known = max(0 if last is None else last[0], self.topic.appender.now_seconds())
        if epoch > known + EPOCH_STEP_MAX:
            raise InvalidRequestError(
                f"epoch {epoch} of producer {producer!r} is too high",
                topic=self.topic.name,
                hint=f"at most {EPOCH_STEP_MAX} above its last epoch, or the time in seconds",
            )

    def _table(self) -> Sequences:
        """The table; the lock is held."""
        if self._sequences is None:
            self._sequences = self._read_log(self._scan_messages, self._end)
        return self._sequences

    def _read_log(self, messages: int, end: int) -> Sequences:
        """Makes a table of the newest messages of those at the beginning, and all up to `end`."""
        sequences = Sequences()
        start = max(self.topic.earliest, self._end - messages)
        bucket, local = self.topic.bucket, self.topic.local_start
        if bucket is not None and start < local and not self._is_deep:
            start = bucket.recent_start(
                start, min(local, end), objects=_SCAN_OBJECTS, seconds=_SCAN_SECONDS
            )
        if start < end:
            gaps: list[range] = []
            ends: dict[str, int] = {}
            for found in _scan(self.topic, start, end, gaps):
                name = found.producer_name
                epoch = epoch_in(found.producer_id, name)
                if epoch is None:
                    continue
                if gaps:
                    last = sequences.last(name)
                    first = last[1] + 1 if last is not None and last[0] == epoch else 0
                    before = _find_removed(
                        gaps,
                        ends.get(name, start),
                        found.offset,
                        found.request_id - first,
                        is_whole=first > 0,
                    )
                    for sequence, run in before:
                        at = found.request_id - sequence
                        sequences.record(name, epoch, at, run.start, len(run))
                sequences.record(name, epoch, found.request_id, found.offset, found.rows)
                ends[name] = found.offset + found.rows
        if self.topic.ack in (AckLevel.MEMORY, AckLevel.WRITTEN):
            sequences.allow_gaps()
        return sequences

    def __repr__(self) -> str:
        return f"<SequencedTopic {self.topic.name}>"


class SequencedTopics:
    """One `SequencedTopic` for each open topic, for all who publish to it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: dict[str, SequencedTopic] = {}
        self._drop_at = 0

    def get(self, topic: Topic) -> SequencedTopic:
        """The `SequencedTopic` of a topic; a topic that was reopened has a new one."""
        with self._lock:
            found = self._topics.get(topic.name)
            if found is None or found.topic is not topic:
                self._drop_closed()
                found = self._topics[topic.name] = SequencedTopic(topic)
            return found

    def _drop_closed(self) -> None:
        """Drops entries of closed topics whenever the number of entries has doubled."""
        if len(self._topics) < self._drop_at:
            return
        self._topics = {
            name: kept
            for name, kept in self._topics.items()
            if kept.topic.state is not TopicState.CLOSED
        }
        self._drop_at = 2 * len(self._topics)

    def forget(self, name: str) -> None:
        """Drops a closed or deleted topic; others are dropped some time after they were closed."""
        with self._lock:
            self._topics.pop(name, None)


# -- reading the log ------------------------------------------------------------------------


class _Found(NamedTuple):
    """Messages in the log that may be a sequenced producer's, one after the other."""

    offset: int
    producer_name: str
    producer_id: int
    request_id: int
    rows: int


_FIELDS: Final = ("offset", "producer_name", "producer_id", "request_id")


def _find_removed(
    gaps: Sequence[range], start: int, end: int, count: int, *, is_whole: bool
) -> list[tuple[int, range]]:
    """Finds the offsets of messages that compaction has removed: the last ones before `end`.

    `gaps`: the ranges without messages, ascending.
    `is_whole`: whether there are as many, or none: sequences may have been left out.
    Returns pairs (how far from the end, offsets), ascending.
    """
    found: list[tuple[int, range]] = []
    taken = 0
    for at in range(bisect_left(gaps, end, key=lambda gap: gap.start) - 1, -1, -1):
        gap = range(max(gaps[at].start, start), gaps[at].stop)
        if not gap or taken >= count or len(found) == _GAPS_MAX:
            break
        gap = gap[-min(len(gap), count - taken) :]
        taken += len(gap)
        found.append((taken, gap))
    if is_whole and taken < count and len(found) < _GAPS_MAX:
        return []
    return found[::-1]


def _scan(topic: Topic, start: int, end: int, gaps: list[range]) -> Iterator[_Found]:
    """Yields the messages of a range that carry a sequence; adds ranges without messages."""
    number = start
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.compute as pc  # noqa: PLC0415
    except ImportError:
        with topic.own_reader(start, end=end) as reader:
            for message in reader:
                if message.offset > number:
                    gaps.append(range(number, message.offset))
                number = message.offset + 1
                record = message.record
                identity = record.msg_id.producer_id
                if is_sequenced(identity):
                    name, sequence = record.producer_name, record.request_id
                    yield _Found(message.offset, name, identity, sequence, 1)
        return
    for batch in topic.scan_arrow(start, end=end, columns=_FIELDS):
        offsets = batch["offset"]
        last = len(offsets) - 1
        if last >= 0 and offsets[last].as_py() - number != last:
            before = pa.concat_arrays(
                [pa.array([number - 1], offsets.type), offsets.slice(0, last)]
            )
            is_far = pc.greater(pc.subtract(offsets, before), 1)
            ends = zip(before.filter(is_far), offsets.filter(is_far), strict=True)
            gaps += [range(begin.as_py() + 1, stop.as_py()) for begin, stop in ends]
        if last >= 0:
            number = offsets[last].as_py() + 1
        rows = batch.filter(find_sequenced(batch["producer_id"]))
        for begin, stop in pairwise([*_run_starts(rows), rows.num_rows]):
            offset, name, identity, sequence = (rows[at][begin].as_py() for at in _FIELDS)
            yield _Found(offset, name, identity, sequence, stop - begin)


def _run_starts(rows: pa.RecordBatch) -> list[int]:
    """The numbers of rows that do not continue the row before; only these are examined."""
    import pyarrow.compute as pc  # noqa: PLC0415 - an extra

    last = rows.num_rows - 1
    if last < 0:
        return []
    is_start = None
    for name in _FIELDS:
        before, after = rows[name].slice(0, last), rows[name].slice(1)
        if name in {"offset", "request_id"}:
            before = pc.add(before, 1)
        is_other = pc.not_equal(before, after)
        is_start = is_other if is_start is None else pc.or_(is_start, is_other)
    return [0, *(number + 1 for number in pc.indices_nonzero(is_start).to_pylist())]


def _check_names(batch: pa.RecordBatch, producer: str) -> None:
    """Refuses rows that name another producer.

    Raises:
        InvalidRequestError: A row does.
    """
    at = batch.schema.get_field_index("producer_name")
    if at < 0:
        return
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.compute as pc  # noqa: PLC0415

    try:
        batch.column(at).validate(full=True)
        given = batch.column(at).cast(pa.string())
        is_other = pc.any(pc.not_equal(given, producer), min_count=0).as_py()
    except pa.ArrowException:
        return  # appending it will raise the error
    if is_other:
        raise InvalidRequestError(
            f"a row has another producer_name than its producer, {producer!r}",
            hint="leave the column out, or publish without sequences",
        )
