"""`ister inspect object URL-or-PATH`: the frames or rows of one object, in words or as JSON.

Owns: arguments, output, exit code. Does not own: examining it (`ister.rescue.examine_object`).

An express object is shown run by run. Exit code 1 means damage, or frames other than the name or
the footer promises.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

from ister.base.clock import SystemClock
from ister.base.model import JsonObject
from ister.cli.errors_out import answer, print_json
from ister.cli.location import add_place_arguments, has_place, load_place, open_bucket
from ister.cli.output import Subparsers, add_command, print_error, print_table
from ister.cli.survey_view import (
    add_listing_arguments,
    file_cells,
    make_listing,
    print_bad_ranges,
    print_frames,
)
from ister.config import CloudConfig
from ister.errors import InvalidRequestError, NotFoundError
from ister.objectstore.base import ObjectStore
from ister.rescue.examine_express import survey_express
from ister.rescue.examine_files import File
from ister.rescue.examine_object import (
    ObjectSurvey,
    open_key,
    open_local,
    open_named,
    survey_object,
)

_BACKENDS: Final = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "azblob": "azblob"}
"""By the scheme of a URL."""
_LOCAL_SCHEMES: Final = ("fs", "file")
_EXPRESS_SUFFIX: Final = ".dnbx"


def register(kinds: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        kinds,
        "object",
        help="show frames, offsets, codec and damage of an object",
        description="Reads an object without changing it: a local file; a URL such as "
        "s3://bucket/key, with credentials from the config's options or the environment; or "
        "a key or name in the log's bucket. Exit code 1 if it is damaged.",
        examples=(
            "ister inspect object data-0-999.dnb1 --data ./ister-data",
            "ister inspect object s3://bucket/prefix/key --frames --limit 10 --json",
        ),
    )
    parser.add_argument("object", metavar="URL-or-PATH", help="file, URL, key or object name")
    add_listing_arguments(parser)
    add_place_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return answer(options, lambda: _inspect(options))


def _inspect(options: argparse.Namespace) -> int:
    with _opened(options) as file:
        if file.path.endswith(_EXPRESS_SUFFIX):
            return _show_express(file.path, survey_express(file, make_listing(options)), options)
        seen = survey_object(file, make_listing(options))
    if options.json:
        print_json(_as_json(seen, with_frames=options.frames))
    else:
        _print_object(seen)
    if seen.found.is_damaged:
        print_error(f"the object is damaged (path={seen.found.path})")
    return 1 if seen.found.is_damaged else 0


def _show_express(path: str, seen: list[ObjectSurvey], options: argparse.Namespace) -> int:
    is_damaged = any(run.found.is_damaged for run in seen)
    if options.json:
        print_json(
            {
                "name": path.rpartition("/")[2],
                "path": path,
                "format": "express",
                "frames": sum(run.found.frames for run in seen),
                "bytes": sum(run.found.bytes for run in seen),
                "runs": [_as_json(run, with_frames=options.frames) for run in seen],
                "damage": [asdict(bad) for run in seen for bad in run.found.damage],
                "errors": [],
            }
        )
    else:
        print(path)
        titles = ("topic", "codec", "start", "next", "frames", "bytes", "published", "state")
        print_table(titles, [(run.found.topic, *file_cells(run.found)) for run in seen])
        for run in seen:
            print_bad_ranges(run.found)
            print_frames(run.found)
    if is_damaged:
        print_error(f"the object is damaged (path={path})")
    return 1 if is_damaged else 0


# -- finding it -----------------------------------------------------------------------------


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[File]:
    """The object that the argument names.

    Raises:
        NotFoundError: There is none.
        InvalidRequestError: It is not clear which one.
    """
    text: str = options.object
    scheme, is_url, rest = text.partition("://")
    if is_url and scheme in _LOCAL_SCHEMES:
        text, is_url = rest, ""
    if not is_url and os.path.isfile(text):
        with open_local(os.path.realpath(text)) as file:
            yield file
        return
    store, key = _open_url(scheme, rest, options) if is_url else (_open_bucket(text, options), "")
    try:
        yield open_key(store, key) if key else open_named(store, text)
    finally:
        store.close()


def _open_url(scheme: str, rest: str, options: argparse.Namespace) -> tuple[ObjectStore, str]:
    from ister.objectstore.opendal_store import open_store  # noqa: PLC0415 - loads a large library

    backend = _BACKENDS.get(scheme)
    bucket, _, key = rest.partition("/")
    if backend is None or not bucket or not key:
        raise InvalidRequestError(
            "not the URL of an object", hint=f"known are {', '.join(_BACKENDS)}://bucket/key"
        )
    cloud = load_place(options).storage.cloud if has_place(options) else CloudConfig()
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


def _open_bucket(text: str, options: argparse.Namespace) -> ObjectStore:
    if not has_place(options):
        raise NotFoundError(
            "file not found",
            path=text,
            hint="pass --data DIR or --config FILE for an object in a log's bucket",
        )
    return open_bucket(load_place(options).storage, SystemClock())


# -- output ---------------------------------------------------------------------------------


def _as_json(seen: ObjectSurvey, *, with_frames: bool) -> JsonObject:
    found, name = seen.found, seen.name
    fields: JsonObject = {
        "name": found.name,
        "path": found.path,
        "topic": found.topic or None,
        "start_offset": found.first_offset,
        "next_offset": found.next_offset,
        "format": seen.format,
        "kept": seen.kept,
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


def _print_object(seen: ObjectSurvey) -> None:
    print(seen.found.path)
    titles = ("format", "codec", "start", "next", "frames", "bytes", "published", "state")
    print_table(titles, [(seen.format, *file_cells(seen.found))])
    if seen.kept:
        print(f"messages kept: {seen.kept}")
    print_bad_ranges(seen.found)
    print_frames(seen.found)
