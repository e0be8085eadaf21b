"""Staged files: rows of many topics on their way from a Spark task, and where each topic's are.

    staged file   segment │ segment │ … │ footer │ trailer
    segment       rows of one topic (`ister.format.staged_rows`)
    footer        JSON: {"topics": {"/default/a": [[position, length, rows], …], …}}
    trailer       see `ister.format.footer`; its magic is "ISTERSTG"

A task writes one file. A reader of rows gets their segments from a manifest
(`ister.format.manifest`). The footer is needed to remove the file: it may be removed when no topic
in it has a batch that needs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final, NamedTuple

from ister.base.limits import STAGED_FOOTER_BYTES_MAX
from ister.base.model import TopicName
from ister.errors import CorruptDataError, TopicNameError
from ister.format.footer import FooterKind, FooterPlace

FOOTER: Final = FooterKind(b"ISTERSTG", 1, STAGED_FOOTER_BYTES_MAX, "a staged file")


class StagedSegment(NamedTuple):
    """Rows of one topic that follow each other in a staged file."""

    topic: str
    position: int
    length: int
    rows: int


def encode_footer(segments: Iterable[StagedSegment], position: int) -> bytes:
    """Returns the footer and the trailer of a staged file whose segments end at `position`."""
    topics: dict[str, list[list[int]]] = {}
    for segment in segments:
        place = [segment.position, segment.length, segment.rows]
        topics.setdefault(segment.topic, []).append(place)
    footer = json.dumps({"topics": topics}, separators=(",", ":")).encode()
    return FOOTER.encode(footer, position)


def decode_footer(data: bytes, place: FooterPlace, *, path: str) -> list[StagedSegment]:
    """Returns the segments of a staged file, by topic.

    Raises:
        CorruptDataError: The footer is damaged; names `path`.
        UnsupportedVersionError: A newer Ister wrote the file.
    """
    FOOTER.check(data, place, path=path)
    try:
        return [
            StagedSegment(str(TopicName.parse(topic)), int(position), int(length), int(rows))
            for topic, segments in json.loads(data)["topics"].items()
            for position, length, rows in segments
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptDataError(
            f"damaged staged file: invalid footer: {error!r}", path=path
        ) from error
    except TopicNameError as error:
        raise CorruptDataError(
            f"damaged staged file: invalid footer: {error.message}", path=path
        ) from error
