"""Bounds of a topic: how many of what, how fast, how large. Rates delay, they never drop.

A bound comes from the topic itself, else from its namespace, else from `broker.policies`; 0 is no
bound.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Final

from ister.base.limits import MESSAGE_SIZE_BYTES_MAX
from ister.config import BrokerPoliciesConfig
from ister.errors import InvalidRequestError

NAMES: Final = tuple(item.name for item in fields(BrokerPoliciesConfig))
_NUMBER_MAX: Final = (1 << 31) - 1
# A short burst above the rate is not worth a delay.
_BURST_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The bounds in force for one topic."""

    max_producers_per_topic: int = 0
    max_subscriptions_per_topic: int = 0
    max_consumers_per_topic: int = 0
    max_consumers_per_subscription: int = 0
    max_publish_rate: int = 0
    max_subscription_dispatch_rate: int = 0
    max_message_size: int = 0

    @classmethod
    def of(cls, defaults: BrokerPoliciesConfig, *overrides: Mapping[str, int]) -> Policies:
        """The defaults with what is set more closely, the closest last."""
        values = {name: getattr(defaults, name) for name in NAMES}
        for override in overrides:
            values.update(override)
        return cls(**values)

    def to_json(self) -> str:
        """All of them, as JSON."""
        return json.dumps(asdict(self))


def parse_overrides(text: str) -> dict[str, int]:
    """Parses policies as JSON."""
    try:
        content: object = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("policies must be a JSON object") from error
    if not isinstance(content, dict):
        raise InvalidRequestError("policies must be a JSON object")
    for name, value in content.items():
        if name not in NAMES:
            raise InvalidRequestError(
                f"unknown policy {name!r}", hint=f"use one of: {', '.join(NAMES)}"
            )
        high = MESSAGE_SIZE_BYTES_MAX if name == "max_message_size" else _NUMBER_MAX
        if type(value) is not int or not 0 <= value <= high:
            raise InvalidRequestError(f"{name} must be a number from 0 (no limit) to {high}")
    return content


class Rate:
    """How long to wait before the next messages, so that there are no more than so many a second.

    Thread-safe: the broker's loop and Flight's threads publish into one topic.
    """

    def __init__(self, per_second: int) -> None:
        self.per_second = per_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._counted = per_second

    def reserve(self, count: int, now: float) -> float:
        """Takes room for `count` messages; how many seconds to wait before they may go."""
        rate = self.per_second
        if not rate:
            return 0.0
        with self._lock:
            start = max(self._free_at, now)
            if rate != self._counted:
                # What was reserved at another rate takes its time at this one.
                start = now + (start - now) * self._counted / rate
                self._counted = rate
            self._free_at = start + count / rate
            return max(0.0, start - now - _BURST_SECONDS)

    def refund(self, count: int) -> None:
        """Gives room back that was taken and is not going to be used."""
        rate = self.per_second
        if rate:
            with self._lock:
                self._free_at -= count / rate
