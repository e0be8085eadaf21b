"""Descriptors: what the metadata store says about an object, as JSON.

    {"object_id": "data-1000-5000.dnb1", "start_offset": 1000, "end_offset": 5000,
     "size": 524288, "etag": null, "created_at": 1703001234, "completed": true,
     "offset_index": [[1000, 0], [2000, 131072]],                         Danube's fields
     "format": "dnb1", "codec": "bincode2", "epoch": 1, "incarnation": "…", "messages": 4001,
     "publish_time_min": 1703001000000, "publish_time_max": 1703001200000,
     "publish_time_index": [0, 1703001100000], "checksum": "crc32:0a1b2c3d",
     "arrival_time_max": 1703001233000}                                         and ours

`end_offset` is inclusive in JSON, as Danube's is, and `end` is exclusive in code: the two are
converted here and nowhere else. A descriptor that Danube itself wrote has its own fields alone and
is read all the same; what it does not say is None.

An object of the format `parquet` has an index entry for each row group (or for every second one,
and so on), at the position of its first page. `kept` is there only if messages of the range were
left out on purpose, `latest-per-key`, or were lost and given up, `readable`. Then `messages` is
less than the range has offsets. `uncompressed_size` is the size of its row groups before
compression, as Parquet's footer has it; it is missing if an earlier Ister wrote the object.

`publish_time_index[i]` is the highest publish time of all messages before `offset_index[i]`, so a
search by time begins at the last entry below the wanted one. Both lists have at most
`OBJECT_INDEX_ENTRIES_MAX` entries, which keeps a descriptor below `DESCRIPTOR_BYTES_MAX`.

A descriptor of the format `express` describes a run in an express object, which many topics share
(`ister.format.express`). Its JSON has the express object's name in `object_id`, and the run's
`position` and `length` in it; in code, `object_id` has all three: `<name>@<position>+<length>`.
Positions of its index count from the run's first byte.

An object of the layout `segments` has its folder in `object_id`: `segments/data-….dnb1`.

Producers set publish times. `arrival_time_max` is when the newest message arrived, by the clock of
the node that accepted it; if unknown, it is left out and `created_at` is used instead.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ister.base.limits import DESCRIPTOR_BYTES_MAX, OBJECT_INDEX_ENTRIES_MAX
from ister.base.model import Codec
from ister.errors import CorruptDataError, UnsupportedVersionError, check

FORMAT_FRAMES: Final = "dnb1"
"""Frames; see `ister.format.frame`."""
FORMAT_PARQUET: Final = "parquet"
"""A Parquet file; see `ister.format.archive`."""
FORMAT_EXPRESS: Final = "express"
"""Frames, as a run in an express object; see `ister.format.express`."""
_FORMATS: Final = (FORMAT_FRAMES, FORMAT_PARQUET, FORMAT_EXPRESS)
KEPT_LATEST: Final = "latest-per-key"
"""Of an object that has only the latest message of each key."""
KEPT_READABLE: Final = "readable"
"""Of an object whose other messages were lost and given up."""

_EXPRESS_NAME: Final = re.compile(r"[0-9A-Za-z_-]{1,64}/[0-9a-f]{16}/[0-9]{20}\.dnbx")
_RUN_ID: Final = re.compile(
    rf"({_EXPRESS_NAME.pattern})@(0|[1-9][0-9]{{0,19}})\+([1-9][0-9]{{0,19}})"
)


class RunId(NamedTuple):
    """The parts of the `object_id` of an `express` descriptor."""

    name: str
    """The express object's name."""
    position: int
    length: int

    def __str__(self) -> str:
        return f"{self.name}@{self.position}+{self.length}"


def parse_run_id(object_id: str) -> RunId | None:
    """Splits the `object_id` of an `express` descriptor; None for other objects."""
    match = _RUN_ID.fullmatch(object_id)
    return None if match is None else RunId(match[1], int(match[2]), int(match[3]))


