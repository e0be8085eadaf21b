"""The one judge of a broker that dies: what its clients saw, against the log afterwards.

Tests record a `DeliveryHistory` while the broker is killed and started again, and hand it the
topics as they read in the end:

    producers      every message, every attempt to send it, and how each attempt ended
    subscriptions  every stream, what came by it and when; every ack and nack, and what was
                   confirmed of them
    the broker     when it was launched, killed, or stopped in order

`check` then finds:

    lost         acknowledged to its producer, and not in the log
    doubled      more often in the log than answers were given, or lost by a kill; or more than
                 once, though its producer numbers its messages
    hole         offsets of the log that do not follow each other
    foreign      in the log or delivered, and never sent
    disagree     delivered at an offset where the log has something else, or nothing
    reorder      in the log before a message that had been acknowledged when it was sent; or
                 delivered before an earlier one, where the kind of subscription forbids that
    skipped      delivered, and an earlier one was neither delivered to that consumer nor
                 acknowledged (exclusive, failover)
    undelivered  in the log, and never came to a subscription that was there before it was sent
    repeated     came again although its ack had been confirmed, and no kill can have taken that
    uncaused     came again with no nack, end of the stream, ack timeout or death in between
    two_active   two consumers of a failover subscription got messages at a time

Nothing here guesses how long a message was under way. That it was sent after an ack is said only
where it follows by logic: its stream was opened after the ack was confirmed, or an earlier message
of that stream was published after that. A kill may take acks that were confirmed within the flush
interval before it, and no older ones; an end in order takes none.

Times are those of this process. Not thread-safe.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import NamedTuple

from tests.support.oracle import count_findings, identify, list_findings

__all__ = ["EXCLUSIVE", "FAILOVER", "KEY_SHARED", "SHARED", "DeliveryHistory", "Entry", "Verdict"]

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = "exclusive", "shared", "failover", "key_shared"
_NEVER = float("inf")


class Entry(NamedTuple):
    """A message as the log has it."""

    offset: int
    payload: bytes
    key: str


class _Logged(NamedTuple):
    offset: int
    message_id: str | None
    key: str
    shown: bytes


@dataclass(slots=True, eq=False)
class Attempt:
    """One call that sends a message."""

    started: float
    ended: float = _NEVER
    is_answered: bool = False


@dataclass(slots=True, eq=False)
class _Sent:
    producer: str
    topic: str
    key: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def first_attempt(self) -> float:
        return self.attempts[0].started if self.attempts else _NEVER

    @property
    def answered_at(self) -> float:
        return min((one.ended for one in self.attempts if one.is_answered), default=_NEVER)


@dataclass(slots=True, eq=False)
class Stream:
    """A consumer's stream, from the call that opens it to its end."""

    subscription: str
    consumer: str
    opened: float
    life_min: int
    """The broker that was there when it was opened, or the next one if none was."""
    life_max: int = -1
    """The newest broker that was there when its first message came."""
    closed: float = _NEVER
    deliveries: list[_Delivery] = field(default_factory=list)

    def is_of_life_of(self, other: Stream) -> bool:
        """Whether the two certainly belong to the same life of the broker."""
        return self.life_min == self.life_max == other.life_min == other.life_max


@dataclass(slots=True, eq=False)
class _Delivery:
    stream: Stream
    offset: int
    message_id: str | None
    key: str
    at: float
    shown: bytes
    """The first bytes of a payload that is nobody's."""


@dataclass(slots=True, eq=False)
class Ack:
    """One call that acknowledges a message."""

    started: float
    confirmed: float = _NEVER


@dataclass(slots=True, eq=False)
class Nack:
    """A call that asks for a message again."""

    started: float
    ended: float = _NEVER


@dataclass(slots=True, eq=False)
class _Subscription:
    name: str
    topic: str
    kind: str
    created: float
    streams: list[Stream] = field(default_factory=list)
    acks: dict[int, list[Ack]] = field(default_factory=lambda: defaultdict(list))
    nacks: dict[int, list[Nack]] = field(default_factory=lambda: defaultdict(list))

    def is_nacked(self, offset: int, start: float, end: float) -> bool:
        """Whether a nack was tried in that time."""
        return any(start <= nack.started <= end for nack in self.nacks.get(offset, ()))

    def is_nacked_late(self, one: _Delivery) -> bool:
        """Whether a nack of an earlier delivery can have come to the broker after this one.

        A client repeats a call that a broker's end has cut off, and the next broker takes it for
        the message that it has sent meanwhile.
        """
        return all(
            other.at >= one.at for other in one.stream.deliveries if other.offset == one.offset
        ) and any(
            nack.started <= one.at and nack.ended >= one.stream.opened
            for nack in self.nacks.get(one.offset, ())
        )


