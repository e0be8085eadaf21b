"""The settings of one write-ahead log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ister.base.model import AckLevel, Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class WalSettings:
    """The settings of one log."""

    topic: str
    ack: AckLevel
    codec: Codec
    fsync_interval_seconds: float
    fsync_max_batch_bytes: int
    rotate_max_bytes: int
    rotate_max_seconds: float
    buffer_max_bytes: int
    blocks_when_full: bool
    incarnation: str = ""
    """Distinguishes topics that had the same name one after the other; empty if unknown."""
    epoch: int = 0
    """The owner's epoch; 0 without a bucket."""
    claim: str = ""
    """The owner's claim."""
    routine_level: int = logging.INFO
    """The level of log lines about rotated and trimmed files."""
