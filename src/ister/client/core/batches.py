"""Messages that are sent together, and the result of each.

A batch is filled under its producer's lock, then sealed, then sent. It is done when each of its
messages has an offset or an error; whoever waits for one of them waits for its batch.

Rows of a batch mostly have offsets that count up, and then the first one is all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ister.errors import InvalidRequestError, IsterError

if TYPE_CHECKING:
    import pyarrow as pa

# What a message takes beside its own bytes, here and on the way: so that many small ones count.
_MESSAGE_BYTES: Final = 128


def as_payload(payload: object) -> bytes:
    """The bytes of a message, as they are now.

    Raises:
        InvalidRequestError: It is something else.
    """
    if type(payload) is bytes:
        return payload
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise InvalidRequestError(
        f"payload must be bytes, not {type(payload).__name__}",
        hint="use .encode(), send_json, or a serializer",
    )


def size_of(payload: bytes, attributes: Mapping[str, str] | None, key: str | None) -> int:
    """Returns the bytes that a message counts as pending.

    Raises:
        InvalidRequestError: An attribute or the key is not a text.
    """
    size = len(payload) + _MESSAGE_BYTES
    if key is not None:
        check_text("routing_key", key)
        size += len(key)
    if attributes is not None:
        if not isinstance(attributes, Mapping):
            raise InvalidRequestError(
                f"attributes must be a mapping, not {type(attributes).__name__}"
            )
        for name, value in attributes.items():
            check_text("an attribute's name", name)
            check_text(f"attribute {name!r}", value)
            size += len(name) + len(value) + _MESSAGE_BYTES
    return size


def check_text(what: str, value: object) -> None:
    """Raises InvalidRequestError if a value is not a text that can be sent."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{what} must be a str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not valid Unicode") from error


class Batch:
    """See the module header. Not thread-safe: the producer's lock is held for every call."""

    __slots__ = (
        "_callbacks",
        "_keys",
        "_more",
        "_outcomes",
        "_payloads",
        "_start",
        "_undecided",
        "columns",
        "is_done",
        "is_seen",
        "rows",
        "size_bytes",
        "topic",
    )

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.rows = 0
        self.size_bytes = 0
        self.columns: frozenset[str] = frozenset()
        """Which columns it needs beside the payload."""
        self.is_done = False
        self.is_seen = False
        """Whether an error in it was reported."""
        self._payloads: list[bytes] = []
        self._more: dict[str, dict[int, object]] = {}
        self._undecided = 0
        self._start = -1
        self._outcomes: dict[int, int | IsterError] = {}
        self._callbacks: list[Callable[[], None]] = []

    # -- filling ----------------------------------------------------------------------------

    def add(
        self,
        payload: bytes,
        size_bytes: int,
        *,
        attributes: Mapping[str, str] | None,
        routing_key: str | None,
        schema_id: int | None,
        schema_version: int | None,
    ) -> int:
        """Takes a message; returns its row."""
        row = self.rows
        self._payloads.append(payload)
        if attributes:
            self._put("attributes", row, tuple(attributes.items()))
        if routing_key is not None:
            self._put("routing_key", row, routing_key)
        if schema_id is not None:
            self._put("schema_id", row, schema_id)
        if schema_version is not None:
            self._put("schema_version", row, schema_version)
        self.rows = row + 1
        self._undecided += 1
        self.size_bytes += size_bytes
        return row

    def _put(self, column: str, row: int, value: object) -> None:
        values = self._more.get(column)
        if values is None:
            values = self._more[column] = {}
            self.columns |= {column}
        values[row] = value

    # -- sending ----------------------------------------------------------------------------

    def to_arrow(self, schema: pa.Schema, first: int, rows: int) -> pa.RecordBatch:
        """Some of its rows, with the columns of a schema."""
        import pyarrow as pa  # noqa: PLC0415 - an extra

        end = first + rows
        columns = []
        for field in schema:
            if field.name == "payload":
                values: Sequence[object] = self._payloads[first:end]
            else:
                given = self._more.get(field.name, {})
                values = [given.get(row) for row in range(first, end)] if given else [None] * rows
            columns.append(pa.array(values, field.type))
        return pa.record_batch(columns, schema=schema)

    # -- what became of it ------------------------------------------------------------------

    def place(self, first: int, rows: int, offset: int) -> list[Callable[[], None]]:
        """Records the offsets of rows, which ascend; returns the callbacks if it is done."""
        if rows == self.rows:
            self._start = offset
        else:
            self._outcomes.update((first + row, offset + row) for row in range(rows))
        return self._decide(rows)

    def fail(self, first: int, rows: int, error: IsterError) -> list[Callable[[], None]]:
        """Records that some rows failed; returns the callbacks if it is done."""
        self._outcomes.update((row, error) for row in range(first, first + rows))
        return self._decide(rows)

    def give_up(self, error: IsterError) -> list[Callable[[], None]]:
        """Records that all rows without a result failed; returns the callbacks."""
        if self.is_done:
            return []
        undecided = [row for row in range(self.rows) if row not in self._outcomes]
        self._outcomes.update(dict.fromkeys(undecided, error))
        return self._decide(len(undecided))

    def _decide(self, rows: int) -> list[Callable[[], None]]:
        self._undecided -= rows
        if self._undecided:
            return []
        self.is_done = True
        # Release the messages: a future that is kept must not keep them.
        self._payloads, self._more = [], {}
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def when_done(self, callback: Callable[[], None]) -> bool:
        """Calls a function once the batch is done; False if it is done already."""
        if self.is_done:
            return False
        self._callbacks.append(callback)
        return True

    def forget(self, callback: Callable[[], None]) -> None:
        """Removes a callback."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    @property
    def failure(self) -> IsterError | None:
        """Returns the error of one of its messages, or None."""
        return next((one for one in self._outcomes.values() if isinstance(one, IsterError)), None)

    def outcome(self, row: int) -> int | IsterError:
        """The offset of a message, or why it has none. The batch has to be done."""
        if self._start >= 0:
            return self._start + row
        found = self._outcomes[row]
        if isinstance(found, IsterError):
            self.is_seen = True
        return found
