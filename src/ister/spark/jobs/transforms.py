"""What a replay does to messages: a function of the user's, found, called and checked.

    module:function or file.py:function ─► TransformSource ─► pickled to tasks ─► loaded there
    record batch ─► Transform.apply ─► record batches with the staged columns

Owns: how a reference becomes a function, what a function may take and return, and errors that name
the source's offset. Does not own: reading, staging.

There are two kinds of functions. One takes a `pyarrow.RecordBatch` with the connector's columns and
returns one, several, or None. The other takes a `ReplayMessage` and returns what replaces it:

    bytes or text            the payload; everything else stays as it is
    a mapping                fields that differ: {"payload": …, "routing_key": None}
    a ReplayMessage          that message
    None                     nothing: the message is dropped
    a list, or a generator   any number of these

A function is of the first kind if its parameter is annotated with `RecordBatch`, or named `batch`,
unless the caller says which kind it is.

A file is read on the driver and its text is sent to the tasks, so it need not be on other machines.
What it imports has to be; files beside it are found on this machine only.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, TypeAlias

import pyarrow as pa

from ister.base.model import COLUMNS
from ister.errors import InvalidRequestError, IsterError, MessageTooLargeError, NotFoundError
from ister.format.staged_rows import STAGED_COLUMNS, STAGED_SCHEMA
from ister.spark.row_staging import check_staged
from ister.spark.rows import to_staged

Function: TypeAlias = Callable[..., object]
"""A user's function; see the module header."""

MARK: Final = "ister-source-offset"
"""The attribute with the offset of the source's message."""

_ROWS_AT_ONCE: Final = 1024
_OWN_FILE: Final = os.path.abspath(__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayMessage:
    """A message of the source, or one for the target, whose `topic` and `offset` are ignored."""

    topic: str = ""
    offset: int = -1
    payload: bytes
    attributes: Mapping[str, str] = field(default_factory=dict)
    routing_key: str | None = None
    producer_name: str | None = None
    publish_time: datetime | None = None
    """None for the time when it is appended."""
    schema_id: int | None = None
    schema_version: int | None = None

    @property
    def text(self) -> str:
        """The payload as text."""
        return self.payload.decode()

    def replace(self, **fields: Any) -> ReplayMessage:  # noqa: ANN401 - values of all fields
        """Returns a copy with other values."""
        return replace(self, **fields)


# -- finding a function ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSource:
    """The location of a function. Pickled to tasks."""

    function: str
    module: str | None = None
    path: str | None = None
    """Absolute path of the file."""
    text: str | None = field(default=None, repr=False)
    """The text of the file."""
    directory: str
    """Where its imports are searched first."""

    @property
    def identity(self) -> str:
        """Identifies the function, independent of its text."""
        return f"{self.module or self.path}:{self.function}"


def parse_transform(reference: str) -> TransformSource:
    """Parses `module:function` or `path/to/file.py:function`, and reads the file."""
    where, colon, function = reference.rpartition(":")
    if not colon or not where or not function.replace(".", "_").isidentifier():
        raise InvalidRequestError(
            f"invalid transform {reference!r}",
            hint="module:function, or path/to/file.py:function",
        )
    if not where.endswith(".py"):
        return TransformSource(function=function, module=where, directory=os.getcwd())
    path = os.path.abspath(where)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError("the transform's file cannot be read", path=path) from error
    return TransformSource(function=function, path=path, text=text, directory=os.path.dirname(path))


@lru_cache(maxsize=8)
def load_transform(source: TransformSource) -> Function:
    """Imports the function in this process."""
    if source.directory not in sys.path and os.path.isdir(source.directory):
        sys.path.insert(0, source.directory)
    try:
        found: object = _load_file(source) if source.text is not None else _import(source)
        for part in source.function.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise InvalidRequestError(
            f"the transform {source.identity} does not exist", path=source.path, hint=str(error)
        ) from error
    except (Exception, SystemExit) as error:
        raise InvalidRequestError(
            f"the transform {source.identity} cannot be loaded: {type(error).__name__}: {error}",
            path=_place_of(error) or source.path,
        ) from error
    if not callable(found):
        raise InvalidRequestError(f"the transform {source.identity} is not a function")
    function: Function = found
    return function


def _import(source: TransformSource) -> types.ModuleType:
    return importlib.import_module(source.module or "")


def _load_file(source: TransformSource) -> types.ModuleType:
    text = source.text or ""
    digest = hashlib.sha256(f"{source.path}\n{text}".encode()).hexdigest()[:12]
    module = types.ModuleType(f"ister_transform_{digest}")
    module.__file__ = source.path
    # Before it is executed: a dataclass looks up its own module.
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, source.path or "transform", "exec"), module.__dict__)  # noqa: S102
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def identify(function: Function) -> str:
    """Identifies a function, so that the same replay is found again."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or "<" in name:
        raise InvalidRequestError(
            "the transform has no name that identifies the replay",
            hint="name the replay: name='…', or use a function of a module",
        )
    if module == "__main__":
        module = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "__main__")
    return f"{module}:{name}"


def takes_batches(function: Function) -> bool:
    """Returns whether a function takes record batches, not messages."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    if not parameters:
        raise InvalidRequestError(
            "the transform takes no argument", hint="def transform(message): …"
        )
    first = parameters[0]
    if first.annotation is not inspect.Parameter.empty:
        return "RecordBatch" in str(first.annotation)
    return first.name == "batch"


