"""`ister inspect wal|checkpoint|object`: what is stored, in words or as JSON.

Owns: arguments, output, exit code. Does not own: examining files and objects (`ister.rescue`);
topics are shown by `ister topics describe`.

Exit code 1 means damage, or frames other than the name or the footer of an object promises. A torn
tail is not damage: a crash leaves one, and opening the topic cuts it off. An express object is
shown run by run.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Annotated, Final

from ister.base.clock import SystemClock
from ister.base.model import JsonObject
from ister.base.positions import format_time
from ister.cli.command import Arg, Group, Shown, Table, command
from ister.cli.location import Place, open_bucket
from ister.cli.output import print_table
from ister.config import CloudConfig
from ister.errors import CorruptDataError, InvalidRequestError, NotFoundError
from ister.objectstore.base import ObjectStore
from ister.rescue.examine_files import (
    CHECKPOINT_NAME,
    UPLOADER_CHECKPOINT_NAME,
    FileSurvey,
    Kind,
    Listing,
    Readable,
    TopicSurvey,
    UploaderCheckpoint,
    WalState,
    find_topics,
    load_checkpoint,
    survey,
)
from ister.rescue.examine_object import (
    ObjectFile,
    ObjectSurvey,
    examine_express,
    examine_object,
    open_local,
    open_named,
)

_LISTED_MAX: Final = 1000
"""A list of this length fits into memory."""
_BACKENDS: Final = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "azblob": "azblob"}
"""By the scheme of a URL."""
_LOCAL_SCHEMES: Final = ("fs", "file")
_EXPRESS_SUFFIX: Final = ".dnbx"


def _parse_count(text: str) -> int:
    """A number of frames or an offset, for argparse."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or higher")
    return int(text)


Frames = Annotated[bool, Arg("also list single frames")]
Limit = Annotated[
    int, Arg(f"with --frames: list at most N (default {_LISTED_MAX})", "N", _parse_count)
]
From = Annotated[
    int, Arg("with --frames: start at this offset", "OFFSET", _parse_count, flags=("--from",))
]

INSPECT = Group(
    "inspect",
    "inspect stored files and objects",
    description="Shows what is stored on disk and in the bucket. Reads only, and can run while the "
    "log is in use.",
    examples=(
        "ister inspect wal ./ister-data/wal/default/orders",
        "ister inspect object data-0-999.dnb1 --data ./ister-data",
    ),
    metavar="KIND",
)
INSPECT.moved = {"topic": "use `ister topics describe`"}
register = INSPECT.register


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


@command(INSPECT, "wal")
def inspect_wal(
    path: Annotated[str, Arg("WAL file, topic directory or data directory", "PATH")],
    *,
    frames: Frames = False,
    limit: Limit = _LISTED_MAX,
    from_offset: From = 0,
) -> Shown:
    """Show files, frames, offsets and damage of a write-ahead log.

    Reads WAL files without changing them, even while another process has the log open. Exit code 1
    if there is damage; a torn tail, which a crash leaves, is not damage.

    Examples:
        ister inspect wal ./ister-data/wal
        ister inspect wal ./ister-data/wal/default/orders --frames --limit 10
        ister inspect wal ./ister-data/wal/default/orders/wal.0.log --json
    """
    real = _resolve(path)
    listing = Listing(start_offset=from_offset, remaining=limit if frames else 0)
    if os.path.isdir(real):
        topics = [survey(directory, listing=listing) for directory in find_topics(real)]
    else:
        directory, name = os.path.split(real)
        topics = [survey(directory, only=name, listing=listing)]
    files = [file for topic in topics for file in topic.files]
    damaged = sum(file.is_damaged for file in files)
    error = CorruptDataError(f"damage in {damaged} of {len(files)} files")
    return Shown(
        {
            "files": [_file_as_json(file, with_frames=frames) for file in files],
            "topics": [_topic_as_json(topic) for topic in topics],
        },
        lambda: _print_topics(topics),
        ok=not damaged,
        errors=[error] if damaged else [],
    )


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
        print_table(titles, [(file.name, *_file_cells(file)) for file in topic.files])
        for file in topic.files:
            _print_bad_ranges(file)
        for file in topic.files:
            _print_frames(file)


