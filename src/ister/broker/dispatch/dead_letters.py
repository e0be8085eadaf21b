"""Dead letters: messages that failed too often, as they are published to a dead-letter topic.

Owns: the attributes of a dead letter. Does not own: publishing it (`dispatcher`).

Dead-letter topics may have subscriptions with dead-letter topics of their own, which may lead back
to the first topic. So each dead letter counts its hops (`x-dead-letter-hops`), and after `HOPS_MAX`
it is not published again. The `x-original-…` attributes are those of the first hop; the attempt and
the reason are those of the last one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ister.errors import CorruptDataError
from ister.model import MessageId, StreamMessage
from ister.subscription.entries import DeadLetter
from ister.topic.message import Message

HOPS_MAX: Final = 8
"""Dead-letter topics that one message may pass through."""

_HOPS: Final = "x-dead-letter-hops"
_ORIGIN: Final = (
    "x-original-topic",
    "x-original-subscription",
    "x-original-topic-offset",
    "x-original-producer-id",
    "x-original-broker-addr",
)


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
        attributes["x-attributes-dropped"] = str(len(known))
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
        "x-poison-policy": "dead_letter",
        "x-delivery-attempt": str(instruction.attempt),
        "x-failure-reason": instruction.reason or "",
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
    text = record.attributes.get(_HOPS, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
