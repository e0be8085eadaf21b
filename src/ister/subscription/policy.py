"""The kinds of subscriptions, and the failure policy: ack timeout, backoff of a nack, poison.

A message has failed when its consumer said so (nack), or did not answer in time (ack timeout). A
consumer that disconnects is not a failure of the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self, cast

import msgspec

from ister.base.model import TopicName
from ister.errors import InvalidRequestError

_REDELIVERIES_MAX: Final = 1_000_000
# A month. Longer is a mistake in the unit.
_DELAY_MS_MAX: Final = 31 * 24 * 3600 * 1000


class SubscriptionKind(StrEnum):
    """How messages are shared between the consumers of a subscription."""

    EXCLUSIVE = "exclusive"
    """One consumer, in the order of offsets."""
    SHARED = "shared"
    """Each consumer in turn."""
    FAILOVER = "failover"
    """The consumer that attached first; when it detaches, the next."""
    KEY_SHARED = "key_shared"
    """All messages of a key to the same consumer, one after the other."""


class PoisonPolicy(StrEnum):
    """What happens to a message that has failed too often."""

    BLOCK = "block"
    """No later message is sent until an operator decides; with key_shared, none of its key."""
    DROP = "drop"
    """It is dropped."""
    DEAD_LETTER = "dead_letter"
    """It is published to another topic."""


class Backoff(StrEnum):
    """How the delay before the next attempt grows."""

    FIXED = "fixed"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """What a subscription does with messages that fail.

    Raises:
        InvalidRequestError: A value is invalid; names it.
    """

    max_redelivery_count: int = 5
    """A message is poison once it has failed more often than this: 5 means 6 attempts."""
    ack_timeout_ms: int = 30_000
    """From when the consumer's program can have a message to its answer; see `delivery`."""
    base_redelivery_delay_ms: int = 1_000
    max_redelivery_delay_ms: int = 60_000
    backoff: Backoff = Backoff.EXPONENTIAL
    poison: PoisonPolicy = PoisonPolicy.BLOCK
    dead_letter_topic: str | None = None

    def __post_init__(self) -> None:
        _check_number("max_redelivery_count", self.max_redelivery_count, 0, _REDELIVERIES_MAX)
        _check_number("ack_timeout_ms", self.ack_timeout_ms, 1, _DELAY_MS_MAX)
        _check_number("base_redelivery_delay_ms", self.base_redelivery_delay_ms, 0, _DELAY_MS_MAX)
        _check_number("max_redelivery_delay_ms", self.max_redelivery_delay_ms, 0, _DELAY_MS_MAX)
        if self.base_redelivery_delay_ms > self.max_redelivery_delay_ms:
            raise InvalidRequestError(
                f"base_redelivery_delay_ms {self.base_redelivery_delay_ms} is above "
                f"max_redelivery_delay_ms {self.max_redelivery_delay_ms}"
            )
        # Text becomes the value itself, so that two policies that say the same are equal.
        object.__setattr__(self, "backoff", _choice(Backoff, "backoff", self.backoff))
        object.__setattr__(self, "poison", _choice(PoisonPolicy, "poison", self.poison))
        if self.dead_letter_topic is not None:
            TopicName.parse(self.dead_letter_topic)
        elif self.poison is PoisonPolicy.DEAD_LETTER:
            raise InvalidRequestError(
                "the poison policy 'dead_letter' has no dead_letter_topic",
                hint="name the topic that takes the messages, for example '/default/orders-dead'",
            )

    def delay_ms(self, attempt: int, requested: int | None = None) -> int:
        """The delay after the failure of attempt number `attempt`, which counts from 1.

        A longer delay than the policy's that the consumer asked for (`requested`) is granted up to
        the policy's maximum.
        """
        delay = self.base_redelivery_delay_ms
        if self.backoff is Backoff.EXPONENTIAL:
            # More doublings than the maximum has bits change nothing.
            delay <<= min(max(attempt - 1, 0), _DELAY_MS_MAX.bit_length())
        if requested is not None and requested > delay:
            delay = requested
        return min(delay, self.max_redelivery_delay_ms)

    def to_json(self) -> dict[str, object]:
        """Returns the policy as it is stored."""
        return cast("dict[str, object]", msgspec.to_builtins(self))

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> Self:
        """Reads a stored policy; missing fields have their defaults, unknown ones are ignored.

        Raises:
            InvalidRequestError: A value is invalid; names it.
        """
        if not isinstance(fields, Mapping):
            raise InvalidRequestError(f"a failure policy is an object, not {fields!r:.40}")
        # Any: the values are checked by `__post_init__`.
        known: dict[str, Any] = {
            name: fields[name] for name in cls.__dataclass_fields__ if name in fields
        }
        return cls(**known)


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value!r:.40}", hint=f"a number from {low} to {high}")


def _choice(kind: type[StrEnum], name: str, value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError as error:
        raise InvalidRequestError(
            f"{name} is {value!r:.40}", hint=f"one of {', '.join(kind)}"
        ) from error
