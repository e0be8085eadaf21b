"""Express objects: frames of many topics in one object, and the footer that lists them.

    run │ run │ … │ footer │ trailer

    run      frames of one topic, one after the other (`ister.format.frame`)
    footer   JSON: {"name": "<node>/<process>/<sequence>.dnbx", "runs": [{"topic": "/default/a",
             "object_id": …, "start_offset": …, "position": …, "length": …, …}, …]}
    trailer  u64 position of the footer · u64 its length · u32 its crc32 · u32 version · "ISTERDNX"

Numbers of the trailer are little endian. A run in the footer has the fields of its descriptor, and
its topic: metadata can be rebuilt from footers alone. Runs follow each other from position 0 on,
without anything in between; the last one ends where the footer begins.

The footer's crc is checked before the version: damage is never mistaken for a newer version.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from ister.errors import CorruptDataError, TopicNameError, UnsupportedVersionError, check
from ister.format.crc import crc32
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    ObjectDescriptor,
    descriptor_fields,
    descriptor_of,
    parse_run_id,
)
from ister.limits import EXPRESS_FOOTER_BYTES_MAX
from ister.model import TopicName

MAGIC: Final = b"ISTERDNX"
VERSION: Final = 1
_TRAILER: Final = struct.Struct("<QQII8s")
TRAILER_BYTES: Final = _TRAILER.size


class ExpressRun(NamedTuple):
    """The frames of one topic in an express object."""

    topic: TopicName
    descriptor: ObjectDescriptor


class FooterPlace(NamedTuple):
    """Where the footer is, and its checksum."""

    position: int
    length: int
    crc: int
    version: int


def encode_footer(name: str, runs: Sequence[ExpressRun], position: int) -> bytes:
    """The footer and the trailer of an object whose runs end at `position`."""
    footer = json.dumps(
        {
            "name": name,
            "runs": [{"topic": str(run.topic)} | descriptor_fields(run.descriptor) for run in runs],
        },
        separators=(",", ":"),
    ).encode()
    check(len(footer) <= EXPRESS_FOOTER_BYTES_MAX, f"a footer of {len(footer)} bytes")
    return footer + _TRAILER.pack(position, len(footer), crc32(footer), VERSION, MAGIC)


def decode_trailer(data: bytes, size_bytes: int, *, path: str) -> FooterPlace:
    """Reads the last bytes of an object of `size_bytes`.

    Raises:
        CorruptDataError: It is not an express object, or it is damaged; names `path`.
    """
    if len(data) != TRAILER_BYTES:
        raise CorruptDataError("not an express object: it is too short", path=path)
    position, length, crc, version, magic = _TRAILER.unpack(data)
    is_whole = position + length + TRAILER_BYTES == size_bytes
    if magic != MAGIC or not is_whole or length > EXPRESS_FOOTER_BYTES_MAX:
        raise CorruptDataError("not an express object: it has no valid trailer", path=path)
    return FooterPlace(position, length, crc, version)


def decode_footer(data: bytes, place: FooterPlace, *, path: str) -> tuple[str, list[ExpressRun]]:
    """The object's name and its runs.

    Raises:
        CorruptDataError: The footer is damaged; names `path`.
        UnsupportedVersionError: A newer Ister wrote the object.
    """
    if len(data) != place.length or crc32(data) != place.crc:
        raise CorruptDataError(
            "damaged express object: the footer's checksum is wrong",
            path=path,
            position=place.position,
        )
    if place.version != VERSION:
        raise UnsupportedVersionError(
            f"unsupported version {place.version} of an express object",
            path=path,
            hint="read it with the newer Ister that wrote it",
        )
    try:
        fields = json.loads(data)
        name = str(fields["name"])
        runs = [
            ExpressRun(TopicName.parse(str(one["topic"])), descriptor_of(one, path=path))
            for one in fields["runs"]
        ]
    except (ValueError, TypeError, KeyError, RecursionError, TopicNameError) as error:
        raise CorruptDataError(
            f"damaged express object: invalid footer: {error!r}", path=path
        ) from error
    position = 0
    for run in runs:
        place_in = parse_run_id(run.descriptor.object_id)
        if (
            run.descriptor.format != FORMAT_EXPRESS
            or place_in is None
            or (place_in.name, place_in.position) != (name, position)
        ):
            raise CorruptDataError(
                "damaged express object: its runs do not follow each other",
                path=path,
                position=position,
            )
        position += place_in.length
    if position != place.position:
        raise CorruptDataError(
            "damaged express object: its runs do not end at the footer", path=path
        )
    return name, runs