# -- calling it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Transform:
    """A function, and the conversion of what it returns. Pickled to tasks."""

    function: Function | TransformSource | None
    """None to copy messages."""
    per_message: bool | None
    """None if the function's signature shows it."""
    target: str
    is_marked: bool
    """Whether to add the attribute `MARK`."""
    payload_bytes_max: int

    def _load(self) -> Function | None:
        """Loads the function in this process: what a file defines cannot be pickled by name."""
        found = self.function
        return load_transform(found) if isinstance(found, TransformSource) else found

    def check(self) -> None:
        """Checks on the driver that the function can be used."""
        function = self._load()
        if function is not None and self.per_message is None:
            takes_batches(function)

    def apply(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Transforms messages, in order, to batches of the staged columns.

        Args:
            batch: All columns of the connector; not empty.

        Raises:
            InvalidRequestError: The function failed, or returned something invalid; names the
                offset of the message, or of the first one of the batch.
            MessageTooLargeError: A message is too large; likewise.
        """
        function = self._load()
        if function is None:
            yield from self._from_batch(batch, batch)
            return
        per_message = self.per_message
        if per_message is None:
            per_message = not takes_batches(function)
        if per_message:
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield from self._by_message(function, batch.slice(start, _ROWS_AT_ONCE))
        else:
            yield from self._by_batch(function, batch)

    # -- by batch ---------------------------------------------------------------------------

    def _by_batch(self, function: Function, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        first, last = batch["offset"][0].as_py(), batch["offset"][-1].as_py()
        where = f"messages {first} up to {last + 1}"
        try:
            results = _batches_of(function(batch))
            for result in results:
                yield from self._from_batch(result, batch)
        except IsterError as error:
            if error.offset is None:
                error.offset, error.topic = first, _topic_of(batch)
            raise
        except (Exception, SystemExit) as error:
            raise _failed(error, _topic_of(batch), first, where) from error

    def _from_batch(self, result: object, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if not isinstance(result, pa.RecordBatch):
            raise InvalidRequestError(
                f"the transform returned {type(result).__name__}",
                hint="return a pyarrow.RecordBatch, several of them, or None; use --per-message "
                "for a function of messages",
            )
        names = result.schema.names
        unknown = [name for name in names if name not in COLUMNS]
        if unknown or "payload" not in names:
            raise InvalidRequestError(
                f"the transform returned the unknown column {unknown[0]!r}"
                if unknown
                else "the transform returned no column payload",
                hint=f"columns are {', '.join(STAGED_COLUMNS)}",
            )
        if not result.num_rows:
            return
        try:
            rows = to_staged(result, None)
        except pa.ArrowException as error:
            raise InvalidRequestError(f"the transform returned invalid types: {error}") from error
        if self.is_marked:
            rows = _marked(rows, _offsets_of(result, batch))
        check_staged(self.target, rows, payload_bytes_max=self.payload_bytes_max)
        yield rows

    # -- by message -------------------------------------------------------------------------

    def _by_message(self, function: Function, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, object]] = []
        for fields in batch.to_pylist():
            fields["attributes"] = dict(fields["attributes"] or ())
            message = ReplayMessage(**fields)
            try:
                rows.extend(
                    self._as_row(message, result) for result in _messages_of(function(message))
                )
            except IsterError as error:
                error.offset, error.topic = message.offset, message.topic
                raise
            except (Exception, SystemExit) as error:
                raise _failed(
                    error, message.topic, message.offset, f"message {message.offset}"
                ) from error
        if rows:
            staged = pa.RecordBatch.from_pylist(rows, schema=STAGED_SCHEMA)
            try:
                check_staged(self.target, staged, payload_bytes_max=self.payload_bytes_max)
            except IsterError as error:
                error.offset, error.topic = batch["offset"][0].as_py(), _topic_of(batch)
                raise
            yield staged

    def _as_row(self, message: ReplayMessage, result: object) -> dict[str, object]:
        if isinstance(result, ReplayMessage):
            made = result
        elif isinstance(result, bytes | bytearray | memoryview | str):
            made = replace(message, payload=_as_payload(result))
        elif isinstance(result, Mapping):
            unknown = [name for name in result if name not in COLUMNS]
            if unknown:
                raise InvalidRequestError(
                    f"the transform returned the unknown field {unknown[0]!r}",
                    hint=f"fields are {', '.join(STAGED_COLUMNS)}",
                )
            made = replace(message, **result)
        else:
            raise InvalidRequestError(
                f"the transform returned {type(result).__name__}",
                hint="return bytes, text, a mapping of fields, a message, a list of these, or None",
            )
        row: dict[str, object] = {name: getattr(made, name) for name in STAGED_COLUMNS}
        payload = row["payload"] = _as_payload(made.payload)
        if len(payload) > self.payload_bytes_max:
            raise MessageTooLargeError(
                f"the transform returned {len(payload)} bytes; at most {self.payload_bytes_max} "
                "are allowed"
            )
        attributes = dict(made.attributes or {})
        if self.is_marked:
            attributes[MARK] = str(message.offset)
        row["attributes"] = list(attributes.items())
        _check_types(row, attributes)
        return row


def _batches_of(returned: object) -> Iterable[object]:
    if returned is None:
        return ()
    if isinstance(returned, pa.RecordBatch):
        return (returned,)
    if isinstance(returned, pa.Table):
        batches: list[object] = returned.to_batches()
        return batches
    if isinstance(returned, Iterable) and not isinstance(returned, bytes | str | Mapping):
        return returned
    return (returned,)


def _messages_of(returned: object) -> Iterator[object]:
    if returned is None:
        return
    if isinstance(returned, list | tuple | types.GeneratorType):
        for item in returned:
            yield from _messages_of(item)
    else:
        yield returned


def _as_payload(payload: object) -> bytes:
    if isinstance(payload, str):
        return payload.encode()
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload)
    raise InvalidRequestError(
        f"the transform returned a payload that is {type(payload).__name__}",
        hint="bytes or text: json.dumps(…), for example",
    )


def _check_types(row: Mapping[str, object], attributes: Mapping[str, object]) -> None:
    """Checks types that Arrow would convert, or reject with an unclear error."""
    for attribute, text in attributes.items():
        if not isinstance(attribute, str) or not isinstance(text, str):
            raise InvalidRequestError(
                f"the transform returned the attribute {attribute!r}: {text!r}",
                hint="attributes are strings with string values",
            )
    for name, kind in (
        ("routing_key", str),
        ("producer_name", str),
        ("publish_time", datetime),
        ("schema_id", int),
        ("schema_version", int),
    ):
        value = row[name]
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise InvalidRequestError(
                f"the transform returned {type(value).__name__} for {name}",
                hint=f"{name} is {kind.__name__} or None",
            )
    moment = row["publish_time"]
    if isinstance(moment, datetime) and moment.tzinfo is None:
        raise InvalidRequestError(
            "the transform returned a publish_time without a time zone",
            hint="datetime.now(UTC), for example",
        )


def _offsets_of(result: pa.RecordBatch, batch: pa.RecordBatch) -> list[int]:
    """Returns the source's offset of each row that a function returned."""
    if "offset" in result.schema.names:
        offsets: list[int] = result["offset"].to_pylist()
    elif result.num_rows == batch.num_rows:
        offsets = batch["offset"].to_pylist()
    else:
        raise InvalidRequestError(
            "the source messages of the transform's rows are unknown",
            hint="keep the column offset, or omit the mark",
        )
    return offsets


def _marked(rows: pa.RecordBatch, offsets: list[int]) -> pa.RecordBatch:
    marked = [
        [*(item for item in attributes or () if item[0] != MARK), (MARK, str(offset))]
        for attributes, offset in zip(rows["attributes"].to_pylist(), offsets, strict=True)
    ]
    at = rows.schema.get_field_index("attributes")
    kind = rows.schema.field("attributes").type
    return rows.set_column(at, rows.schema.field(at), pa.array(marked, kind))


def _topic_of(batch: pa.RecordBatch) -> str | None:
    topic: str | None = batch["topic"][0].as_py()
    return topic


def _failed(
    error: BaseException, topic: str | None, offset: int, where: str
) -> InvalidRequestError:
    return InvalidRequestError(
        f"the transform failed at {where}: {type(error).__name__}: {error}",
        topic=topic,
        offset=offset,
        path=_place_of(error),
        hint="fix it and run the same command again: it continues where this run ended",
    )


def _place_of(error: BaseException) -> str | None:
    """Returns file and line of the user's code where an error was raised."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.abspath(frame.filename) != _OWN_FILE and "importlib" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
