"""Checks the columns of a batch and brings each into the one Arrow type that encoding takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ister.base.model import COLUMNS
from ister.errors import InvalidRequestError
from ister.format.arrow.schema import repeated_column
from ister.format.frame import FRAME_HEADER_SIZE

NUMBERS_BYTES_MAX: Final = FRAME_HEADER_SIZE + 11 * 9 + 4
"""The numbers of a frame: its header, eleven integers and four tags."""


class Times(NamedTuple):
    """Publish times as integers, and how to make milliseconds of them."""

    values: pa.Array
    multiplier: int
    divisor: int


class Maps(NamedTuple):
    """Attributes: where the entries of each row begin in `keys` and `values`."""

    maps: pa.Array
    keys: pa.Array
    values: pa.Array
    first_entry: int
    """The entry of the maps' child that is the first of `keys`."""


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """The columns of a batch in the types that encoding takes, None for those not given."""

    count: int
    payload: pa.Array
    publish_time: Times | None
    producer_name: pa.Array | None
    attributes: Maps | None
    routing_key: pa.Array | None
    schema_id: pa.Array | None
    schema_version: pa.Array | None

    @property
    def bytes_max(self) -> int:
        """No less than what the frames have beside the topic's name."""
        entries = 0 if self.attributes is None else len(self.attributes.keys)
        sizes: list[int] = [
            column.nbytes
            for column in (
                self.payload,
                self.producer_name,
                self.routing_key,
                None if self.attributes is None else self.attributes.keys,
                None if self.attributes is None else self.attributes.values,
            )
            if column is not None
        ]
        # Two lengths for an attribute.
        return sum(sizes) + self.count * NUMBERS_BYTES_MAX + entries * 18


def as_table(batch: pa.RecordBatch) -> BatchColumns:
    """Checks the columns and brings each into the one type that encoding takes.

    Arrow validates all of it first: a batch may come from anywhere, and compiled code trusts the
    offsets in it.
    """
    columns: dict[str, pa.Array] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name not in COLUMNS:
            raise _unknown_column(name)
        if name in columns:
            raise repeated_column(name)
        columns[name] = column
        if name in {"topic", "offset"}:
            continue
        try:
            column.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            raise InvalidRequestError(
                f"column {name!r} is not a valid Arrow array: {error}"
            ) from error
    payload = columns.get("payload")
    if payload is None:
        raise InvalidRequestError(
            "there is no column 'payload'", hint="it is the one column that is required"
        )
    payload = _cast(payload, "column 'payload'", pa.large_binary(), _is_blob, "binary or string")
    if payload.null_count:
        row = pc.index(payload.is_null(), True).as_py()
        raise InvalidRequestError(
            f"row {row} has no payload", hint="an empty payload is b'', not null"
        )

    def text(name: str) -> pa.Array | None:
        column = columns.get(name)
        return None if column is None else as_text(column, f"column {name!r}")

    times, attributes = columns.get("publish_time"), columns.get("attributes")
    return BatchColumns(
        count=batch.num_rows,
        payload=payload,
        publish_time=None if times is None else _as_times(times),
        producer_name=text("producer_name"),
        attributes=None if attributes is None else _as_maps(attributes),
        routing_key=text("routing_key"),
        schema_id=_as_integers(columns.get("schema_id"), "schema_id", 64),
        schema_version=_as_integers(columns.get("schema_version"), "schema_version", 32),
    )


def _unknown_column(name: str) -> InvalidRequestError:
    renamed = {"value": "payload", "key": "routing_key"}.get(name)
    return InvalidRequestError(
        f"unknown column {name!r}",
        hint=f"rename it to {renamed!r}"
        if renamed
        else f"the columns are {', '.join(COLUMNS)}; drop or rename it",
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether it is any of Arrow's string types."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_blob(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
        or is_text(kind)
    )


def _cast(
    column: pa.Array,
    what: str,
    kind: pa.DataType,
    accepts: Callable[[pa.DataType], bool],
    expected: str,
) -> pa.Array:
    found = column.type
    plain = found.value_type if pa.types.is_dictionary(found) else found
    if not (accepts(plain) or pa.types.is_null(plain)):
        raise InvalidRequestError(
            f"{what} is {found}, not {expected}", hint="cast it before it is written"
        )
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"{what} does not fit {expected}: {error}") from error


def as_text(column: pa.Array, what: str) -> pa.Array:
    """Casts a column to `large_string`; `what` names it in errors."""
    return _cast(column, what, pa.large_string(), is_text, "string")


def _as_integers(column: pa.Array | None, name: str, bits: int) -> pa.Array | None:
    """The column as signed integers; unsigned ones keep their bits."""
    if column is None:
        return None
    kind = pa.int64() if bits == 64 else pa.int32()
    if column.type == (pa.uint64() if bits == 64 else pa.uint32()):
        return column.view(kind)
    return _cast(
        column, f"column {name!r}", kind, pa.types.is_integer, f"an integer of {bits} bits"
    )


_UNITS: Final = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


def _as_times(column: pa.Array) -> Times:
    kind = column.type
    if pa.types.is_null(kind):
        return Times(column.cast(pa.int64()), 1, 1)
    if not pa.types.is_timestamp(kind):
        raise InvalidRequestError(
            f"column 'publish_time' is {kind}, not a timestamp", hint="cast it before it is written"
        )
    return Times(column.view(pa.int64()), *_UNITS[kind.unit])


def _as_maps(column: pa.Array) -> Maps | None:
    kind = column.type
    if pa.types.is_null(kind):
        return None
    if not pa.types.is_map(kind):
        raise InvalidRequestError(
            f"column 'attributes' is {kind}, not map<string, string>",
            hint="cast it before it is written",
        )
    first, last = 0, 0
    if len(column):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return Maps(
        column,
        as_text(column.keys.slice(first, last - first), "a part of column 'attributes'"),
        as_text(column.items.slice(first, last - first), "a part of column 'attributes'"),
        first,
    )
