"""Examines one stored object: a local file, or a key of a bucket.

Owns: finding it, and choosing between frames and Parquet. Does not own: walking its bytes
(`survey`, `survey_archive`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, NoReturn

from ister.base.extras import missing_extra
from ister.bucket.names import (
    EXPRESS_PREFIX,
    TOPICS_PREFIX,
    ObjectName,
    parse_danube_id,
    parse_object_id,
    parse_topic_of_key,
)
from ister.errors import InvalidRequestError, NotFoundError, UnsupportedOperationError
from ister.format.crc import Buffer
from ister.format.descriptor import (
    FORMAT_FRAMES,
    FORMAT_PARQUET,
    is_express_name,
    parse_run_id,
)
from ister.fs.base import File
from ister.fs.local import LocalFileSystem
from ister.objectstore.base import ObjectStore
from ister.rescue.examine_files import FileSurvey, Listing, survey_frames

_PARQUET_MAGIC: Final = b"PAR1"
_SECONDS_MIN: Final = 10**9


class ObjectSurvey(NamedTuple):
    """What an object holds, beside what its name promises."""

    found: FileSurvey
    name: ObjectName | None
    format: str
    kept: str
    """Which messages of the range the object has; empty for all of them."""


def offsets_of(path: str) -> tuple[int, int] | None:
    """The range of offsets that the name of an object promises; None if it is not such a name."""
    name = _parse_path(path)
    return None if name is None else (name.start, name.end)


@contextmanager
def open_local(path: str) -> Iterator[File]:
    """An object that is a local file.

    Raises:
        NotFoundError: There is no such file.
    """
    file = LocalFileSystem().open_read(path)
    try:
        yield file
    finally:
        file.close()


def open_key(store: ObjectStore, key: str) -> File:
    """An object of a bucket."""
    return _ObjectFile(store, key)


def open_named(store: ObjectStore, key_or_name: str) -> File:
    """An object of a log's bucket, by its key, or by its name if only one topic has such a one.

    Raises:
        NotFoundError: No topic has an object of this name.
        InvalidRequestError: Several have.
    """
    if is_express_name(key_or_name) or parse_run_id(key_or_name) is not None:
        key_or_name = EXPRESS_PREFIX + key_or_name
    is_key = key_or_name.startswith((TOPICS_PREFIX, EXPRESS_PREFIX))
    return _ObjectFile(store, key_or_name if is_key else _find_key(store, key_or_name))


def _find_key(store: ObjectStore, name: str) -> str:
    """The key of the only object of that name, in whichever topic."""
    keys = [info.key for info in store.list(TOPICS_PREFIX) if info.key.endswith(f"/{name}")]
    if not keys:
        raise NotFoundError(
            f"no file and no object {name!r} found",
            path=store.location,
            hint="list the objects of a topic with `ister inspect topic`",
        )
    if len(keys) > 1:
        raise InvalidRequestError(
            f"{len(keys)} topics have an object {name!r}",
            path=store.location,
            hint=f"give its key, one of: {', '.join(keys)}",
        )
    return keys[0]


def survey_object(file: File, listing: Listing) -> ObjectSurvey:
    """Examines an object in the format that its name says, or else its first bytes.

    Raises:
        ConfigError: It is in Parquet, and pyarrow is not installed.
        IsterError: It cannot be read.
    """
    name = file.path.rpartition("/")[2]
    at = file.path.find(TOPICS_PREFIX)
    topic = str((parse_topic_of_key(file.path[at:]) if at >= 0 else None) or "")
    expected = _parse_path(file.path)
    danube = parse_danube_id(name)
    is_parquet = (
        expected.format == FORMAT_PARQUET if expected else file.read_at(0, 4) == _PARQUET_MAGIC
    )
    if not is_parquet:
        found = survey_frames(file, name=name, topic=topic, expected=expected, listing=listing)
        if expected is not None and danube is not None and _ends_elsewhere(found, expected):
            expected = None  # the number in the name is no offset: Danube 0.6.2 or later wrote it
            found.damage.clear()
        return ObjectSurvey(found, expected, FORMAT_FRAMES, "")
    try:
        from ister.rescue.examine_archive import survey_archive  # noqa: PLC0415 - needs pyarrow
    except ImportError as error:
        raise missing_extra("an object in Parquet", "arrow", error) from error
    archive = survey_archive(file, name=name, topic=topic, expected=expected, listing=listing)
    return ObjectSurvey(archive, expected, FORMAT_PARQUET, archive.kept)


def _parse_path(path: str) -> ObjectName | None:
    """What the name of an object says, in the folder that it is in."""
    folder, _, name = path.rpartition("/")
    is_segment = folder.rpartition("/")[2] == "segments"
    return parse_object_id(f"segments/{name}" if is_segment else name) or parse_object_id(
        f"segments/{name}"
    )


def _ends_elsewhere(found: FileSurvey, expected: ObjectName) -> bool:
    """Whether whole frames begin where a name says and end elsewhere, at what may be a time."""
    return (
        expected.end - 1 >= _SECONDS_MIN
        and found.first_offset == expected.start
        and len(found.damage) == 1
        and found.damage[0].position == found.bytes == found.damage[0].end_position
    )


class ReadOnlyFile:
    """The part of a file that changes it, refused: for objects and runs, which are only read."""

    path: str

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        self._refuse()

    def truncate(self, size: int) -> None:
        self._refuse()

    def allocate(self, size: int) -> None:
        self._refuse()

    def sync(self) -> None:
        self._refuse()

    def close(self) -> None:
        """Does nothing: the caller closes what is behind it."""

    def _refuse(self) -> NoReturn:
        raise UnsupportedOperationError("an object is only read here", path=self.path)


class _ObjectFile(ReadOnlyFile):
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
