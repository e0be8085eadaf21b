"""The columns of an exported table, and how they go together with those that a table has.

Owns: the envelope's columns, those of dead letters, and what fits into what. Does not own: columns
from a JSON Schema (`json_schema`), how a table stores its schema.

A table that exists keeps its types: a file is written with them, where nothing can get lost by
that. Columns that it lacks are added to it, those that it has beyond ours are null.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from ister.errors import ConflictError
from ister.format.arrow.schema import arrow_schema
from ister.format.arrow.table import is_text
from ister.spark.tables.base import PUBLISH_DATE

_DAY_US: Final = 86_400_000_000

ENVELOPE: Final = arrow_schema()
"""As `format("ister")` has them."""

ENVELOPE_WITHOUT_PAYLOAD: Final = pa.schema([item for item in ENVELOPE if item.name != "payload"])

LETTERS: Final = arrow_schema(("topic", "offset", "publish_time", "payload")).append(
    pa.field("reason", pa.string())
)
"""Messages that did not become rows."""

_NEVER_NULL: Final = frozenset({"topic", "offset", "publish_time", PUBLISH_DATE})
"""Columns of every row and dead letter that have a value."""

_INTEGER_WIDTHS: Final = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}


def dates_of(times: pa.Array) -> pa.Array:
    """Days since the Unix epoch, in UTC, of points in time."""
    micros = pc.cast(times, pa.int64())
    return pc.cast(pc.divide(micros, _DAY_US), pa.int32())


def cast_column(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """A column with a table's type for it, which `fit` has found to take all its values."""
    return column if column.type == wanted else pc.cast(column, wanted)


def fit(
    existing: pa.Schema,
    wanted: pa.Schema,
    *,
    path: str,
    nested: bool,
    is_required: Callable[[str], bool] = lambda name: False,
) -> tuple[pa.Schema, list[pa.Field]]:
    """Our columns as a table has them, and those that it lacks.

    Args:
        existing: The table's columns.
        wanted: Ours.
        path: Of the table, for errors.
        nested: Whether the table can take new fields within its structs.
        is_required: Whether a column of the table's may not be null.

    Raises:
        ConflictError: A column of the table's cannot take ours, or needs values that we have not.
    """
    fields: list[pa.Field] = []
    added: list[pa.Field] = []
    by_fold: dict[str, pa.Field] = {item.name.casefold(): item for item in existing}
    for item in wanted:
        theirs = by_fold.get(item.name.casefold())
        if theirs is None:
            fields.append(item)
            added.append(item)
            continue
        if theirs.name != item.name:
            raise ConflictError(
                f"the table has a column {theirs.name}, and the export one of the name {item.name}",
                path=path,
                hint="names that differ by case alone are one name to Spark; rename one of them",
            )
        kind = _common(theirs.type, item.type, nested=nested)
        if kind is None or _has_required(theirs.type):
            raise ConflictError(
                f"the table's column {item.name} is {theirs.type}, and the export's {item.type}",
                path=path,
                hint="export into another table, or change the column's type",
            )
        fields.append(pa.field(item.name, kind))
        if kind != theirs.type and nested and _lacks(theirs.type, kind):
            added.append(pa.field(item.name, kind))
    names = {item.name for item in wanted}
    for theirs in existing:
        if theirs.name not in _NEVER_NULL & {*names, PUBLISH_DATE} and is_required(theirs.name):
            ours = "the export's may be" if theirs.name in names else "the export has none"
            raise ConflictError(
                f"the table's column {theirs.name} may not be null, and {ours}",
                path=path,
                hint="make it optional, or export into another table",
            )
    return pa.schema(fields), added


def _common(theirs: pa.DataType, ours: pa.DataType, *, nested: bool) -> pa.DataType | None:
    """The type that a file has: theirs where it takes ours without loss; None if it does not."""
    if theirs == ours:
        return theirs
    if is_text(theirs) and is_text(ours):
        return ours
    if _is_bytes(theirs) and _is_bytes(ours):
        return ours
    if ours in _INTEGER_WIDTHS:
        if theirs in _INTEGER_WIDTHS:
            return theirs if _INTEGER_WIDTHS[theirs] >= _INTEGER_WIDTHS[ours] else None
        return theirs if pa.types.is_float64(theirs) else None
    if pa.types.is_timestamp(ours) and pa.types.is_timestamp(theirs):
        same_zone = theirs.tz in ("UTC", "+00:00", "Etc/UTC")
        return ours if same_zone and theirs.unit in ("us", "ns") else None
    if pa.types.is_struct(theirs) and pa.types.is_struct(ours):
        return _common_struct(theirs, ours, nested=nested)
    if is_list(theirs) and is_list(ours):
        item = _common(theirs.value_type, ours.value_type, nested=nested)
        return None if item is None else pa.list_(item)
    if pa.types.is_map(theirs) and pa.types.is_map(ours):
        key = _common(theirs.key_type, ours.key_type, nested=nested)
        value = _common(theirs.item_type, ours.item_type, nested=nested)
        return None if key is None or value is None else pa.map_(key, value)
    return None


def _common_struct(
    theirs: pa.StructType, ours: pa.StructType, *, nested: bool
) -> pa.DataType | None:
    known = {item.name: item.type for item in theirs}
    fields: list[pa.Field] = []
    for item in ours:
        if item.name not in known:
            if not nested:
                return None
            fields.append(item)
            continue
        kind = _common(known[item.name], item.type, nested=nested)
        if kind is None:
            return None
        fields.append(pa.field(item.name, kind))
    return pa.struct(fields)


def _has_required(kind: pa.DataType) -> bool:
    """Whether something within a column may not be null; keys never are."""
    if pa.types.is_struct(kind):
        parts = list(kind)
    elif is_list(kind):
        parts = [kind.value_field]
    else:
        parts = [kind.item_field] if pa.types.is_map(kind) else []
    return any(not part.nullable or _has_required(part.type) for part in parts)


def _lacks(theirs: pa.DataType, ours: pa.DataType) -> bool:
    """Whether a struct of ours, at any depth, has a field that theirs has not."""
    if pa.types.is_struct(theirs) and pa.types.is_struct(ours):
        known = {item.name: item.type for item in theirs}
        return any(item.name not in known or _lacks(known[item.name], item.type) for item in ours)
    if is_list(theirs) and is_list(ours):
        return _lacks(theirs.value_type, ours.value_type)
    return False


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or (pa.types.is_binary_view(kind))
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list, of either size."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
