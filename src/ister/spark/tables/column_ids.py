"""Which column of an Iceberg table is which of ours, whatever it is called now.

    our name ─► id, in the table's property `ister.columns` ─► the table's column with this id

Owns: the record, and the way from our names to the table's and back, also within structs. Does not
own: which types fit (`columns`), the table.

A column that an export has made or found is known by its id from then on: renamed, it is written
under its new name; dropped, it is left out, and neither made again nor filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

import msgspec
import pyarrow as pa

from ister.errors import ConflictError, CorruptDataError
from ister.spark.tables.columns import is_list

Path: TypeAlias = tuple[str, ...]
"""The names of a column and of those that it is in."""
Ids: TypeAlias = Mapping[Path, int]

_FIELD_ID: Final = b"PARQUET:field_id"


def decode_ids(text: str, *, where: str) -> dict[Path, int]:
    """Decodes the record of our columns."""
    try:
        return dict(msgspec.json.decode(text, type=list[tuple[Path, int]]))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptDataError(
            f"the table's record of its columns is invalid: {error}",
            path=where,
            hint="another program changed it; export into another table",
        ) from error


def encode_ids(ids: Ids) -> str:
    """Encodes the record of our columns."""
    return msgspec.json.encode(sorted(ids.items())).decode()


def ids_of(table: pa.Schema) -> dict[Path, int]:
    """Returns the ids of all columns of a table, also of those within others."""
    return {
        path: int(item.metadata[_FIELD_ID])
        for path, item in _walk(table, ())
        if item.metadata is not None and _FIELD_ID in item.metadata
    }


def places_of(wanted: pa.Schema, known: Ids, table: Ids, *, where: str) -> dict[Path, Path]:
    """Returns where the table has our columns, or will have them; not of those that were dropped.

    Args:
        wanted: Our columns.
        known: The ids of ours.
        table: The ids of the table's.
        where: The table, for errors.

    Raises:
        ConflictError: A column was renamed, and another one has its name.
    """
    by_id = {number: path for path, number in table.items()}
    places: dict[Path, Path] = {(): ()}
    for path, _ in _walk(wanted, ()):
        if path[:-1] not in places:
            continue  # in one that was dropped
        place = (*places[path[:-1]], path[-1])
        if path in known and known[path] not in by_id and place not in table:
            continue
        # Whoever makes a dropped column again by hand wants it filled.
        found = by_id.get(known.get(path, -1), place)
        if found != place and place in table:
            raise ConflictError(
                f"the table's column {'.'.join(place)} was renamed to {'.'.join(found)}, and "
                f"another column is called {'.'.join(place)} now",
                path=where,
                hint="rename the other column, or export into another table",
            )
        places[path] = found
    return places


def to_table(wanted: pa.Schema, places: Mapping[Path, Path]) -> pa.Schema:
    """Returns our columns under the table's names, without those that were dropped."""

    def change(path: Path, item: pa.Field) -> pa.Field | None:
        return item.with_name(places[path][-1]) if path in places else None

    return pa.schema(_rebuilt(wanted, (), change))


def to_ours(schema: pa.Schema, places: Mapping[Path, Path], table: Ids) -> pa.Schema:
    """Returns columns of a table under our names, with their ids."""
    ours = {place: path for path, place in places.items()}

    def change(path: Path, item: pa.Field) -> pa.Field:
        name = ours.get(path, path)[-1]
        metadata = {_FIELD_ID: str(table[path])}
        return pa.field(name, item.type, nullable=item.nullable, metadata=metadata)

    return pa.schema(_rebuilt(schema, (), change))


def _parts(kind: pa.DataType | pa.Schema) -> list[tuple[str, pa.Field]]:
    """Returns the columns within one, under the names that a path has for them."""
    if isinstance(kind, pa.Schema) or pa.types.is_struct(kind):
        return [(item.name, item) for item in kind]
    if is_list(kind):
        return [("element", kind.value_field)]
    if pa.types.is_map(kind):
        return [("key", kind.key_field), ("value", kind.item_field)]
    return []


def _walk(kind: pa.DataType | pa.Schema, path: Path) -> Iterator[tuple[Path, pa.Field]]:
    """Yields all columns, each before those within it."""
    for name, item in _parts(kind):
        yield (*path, name), item
        yield from _walk(item.type, (*path, name))


def _rebuilt(
    kind: pa.DataType | pa.Schema, path: Path, change: Callable[[Path, pa.Field], pa.Field | None]
) -> list[pa.Field]:
    """Returns the columns within one as `change` has them; it is asked for each."""
    found: list[pa.Field] = []
    for name, item in _parts(kind):
        here = (*path, name)
        within = _rebuilt(item.type, here, change)
        if _parts(item.type) and not within:
            continue  # Parquet has nothing without columns
        changed = change(here, item.with_type(_of_parts(item.type, within)))
        if changed is not None:
            found.append(changed)
    return found


def _of_parts(kind: pa.DataType, parts: list[pa.Field]) -> pa.DataType:
    """Returns a type with other columns within it."""
    if pa.types.is_struct(kind):
        return pa.struct(parts)
    if is_list(kind):
        return pa.list_(parts[0])
    return pa.map_(parts[0], parts[1]) if pa.types.is_map(kind) else kind
