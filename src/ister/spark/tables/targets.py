"""Where the data files of a table go: a value that Spark sends to its tasks.

    FileTarget (backend, root, options, folder) ─► pickled ─► a store per process ─► writers

Owns: the naming of data files, and the connections of this process, of which it keeps a few. Does
not own: what is in the files, whether they ever count.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urlparse

from ister.base import forks
from ister.base.clock import SystemClock
from ister.base.extras import missing_extra
from ister.base.limits import MIB
from ister.config import CloudBackend, CloudConfig
from ister.errors import ConfigError, InvalidRequestError, UnavailableError
from ister.format.crc import Buffer
from ister.objectstore.base import ObjectStore, ObjectWriter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from pyiceberg.io import FileIO

_STORES_MAX: Final = 8
_CHUNK_BYTES: Final = 8 * MIB
_CONCURRENT_PARTS: Final = 2
_BACKENDS: Final = {
    "s3": CloudBackend.S3,
    "gs": CloudBackend.GCS,
    "gcs": CloudBackend.GCS,
    "azblob": CloudBackend.AZBLOB,
}

_lock = threading.Lock()
_stores: OrderedDict[bytes, ObjectStore] = OrderedDict()


@dataclass(frozen=True)
class Storage:
    """A directory, or a prefix of a bucket, and what is needed to get there."""

    backend: str
    root: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @cached_property
    def _key(self) -> bytes:
        return pickle.dumps((self.backend, self.root, sorted(self.options.items())))

    @property
    def is_local(self) -> bool:
        """Whether it is a directory."""
        return self.backend == CloudBackend.FS.value

    def open(self) -> ObjectStore:
        """Its object store, of which whoever asks is the owner."""
        from ister.objectstore.opendal_store import (  # noqa: PLC0415 - loads a large library
            open_store,
        )

        return open_store(self.backend, self.root, self.options, clock=SystemClock())

    def store(self) -> ObjectStore:
        """Its object store; shared by this process, not to be closed, nor to be kept for long."""
        with _lock:
            store = _stores.get(self._key)
            if store is None:
                store = _stores[self._key] = self.open()
            _stores.move_to_end(self._key)
            while len(_stores) > _STORES_MAX:
                _stores.popitem(last=False)[1].close()
            return store


@forks.call_in_child
def _forget_stores() -> None:
    """Forgets the parent's object stores in a forked child."""
    forks.reset_locks(_lock)
    _stores.clear()


@atexit.register
def close_stores() -> None:
    """Closes the connections of this process; they are opened again when needed."""
    with _lock:
        for store in _stores.values():
            store.close()
        _stores.clear()


def local_path(location: str) -> str | None:
    """The path of a directory that a path or a `file:` address names; None for anything else."""
    scheme = urlparse(location).scheme if "://" in location or location.startswith("file:") else ""
    if not scheme:
        return os.path.abspath(location)
    if scheme != "file":
        return None
    return os.path.abspath(unquote(urlparse(location).path))


def storage_of(
    location: str, given: Mapping[str, str] | None, cloud: CloudConfig | None
) -> Storage:
    """The storage that a path or an address names.

    Args:
        location: A directory, `s3://bucket/prefix`, `gs://…` or `azblob://…`.
        given: Options for it, as `storage.cloud.options` has them; None takes the log's own if its
            bucket is of the same kind.
        cloud: The log's bucket.
    """
    directory = local_path(location)
    if directory is not None:
        return Storage(CloudBackend.FS.value, directory)
    backend = _BACKENDS.get(location.partition("://")[0])
    if backend is None:
        # The address itself is not repeated: people put credentials into addresses.
        raise InvalidRequestError(
            "a table's place is neither a directory nor an address that is known here",
            hint="a path, s3://bucket/prefix, gs://bucket/prefix or azblob://container/prefix",
        )
    check_address(location)
    options = given
    if options is None:
        options = cloud.options if cloud is not None and cloud.backend is backend else {}
    return Storage(backend.value, location.rstrip("/"), dict(options))


def check_address(location: str) -> None:
    """Refuses an address with credentials: it is shown, and stored, in many places."""
    if "@" in location.partition("://")[2].partition("/")[0]:
        raise InvalidRequestError(
            "a table's address has credentials in it",
            hint="give them as storage options: access_key=…, secret_key=…",
        )


