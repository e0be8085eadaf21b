"""`ister inspect wal|checkpoint PATH`: what is on disk, in words or as JSON.

Owns: arguments, output, exit code. Does not own: examining files (`ister.rescue`), the other kinds
(`inspect_object`, `inspect_topic`).

Exit code 1 means damage. A torn tail is not damage: a crash leaves one, and opening the topic cuts
it off.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
from dataclasses import asdict

from ister.base.model import JsonObject
from ister.cli import inspect_object, inspect_topic
from ister.cli.output import Subparsers, add_command, print_error, print_table
from ister.cli.survey_view import (
    add_listing_arguments,
    file_cells,
    make_listing,
    print_bad_ranges,
    print_frames,
)
from ister.errors import CorruptDataError, NotFoundError
from ister.rescue.examine_files import (
    CHECKPOINT_NAME,
    UPLOADER_CHECKPOINT_NAME,
    FileSurvey,
    TopicSurvey,
    UploaderCheckpoint,
    WalState,
    find_topics,
    load_checkpoint,
    survey,
)


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "inspect",
        help="inspect stored files, objects and topics",
        description="Shows what is stored on disk and in the bucket. Reads only, and can run "
        "while the log is in use.",
        examples=(
            "ister inspect topic /default/orders",
            "ister inspect wal ./ister-data/wal/default/orders",
        ),
    )
    kinds = parser.add_subparsers(metavar="KIND", required=True)

    wal = add_command(
        kinds,
        "wal",
        help="show files, frames, offsets and damage of a write-ahead log",
        description="Reads WAL files without changing them, even while another process has "
        "the log open. Exit code 1 if there is damage; a torn tail, which a crash leaves, is "
        "not damage.",
        examples=(
            "ister inspect wal ./ister-data/wal",
            "ister inspect wal ./ister-data/wal/default/orders --frames --limit 10",
            "ister inspect wal ./ister-data/wal/default/orders/wal.0.log --json",
        ),
    )
    wal.add_argument("path", metavar="PATH", help="WAL file, topic directory or data directory")
    wal.add_argument("--json", action="store_true", help="print one JSON object")
    add_listing_arguments(wal)
    wal.set_defaults(run=_run_wal)

    checkpoint = add_command(
        kinds,
        "checkpoint",
        help="show the fields of wal.ckpt or uploader.ckpt",
        description="Shows a checkpoint file, or both checkpoints of a topic directory. Exit "
        "code 1 if one is damaged or has a newer version.",
        examples=("ister inspect checkpoint ./ister-data/wal/default/orders",),
    )
    checkpoint.add_argument("path", metavar="PATH", help="checkpoint file or topic directory")
    checkpoint.add_argument("--json", action="store_true", help="print one JSON object")
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
        raise NotFoundError(f"cannot read {path}: {error.strerror}", path=path) from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        # Opening a pipe would wait for a writer.
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


def _file_as_json(file: FileSurvey, *, with_frames: bool) -> JsonObject:
    fields = asdict(file)
    listed = fields.pop("listed")
    if with_frames:
        fields["frame_list"] = listed
    return fields


def _topic_as_json(topic: TopicSurvey) -> JsonObject:
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
            print("no files: the topic is empty")
            continue
        titles = ("file", "codec", "first", "next", "frames", "bytes", "published", "state")
        print_table(titles, [(file.name, *file_cells(file)) for file in topic.files])
        for file in topic.files:
            print_bad_ranges(file)
        for file in topic.files:
            print_frames(file)


# -- checkpoint -----------------------------------------------------------------------------


def _run_checkpoint(options: argparse.Namespace) -> int:
    path = _resolve(options.path)
    beside: str | None = None
    if os.path.isdir(path):
        beside = os.path.join(path, UPLOADER_CHECKPOINT_NAME)
        path = os.path.join(path, CHECKPOINT_NAME)
    found, uploader = load_checkpoint(path), None
    shown: JsonObject = {"path": path, "damaged": found is None, **_checkpoint_fields(found)}
    damaged = path if found is None else None
    if beside is not None and not os.path.lexists(beside):
        shown["uploader"] = None  # nothing was uploaded yet
    elif beside is not None:
        uploader = load_checkpoint(beside)
        shown["uploader"] = {
            "path": beside,
            "damaged": uploader is None,
            **_checkpoint_fields(uploader),
        }
        damaged = damaged or (beside if uploader is None else None)
    if options.json:
        print(json.dumps(shown))
    else:
        _print_checkpoints(found, uploader)
    if damaged is not None:
        raise CorruptDataError(
            "the checkpoint is damaged",
            path=damaged,
            hint="opening the topic rebuilds it from the files",
        )
    return 0


def _print_checkpoints(*checkpoints: WalState | UploaderCheckpoint | None) -> None:
    for number, found in enumerate(checkpoints):
        if found is None:
            continue
        if number:
            print()
        for name, value in _checkpoint_fields(found).items():
            if isinstance(value, list):
                print(f"{name}: {len(value)}")
                for item in value:
                    print("  " + ", ".join(f"{key} {entry}" for key, entry in item.items()))
            else:
                print(f"{name}: {'-' if value is None else value}")


def _checkpoint_fields(found: WalState | UploaderCheckpoint | None) -> JsonObject:
    """The fields of either kind, Danube's and Ister's beside each other."""
    if isinstance(found, WalState):
        own = asdict(found)
        danube = own.pop("checkpoint")
        return {"kind": "wal", **own, **danube, "rotated_files": list(danube["rotated_files"])}
    if isinstance(found, UploaderCheckpoint):
        return {"kind": "uploader", **asdict(found)}
    return {"kind": None}