def is_express_name(name: str) -> bool:
    """Whether an express object can have this name: `<node>/<process>/<sequence>.dnbx`."""
    return _EXPRESS_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectDescriptor:
    """One committed object. Offsets are `start` up to, not including, `end`."""

    object_id: str
    start: int
    end: int
    size_bytes: int
    etag: str | None = None
    created_at: int = 0
    """Seconds since the Unix epoch."""
    completed: bool = True
    offset_index: tuple[tuple[int, int], ...] = ()
    """(offset, position) of some frames, ascending."""
    format: str = FORMAT_FRAMES
    codec: Codec | None = None
    """None where another program wrote it: to be recognised from the first frame."""
    epoch: int = 0
    incarnation: str = ""
    messages: int = 0
    publish_time_min: int | None = None
    """In milliseconds since the Unix epoch."""
    publish_time_max: int | None = None
    publish_time_index: tuple[int, ...] = ()
    checksum: str | None = None
    """Of the whole object, as `crc32:` and eight digits; None where another program wrote it."""
    kept: str = ""
    """Which messages were kept: all of the range if empty; else compaction removed some."""
    arrival_time_max: int | None = None
    """In milliseconds since the Unix epoch."""
    uncompressed_bytes: int | None = None
    """Of Parquet: the size of its row groups before compression; None if unknown."""

    @property
    def arrived_ms(self) -> int | None:
        """The latest possible arrival time of its newest message; None if unknown."""
        if self.arrival_time_max is not None:
            return self.arrival_time_max
        return self.created_at * 1000 or None

    def position_before(self, offset: int) -> tuple[int, int]:
        """The last indexed frame at or before `offset`: (its offset, its position)."""
        at = bisect_right(self.offset_index, offset, key=lambda entry: entry[0])
        return self.offset_index[at - 1] if at else (self.start, 0)

    def position_before_time(self, publish_time_ms: int) -> tuple[int, int]:
        """The last indexed frame before which no message was published at or after the time."""
        if len(self.publish_time_index) != len(self.offset_index):
            return self.start, 0
        at = bisect_left(self.publish_time_index, publish_time_ms)
        return self.offset_index[at - 1] if at else (self.start, 0)


def count_messages(descriptor: ObjectDescriptor) -> int:
    """How many messages an object has; of one that another program wrote, by its range."""
    return descriptor.messages if descriptor.kept else descriptor.end - descriptor.start


def format_checksum(crc: int) -> str:
    """The text form of an object's checksum."""
    return f"crc32:{crc:08x}"


def encode_descriptor(descriptor: ObjectDescriptor) -> bytes:
    """The descriptor's JSON."""
    data = json.dumps(descriptor_fields(descriptor), separators=(",", ":")).encode()
    check(len(data) <= DESCRIPTOR_BYTES_MAX, f"a descriptor of {len(data)} bytes")
    return data


def descriptor_fields(descriptor: ObjectDescriptor) -> dict[str, object]:
    """The fields of a descriptor's JSON."""
    run = parse_run_id(descriptor.object_id)
    check(
        descriptor.start < descriptor.end
        and len(descriptor.offset_index) <= OBJECT_INDEX_ENTRIES_MAX
        and (run is not None) == (descriptor.format == FORMAT_EXPRESS),
        f"not a descriptor: {descriptor}",
    )
    fields: dict[str, object] = {
        "object_id": descriptor.object_id if run is None else run.name,
        "start_offset": descriptor.start,
        "end_offset": descriptor.end - 1,
        "size": descriptor.size_bytes,
        "etag": descriptor.etag,
        "created_at": descriptor.created_at,
        "completed": descriptor.completed,
    }
    if descriptor.offset_index:
        fields["offset_index"] = descriptor.offset_index
    fields |= {
        "format": descriptor.format,
        "codec": descriptor.codec,
        "epoch": descriptor.epoch,
        "incarnation": descriptor.incarnation,
        "messages": descriptor.messages,
        "publish_time_min": descriptor.publish_time_min,
        "publish_time_max": descriptor.publish_time_max,
        "publish_time_index": descriptor.publish_time_index,
        "checksum": descriptor.checksum,
    }
    if run is not None:
        fields |= {"position": run.position, "length": run.length}
    if descriptor.kept:
        fields["kept"] = descriptor.kept
    if descriptor.arrival_time_max is not None:
        fields["arrival_time_max"] = descriptor.arrival_time_max
    if descriptor.uncompressed_bytes is not None:
        fields["uncompressed_size"] = descriptor.uncompressed_bytes
    return fields


