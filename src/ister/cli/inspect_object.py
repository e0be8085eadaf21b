"""`ister inspect object URL-or-PATH`: the frames or rows of one object, in words or as JSON.

Owns: arguments, output, exit code, and finding the object: a local file, a URL, or a name in the
log's bucket. Does not own: looking at its bytes (`survey`).

Exit code 1 means that damage was found, or that the frames are not those that the name says.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ister.cli.look import add_command, print_error, print_table
from ister.cli.place import add_place_arguments, has_place, load_place, open_bucket
from ister.cli.report import answer, error_as_json, print_json
from ister.cli.survey import FileSurvey, Listing, survey_object
from ister.cli.survey_view import (
    add_listing_arguments,
    format_published,
    format_state,
    make_listing,
    print_bad_ranges,
    print_frames,
)
from ister.clock import SystemClock
from ister.config import CloudConfig
from ister.errors import (
    InvalidRequestError,
    IsterError,
    NotFoundError,
    UnsupportedOperationError,
)
from ister.extras import missing_extra
from ister.format.crc import Buffer
from ister.format.descriptor import FORMAT_FRAMES, FORMAT_PARQUET
from ister.fs.base import File
from ister.fs.local import LocalFileSystem
from ister.objectstore.base import ObjectStore
from ister.tier.names import TOPICS_PREFIX, ObjectName, parse_object_id, parse_topic_of_key

if TYPE_CHECKING:
    # argparse has no public name for it.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

__all__ = ["register"]

_BACKENDS: Final = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "azblob": "azblob"}
"""By the scheme of a URL."""
_LOCAL_SCHEMES: Final = ("fs", "file")
_PARQUET_MAGIC: Final = b"PAR1"


def register(kinds: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        kinds,
        "object",
        help="frames, offsets, codec and damage of an object",
        description="Reads an object without changing it: a local file; a URL such as "
        "s3://bucket/key, with credentials from the config's options or the environment; or a key "
        "or name in the log's bucket. Exit code 1 if it is damaged.",
        examples=(
            "ister inspect object data-0-999.dnb1 --data ./ister-data",
            "ister inspect object s3://bucket/prefix/key --frames --limit 10 --json",
        ),
    )
    parser.add_argument("object", metavar="URL-or-PATH", help="a file, a URL, a key, or a name")
    add_listing_arguments(parser)
    add_place_arguments(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    def failed(error: IsterError) -> dict[str, Any]:
        return {"errors": [error_as_json(error)]}

    return answer(lambda: _inspect(options), as_json=options.json, on_error=failed)


def _inspect(options: argparse.Namespace) -> int:
    with _opened(options) as file:
        name = file.path.rpartition("/")[2]
        expected = parse_object_id(name)
        found = _survey(
            file,
            name=name,
            topic=_topic_of(file.path),
            expected=expected,
            listing=make_listing(options),
        )
    if options.json:
        print_json(_as_json(found, expected, with_frames=options.frames))
    else:
        _print_object(found)
    if found.is_damaged:
        print_error(f"the object is damaged (path={found.path})")
    return 1 if found.is_damaged else 0


def _survey(
    file: File, *, name: str, topic: str, expected: ObjectName | None, listing: Listing
) -> FileSurvey:
    """Looks at an object in the format that its name says, or else its first bytes."""
    is_parquet = (
        expected.format == FORMAT_PARQUET if expected else file.read_at(0, 4) == _PARQUET_MAGIC
    )
    if not is_parquet:
        return survey_object(file, name=name, topic=topic, expected=expected, listing=listing)
    try:
        from ister.cli.survey_archive import survey_archive  # noqa: PLC0415 - needs pyarrow
    except ImportError as error:
        raise missing_extra("an object in Parquet", "arrow", error) from error
    return survey_archive(file, name=name, topic=topic, expected=expected, listing=listing)


# -- finding it -----------------------------------------------------------------------------


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[File]:
    """The bytes of the object that is meant.

    Raises:
        NotFoundError: There is none.
        InvalidRequestError: It is not clear which one.
    """
    text: str = options.object
    scheme, is_url, rest = text.partition("://")
    if is_url and scheme in _LOCAL_SCHEMES:
        text, is_url = rest, ""
    if is_url:
        store, key = _open_url(scheme, rest, options)
    elif os.path.isfile(text):
        file = LocalFileSystem().open_read(os.path.realpath(text))
        try:
            yield file
        finally:
            file.close()
        return
    else:
        store, key = _open_in_bucket(text, options)
    try:
        yield _ObjectFile(store, key or _find_key(store, text))
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
    """What the environment says that is not found by itself: S3's address, as AWS's tools do."""
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {"endpoint": address} if backend == "s3" and address else {}


def _open_in_bucket(text: str, options: argparse.Namespace) -> tuple[ObjectStore, str]:
    """The log's bucket, and the key if the text is one; a name has none yet."""
    if not has_place(options):
        raise NotFoundError(
            "there is no such file",
            path=text,
            hint="for an object in a log's bucket, --data DIR or --config FILE says where that is",
        )
    store = open_bucket(load_place(options).storage, SystemClock())
    return store, text if text.startswith(TOPICS_PREFIX) else ""


