"""The column `text`: payloads decoded as UTF-8.

Not stored and not sent: the reader requests `payload` and derives `text` from it, so it works with
brokers of any version, with frames and with Parquet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from ister.base.model import COLUMNS
from ister.errors import InvalidRequestError
from ister.format.arrow.schema import arrow_schema, as_names, make_batch, repeated_column

TEXT: Final = "text"
"""The payload as a string; null where it is not UTF-8. Present only if requested by name."""


class Projection:
    """Columns that a reader asked for, made of stored ones."""

    def __init__(self, columns: Sequence[str] | None, *, reads: Sequence[str] = ()) -> None:
        """Checks the columns.

        Args:
            columns: Names, `text` among them; None for the usual ones.
            reads: Stored columns to read whether they were asked for or not.

        Raises:
            InvalidRequestError: A name is unknown, or occurs twice.
        """
        names = COLUMNS if columns is None else as_names(columns)
        for name in names:
            if names.count(name) > 1:
                raise repeated_column(name)
        asked = [name for name in names if name != TEXT]
        try:
            fields = {field.name: field for field in arrow_schema(asked)}
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, hint=f"{error.hint}, {TEXT}") from None
        needed = [*asked, *(["payload"] if TEXT in names else []), *reads]
        self.stored: tuple[str, ...] = tuple(dict.fromkeys(needed))
        """What has to be read."""
        self.is_plain = self.stored == names
        """Whether stored columns are all that was asked for."""
        self.schema: pa.Schema = pa.schema(
            [pa.field(TEXT, pa.string()) if name == TEXT else fields[name] for name in names]
        )

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Makes the columns that were asked for of a batch of the stored ones."""
        if self.is_plain:
            return batch
        arrays = [
            decode_text(batch["payload"]) if name == TEXT else batch[name]
            for name in self.schema.names
        ]
        return make_batch(arrays, self.schema, batch.num_rows)


def decode_text(payloads: pa.Array) -> pa.Array:
    """Payloads as strings; null where one is not UTF-8."""
    try:
        return payloads.cast(pa.string())
    except pa.ArrowInvalid:
        # Rare: in most topics all payloads are text, or none is read as text.
        return pa.array([_decoded(payload) for payload in payloads.to_pylist()], pa.string())


def _decoded(payload: bytes | None) -> str | None:
    if payload is None:
        return None
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None
