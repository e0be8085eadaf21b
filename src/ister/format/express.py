"""Express objects: frames of many topics in one object, and the footer that lists them.

    run │ run │ … │ footer │ trailer

    run      frames of one topic, one after the other (`ister.format.frame`)
    footer   JSON: {"name": "<node>/<process>/<sequence>.dnbx", "runs": [{"topic": "/default/a",
             "object_id": …, "start_offset": …, "position": …, "length": …, …}, …]}
    trailer  see `ister.format.footer`; its magic is "ISTERDNX"

A run in the footer has the fields of its descriptor, and its topic: metadata can be rebuilt from
footers alone. A later version may change all but `runs` and `topic`: by these, older releases tell
which topics an object that they cannot read concerns. Runs follow each other from position 0 on,
without anything in between; the last one ends where the footer begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, NamedTuple

from ister.base.limits import EXPRESS_FOOTER_BYTES_MAX
from ister.base.model import TopicName
from ister.errors import CorruptDataError, TopicNameError
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    ObjectDescriptor,
    descriptor_fields,
    descriptor_of,
    parse_run_id,
)
from ister.format.footer import FooterKind, FooterPlace

MAGIC: Final = b"ISTERDNX"
VERSION: Final = 1
FOOTER: Final = FooterKind(MAGIC, VERSION, EXPRESS_FOOTER_BYTES_MAX, "an express object")


class ExpressRun(NamedTuple):
    """The frames of one topic in an express object."""

    topic: TopicName
    descriptor: ObjectDescriptor


def encode_footer(name: str, runs: Sequence[ExpressRun], position: int) -> bytes:
    """The footer and the trailer of an object whose runs end at `position`."""
    footer = json.dumps(
        {
            "name": name,
            "runs": [{"topic": str(run.topic)} | descriptor_fields(run.descriptor) for run in runs],
        },
        separators=(",", ":"),
    ).encode()
    return FOOTER.encode(footer, position)


def decode_footer(data: bytes, place: FooterPlace, *, path: str) -> tuple[str, list[ExpressRun]]:
    """The object's name and its runs.

    Raises:
        CorruptDataError: The footer is damaged; names `path`.
        UnsupportedVersionError: A newer Ister wrote the object.
    """
    FOOTER.check(data, place, path=path)
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


def decode_topics(data: bytes) -> set[TopicName] | None:
    """The topics in the footer of any version; None if they cannot be read."""
    try:
        return {TopicName.parse(one["topic"]) for one in json.loads(data)["runs"]}
    except (ValueError, TypeError, KeyError, RecursionError, TopicNameError):
        return None
