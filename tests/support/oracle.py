"""The one judge of every fault test: what clients were told, against what the log holds afterwards.

Tests record a `History` of client events and hand it the log as it reads after recovery:

    send     an append is about to be made           refused   it raised: nothing was accepted
    ack      `wait` returned, for a level            unknown   the outcome was lost, or never came

`check` then finds:

    lost       acknowledged at a level that had to survive, or read before, and no longer there
    changed    the same, and another message stands at its offset
    duplicate  an offset, or a message, that is there twice
    hole       offsets that do not follow each other
    reorder    a message before one that had been acknowledged when it was sent, or before an
               earlier one of the same sender
    phantom    a message that nobody sent
    refused    a message whose append raised an error

An unknown message may be there or not. Once a check has read it, though, it has to stay: whoever
opened the log has seen it, and recovery counts as durable what it shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import ister

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Entry = tuple[int, bytes]
"""An offset and the payload read there."""

SURVIVES_KILL = frozenset({"written", "synced"})
"""What kill -9 must not take."""
SURVIVES_POWER_CUT = frozenset({"synced"})
"""What a power cut must not take."""

_SHOWN_MAX = 5


def payload_of(message_id: str) -> bytes:
    """The payload that a message id stands for: the id, and a filler that depends on it.

    Ids go into payloads, so that a log can be judged by what it holds; the filler shows damage
    that left the id whole. It has many sizes; an id that ends in `#4096` asks for that one.
    """
    seed = zlib.crc32(message_id.encode())
    size = message_id.rpartition("#")[2] if "#" in message_id else ""
    filler = int(size) if size.isdigit() else seed % 400
    return f"{message_id}|".encode() + seed.to_bytes(4, "little") * (filler // 4)


def identify(payload: bytes) -> str | None:
    """The id whose payload this is, or None if it is nobody's."""
    message_id = payload.partition(b"|")[0].decode("ascii", errors="replace")
    return message_id if payload_of(message_id) == payload else None


def count_findings(report: DataclassInstance) -> dict[str, int]:
    """How many findings there are of each kind that has some: each field with a list is one."""
    values = {f.name: getattr(report, f.name) for f in fields(report)}
    return {kind: len(v) for kind, v in values.items() if isinstance(v, list) and v}


def list_findings(report: DataclassInstance) -> Iterator[str]:
    """A line for each finding, but only the first few of a kind."""
    for kind, count in count_findings(report).items():
        yield from (f"  {kind}: {finding}" for finding in getattr(report, kind)[:_SHOWN_MAX])
        if count > _SHOWN_MAX:
            yield f"  {kind}: … {count - _SHOWN_MAX} more"


@dataclass(slots=True)
class _Sent:
    """What is known of one message. Moments number the events of the history."""

    sender: str
    number: int
    sent_at: int
    offset: int | None = None
    levels: set[str] = field(default_factory=set)
    acked_at: int | None = None
    is_refused: bool = False


@dataclass(slots=True)
class _TopicHistory:
    sent: dict[str, _Sent] = field(default_factory=dict)
    told_twice: list[str] = field(default_factory=list)
    seen: dict[int, str] = field(default_factory=dict)
    """What the last check read where."""
    trimmed_max: int = 0


