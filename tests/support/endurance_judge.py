"""The judge of the endurance run: what programs wrote down, and nothing else.

Producers, consumers and the runner append records to files, each a JSON array of a kind, a time
(CLOCK_MONOTONIC in nanoseconds, the same for all processes) and what belongs to the kind:

    producer    topic, producer, whether each of its messages may be in the topic only once
    send        topic, producer, number, key            before the first attempt
    sent        topic, producer, number, offset         the broker acknowledged it; offset or null
    subscribed  topic, subscription, kind               what is sent from now on has to come
    join/leave  topic, subscription, consumer
    got         topic, subscription, consumer, offset, message id or null, key
    ack/nack    topic, subscription, offset             before the call
    seek        topic, subscription, offset             before the call
    sought      topic, subscription, offset, began      the broker confirmed it; `seek`'s time
    disturb     what                                    a kill, a pause, the end of a pause
    logged      topic, offset, message id or null, key  in the topic, as read from the bucket
    log_end     topic, offset                           where that reading ended

A broker's state is not read. What the bucket has in the end is, where a runner reads it. `check`
finds:

    lost        acknowledged to its producer, and never received by a subscription that was there
    not_again   a seek went back to before it, and it was not received again
    order       received for the first time before an earlier one: by offset for exclusive and
                failover, by offset within a key for key_shared; or, for key_shared, while an
                earlier one of its key was not acknowledged
    backwards   a consumer got an earlier offset (of the key, for key_shared) again, and neither a
                nack nor a disturbance explains it
    published   the offsets of a producer's messages are not in the order in which it sent them
    doubled     at two offsets, though its producer counts its messages
    disagree    two messages at one offset, or another key than it was sent with
    foreign     received, or in the topic, and never sent
    missing     acknowledged to its producer, and not in the topic
    hole        an offset that the topic does not have

How this is independent of time: a consumer gets every message from the subscription's first
unacknowledged one on, in order, whatever died before. So first receipts are in order across kills,
pauses, churn and seeks back. Seeks must not go forward: the runner never makes such.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.oracle import count_findings, list_findings

__all__ = ["EXCLUSIVE", "FAILOVER", "KEY_SHARED", "SHARED", "Judge", "Records", "Verdict"]

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = "exclusive", "shared", "failover", "key_shared"
_SECOND = 1_000_000_000
SETTLED_NS = 20 * _SECOND
"""An ack that was tried so long before a seek has arrived, with those that were repeated."""
DISTURBED_NS = 40 * _SECOND
"""For so long a disturbance explains one step backwards: a client holds messages for a while."""


@dataclass(slots=True)
class Verdict:
    """What is wrong, by kind, and some figures."""

    lost: list[str] = field(default_factory=list)
    not_again: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    backwards: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    disagree: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    hole: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not self.kinds()

    def kinds(self) -> dict[str, int]:
        """How many findings there are of each kind that has some."""
        return count_findings(self)

    def shown(self) -> list[str]:
        """The first findings of each kind."""
        return list(list_findings(self))


@dataclass(slots=True)
class _Sent:
    at: int
    key: str
    acked_at: int = 0

    @property
    def is_acked(self) -> bool:
        return self.acked_at > 0


@dataclass(slots=True)
class _Topic:
    sent: dict[str, _Sent] = field(default_factory=dict)
    once: dict[str, bool] = field(default_factory=dict)
    places: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    at: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Message id and key by offset."""
    logged: dict[int, str] = field(default_factory=dict)
    log_end: int | None = None


@dataclass(slots=True)
class _Subscription:
    topic: str
    name: str
    kind: str
    created: int
    got: list[tuple[int, str, int, str]] = field(default_factory=list)
    """When, to which consumer, offset, key."""
    ids: set[str] = field(default_factory=set)
    acks: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    nacked: set[int] = field(default_factory=set)
    seeks: list[tuple[int, int]] = field(default_factory=list)
    """When it began and where to, of those that were confirmed."""
    disturbed: list[int] = field(default_factory=list)
    latest: dict[int, tuple[int, str]] = field(default_factory=dict)
    """When each offset was received last, and by which consumer."""
    left: dict[str, int] = field(default_factory=dict)
    """When consumers had left; those that were killed never say so."""

    def __str__(self) -> str:
        return f"{self.topic} {self.name} ({self.kind})"


