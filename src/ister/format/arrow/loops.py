"""The arguments of the compiled loops in `ister.format.arrow.kernel`, and when the loops are used.

A loop takes one array of 64-bit integers. Its fields are named here, so that callers need no numba.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final, Protocol

from ister import kernels
from ister.errors import ConfigError, InvariantError

ROWS_WEIGHT: Final = 16
"""In Python, converting a row costs about this many times as much as scanning its frame."""


class _Memory(Protocol):
    data: int
    """The address."""


class IntArray(Protocol):
    """An array of integers, as numpy has them."""

    ctypes: _Memory
    shape: tuple[int, ...]

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...
    def copy(self) -> IntArray: ...
    def tolist(self) -> list[int]: ...


def wants_compiled(is_compiled: bool | None) -> bool:
    """Decides whether to use the compiled loops.

    `is_compiled` is None to use them if they are loaded, True to load and require them.

    Raises:
        ConfigError: They are required and not available.
    """
    if is_compiled and not kernels.load():
        raise ConfigError(
            "the compiled loops are not available",
            hint="install the extra: pip install 'ister[fast]'",
        )
    return is_compiled is not False and kernels.current() is not None


def loops() -> ModuleType:
    """The module with the compiled loops, which must be loaded; they are never unloaded."""
    loaded = kernels.current()
    if loaded is None:
        raise InvariantError("the compiled loops are used before they are loaded")
    return loaded.arrow


# -- the fields of the array ----------------------------------------------------------------

# Arguments of both loops.
BASE: Final = 0
"""The address of the frames: where they are read, or written to."""
SIZE: Final = 1
"""How many bytes there are from `BASE` on."""
POSITION: Final = 2
"""Decoding: the next frame's position, moved over the frames taken. Encoding: bytes written."""
OFFSET: Final = 3
"""The next frame's offset, moved over the frames taken or written."""
ROWS: Final = 4
"""How many rows there are by now, or have been written."""
ROWS_MAX: Final = 5
"""Decoding: how many there is room for. Encoding: how many there are to write."""
IS_VARINT: Final = 6
"""1 for bincode2, 0 for bincode1."""
BODY_BYTES_MAX: Final = 7
PERMITTED: Final = 8
"""The offset of the one message that may have `CROWD_MIN` attributes or more: Python checked it."""
ROOM: Final = 9
"""With `NEEDS_ROOM`, decoding: the column, or -1 for rows. Encoding: how many bytes."""

# Arguments of `decode`.
END_OFFSET: Final = 10

# Arguments of `encode`.
REQUEST_ID: Final = 11
MIDDLE: Final = 12
"""The address of the encoded fields between request id and offset, equal for all messages."""
MIDDLE_BYTES: Final = 13
SEGMENT_BYTES: Final = 14
PAYLOAD_BYTES_MAX: Final = 15
ENVELOPE_BYTES_MAX: Final = 16
TIME_DEFAULT: Final = 17
TIME_MULTIPLIER: Final = 18
TIME_DIVISOR: Final = 19
TIME_RAW_MAX: Final = 20
"""The largest publish time, in its column's unit."""
TIME_LAST: Final = 21
"""The largest publish time written, in milliseconds."""
TOPIC: Final = 22
"""The address of the topic's name; an argument of both loops."""
TOPIC_BYTES: Final = 23
STARTS: Final = 24
"""The address of an array for the position of each frame; 0 for none."""
IS_CHECK: Final = 25
"""1 to check rows, and to write nothing."""

# Columns, a block of fields each. OFFSETS is 0 for a column that is not wanted or absent.
COLUMN_FIELDS: Final = 6
OFFSETS: Final = 0
"""The address of the values; of columns without a fixed width, where each value begins in DATA."""
DATA: Final = 1
DATA_BYTES: Final = 2
"""How much of DATA is filled; of ATTRIBUTES, how many entries there are."""
DATA_BYTES_MAX: Final = 3
VALIDITY: Final = 4
"""The address of the bits that say which values are not null; 0 for all."""
VALID: Final = 5
"""Decoding: how many values are not null."""
VALIDITY_START: Final = 5
"""Encoding: the bit of the first row."""

_HEADER_FIELDS: Final = 26
TIMES: Final = _HEADER_FIELDS
NAMES: Final = TIMES + COLUMN_FIELDS
PAYLOADS: Final = NAMES + COLUMN_FIELDS
ATTRIBUTES: Final = PAYLOADS + COLUMN_FIELDS
KEYS: Final = ATTRIBUTES + COLUMN_FIELDS
VALUES: Final = KEYS + COLUMN_FIELDS
ROUTING_KEYS: Final = VALUES + COLUMN_FIELDS
SCHEMA_IDS: Final = ROUTING_KEYS + COLUMN_FIELDS
SCHEMA_VERSIONS: Final = SCHEMA_IDS + COLUMN_FIELDS
REQUEST_IDS: Final = SCHEMA_VERSIONS + COLUMN_FIELDS
PRODUCER_IDS: Final = REQUEST_IDS + COLUMN_FIELDS
NUMBERS: Final = PRODUCER_IDS + COLUMN_FIELDS
"""The column `offset`. Encoding: set if the original frames are restored."""
MESSAGE_TOPICS: Final = NUMBERS + COLUMN_FIELDS
"""Null where a message names the topic that it is in."""
MESSAGE_OFFSETS: Final = MESSAGE_TOPICS + COLUMN_FIELDS
"""Null where a message has the offset of its frame."""
BROKERS: Final = MESSAGE_OFFSETS + COLUMN_FIELDS
"""Null where it is empty."""
SUBSCRIPTIONS: Final = BROKERS + COLUMN_FIELDS
EXACT_TIMES: Final = SUBSCRIPTIONS + COLUMN_FIELDS
"""Null unless the publish time is after the year 9999."""
CROWD_MIN: Final = 65
"""From this many attributes on, Python finds repeated keys faster than comparing all pairs."""
SCRATCH: Final = EXACT_TIMES + COLUMN_FIELDS
"""Room for the address and size of each key of one message."""
FIELDS: Final = SCRATCH + 2 * CROWD_MIN
"""The length of the array."""

# What a loop returns: why it stopped.
DONE: Final = 0
"""All is done, or the next frame is incomplete or damaged."""
BODY_IS_BAD: Final = 1
"""The next frame is intact and its body is not a message, or the next row cannot be encoded."""
NEEDS_ROOM: Final = 2
"""A buffer is too small for the next row."""
CROWDED: Final = 3
"""The next message has `CROWD_MIN` attributes or more: Python has to look for repeated keys."""
SEGMENT_IS_FULL: Final = 4

TIME_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, where calendars end."""
TIME_US_CLAMPED: Final = 253_402_300_799_999_999
"""What a later publish time becomes in the column `publish_time`."""