@dataclass(slots=True)
class Report:
    """What is wrong, by kind; each finding says what and where."""

    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    duplicate: list[str] = field(default_factory=list)
    hole: list[str] = field(default_factory=list)
    reorder: list[str] = field(default_factory=list)
    phantom: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    read: int = 0
    """How many messages were read."""
    acked: int = 0
    """How many acknowledgements had to hold."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.kinds()

    def kinds(self) -> dict[str, int]:
        """How many findings there are of each kind that has some."""
        return count_findings(self)

    def __str__(self) -> str:
        head = f"{self.read} messages read, {self.acked} acknowledged, wrong: {self.kinds()}"
        return "\n".join([head, *list_findings(self)])


class History:
    """What the clients of some topics did and were told, in the order in which it happened.

    Not thread-safe. The order matters: an acknowledgement recorded before a send happened before.
    """

    def __init__(self) -> None:
        self._topics: dict[str, _TopicHistory] = {}
        self._now = 0
        self.sends = 0
        self.acks = 0
        self.errors = 0
        self.unknowns = 0

    def send(self, topic: str, message_id: str, sender: str | None = None) -> None:
        """An append is about to be made; a sender's sends are made one after the other."""
        of_topic = self._topics.setdefault(topic, _TopicHistory())
        if message_id in of_topic.sent:
            raise ValueError(f"{message_id} was sent before: the test is wrong")
        if sender is None:
            sender = message_id.rpartition(".")[0]
        of_topic.sent[message_id] = _Sent(sender, len(of_topic.sent), self._tick())
        self.sends += 1

    def ack(self, topic: str, message_id: str, offset: int, level: str) -> None:
        """The message was acknowledged at `level`, as the one at `offset`."""
        of_topic = self._topics[topic]
        sent = of_topic.sent[message_id]
        if sent.offset is not None and sent.offset != offset:
            of_topic.told_twice.append(f"{topic} {message_id} told {sent.offset}, then {offset}")
        sent.offset = offset
        sent.levels.add(level)
        if sent.acked_at is None:
            sent.acked_at = self._tick()
        self.acks += 1

    def error(self, topic: str, message_id: str) -> None:
        """The append raised: the message was not accepted and must never be seen."""
        self._topics[topic].sent[message_id].is_refused = True
        self.errors += 1

    def unknown(self, topic: str, message_id: str) -> None:
        """The message was accepted, and what became of it was not learnt."""
        if message_id not in self._topics[topic].sent:
            raise KeyError(message_id)
        self.unknowns += 1

    def trim(self, topic: str, before: int) -> None:
        """Messages below `before` are about to be removed on purpose."""
        of_topic = self._topics.setdefault(topic, _TopicHistory())
        of_topic.trimmed_max = max(of_topic.trimmed_max, before)

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def topics(self) -> list[str]:
        """The topics that something happened to."""
        return sorted(self._topics)

    # -- the verdict --------------------------------------------------------------------------

    def check(
        self, topic: str, entries: Iterable[Entry], *, survives: frozenset[str], first: int = 0
    ) -> Report:
        """Judges one topic by everything that can be read in it.

        Args:
            topic: Which.
            entries: All its messages, as read from `first` on.
            survives: The ack levels that had to survive what has happened since the last check.
            first: The first offset that the topic offers to readers.
        """
        of_topic = self._topics.setdefault(topic, _TopicHistory())
        report = Report()
        read = list(entries)
        report.read = len(read)
        report.duplicate += of_topic.told_twice
        _check_offsets(report, topic, read, first, of_topic.trimmed_max)
        found: dict[int, str] = {}
        for offset, payload in read:
            message_id = identify(payload)
            sent = None if message_id is None else of_topic.sent.get(message_id)
            if message_id is None or sent is None:
                report.phantom.append(f"{topic}@{offset} holds {payload[:40]!r}, never sent")
                continue
            if sent.is_refused:
                report.refused.append(f"{topic}@{offset} holds {message_id}, which was refused")
            found.setdefault(offset, message_id)
        _check_promises(report, topic, of_topic, found, survives, first)
        _check_order(report, topic, of_topic.sent, found)
        of_topic.seen = found
        return report


def _check_offsets(
    report: Report, topic: str, read: Sequence[Entry], first: int, trimmed_max: int
) -> None:
    if first > trimmed_max:
        report.hole.append(f"{topic} begins at {first}, trimmed up to {trimmed_max}")
    expected = first
    seen: set[int] = set()
    for offset, _ in read:
        if offset in seen:
            report.duplicate.append(f"{topic}@{offset} is there twice")
        elif offset > expected:
            report.hole.append(f"{topic}@{offset} where {expected} should be")
        elif offset < expected:
            report.reorder.append(f"{topic}@{offset} after {expected - 1}")
        seen.add(offset)
        expected = max(expected, offset + 1)


