"""`ister inspect wal|checkpoint PATH`: what is on disk, in words or as JSON.

Owns: arguments, output, exit code. Does not own: finding it out (`survey`), the formats, the other
kinds (`inspect_object`, `inspect_topic`).

Exit code 1 means that damage was found. A torn tail is none: a crash leaves one, and opening the
topic cuts it off.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ister.cli import inspect_object, inspect_topic
from ister.cli.look import add_command, print_error, print_table
from ister.cli.survey import FileSurvey, TopicSurvey, find_topics, survey
from ister.cli.survey_view import (
    add_listing_arguments,
    format_published,
    format_state,
    make_listing,
    print_bad_ranges,
    print_frames,
)
from ister.errors import CorruptDataError, NotFoundError
from ister.format.checkpoint import (
    UploaderCheckpoint,
    WalState,
    decode_uploader_checkpoint,
    decode_wal_checkpoint,
)
from ister.fs.local import LocalFileSystem
from ister.limits import CHECKPOINT_BYTES_MAX
from ister.wal.directory import CHECKPOINT_NAME, UPLOADER_CHECKPOINT_NAME

if TYPE_CHECKING:
    # argparse has no public name for it.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

__all__ = ["register"]


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "inspect",
        help="look at files, objects and topics as they are stored",
        description="Shows what is on disk and in the bucket, byte by byte if need be. Reads "
        "only, also while the log is in use.",
        examples=(
            "ister inspect topic /default/orders",
            "ister inspect wal ./ister-data/wal/default/orders",
        ),
    )
    kinds = parser.add_subparsers(metavar="KIND", required=True)

    wal = add_command(
        kinds,
        "wal",
        help="files, frames, offsets and damage of a write-ahead log",
        description="Reads WAL files without changing them, also while the log is open elsewhere. "
        "Exit code 1 if there is damage; a torn tail, which a crash leaves, is none.",
        examples=(
            "ister inspect wal ./ister-data/wal",
            "ister inspect wal ./ister-data/wal/default/orders --frames --limit 10",
            "ister inspect wal ./ister-data/wal/default/orders/wal.0.log --json",
        ),
    )
    wal.add_argument("path", metavar="PATH", help="a WAL file, a topic's or a data directory")
    wal.add_argument("--json", action="store_true", help="one JSON object")
    add_listing_arguments(wal)
    wal.set_defaults(run=_run_wal)

    checkpoint = add_command(
        kinds,
        "checkpoint",
        help="the fields of wal.ckpt or uploader.ckpt",
        description="Shows a checkpoint; of a topic's directory, both. Exit code 1 if one is "
        "damaged or of a newer version.",
        examples=("ister inspect checkpoint ./ister-data/wal/default/orders",),
    )
    checkpoint.add_argument("path", metavar="PATH", help="the file, or a topic's directory")
    checkpoint.add_argument("--json", action="store_true", help="one JSON object")
    checkpoint.set_defaults(run=_run_checkpoint)

    inspect_object.register(kinds)
    inspect_topic.register(kinds)


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
    listing = make_listing(options)
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
        print_error(f"damage in {damaged} of {len(files)} files")
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
        print_table(titles, [_file_as_row(file) for file in topic.files])
        for file in topic.files:
            print_bad_ranges(file)
        for file in topic.files:
            print_frames(file)


def _file_as_row(file: FileSurvey) -> tuple[object, ...]:
    return (
        file.name,
        file.codec,
        file.first_offset,
        file.next_offset,
        file.frames,
        file.bytes,
        format_published(file),
        format_state(file),
    )


# -- checkpoint -----------------------------------------------------------------------------


def _run_checkpoint(options: argparse.Namespace) -> int:
    path = _resolve(options.path)
    beside: str | None = None
    if os.path.isdir(path):
        beside = os.path.join(path, UPLOADER_CHECKPOINT_NAME)
        path = os.path.join(path, CHECKPOINT_NAME)
    found = _load_checkpoint(path)
    shown: dict[str, Any] = {
        "path": path,
        "damaged": found is None,
        **_checkpoint_fields(found),
    }
    damaged = path if found is None else None
    if beside is not None and not os.path.lexists(beside):
        shown["uploader"] = None  # nothing was uploaded yet
    elif beside is not None:
        uploader = _load_checkpoint(beside)
        shown["uploader"] = {
            "path": beside,
            "damaged": uploader is None,
            **_checkpoint_fields(uploader),
        }
        damaged = damaged or (beside if uploader is None else None)
    if options.json:
        print(json.dumps(shown))
    else:
        _print_checkpoints(shown)
    if damaged is not None:
        raise CorruptDataError(
            "the checkpoint is damaged",
            path=damaged,
            hint="it is a hint: opening the topic works from the files and writes a new one",
        )
    return 0


def _load_checkpoint(path: str) -> WalState | UploaderCheckpoint | None:
    """A checkpoint of either kind; None if it is damaged."""
    file = LocalFileSystem().open_read(path)
    try:
        data = file.read_at(0, CHECKPOINT_BYTES_MAX + 1)
    finally:
        file.close()
    if len(data) > CHECKPOINT_BYTES_MAX:
        return None
    return decode_wal_checkpoint(data) or decode_uploader_checkpoint(data)


def _print_checkpoints(shown: dict[str, Any]) -> None:
    uploader = shown.pop("uploader", None)
    for number, fields in enumerate((shown, uploader)):
        if fields is None or fields.pop("damaged"):
            continue
        if number:
            print()
        del fields["path"]
        for name, value in fields.items():
            if isinstance(value, list):
                print(f"{name}: {len(value)}")
                for item in value:
                    print("  " + ", ".join(f"{key} {entry}" for key, entry in item.items()))
            else:
                print(f"{name}: {'-' if value is None else value}")


def _checkpoint_fields(found: WalState | UploaderCheckpoint | None) -> dict[str, Any]:
    """The fields of either kind, Danube's and Ister's beside each other."""
    if isinstance(found, WalState):
        own = asdict(found)
        danube = own.pop("checkpoint")
        return {"kind": "wal", **own, **danube, "rotated_files": list(danube["rotated_files"])}
    if isinstance(found, UploaderCheckpoint):
        return {"kind": "uploader", **asdict(found)}
    return {"kind": None}
