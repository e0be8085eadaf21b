"""Asking again while a store or a broker does not answer.

An exception on the driver ends a whole query, and a restart of a broker takes seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from ister.clock import SystemClock
from ister.errors import UnavailableError

__all__ = ["patiently"]

_log = logging.getLogger("ister.spark.patience")

_PATIENCE_SECONDS: Final = 120.0
_PAUSE_SECONDS: Final = (0.2, 0.5, 1.0, 2.0, 5.0)

_Answer = TypeVar("_Answer")


def patiently(ask: Callable[[], _Answer], *, seconds: float = _PATIENCE_SECONDS) -> _Answer:
    """Asks again while a store does not answer: an exception on the driver ends a whole query.

    Raises:
        UnavailableError: It has not answered for a long time.
    """
    pause = threading.Event()
    deadline = SystemClock.monotonic() + seconds
    attempt = 0
    while True:
        try:
            return ask()
        except UnavailableError as error:
            length = _PAUSE_SECONDS[min(attempt, len(_PAUSE_SECONDS) - 1)]
            if SystemClock.monotonic() + length >= deadline:
                raise
            _log.warning("asked again", extra={"error": str(error), "pause_seconds": length})
            pause.wait(length)
            attempt += 1