def _check_promises(
    report: Report,
    topic: str,
    of_topic: _TopicHistory,
    found: dict[int, str],
    survives: frozenset[str],
    first: int,
) -> None:
    """What was acknowledged at a level that survives, or read before, is where it was."""
    claims = [
        (sent.offset, message_id, "acknowledged")
        for message_id, sent in of_topic.sent.items()
        if sent.offset is not None and sent.levels & survives
    ]
    report.acked = len(claims)
    promised = {message_id for _, message_id, _ in claims}
    claims += [(o, m, "read before") for o, m in of_topic.seen.items() if m not in promised]
    for offset, message_id, why in sorted(claims):
        if offset < first:
            continue
        there = found.get(offset)
        if there is None:
            report.lost.append(f"{topic}@{offset} {message_id}, {why}")
        elif there != message_id:
            report.changed.append(f"{topic}@{offset} {message_id}, {why}, is now {there}")


def _check_order(report: Report, topic: str, sent: dict[str, _Sent], found: dict[int, str]) -> None:
    places: dict[str, int] = {}
    latest_of: dict[str, tuple[int, str]] = {}
    for offset in sorted(found):
        message_id = found[offset]
        if message_id in places:
            report.duplicate.append(f"{topic} {message_id} at {places[message_id]} and {offset}")
            continue
        places[message_id] = offset
        by_sender = sent[message_id]
        before = latest_of.get(by_sender.sender)
        if before is not None and before[0] > by_sender.number:
            report.reorder.append(f"{topic}@{offset} {message_id} behind {before[1]}, sent later")
        latest_of[by_sender.sender] = (by_sender.number, message_id)
    # Backwards: whatever stands behind a message was not acknowledged when that was sent.
    earliest_ack: tuple[int, str] | None = None
    for message_id in sorted(places, key=places.__getitem__, reverse=True):
        one = sent[message_id]
        if earliest_ack is not None and earliest_ack[0] < one.sent_at:
            report.reorder.append(
                f"{topic}@{places[message_id]} {message_id} before {earliest_ack[1]}, "
                "which was acknowledged when it was sent"
            )
        if one.acked_at is not None and (earliest_ack is None or one.acked_at < earliest_ack[0]):
            earliest_ack = (one.acked_at, message_id)


# -- logs on disk -----------------------------------------------------------------------------


def settings_of(directory: str, *, level: str = "synced", **wal: object) -> dict:
    """The settings that the tests and their writer processes open a directory with.

    `mixed` are topics at `written` of which some messages are waited for up to `synced`.
    """
    return {
        "storage": {
            "mode": "local_only",
            "ack": "written" if level == "mixed" else level,
            "wal": {"dir": f"{directory}/wal", "rotate_max_bytes": 16384, **wal},
            # About the last byte of a disk; `test_disk_heals.py` is about the room before it.
            "disk": {"min_free": 0, "reserve": 0},
        }
    }


def read_all(topic: ister.Topic) -> Iterator[Entry]:
    """Every message that a topic holds."""
    return ((message.offset, message.payload) for message in topic.read("earliest"))


def verify(history: History, log: ister.Log, *, survives: frozenset[str]) -> dict[str, Report]:
    """Checks every topic of the history against the log as it is now.

    Raises:
        AssertionError: Something is wrong; says what.
    """
    reports: dict[str, Report] = {}
    there = set(log.topics())
    for name in history.topics():
        if name in there:
            topic = log.topic(name)
            first, entries = topic.earliest, list(read_all(topic))
            assert not topic.damage, f"{name} is quarantined: {topic.damage}"
        else:
            first, entries = 0, []
        reports[name] = history.check(name, entries, survives=survives, first=first)
    wrong = [str(report) for report in reports.values() if not report.is_clean]
    assert not wrong, "\n".join(wrong)
    return reports
