"""The columns of messages and their Arrow types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from ister.base.limits import GIB
from ister.base.model import COLUMNS
from ister.errors import InvalidRequestError

HIDDEN: Final = ("request_id", "producer_id")
"""Columns that Danube's protocol needs; present only if requested by name."""

EVERY_FIELD: Final = (
    *COLUMNS,
    *HIDDEN,
    "message_topic",
    "message_offset",
    "broker_addr",
    "subscription_name",
    "publish_time_ms",
)
"""All fields of a body: rows with these columns can be encoded as the same frames again.

The last five are mostly null. `message_topic` and `message_offset` are set if a message names
another topic or offset than those it is stored under, `broker_addr` if it is not empty, and
`publish_time_ms` if the time is after the year 9999."""

_TYPES: Final[dict[str, pa.DataType]] = {
    "topic": pa.string(),
    "offset": pa.int64(),
    "publish_time": pa.timestamp("us", tz="UTC"),
    "producer_name": pa.string(),
    "payload": pa.binary(),
    "attributes": pa.map_(pa.string(), pa.string()),
    "routing_key": pa.string(),
    "schema_id": pa.int64(),
    "schema_version": pa.int32(),
    "request_id": pa.uint64(),
    "producer_id": pa.uint64(),
    "message_topic": pa.string(),
    "message_offset": pa.uint64(),
    "broker_addr": pa.string(),
    "subscription_name": pa.string(),
    "publish_time_ms": pa.uint64(),
}

# Arrow's `offset` column is signed, and the offset after the last one has to fit too.
_OFFSET_END: Final = (1 << 63) - 1
COLUMN_BYTES_MAX: Final = (1 << 31) - 1
"""Arrow counts the bytes of a string or binary column in 32 signed bits."""
BATCH_BYTES_MAX: Final = 1 * GIB
"""The bytes of frames in one batch: far below `COLUMN_BYTES_MAX`, and larger than any frame."""


def arrow_schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """Returns the Arrow schema of messages; Spark derives the same one, so batches need no cast.

    Args:
        columns: Names out of `EVERY_FIELD`, in any order; None for `COLUMNS`.

    Raises:
        InvalidRequestError: A name is unknown, or occurs twice.
    """
    names = COLUMNS if columns is None else as_names(columns)
    for number, name in enumerate(names):
        if name not in _TYPES:
            known = f"{', '.join(COLUMNS)}; and, by name only, {', '.join(HIDDEN)}"
            raise InvalidRequestError(f"unknown column {name!r}", hint=f"the columns are {known}")
        if name in names[:number]:
            raise repeated_column(name)
    return pa.schema([pa.field(name, _TYPES[name]) for name in names])


def as_names(columns: object) -> tuple[str, ...]:
    """Column names that a caller passed.

    Raises:
        InvalidRequestError: They are not a sequence of strings.
    """
    is_text = isinstance(columns, str)
    given = list(columns) if isinstance(columns, Iterable) and not is_text else [None]
    names = tuple(name for name in given if isinstance(name, str))
    if len(names) < len(given):
        raise InvalidRequestError(f"columns must be a list of names, not {columns!r:.80}")
    return names


def repeated_column(name: str) -> InvalidRequestError:
    """The error for a column that occurs twice."""
    return InvalidRequestError(f"column {name!r} occurs twice", hint="name each column once")


def make_batch(arrays: list[pa.Array], schema: pa.Schema, count: int) -> pa.RecordBatch:
    """Builds a batch of `count` rows, which may have no columns."""
    if arrays:
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    return pa.RecordBatch.from_struct_array(
        pa.StructArray.from_buffers(pa.struct([]), count, [None])
    )


def check_offset(offset: int) -> None:
    """Raises InvalidRequestError for an offset that does not fit into the column `offset`."""
    if not 0 <= offset < _OFFSET_END:
        raise InvalidRequestError(f"offset {offset} is not in 0..{_OFFSET_END - 1}")


def cut_offset(end_offset: int | None) -> int:
    """The end of a range, cut to what the column `offset` can hold."""
    return _OFFSET_END if end_offset is None else max(0, min(end_offset, _OFFSET_END))


def to_signed(value: int | None, bits: int) -> int | None:
    """The signed integer with the same bits."""
    if value is None:
        return None
    return value - (1 << bits) if value >> (bits - 1) else value
