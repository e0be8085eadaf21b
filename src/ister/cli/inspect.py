"""`ister inspect wal|checkpoint PATH`: what is on disk, in words or as JSON.

Owns: arguments, output, exit code. Does not own: finding it out (`survey`), the formats.

Exit code 1 means that damage was found. A torn tail is none: a crash leaves one, and opening the
topic cuts it off.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from ister.cli.survey import FileSurvey, Kind, Listing, TopicSurvey, find_topics, survey
from ister.cli.table import format_table
from ister.errors import CorruptDataError, NotFoundError
from ister.format.checkpoint import (
    UploaderCheckpoint,
    WalState,
    decode_uploader_checkpoint,
    decode_wal_checkpoint,
)
from ister.fs.local import LocalFileSystem
from ister.limits import CHECKPOINT_BYTES_MAX
from ister.wal.directory import CHECKPOINT_NAME

if TYPE_CHECKING:
    # argparse has no public name for it.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

__all__ = ["register"]

_LISTED_FRAMES_DEFAULT: Final = 1000
"""Enough to look at, and a list that fits into memory and onto a screen with a pager."""


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("inspect", help="show what is on disk")
    kinds = parser.add_subparsers(metavar="KIND", required=True)

    wal = kinds.add_parser(
        "wal",
        help="files, frames, offsets and damage of a write-ahead log",
        description="Reads WAL files without changing them, also while the log is open elsewhere. "
        "Exit code 1 if there is damage; a torn tail, which a crash leaves, is none.",
    )
    wal.add_argument("path", metavar="PATH", help="a WAL file, a topic's or a data directory")
    wal.add_argument("--json", action="store_true", help="one JSON object")
    wal.add_argument("--frames", action="store_true", help="list single frames too")
    wal.add_argument(
        "--limit",
        type=_count,
        default=_LISTED_FRAMES_DEFAULT,
        metavar="N",
        help=f"with --frames: list at most N (default {_LISTED_FRAMES_DEFAULT})",
    )
    wal.add_argument(
        "--from",
        dest="from_offset",
        type=_count,
        default=0,
        metavar="OFFSET",
        help="with --frames: begin at this offset",
    )
    wal.set_defaults(run=_run_wal)

    checkpoint = kinds.add_parser(
        "checkpoint",
        help="the fields of wal.ckpt or uploader.ckpt",
        description="Shows a checkpoint. Exit code 1 if it is damaged or of a newer version.",
    )
    checkpoint.add_argument("path", metavar="PATH", help="the file, or a topic's directory")
    checkpoint.add_argument("--json", action="store_true", help="one JSON object")
    checkpoint.set_defaults(run=_run_checkpoint)


def _count(text: str) -> int:
    """A number of frames or an offset, for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _resolve(path: str) -> str:
    """The real path: files of a log are never opened through a link, what a user names may be one.

    Raises:
        NotFoundError: There is nothing, or no regular file or directory.
    """
    real = os.path.realpath(path)
    try:
        mode = os.stat(real).st_mode
    except OSError as error:
        raise NotFoundError(f"cannot look at it: {error.strerror}", path=path) from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        # Opening a pipe would wait for somebody to write to it.
        raise NotFoundError("neither a file nor a directory", path=path)
    return real


# -- wal ------------------------------------------------------------------------------------


def _run_wal(options: argparse.Namespace) -> int:
    path = _resolve(options.path)
    listing = Listing(
        start_offset=options.from_offset, remaining=options.limit if options.frames else 0
    )
    if os.path.isdir(path):
        topics = [survey(directory, listing=listing) for directory in find_topics(path)]
    else:
        directory, name = os.path.split(path)
        topics = [survey(directory, only=name, listing=listing)]
    files = [file for topic in topics for file in topic.files]
    if options.json:
        print(
            json.dumps(
                {
                    "files": [_file_as_json(file, with_frames=options.frames) for file in files],
                    "topics": [_topic_as_json(topic) for topic in topics],
                }
            )
        )
    else:
        _print_topics(topics)
    damaged = sum(file.is_damaged for file in files)
    if damaged:
        print(f"ister: damage in {damaged} of {len(files)} files", file=sys.stderr)
    return 1 if damaged else 0


def _file_as_json(file: FileSurvey, *, with_frames: bool) -> dict[str, Any]:
    fields = asdict(file)
    listed = fields.pop("listed")
    if with_frames:
        fields["frame_list"] = listed
    return fields


