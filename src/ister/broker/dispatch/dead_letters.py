"""Dead letters: messages that failed too often, as they are published to a dead-letter topic.

Owns: the attributes of a dead letter, both directions. Does not own: publishing it (`dispatcher`),
and what operators do with it (`ister.broker.topics.dead_letter_queue`).

Dead-letter topics may have subscriptions with dead-letter topics of their own, which may lead back
to the first topic. So each dead letter counts its hops (`x-dead-letter-hops`), and after `HOPS_MAX`
it is not published again. The `x-original-…` attributes are those of the first hop; the attempt and
the reason are those of the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ister.errors import CorruptDataError
from ister.model import MessageId, StreamMessage
from ister.subscription.entries import DeadLetter
from ister.topic.message import Message

HOPS_MAX: Final = 8
"""Dead-letter topics that one message may pass through."""

_HOPS: Final = "x-dead-letter-hops"
_POLICY: Final = "x-poison-policy"
_ATTEMPT: Final = "x-delivery-attempt"
_REASON: Final = "x-failure-reason"
_DROPPED: Final = "x-attributes-dropped"
_ORIGIN: Final = (
    "x-original-topic",
    "x-original-subscription",
    "x-original-topic-offset",
    "x-original-producer-id",
    "x-original-broker-addr",
)
_NUMBER_MAX: Final = 10**9
_OURS: Final = frozenset({*_ORIGIN, _HOPS, _POLICY, _ATTEMPT, _REASON, _DROPPED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterStory:
    """The origin of a dead letter, and the reason."""

    topic: str
    """The topic in which it failed first."""
    subscription: str
    offset: int | None
    attempt: int | None
    """Deliveries until it was given up."""
    reason: str
    hops: int
    dropped_attributes: int
    """Attributes of the message that did not fit, and are lost."""


def read_story(record: StreamMessage) -> LetterStory | None:
    """Reads the origin and reason of a dead letter; None if the message is not one."""
    known = record.attributes
    if _ORIGIN[0] not in known:
        return None
    return LetterStory(
        topic=known[_ORIGIN[0]],
        subscription=known.get(_ORIGIN[1], ""),
        offset=_number(known.get(_ORIGIN[2])),
        attempt=_number(known.get(_ATTEMPT)),
        reason=known.get(_REASON, ""),
        hops=_hops(record),
        dropped_attributes=_number(known.get(_DROPPED)) or 0,
    )


def own_attributes(record: StreamMessage) -> dict[str, str]:
    """The attributes that a dead letter had before it failed."""
    return {name: value for name, value in record.attributes.items() if name not in _OURS}


def restore_message(record: StreamMessage, target: str) -> StreamMessage:
    """Restores the original message of a dead letter, to publish it to `target`.

    Payload, routing key, schema, producer name and publish time are those of the dead letter, which
    has them from the message that failed.
    """
    identity = MessageId(topic_name=target, broker_addr=record.msg_id.broker_addr)
    return replace(record, msg_id=identity, attributes=own_attributes(record))


def has_used_up_hops(message: Message) -> bool:
    """Whether a message has passed through as many dead-letter topics as it may."""
    return _hops(_record(message)) >= HOPS_MAX


def make_letter(
    message: Message,
    instruction: DeadLetter,
    *,
    topic: str,
    subscription: str,
    target: str,
    is_bare: bool = False,
) -> StreamMessage:
    """Makes the dead letter of a message.

    `is_bare` leaves out the message's own attributes, because they do not fit.
    """
    record = _record(message)
    known, hops = record.attributes, _hops(record)
    attributes = {} if is_bare else dict(known)
    if is_bare and known:
        attributes[_DROPPED] = str(len(known))
    if hops and all(name in known for name in _ORIGIN):
        attributes |= {name: known[name] for name in _ORIGIN}
    else:
        values = (
            topic,
            subscription,
            str(message.offset),
            str(record.msg_id.producer_id),
            record.msg_id.broker_addr,
        )
        attributes |= dict(zip(_ORIGIN, values, strict=True))
    attributes |= {
        _HOPS: str(hops + 1),
        _POLICY: "dead_letter",
        _ATTEMPT: str(instruction.attempt),
        _REASON: instruction.reason or "",
    }
    identity = MessageId(topic_name=target, broker_addr=record.msg_id.broker_addr)
    return replace(record, msg_id=identity, attributes=attributes)


def _record(message: Message) -> StreamMessage:
    try:
        return message.record
    except CorruptDataError:
        # The raw body can still be examined.
        return StreamMessage(payload=message.body)


def _hops(record: StreamMessage) -> int:
    """Dead-letter topics that a message has passed through; 0 if its attribute is not a number."""
    hops = _number(record.attributes.get(_HOPS))
    return hops if hops is not None and hops < _NUMBER_MAX else 0


def _number(text: str | None) -> int | None:
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) < 20
    return int(text) if is_number and text is not None else None
