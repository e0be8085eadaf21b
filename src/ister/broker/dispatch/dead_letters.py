"""Dead letters: messages that failed too often, as they are published to a dead-letter topic.

Owns: the attributes of a dead letter, both directions. Does not own: publishing it (`dispatcher`),
and what operators do with it (`ister.broker.services.dead_letter_queue`).

Whoever may produce to a dead-letter topic can publish a message with these attributes. So brokers
sign their letters (`x-dead-letter-signature`): a MAC of the message and its topic, with a key that
only brokers of the metadata store have. What a message without a valid signature says of its past
is not believed.

Dead-letter topics may have subscriptions with dead-letter topics of their own, which may lead back
to the first topic. So each dead letter counts its hops (`x-dead-letter-hops`), and after `HOPS_MAX`
it is not published again. The `x-original-…` attributes are those of the first hop; the attempt and
the reason are those of the last one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass, replace
from typing import Final

from ister.base.model import MessageId, StreamMessage
from ister.errors import CorruptDataError
from ister.subscription.entries import DeadLetter
from ister.topic.message import Message

HOPS_MAX: Final = 8
"""Dead-letter topics that one message may pass through."""

_HOPS: Final = "x-dead-letter-hops"
_POLICY: Final = "x-poison-policy"
_ATTEMPT: Final = "x-delivery-attempt"
_REASON: Final = "x-failure-reason"
_DROPPED: Final = "x-attributes-dropped"
_SIGNATURE: Final = "x-dead-letter-signature"
_ORIGIN: Final = (
    "x-original-topic",
    "x-original-subscription",
    "x-original-topic-offset",
    "x-original-producer-id",
    "x-original-broker-addr",
)
_NUMBER_MAX: Final = 10**9
_OURS: Final = frozenset({*_ORIGIN, _HOPS, _POLICY, _ATTEMPT, _REASON, _DROPPED, _SIGNATURE})


class LetterSigner:
    """Marks the dead letters of a cluster's brokers. Thread-safe.

    `secret` is the cluster's, see `ister.broker.security.cluster_secret`.
    """

    def __init__(self, secret: str) -> None:
        self._key = secret.encode()

    def sign(self, record: StreamMessage, topic: str) -> StreamMessage:
        """Returns a message with the signature of a letter in the dead-letter topic `topic`."""
        return replace(
            record, attributes={**record.attributes, _SIGNATURE: self._mac(record, topic)}
        )

    def verify(self, record: StreamMessage, topic: str) -> bool:
        """Whether a broker has signed a message, unchanged, for the topic that it is in."""
        shown = record.attributes.get(_SIGNATURE, "")
        return hmac.compare_digest(
            self._mac(record, topic).encode(), shown.encode("utf-8", "replace")
        )

    def _mac(self, record: StreamMessage, topic: str) -> str:
        fields = (
            "dead letter",
            topic,
            sorted((name, text) for name, text in record.attributes.items() if name != _SIGNATURE),
            record.publish_time,
            record.producer_name,
            record.schema_id,
            record.schema_version,
            record.routing_key,
        )
        mac = hmac.new(self._key, json.dumps(fields).encode(), hashlib.sha256)
        mac.update(record.payload)
        return mac.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterOrigin:
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


def read_origin(record: StreamMessage) -> LetterOrigin | None:
    """Reads the origin and reason of a dead letter; None if the message is not one."""
    known = record.attributes
    if _ORIGIN[0] not in known:
        return None
    return LetterOrigin(
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


def has_used_up_hops(message: Message, topic: str, signer: LetterSigner) -> bool:
    """Whether a message of `topic` has passed through as many dead-letter topics as it may."""
    record = _record(message)
    return _hops(record) >= HOPS_MAX and signer.verify(record, topic)


def make_letter(
    message: Message,
    instruction: DeadLetter,
    *,
    topic: str,
    subscription: str,
    target: str,
    signer: LetterSigner,
    is_bare: bool = False,
) -> StreamMessage:
    """Makes the dead letter of a message of `topic`.

    `is_bare` leaves out the message's own attributes, because they do not fit.
    """
    record = _record(message)
    is_letter = signer.verify(record, topic)
    known = record.attributes if is_letter else own_attributes(record)
    hops = _hops(record) if is_letter else 0
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
    return signer.sign(replace(record, msg_id=identity, attributes=attributes), target)


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