def _topic_as_json(topic: TopicSurvey) -> dict[str, Any]:
    state = topic.state
    return {
        "topic": topic.topic,
        "path": topic.path,
        "checkpoint": topic.checkpoint,
        "synced": state.synced if state is not None else None,
        "ack": state.ack if state is not None else None,
        "is_poisoned": state.is_poisoned if state is not None else None,
        "files": [file.name for file in topic.files],
    }


def _print_topics(topics: list[TopicSurvey]) -> None:
    if not topics:
        print("no topics")
    for number, topic in enumerate(topics):
        if number:
            print()
        state = topic.state
        print(f"{topic.topic}  {topic.path}")
        if state is None:
            print(f"checkpoint: {topic.checkpoint}")
        else:
            poisoned = ", a sync failed: frames above are not trusted" if state.is_poisoned else ""
            print(f"checkpoint: synced {state.synced}, ack {state.ack}{poisoned}")
        if not topic.files:
            print("no files: nothing was appended yet")
            continue
        titles = ("file", "codec", "first", "next", "frames", "bytes", "published", "state")
        print(format_table(titles, [_file_as_row(file) for file in topic.files]))
        for file in topic.files:
            _print_bad_ranges(file)
        for file in topic.files:
            _print_frames(file)


def _file_as_row(file: FileSurvey) -> tuple[object, ...]:
    published = None
    if file.publish_time_min is not None:
        published = f"{_time(file.publish_time_min)} … {_time(file.publish_time_max)}"
    kinds = {bad.kind for bad in file.damage}
    if file.is_missing:
        state = "MISSING"
    elif Kind.DAMAGE in kinds:
        state = "DAMAGED"
    else:
        state = "torn tail" if kinds else "whole"
    if file.undecodable:
        state += f", {file.undecodable} bodies are no {file.codec or ''} messages"
    return (
        file.name,
        file.codec,
        file.first_offset,
        file.next_offset,
        file.frames,
        file.bytes,
        published,
        state,
    )


def _print_bad_ranges(file: FileSurvey) -> None:
    for bad in file.damage:
        offsets = f"offset {'?' if bad.offset is None else bad.offset}"
        if bad.end_offset is not None:
            offsets += f" up to {bad.end_offset}"
        print(
            f"{bad.kind}: {file.name} position {bad.position} up to {bad.end_position}, "
            f"{offsets}: {bad.reason}"
        )


def _print_frames(file: FileSurvey) -> None:
    if not file.listed:
        return
    print(f"\nframes of {file.name}")
    rows = [
        (line.offset, line.position, line.size, _time(line.publish_time), line.producer)
        for line in file.listed
    ]
    print(format_table(("offset", "position", "size", "published", "producer"), rows))


def _time(milliseconds: int | None) -> str | None:
    """A point in time for people; a number where the calendar ends."""
    if milliseconds is None:
        return None
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return str(milliseconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- checkpoint -----------------------------------------------------------------------------


def _run_checkpoint(options: argparse.Namespace) -> int:
    path = _resolve(options.path)
    if os.path.isdir(path):
        path = os.path.join(path, CHECKPOINT_NAME)
    file = LocalFileSystem().open_read(path)
    try:
        data = file.read_at(0, CHECKPOINT_BYTES_MAX + 1)
    finally:
        file.close()
    is_whole = len(data) <= CHECKPOINT_BYTES_MAX
    found = decode_wal_checkpoint(data) or decode_uploader_checkpoint(data) if is_whole else None
    fields = _checkpoint_fields(found)
    if options.json:
        print(json.dumps({"path": path, "damaged": found is None, **fields}))
    elif found is not None:
        for name, value in fields.items():
            if isinstance(value, list):
                print(f"{name}: {len(value)}")
                for item in value:
                    print("  " + ", ".join(f"{key} {entry}" for key, entry in item.items()))
            else:
                print(f"{name}: {'-' if value is None else value}")
    if found is None:
        raise CorruptDataError(
            "the checkpoint is damaged",
            path=path,
            hint="it is a hint: opening the topic works from the files and writes a new one",
        )
    return 0


def _checkpoint_fields(found: WalState | UploaderCheckpoint | None) -> dict[str, Any]:
    """The fields of either kind, Danube's and Ister's beside each other."""
    if isinstance(found, WalState):
        own = asdict(found)
        danube = own.pop("checkpoint")
        return {"kind": "wal", **own, **danube, "rotated_files": list(danube["rotated_files"])}
    if isinstance(found, UploaderCheckpoint):
        return {"kind": "uploader", **asdict(found)}
    return {"kind": None}
