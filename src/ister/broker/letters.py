"""Dead letters: a message that failed too often, as it goes to the dead-letter topic.

Owns: the attributes that a dead letter gets. Does not own: publishing it (`ister.broker.dispatch`).

Dead-letter topics may have subscriptions with dead-letter topics of their own, which may lead back
to where a message came from. So each letter counts its hops (`x-dead-letter-hops`), and one that
has made `HOPS_MAX` is not published again. The `x-original-…` attributes are those of the first
hop; the attempts and the reason are those of the last one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ister.errors import CorruptDataError
from ister.model import MessageId, StreamMessage
from ister.subscription.delivery import DeadLetter
from ister.topic.message import Message

__all__ = ["HOPS_MAX", "is_worn", "make_letter"]

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


def is_worn(message: Message) -> bool:
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
    """A message as it goes to the dead-letter topic.

    Args:
        message: As it is in the log.
        instruction: Why, and after how many attempts.
        topic: Where it failed.
        subscription: Whose consumers failed.
        target: The dead-letter topic.
        is_bare: Whether to leave out its own attributes, for want of room.
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
        # Whatever it is, somebody may want to look at it.
        return StreamMessage(payload=message.body)


def _hops(record: StreamMessage) -> int:
    """Dead-letter topics that a message has passed through; 0 where it says nothing sensible."""
    text = record.attributes.get(_HOPS, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