@dataclass(slots=True, eq=False)
class _Life:
    launched: float
    ending: float = _NEVER
    """It was certainly there until then."""
    ended: float = _NEVER
    is_killed: bool = False


@dataclass(slots=True)
class Verdict:
    """What is wrong, by kind, each finding with what and where; and some figures."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    hole: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    disagree: list[str] = field(default_factory=list)
    reorder: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    undelivered: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    uncaused: list[str] = field(default_factory=list)
    two_active: list[str] = field(default_factory=list)
    kills: int = 0
    sent: int = 0
    acked: int = 0
    """Messages whose producer was told that they are in."""
    logged: int = 0
    sent_twice: int = 0
    """Copies in the log beyond the first, all of them allowed unless `doubled` says otherwise."""
    delivered: int = 0
    duplicates: int = 0
    """Deliveries beyond the first one to a subscription."""
    confirmed: int = 0
    """Acknowledgements of consumers that were confirmed."""
    forgotten: int = 0
    """Deliveries although an ack was confirmed: a kill took it."""
    forgotten_seconds_max: float = 0.0
    """How long before its kill the oldest of those was confirmed."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.kinds()

    def kinds(self) -> dict[str, int]:
        """How many findings there are of each kind that has some."""
        return count_findings(self)

    def figures(self) -> dict[str, int | float]:
        """For a line of JSON."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self)}
        made = {k: round(v, 3) for k, v in numbers.items() if not isinstance(v, list)}
        return {**made, "lost": len(self.lost) + len(self.undelivered)}

    def __str__(self) -> str:
        head = f"wrong: {self.kinds()} in {self.figures()}"
        return "\n".join([head, *list_findings(self)])


class DeliveryHistory:
    """What happened, as the clients and the one who kills saw it.

    Args:
        flush_seconds: An ack that was confirmed longer than this before a kill has to hold. The
            broker's interval, and what a write may take.
        ack_timeout_seconds: Of all subscriptions.
        clock: Seconds, never backwards.
    """

    def __init__(
        self,
        *,
        flush_seconds: float,
        ack_timeout_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._flush = flush_seconds
        self._ack_timeout = ack_timeout_seconds
        self.now = clock
        self._numbering: dict[str, bool] = {}
        self._topics: dict[str, str] = {}
        self._sent: dict[str, _Sent] = {}
        self._subscriptions: dict[str, _Subscription] = {}
        self._lives: list[_Life] = []
        self.deliveries = 0
        self.answers = 0

    # -- producers --------------------------------------------------------------------------

    def producer(self, name: str, topic: str, *, is_sequenced: bool) -> None:
        """There is a producer; a sequenced one numbers its messages, so that none is in twice."""
        self._numbering[name] = is_sequenced
        self._topics[name] = topic

    def send(self, producer: str, message_id: str, key: str) -> None:
        """A message is about to be sent."""
        if message_id in self._sent:
            raise ValueError(f"{message_id} was sent before: the test is wrong")
        self._sent[message_id] = _Sent(producer, self._topics[producer], key)

    def attempt(self, message_id: str) -> Attempt:
        """A call is about to be made that sends it; `answered` or `failed` tells its end."""
        made = Attempt(self.now())
        self._sent[message_id].attempts.append(made)
        return made

    def answered(self, attempt: Attempt) -> None:
        """The broker said that the message is in."""
        attempt.ended = self.now()
        attempt.is_answered = True
        self.answers += 1

    def failed(self, attempt: Attempt) -> None:
        """The call ended with an error: the message may be in, if the broker was killed."""
        attempt.ended = self.now()

    # -- consumers --------------------------------------------------------------------------

    def subscription(self, name: str, topic: str, kind: str) -> None:
        """A subscription is there: what is sent from now on has to come. Its name is unique."""
        self._subscriptions[name] = _Subscription(name, topic, kind, self.now())

    def opening(self, subscription: str, consumer: str) -> Stream:
        """A call is about to be made that opens a stream."""
        ended = sum(life.ended < _NEVER for life in self._lives)
        return Stream(subscription, consumer, self.now(), ended)

    def delivered(self, stream: Stream, offset: int, payload: bytes, key: str) -> None:
        """A message came by a stream."""
        if not stream.deliveries:
            stream.life_max = len(self._lives) - 1
            self._subscriptions[stream.subscription].streams.append(stream)
        message_id = identify(payload)
        shown = payload[:40] if message_id is None else b""
        stream.deliveries.append(_Delivery(stream, offset, message_id, key, self.now(), shown))
        self.deliveries += 1

    def closed(self, stream: Stream) -> None:
        """A stream ended, whoever ended it."""
        stream.closed = min(stream.closed, self.now())

    def ack(self, subscription: str, offset: int) -> Ack:
        """A call is about to be made that acknowledges a message."""
        made = Ack(self.now())
        self._subscriptions[subscription].acks[offset].append(made)
        return made

    def acked(self, ack: Ack) -> None:
        """The broker confirmed it."""
        ack.confirmed = self.now()

    def nack(self, subscription: str, offset: int) -> Nack:
        """A call is about to be made that asks for a message again."""
        made = Nack(self.now())
        self._subscriptions[subscription].nacks[offset].append(made)
        return made

    def nacked(self, nack: Nack) -> None:
        """The call is over, whatever has become of it."""
        nack.ended = self.now()

    # -- the broker -------------------------------------------------------------------------

    def launched(self) -> None:
        """A broker is about to be started."""
        self._lives.append(_Life(self.now()))

    def killed(self, since: float) -> None:
        """The broker is dead, and was alive at `since` for the last time."""
        life = self._lives[-1]
        life.ending, life.ended, life.is_killed = since, self.now(), True

    def stopped(self, since: float) -> None:
        """The broker has ended in order, and was told to at `since`."""
        life = self._lives[-1]
        life.ending, life.ended = since, self.now()

    @property
    def kills(self) -> int:
        """How many lives ended by a kill."""
        return sum(life.is_killed for life in self._lives)

    # -- the verdict ------------------------------------------------------------------------

    def check(self, logs: Mapping[str, Iterable[Entry]]) -> Verdict:
        """Judges everything that was recorded.

        Args:
            logs: Every message of every topic, as read after the last end of the broker.
        """
        verdict = Verdict(kills=self.kills, sent=len(self._sent))
        kills = [life for life in self._lives if life.is_killed]
        read = {
            topic: [_Logged(o, identify(payload), key, payload[:40]) for o, payload, key in entries]
            for topic, entries in logs.items()
        }
        for topic, entries in read.items():
            self._check_log(verdict, topic, entries, kills)
        for subscription in self._subscriptions.values():
            entries = read.get(subscription.topic, [])
            self._check_contents(verdict, subscription, entries)
            self._check_order(verdict, subscription, entries)
            self._check_repeats(verdict, subscription, kills)
            if subscription.kind == FAILOVER:
                _check_one_active(verdict, subscription)
        return verdict

    def _check_log(
        self, verdict: Verdict, topic: str, entries: Sequence[_Logged], kills: Sequence[_Life]
    ) -> None:
        verdict.logged += len(entries)
        places: dict[str, list[int]] = defaultdict(list)
        expected = 0
        for offset, message_id, key, shown in entries:
            if offset != expected:
                verdict.hole.append(f"{topic}@{offset} where {expected} should be")
            expected = offset + 1
            sent = self._sent.get(message_id or "")
            if message_id is None or sent is None or (sent.topic, sent.key) != (topic, key):
                verdict.foreign.append(f"{topic}@{offset} holds {shown!r}, key {key!r}")
                continue
            places[message_id].append(offset)
        for message_id, sent in self._sent.items():
            if sent.topic != topic:
                continue
            at = places.get(message_id, [])
            is_acked = sent.answered_at < _NEVER
            verdict.acked += is_acked
            if not at:
                if is_acked:
                    verdict.lost.append(f"{topic} {message_id}, acknowledged")
                continue
            verdict.sent_twice += len(at) - 1
            may_be = 1 if self._numbering[sent.producer] else _copies_max(sent, kills)
            if len(at) > may_be:
                verdict.doubled.append(f"{topic} {message_id} at {at}, may be {may_be} times")
        self._check_log_order(verdict, topic, {at[0]: mid for mid, at in places.items()})

    def _check_log_order(self, verdict: Verdict, topic: str, first: Mapping[int, str]) -> None:
        # Backwards: whatever stands behind a message was not acknowledged when that was sent.
        earliest: tuple[float, str] = (_NEVER, "")
        for offset in sorted(first, reverse=True):
            sent = self._sent[first[offset]]
            if earliest[0] < sent.first_attempt:
                verdict.reorder.append(
                    f"{topic}@{offset} {first[offset]} before {earliest[1]}, which was "
                    "acknowledged when it was sent"
                )
            earliest = min(earliest, (sent.answered_at, first[offset]))

    def _required(self, subscription: _Subscription, entries: Sequence[_Logged]) -> int:
        """The first offset that a subscription has to get: what was sent after it was there."""
        for one in reversed(entries):
            sent = self._sent.get(one.message_id or "")
            if sent is not None and sent.first_attempt <= subscription.created:
                return one.offset + 1
        return 0

    def _check_contents(
        self, verdict: Verdict, subscription: _Subscription, entries: Sequence[_Logged]
    ) -> None:
        """What came was sent, and is what the log has there; what the log has came."""
        name = subscription.name
        logged = {one.offset: (one.message_id, one.key) for one in entries}
        came: set[int] = set()
        for stream in subscription.streams:
            for one in stream.deliveries:
                verdict.delivered += 1
                verdict.duplicates += one.offset in came
                came.add(one.offset)
                if one.message_id is None or one.message_id not in self._sent:
                    shown = one.message_id or one.shown
                    verdict.foreign.append(f"{name}@{one.offset} got {shown!r}, never sent")
                elif logged.get(one.offset) != (one.message_id, one.key):
                    verdict.disagree.append(
                        f"{name}@{one.offset} got {(one.message_id, one.key)}, the log has "
                        f"{logged.get(one.offset)}"
                    )
        verdict.confirmed += sum(
            any(ack.confirmed < _NEVER for ack in acks) for acks in subscription.acks.values()
        )
        required = self._required(subscription, entries)
        verdict.undelivered += [
            f"{name}@{offset} {logged[offset][0]}"
            for offset in sorted(logged)
            if offset >= required and offset not in came
        ]

    def _check_order(
        self, verdict: Verdict, subscription: _Subscription, entries: Sequence[_Logged]
    ) -> None:
        """Exclusive and failover: by offset, apart from redelivery. Key-shared: the same by key."""
        if subscription.kind == SHARED:
            return
        is_keyed = subscription.kind == KEY_SHARED
        required = self._required(subscription, entries)
        lanes: dict[str, list[int]] = defaultdict(list)
        for one in entries:
            if one.offset >= required:
                lanes[one.key if is_keyed else ""].append(one.offset)
        tried = {name: _Tried(offsets, subscription.acks) for name, offsets in lanes.items()}
        nothing = _Tried([], {})
        for stream in subscription.streams:
            highest: dict[str, int] = {}
            seen: set[int] = set()
            for one in stream.deliveries:
                lane = one.key if is_keyed else ""
                before = highest.get(lane, -1)
                where = f"{subscription.name}@{one.offset} {one.message_id} key {one.key!r}"
                is_again = one.offset in seen
                seen.add(one.offset)
                highest[lane] = max(before, one.offset)
                if one.offset < before:
                    # One that failed comes again when its pause is over: later ones may have come
                    # before. With keys they may not.
                    if is_keyed or not (is_again or subscription.is_nacked(one.offset, 0, one.at)):
                        verdict.reorder.append(f"{where} after {before}, to {stream.consumer}")
                    continue
                for earlier in tried.get(lane, nothing).unacked_before(one.offset, one.at):
                    if is_keyed:
                        verdict.reorder.append(f"{where} while {earlier} was not acknowledged")
                        break
                    if earlier not in seen and not subscription.is_nacked(earlier, 0, one.at):
                        verdict.skipped.append(f"{where} before {earlier}, to {stream.consumer}")
                        break

    def _check_repeats(
        self, verdict: Verdict, subscription: _Subscription, kills: Sequence[_Life]
    ) -> None:
        by_offset: dict[int, list[_Delivery]] = defaultdict(list)
        for stream in subscription.streams:
            known_at = stream.opened
            for one in stream.deliveries:
                by_offset[one.offset].append(one)
                self._check_acks(verdict, subscription, one, known_at, kills)
                sent = self._sent.get(one.message_id or "")
                if sent is not None and sent.attempts:
                    # Whatever comes after this one by this stream was sent after this.
                    known_at = max(known_at, sent.first_attempt)
        for offset, deliveries in by_offset.items():
            # By life first: what a stream of a dead broker held may be looked at late.
            deliveries.sort(key=lambda one: (one.stream.life_min, one.at))
            for first, again in pairwise(deliveries):
                if not self._has_cause(subscription, first, again):
                    verdict.uncaused.append(
                        f"{subscription.name}@{offset} {again.message_id} to "
                        f"{first.stream.consumer} and {again.stream.consumer}, "
                        f"{again.at - first.at:.3f} s apart"
                    )

    def _check_acks(
        self,
        verdict: Verdict,
        subscription: _Subscription,
        one: _Delivery,
        known_at: float,
        kills: Sequence[_Life],
    ) -> None:
        """A message that was certainly sent after `known_at`: no ack before that may stand."""
        for ack in subscription.acks.get(one.offset, ()):
            if ack.confirmed >= known_at:
                continue
            kill = self._kill_that_took(ack, one, kills)
            if kill is None:
                verdict.repeated.append(
                    f"{subscription.name}@{one.offset} {one.message_id} to {one.stream.consumer}, "
                    f"{one.at - ack.confirmed:.3f} s after its ack was confirmed"
                )
            else:
                verdict.forgotten += 1
                age = kill.ending - ack.confirmed
                verdict.forgotten_seconds_max = max(verdict.forgotten_seconds_max, age)

    def _kill_that_took(self, ack: Ack, one: _Delivery, kills: Sequence[_Life]) -> _Life | None:
        """The kill by which the broker may have forgotten an ack."""
        at = bisect_left(kills, ack.started, key=lambda life: life.ended)
        while at < len(kills) and kills[at].ending < ack.confirmed + self._flush:
            if kills[at].ending <= one.at:
                return kills[at]
            at += 1
        return None

    def _has_cause(self, subscription: _Subscription, first: _Delivery, again: _Delivery) -> bool:
        if not again.stream.is_of_life_of(first.stream):
            return True
        if subscription.is_nacked(first.offset, first.at, again.at):
            return True
        if subscription.is_nacked_late(first):
            return True
        if again.at - first.stream.opened >= self._ack_timeout:
            return True
        return again.stream is not first.stream and (
            first.stream.closed <= again.at or first.stream.consumer == again.stream.consumer
        )


def _copies_max(sent: _Sent, kills: Sequence[_Life]) -> int:
    """How often a message may be in the log: once for each answer, given or lost by a kill."""
    return sum(
        one.is_answered
        or any(kill.ending <= one.ended and one.started <= kill.ended for kill in kills)
        for one in sent.attempts
    )


def _check_one_active(verdict: Verdict, subscription: _Subscription) -> None:
    streams = sorted(subscription.streams, key=lambda stream: (stream.life_min, stream.opened))
    for at, one in enumerate(streams):
        for other in streams[at + 1 :]:
            if other.life_min > one.life_max:
                break
            if one.consumer == other.consumer or not one.is_of_life_of(other):
                continue
            if one.closed > other.deliveries[0].at and other.closed > one.deliveries[0].at:
                verdict.two_active.append(
                    f"{subscription.name} {one.consumer} and {other.consumer} in life "
                    f"{one.life_min}, from {one.deliveries[0].offset} and "
                    f"{other.deliveries[0].offset}"
                )


class _Tried:
    """When each of some offsets was first tried to be acknowledged."""

    def __init__(self, offsets: Sequence[int], acks: Mapping[int, Sequence[Ack]]) -> None:
        self._offsets = offsets
        self._times = [min((a.started for a in acks.get(o, ())), default=_NEVER) for o in offsets]
        self._latest: list[float] = []
        latest = 0.0
        for at in self._times:
            latest = max(latest, at)
            self._latest.append(latest)

    def unacked_before(self, offset: int, at: float) -> Iterable[int]:
        """The offsets before `offset` whose ack had not been tried by then."""
        index = bisect_right(self._offsets, offset - 1) - 1
        # Below the point where all had been tried there is nothing to look at.
        while index >= 0 and self._latest[index] >= at:
            if self._times[index] >= at:
                yield self._offsets[index]
            index -= 1