# -- checkpoint -----------------------------------------------------------------------------


@command(INSPECT, "checkpoint")
def inspect_checkpoint(
    path: Annotated[str, Arg("checkpoint file or topic directory", "PATH")],
) -> Shown:
    """Show the fields of wal.ckpt or uploader.ckpt.

    Shows a checkpoint file, or both checkpoints of a topic directory. Exit code 1 if one is damaged
    or has a newer version.

    Examples:
        ister inspect checkpoint ./ister-data/wal/default/orders
    """
    real = _resolve(path)
    beside: str | None = None
    if os.path.isdir(real):
        beside = os.path.join(real, UPLOADER_CHECKPOINT_NAME)
        real = os.path.join(real, CHECKPOINT_NAME)
    found, uploader = load_checkpoint(real), None
    shown = _checkpoint_as_json(real, found)
    damaged = real if found is None else None
    if beside is not None and not os.path.lexists(beside):
        shown["uploader"] = None  # nothing was uploaded yet
    elif beside is not None:
        uploader = load_checkpoint(beside)
        shown["uploader"] = _checkpoint_as_json(beside, uploader)
        damaged = damaged or (beside if uploader is None else None)
    error = CorruptDataError(
        "the checkpoint is damaged",
        path=damaged,
        hint="opening the topic rebuilds it from the files",
    )
    return Shown(
        shown,
        lambda: _print_checkpoints(found, uploader),
        damaged is None,
        errors=[] if damaged is None else [error],
    )


def _checkpoint_as_json(path: str, found: WalState | UploaderCheckpoint | None) -> JsonObject:
    return {"path": path, "damaged": found is None, **_checkpoint_fields(found)}


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


# -- object ---------------------------------------------------------------------------------


@command(INSPECT, "object", failed={})
def inspect_object(
    place: Place,
    object: Annotated[str, Arg("file, URL, key or object name", "URL-or-PATH")],
    *,
    frames: Frames = False,
    limit: Limit = _LISTED_MAX,
    from_offset: From = 0,
) -> Shown:
    """Show frames, offsets, codec and damage of an object.

    Reads an object without changing it: a local file; a URL such as s3://bucket/key, with
    credentials from the config's options or the environment; or a key or name in the log's bucket.
    Exit code 1 if it is damaged.

    Examples:
        ister inspect object data-0-999.dnb1 --data ./ister-data
        ister inspect object s3://bucket/prefix/key --frames --limit 10 --json
    """
    listing = Listing(start_offset=from_offset, remaining=limit if frames else 0)
    with _opened(object, place) as file:
        path, is_express = file.path, file.path.endswith(_EXPRESS_SUFFIX)
        seen = examine_express(file, listing) if is_express else [examine_object(file, listing)]
    is_whole = not any(one.is_damaged for one in seen)
    shown = [_object_as_json(one, with_frames=frames) for one in seen]
    title = "topic" if is_express else "format"
    titles = (title, "codec", "start", "next", "frames", "bytes", "published", "state")
    rows = [(one.topic if is_express else one.format, *_file_cells(one)) for one in seen]

    def rest() -> None:
        for one in seen:
            if one.kept:
                print(f"messages kept: {one.kept}")
            _print_bad_ranges(one)
            _print_frames(one)

    error = CorruptDataError(f"the object is damaged (path={path})")
    return Shown(
        _express_as_json(path, seen, shown) if is_express else shown[0],
        [path, Table(titles, rows), rest],
        is_whole,
        errors=[] if is_whole else [error],
    )