def decode_descriptor(data: bytes, *, key: str) -> ObjectDescriptor:
    """Reads a descriptor's JSON.

    Raises:
        CorruptDataError: It is not a descriptor; names the metadata key.
        UnsupportedVersionError: The object has a format that a newer Ister wrote.
    """
    try:
        return descriptor_of(json.loads(data), path=key)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"not a descriptor: {error!r}", path=key) from error


def descriptor_of(fields: Mapping[str, object], *, path: str) -> ObjectDescriptor:
    """The descriptor with the fields of its JSON.

    Raises:
        CorruptDataError: They are not those of a descriptor; names `path`.
        UnsupportedVersionError: The object has a format that a newer Ister wrote.
    """
    try:
        kind = _text(fields.get("format", FORMAT_FRAMES))
        if kind not in _FORMATS:
            raise UnsupportedVersionError(
                f"unsupported object format {kind!r}",
                path=path,
                hint="read it with the newer Ister that wrote it",
            )
        codec = fields.get("codec")
        etag, checksum = fields.get("etag"), fields.get("checksum")
        object_id = str(fields["object_id"])
        if kind == FORMAT_EXPRESS:
            object_id = str(RunId(object_id, _whole(fields["position"]), _whole(fields["length"])))
        descriptor = ObjectDescriptor(
            object_id=object_id,
            start=_whole(fields["start_offset"]),
            end=_whole(fields["end_offset"]) + 1,
            size_bytes=_whole(fields["size"]),
            etag=None if etag is None else _text(etag),
            created_at=_whole(fields.get("created_at", 0)),
            completed=bool(fields.get("completed", True)),
            offset_index=tuple(map(_pair, _entries(fields.get("offset_index")))),
            format=kind,
            codec=None if codec is None else Codec(_text(codec)),
            epoch=_whole(fields.get("epoch", 0)),
            incarnation=str(fields.get("incarnation", "")),
            messages=_whole(fields.get("messages", 0)),
            publish_time_min=_optional(fields.get("publish_time_min")),
            publish_time_max=_optional(fields.get("publish_time_max")),
            publish_time_index=tuple(map(_whole, _entries(fields.get("publish_time_index")))),
            checksum=None if checksum is None else _text(checksum),
            kept=_text(fields.get("kept", "")),
            arrival_time_max=_optional(fields.get("arrival_time_max")),
            uncompressed_bytes=_optional(fields.get("uncompressed_size")),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptDataError(f"not a descriptor: {error!r}", path=path) from error
    run = parse_run_id(descriptor.object_id)
    has_name = (
        "/" not in descriptor.object_id.removeprefix("segments/")
        if kind != FORMAT_EXPRESS
        else run is not None and run.length == descriptor.size_bytes
    )
    if descriptor.start >= descriptor.end or not has_name:
        raise CorruptDataError("descriptor with an invalid range or name", path=path)
    return descriptor


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _entries(value: object) -> list[object]:
    """A list; None counts as an empty one."""
    if not isinstance(value, list | None):
        raise TypeError(f"{value!r} is not a list")
    return value or []


def _pair(value: object) -> tuple[int, int]:
    first, second = _entries(value)
    if type(first) is type(second) is int and first >= 0 <= second:
        return first, second  # without calls: an index has hundreds of pairs
    return _whole(first), _whole(second)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _optional(value: object) -> int | None:
    return None if value is None else _whole(value)