class Records:
    """Files that programs append to, read as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: Counter[Path] = Counter()

    def news(self) -> list[list[Any]]:
        """The whole lines that are new, of all files."""
        found = []
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # the rest is yet to be written
                    self._read[path] += len(line)
                    found.append(json.loads(line))
        return found


class Judge:
    """Takes records in any order and says what they prove."""

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = defaultdict(_Topic)
        self._subscriptions: dict[tuple[str, str], _Subscription] = {}
        self._disturbed: list[int] = []
        self._early: list[list[Any]] = []
        """Records of what is not known yet."""
        self._counts: Counter[str] = Counter()
        self._disagree: list[str] = []

    def feed(self, records: Iterable[Sequence[Any]]) -> None:
        """Takes records; those of one file in its order."""
        waiting = [*self._early, *map(list, records)]
        self._early = []
        # What names a thing first, as files are read one after the other.
        first = {"producer": 0, "subscribed": 0, "send": 1}
        for record in sorted(waiting, key=lambda one: first.get(one[0], 2)):
            kind, at, *rest = record
            if not self._is_known(kind, rest):
                self._early.append(record)
                continue
            self._counts[kind] += 1
            getattr(self, f"_{kind}")(at, *rest)

    def _is_known(self, kind: str, rest: Sequence[Any]) -> bool:
        """Whether what a record speaks of has been read; another file may be behind."""
        if kind in ("producer", "subscribed", "send", "sent", "disturb", "log_end"):
            return True
        topic, name = rest[:2]
        if kind == "logged":
            return rest[2] in self._topics[topic].sent
        is_sent = kind != "got" or rest[4] in self._topics[topic].sent
        return is_sent and (topic, name) in self._subscriptions

    # -- records ----------------------------------------------------------------------------

    def _producer(self, _at: int, topic: str, producer: str, is_once: bool) -> None:
        self._topics[topic].once[producer] = is_once

    def _send(self, at: int, topic: str, producer: str, number: int, key: str) -> None:
        self._topics[topic].sent[f"{producer}.{number}"] = _Sent(at, key)

    def _sent(self, at: int, topic: str, producer: str, number: int, offset: int | None) -> None:
        message_id, found = f"{producer}.{number}", self._topics[topic]
        found.sent[message_id].acked_at = at
        if offset is not None:
            self._place(topic, offset, message_id, found.sent[message_id].key)

    def _subscribed(self, at: int, topic: str, name: str, kind: str) -> None:
        self._subscriptions[topic, name] = _Subscription(topic, name, kind, at)

    def _join(self, at: int, topic: str, name: str, _consumer: str) -> None:
        self._subscriptions[topic, name].disturbed.append(at)

    def _leave(self, at: int, topic: str, name: str, consumer: str) -> None:
        self._join(at, topic, name, consumer)
        self._subscriptions[topic, name].left[consumer] = at

    def _got(
        self,
        at: int,
        topic: str,
        name: str,
        consumer: str,
        offset: int,
        message_id: str,
        key: str,
    ) -> None:
        subscription = self._subscriptions[topic, name]
        self._place(topic, offset, message_id, key)
        subscription.got.append((at, consumer, offset, key))
        subscription.ids.add(message_id)
        subscription.latest[offset] = max((at, consumer), subscription.latest.get(offset, (0, "")))

    def _place(self, topic: str, offset: int, message_id: str, key: str) -> None:
        found = self._topics[topic]
        found.places[message_id].add(offset)
        known = found.at.setdefault(offset, (message_id, found.sent[message_id].key))
        if known != (message_id, key):
            self._disagree.append(f"{topic} at {offset}: {known} and {(message_id, key)}")

    def _ack(self, at: int, topic: str, name: str, offset: int) -> None:
        self._subscriptions[topic, name].acks[offset].append(at)

    def _nack(self, _at: int, topic: str, name: str, offset: int) -> None:
        self._subscriptions[topic, name].nacked.add(offset)

    def _seek(self, at: int, topic: str, name: str, offset: int) -> None:
        self._subscriptions[topic, name].disturbed.append(at)

    def _sought(self, at: int, topic: str, name: str, offset: int, began: int) -> None:
        subscription = self._subscriptions[topic, name]
        subscription.seeks.append((began, offset))
        subscription.disturbed.append(at)

    def _disturb(self, at: int, _what: str) -> None:
        self._disturbed.append(at)

    def _logged(self, _at: int, topic: str, offset: int, message_id: str, key: str) -> None:
        self._place(topic, offset, message_id, key)
        self._topics[topic].logged[offset] = message_id

    def _log_end(self, _at: int, topic: str, offset: int) -> None:
        self._topics[topic].log_end = offset

    # -- figures ----------------------------------------------------------------------------

    def served_at(self, topic: str, since: int) -> int | None:
        """When a message that was first sent after `since` was acknowledged; None if none was."""
        found = None
        # A topic's messages are known in the order in which they were sent.
        for one in reversed(self._topics[topic].sent.values()):
            if one.at <= since:
                break
            if one.is_acked and (found is None or one.acked_at < found):
                found = one.acked_at
        return found

    def longest_pause(self, topic: str, since: int, until: int) -> int:
        """The longest time without an acknowledgement between two times, in nanoseconds."""
        sent = self._topics[topic].sent.values()
        inside = sorted(one.acked_at for one in sent if since < one.acked_at < until)
        return max(later - earlier for earlier, later in pairwise((since, *inside, until)))

    # -- the verdict ------------------------------------------------------------------------

    def unfinished(self) -> int:
        """How much has yet to come to some subscription."""
        return sum(
            len(self._lost(one)) + len(self._not_again(one)) for one in self._subscriptions.values()
        )

    def check(self) -> Verdict:
        """Judges what was fed."""
        verdict = Verdict(disagree=list(self._disagree))
        verdict.foreign = [f"{json.dumps(record)}, never sent" for record in self._early]
        for name, topic in self._topics.items():
            self._check_topic(verdict, name, topic)
        for one in self._subscriptions.values():
            verdict.lost += [f"{one} never got {message_id}" for message_id in self._lost(one)]
            verdict.not_again += self._not_again(one)
            if one.kind != SHARED:
                self._check_order(verdict, one)
                self._check_backwards(verdict, one)
        verdict.figures = self._figures()
        return verdict

    def _figures(self) -> dict[str, int]:
        received = dict.fromkeys((EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED), 0)
        for one in self._subscriptions.values():
            received[one.kind] += len(one.latest)
        counts = self._counts
        return {
            "acknowledged": counts["sent"],
            "received": counts["got"],
            **{f"received_{kind}": count for kind, count in received.items()},
            "received_again": counts["got"] - sum(received.values()),
            "nacks": counts["nack"],
            "seeks": counts["sought"],
            "consumers": counts["join"],
        }

    def _lost(self, one: _Subscription) -> list[str]:
        return [
            message_id
            for message_id, sent in self._topics[one.topic].sent.items()
            if sent.is_acked and sent.at > one.created and message_id not in one.ids
        ]

    def _not_again(self, one: _Subscription) -> list[str]:
        """What a seek should have brought again: acknowledged for good when it was made.

        A consumer repeats acknowledgements that a kill has cut off until it has left, and the
        broker may get them after the seek.
        """
        found = []
        for began, target in one.seeks:
            for offset, acks in one.acks.items():
                at, consumer = one.latest[offset]
                if offset < target or at > began or one.left.get(consumer, began) >= began:
                    continue
                if max(acks) < began - SETTLED_NS:
                    found.append(f"{one} never got {offset} again after a seek to {target}")
        return found

    def _check_topic(self, verdict: Verdict, name: str, topic: _Topic) -> None:
        if topic.log_end is not None:
            there = set(topic.logged.values())
            verdict.missing += [
                f"{name} {message_id}, acknowledged"
                for message_id, sent in topic.sent.items()
                if sent.is_acked and message_id not in there
            ]
            verdict.hole += [
                f"{name} at {offset}"
                for offset in range(topic.log_end)
                if offset not in topic.logged
            ]
        newest: dict[str, tuple[int, int]] = {}
        for message_id, places in sorted(topic.places.items(), key=lambda one: _number(one[0])):
            producer, number = message_id.rpartition(".")[0], _number(message_id)
            if len(places) > 1 and topic.once.get(producer):
                verdict.doubled.append(f"{name} {message_id} at {sorted(places)}")
            offset = min(places)
            before = newest.get(producer)
            if before is not None and before[1] > offset:
                verdict.published.append(
                    f"{name} {producer}: {number} at {offset}, {before[0]} at {before[1]}"
                )
            newest[producer] = (number, offset)

    def _check_order(self, verdict: Verdict, one: _Subscription) -> None:
        is_keyed = one.kind == KEY_SHARED
        first: dict[str, dict[int, int]] = defaultdict(dict)
        for at, _, offset, key in one.got:
            lane = first[key if is_keyed else ""]
            lane[offset] = min(at, lane.get(offset, at))
        for key, lane in first.items():
            latest, before = 0, -1
            for offset in sorted(lane):
                if lane[offset] < latest:
                    verdict.order.append(f"{one} key {key!r}: {offset} before {before}")
                elif is_keyed and before >= 0 and not _tried(one.acks[before], lane[offset]):
                    verdict.order.append(
                        f"{one} key {key!r}: {offset} while {before} was not acknowledged"
                    )
                if lane[offset] >= latest:
                    latest, before = lane[offset], offset

    def _check_backwards(self, verdict: Verdict, one: _Subscription) -> None:
        is_keyed = one.kind == KEY_SHARED
        disturbed = sorted((*self._disturbed, *one.disturbed))
        highest: dict[tuple[str, str], int] = {}
        used: dict[tuple[str, str], int] = {}
        for at, consumer, offset, key in sorted(one.got):
            lane = (consumer, key if is_keyed else "")
            before = highest.get(lane, -1)
            highest[lane] = offset
            if offset >= before:
                continue
            if offset in one.nacked and not is_keyed:
                highest[lane] = before
                continue
            # The oldest disturbance that has not explained a step of this consumer yet.
            index = max(used.get(lane, 0), bisect_right(disturbed, at - DISTURBED_NS))
            if index >= bisect_right(disturbed, at):
                verdict.backwards.append(f"{one}: {offset} after {before}, to {consumer}")
            used[lane] = index + 1


def _number(message_id: str) -> int:
    return int(message_id.rpartition(".")[2])


def _tried(acks: Sequence[int], at: int) -> bool:
    return bool(acks) and min(acks) <= at