def _express_as_json(path: str, seen: list[ObjectSurvey], shown: list[JsonObject]) -> JsonObject:
    return {
        "name": path.rpartition("/")[2],
        "path": path,
        "format": "express",
        "frames": sum(run.frames for run in seen),
        "bytes": sum(run.bytes for run in seen),
        "runs": shown,
        "damage": [asdict(bad) for run in seen for bad in run.damage],
        "errors": [],
    }


# -- finding an object ------------------------------------------------------------------------


@contextmanager
def _opened(text: str, place: Place) -> Iterator[Readable]:
    """The object that the argument names.

    Raises:
        NotFoundError: There is none.
        InvalidRequestError: It is not clear which one.
    """
    scheme, is_url, rest = text.partition("://")
    if is_url and scheme in _LOCAL_SCHEMES:
        text, is_url = rest, ""
    if not is_url and os.path.isfile(text):
        with closing(open_local(os.path.realpath(text))) as file:
            yield file
        return
    store, key = _open_url(scheme, rest, place) if is_url else (_open_bucket(text, place), "")
    try:
        yield ObjectFile(store, key) if key else open_named(store, text)
    finally:
        store.close()


def _open_url(scheme: str, rest: str, place: Place) -> tuple[ObjectStore, str]:
    from ister.objectstore.opendal_store import open_store  # noqa: PLC0415 - loads a large library

    backend = _BACKENDS.get(scheme)
    bucket, _, key = rest.partition("/")
    if backend is None or not bucket or not key:
        raise InvalidRequestError(
            "not the URL of an object", hint=f"known are {', '.join(_BACKENDS)}://bucket/key"
        )
    cloud = place.load().storage.cloud if place.is_there else CloudConfig()
    store = open_store(
        backend,
        f"{scheme}://{bucket}",
        # Of the same kind of store, so its credentials and its address are meant for this one.
        cloud.options if cloud.backend.value == backend else _environment_options(backend),
        clock=SystemClock(),
        call_timeout_seconds=float(cloud.call_timeout_seconds),
    )
    return store, key


def _environment_options(backend: str) -> dict[str, str]:
    """Options from the environment: the endpoint of S3, as in AWS's own tools."""
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {"endpoint": address} if backend == "s3" and address else {}


def _open_bucket(text: str, place: Place) -> ObjectStore:
    if not place.is_there:
        raise NotFoundError(
            "file not found",
            path=text,
            hint="pass --data DIR or --config FILE for an object in a log's bucket",
        )
    return open_bucket(place.load().storage, SystemClock())


def _object_as_json(found: ObjectSurvey, *, with_frames: bool) -> JsonObject:
    name = found.promised
    fields: JsonObject = {
        "name": found.name,
        "path": found.path,
        "topic": found.topic or None,
        "start_offset": found.first_offset,
        "next_offset": found.next_offset,
        "format": found.format,
        "kept": found.kept,
        "frames": found.frames,
        "bytes": found.bytes,
        "codec": found.codec,
        "epoch": name.epoch if name is not None else None,
        "publish_time_min": found.publish_time_min,
        "publish_time_max": found.publish_time_max,
        "undecodable": found.undecodable,
        "damage": [asdict(bad) for bad in found.damage],
        "errors": [],
    }
    if name is not None and (found.first_offset, found.next_offset) != (name.start, name.end):
        fields |= {"name_start": name.start, "name_end": name.end}
    if with_frames:
        fields["frame_list"] = [asdict(line) for line in found.listed]
    return fields


# -- for people -----------------------------------------------------------------------------


def _file_cells(file: FileSurvey) -> tuple[object, ...]:
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


def _print_bad_ranges(file: FileSurvey) -> None:
    """One line for each."""
    for bad in file.damage:
        offsets = f"offset {'?' if bad.offset is None else bad.offset}"
        if bad.end_offset is not None:
            offsets += f" up to {bad.end_offset}"
        print(
            f"{bad.kind}: {file.name} position {bad.position} up to {bad.end_position}, "
            f"{offsets}: {bad.reason}"
        )


def _print_frames(file: FileSurvey) -> None:
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