class FileTarget(Protocol):
    """Where data files go. Pickled; used by one thread at a time."""

    def path(self, date: str | None, name: str) -> str:
        """The path of a file, relative to the root."""
        ...

    def open(self, path: str) -> FileOutput:
        """Begins a file."""
        ...

    def delete(self, path: str) -> None:
        """Removes a file; one that does not exist is fine."""
        ...


class FileOutput(io.RawIOBase):
    """A file under way, as pyarrow writes one: it exists once `complete` has returned."""

    def __init__(self, writer: ObjectWriter) -> None:
        super().__init__()
        self._writer = writer
        self._position = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """How much was written."""
        return self._position

    def write(self, data: ReadableBuffer) -> int:
        """Takes the next bytes."""
        view = memoryview(data)
        self._writer.write(data if isinstance(data, bytes) else view)
        self._position += view.nbytes
        return view.nbytes

    def complete(self) -> None:
        """Completes the file: it exists as a whole when this returns."""
        self._writer.close()

    def abort(self) -> None:
        """Gives it up, unless it is complete. Raises nothing."""
        self._writer.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTarget:
    """Files in a directory or a bucket, durable when they are complete."""

    storage: Storage
    folder: str = ""
    """Below the root."""
    partition: str | None = "publish_date"
    """What a folder of a date is called; None if dates have none."""
    suffix: str = ""
    """What follows the names of files."""

    def path(self, date: str | None, name: str) -> str:
        """The path of a file, relative to the root."""
        has_folder = date is not None and self.partition is not None
        parts = [self.folder, f"{self.partition}={date}" if has_folder else "", name + self.suffix]
        return "/".join(part for part in parts if part)

    def open(self, path: str) -> FileOutput:
        """Begins a file."""
        return FileOutput(
            self.storage.store().open_writer(
                path, chunk_bytes=_CHUNK_BYTES, concurrent_parts=_CONCURRENT_PARTS
            )
        )

    def delete(self, path: str) -> None:
        """Removes a file; one that does not exist is fine."""
        self.storage.store().delete(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergTarget:
    """Files at a place that a catalog knows how to get to."""

    location: str
    properties: Mapping[str, str] = field(repr=False)
    partition: str = "publish_time_day"

    def path(self, date: str | None, name: str) -> str:
        """The path of a file, relative to the table's location."""
        return f"data/{self.partition}={date}/{name}" if date is not None else f"data/{name}"

    def open(self, path: str) -> FileOutput:
        """Begins a file."""
        return FileOutput(_IcebergWriter(self._io(), f"{self.location}/{path}"))

    def delete(self, path: str) -> None:
        """Removes a file; one that does not exist is fine."""
        try:
            self._io().delete(f"{self.location}/{path}")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnavailableError(f"delete failed: {error.strerror}", path=path) from error

    def _io(self) -> FileIO:
        try:
            from pyiceberg.io import load_file_io  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise missing_extra("an Iceberg table", "lakehouse", error) from error
        try:
            return load_file_io(dict(self.properties), self.location)
        except (ValueError, ModuleNotFoundError) as error:
            raise ConfigError(
                "the catalog's properties do not say how to write the table's files",
                hint="properties such as s3.endpoint, s3.access-key-id",
            ) from error


class _IcebergWriter:
    """A file written through the catalog's own access."""

    def __init__(self, files: FileIO, location: str) -> None:
        self._files = files
        self._location = location
        self._is_complete = False
        try:
            self._stream = files.new_output(location).create()
        except OSError as error:
            raise UnavailableError("a file of the table could not be made", path=location) from (
                error
            )

    def write(self, data: Buffer) -> None:
        try:
            self._stream.write(data)  # type: ignore[arg-type]  # its protocol names bytes only
        except OSError as error:
            raise UnavailableError("a write failed", path=self._location) from error

    def close(self) -> None:
        try:
            self._stream.close()
        except OSError as error:
            raise UnavailableError("a file was not completed", path=self._location) from error
        self._is_complete = True

    def abort(self) -> None:
        if self._is_complete:
            return
        self._is_complete = True
        try:
            self._stream.close()
            self._files.delete(self._location)
        except OSError:
            return