def _find_key(store: ObjectStore, name: str) -> str:
    """The key of the only object of that name, whichever topic's it is."""
    keys = [info.key for info in store.list(TOPICS_PREFIX) if info.key.endswith(f"/{name}")]
    if not keys:
        raise NotFoundError(
            f"there is no file and no object {name!r}",
            path=store.location,
            hint="`ister inspect topic` lists the objects of a topic",
        )
    if len(keys) > 1:
        raise InvalidRequestError(
            f"{len(keys)} topics have an object {name!r}",
            path=store.location,
            hint=f"give its key, one of: {', '.join(keys)}",
        )
    return keys[0]


def _topic_of(path: str) -> str:
    """The topic that a path or key of an object names; empty if it names none."""
    at = path.find(TOPICS_PREFIX)
    topic = parse_topic_of_key(path[at:]) if at >= 0 else None
    return str(topic) if topic is not None else ""


class _ObjectFile:
    """An object as a file that can be read."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.path = f"{store.location.rstrip('/')}/{key}"
        self._store = store
        self._key = key
        self._size: int | None = None

    def read_at(self, position: int, size: int) -> bytes:
        return self._store.read(self._key, position, size)

    def size(self) -> int:
        if self._size is None:
            self._size = self._store.stat(self._key).size
        return self._size

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        self._refuse()

    def truncate(self, size: int) -> None:
        self._refuse()

    def allocate(self, size: int) -> None:
        self._refuse()

    def sync(self) -> None:
        self._refuse()

    def close(self) -> None:
        """The store is closed by whoever opened it."""

    def _refuse(self) -> NoReturn:
        raise UnsupportedOperationError("an object is only read here", path=self.path)


# -- output ---------------------------------------------------------------------------------


def _as_json(
    found: FileSurvey, expected: ObjectName | None, *, with_frames: bool
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": found.name,
        "path": found.path,
        "topic": found.topic or None,
        "start_offset": found.first_offset,
        "next_offset": found.next_offset,
        "format": getattr(found, "format", FORMAT_FRAMES),
        "kept": getattr(found, "kept", ""),
        "frames": found.frames,
        "bytes": found.bytes,
        "codec": found.codec,
        "epoch": expected.epoch if expected is not None else None,
        "publish_time_min": found.publish_time_min,
        "publish_time_max": found.publish_time_max,
        "undecodable": found.undecodable,
        "damage": [asdict(bad) for bad in found.damage],
        "errors": [],
    }
    if expected is not None and (found.first_offset, found.next_offset) != (
        expected.start,
        expected.end,
    ):
        fields |= {"name_start": expected.start, "name_end": expected.end}
    if with_frames:
        fields["frame_list"] = [asdict(line) for line in found.listed]
    return fields


def _print_object(found: FileSurvey) -> None:
    print(found.path)
    titles = ("format", "codec", "start", "next", "frames", "bytes", "published", "state")
    row = (
        getattr(found, "format", FORMAT_FRAMES),
        found.codec,
        found.first_offset,
        found.next_offset,
        found.frames,
        found.bytes,
        format_published(found),
        format_state(found),
    )
    print_table(titles, [row])
    if kept := getattr(found, "kept", ""):
        print(f"messages were left out on purpose: {kept}")
    print_bad_ranges(found)
    print_frames(found)
