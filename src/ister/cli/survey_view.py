"""Prints the results of a survey: bad ranges, single frames, times."""

from __future__ import annotations

import argparse
from typing import Final

from ister.base.positions import format_time
from ister.cli.output import print_table
from ister.rescue.examine_files import FileSurvey, Kind, Listing

_LISTED_FRAMES_DEFAULT: Final = 1000
"""A list of this length fits into memory."""


def add_listing_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--frames`, `--limit` and `--from`."""
    parser.add_argument("--frames", action="store_true", help="also list single frames")
    parser.add_argument(
        "--limit",
        type=_count,
        default=_LISTED_FRAMES_DEFAULT,
        metavar="N",
        help=f"with --frames: list at most N (default {_LISTED_FRAMES_DEFAULT})",
    )
    parser.add_argument(
        "--from",
        dest="from_offset",
        type=_count,
        default=0,
        metavar="OFFSET",
        help="with --frames: start at this offset",
    )


def make_listing(options: argparse.Namespace) -> Listing:
    """Which frames the arguments ask for."""
    return Listing(
        start_offset=options.from_offset, remaining=options.limit if options.frames else 0
    )


def _count(text: str) -> int:
    """A number of frames or an offset, for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or higher")
    return int(text)


def file_cells(file: FileSurvey) -> tuple[object, ...]:
    """The cells of a file's row: codec, first, next, frames, bytes, published, state."""
    return (
        file.codec,
        file.first_offset,
        file.next_offset,
        file.frames,
        file.bytes,
        _format_published(file),
        _format_state(file),
    )


def _format_state(file: FileSurvey) -> str:
    """Whether a file is whole, in a word or two."""
    kinds = {bad.kind for bad in file.damage}
    if Kind.GIVEN_UP in kinds and Kind.DAMAGE not in kinds:
        state = "given up"
    elif file.is_missing:
        state = "MISSING"
    elif Kind.DAMAGE in kinds:
        state = "DAMAGED"
    else:
        state = "torn tail" if kinds else "whole"
    if file.undecodable:
        state += f", {file.undecodable} bodies cannot be decoded as {file.codec or 'messages'}"
    return state


def _format_published(file: FileSurvey) -> str | None:
    """From when to when the messages of a file were published."""
    first, last = file.publish_time_min, file.publish_time_max
    if first is None or last is None:
        return None
    return f"{format_time(first)} … {format_time(last)}"


def print_bad_ranges(file: FileSurvey) -> None:
    """One line for each."""
    for bad in file.damage:
        offsets = f"offset {'?' if bad.offset is None else bad.offset}"
        if bad.end_offset is not None:
            offsets += f" up to {bad.end_offset}"
        print(
            f"{bad.kind}: {file.name} position {bad.position} up to {bad.end_position}, "
            f"{offsets}: {bad.reason}"
        )


def print_frames(file: FileSurvey) -> None:
    """The frames that were listed, if any."""
    if not file.listed:
        return
    print()
    rows = [
        (
            line.offset,
            line.position,
            line.size,
            None if line.publish_time is None else format_time(line.publish_time),
            line.producer,
        )
        for line in file.listed
    ]
    print_table(
        ("offset", "position", "size", "published", "producer"),
        rows,
        title=f"frames of {file.name}",
    )
