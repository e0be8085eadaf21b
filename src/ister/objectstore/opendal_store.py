"""Object stores through opendal: S3 and compatible, GCS, Azure, a directory, memory.

Owns: settings → an operator; deadlines; which calls are repeated; what a store can do. Does not
own: the mapping of errors (`store_errors`), pauses (`retry`), how a file gets its name on the
`fs` backend (`staged_files`), or what is stored where.

What opendal does, and what is made of it here (measured with 0.47.12):

- Its iterator of a listing holds the interpreter lock while it waits for a page: a store that
  hangs would stop every thread of the process. Listings therefore run on opendal's asynchronous
  side, in a thread of their own for as long as they take.
- `read` has a deadline for each piece of a body, so a body that drips byte by byte never ends.
  Reads therefore take the pieces themselves and look at the clock in between. A range that goes
  beyond the end is an error there; here it is cut to the object's size, which also tells a short
  object from a short answer.
- Writers upload parts in the background, and only opendal can repeat one of those: the writer's
  operator has opendal's own retries, all other calls are repeated by `retry`. It repeats
  Complete, too; a store that had completed and lost its answer then says that there is no such
  upload, which is an unknown outcome and is reported as one.
- `File.close`, and leaving a `with` block even by an error, complete the object. Letting go of
  the file object does not: it stops the uploads. That is how `abort` works. On S3 and GCS the
  parts stay behind until a lifecycle rule of the bucket removes them; opendal cannot list them.
- On a directory, conditional creates are a look followed by a rename (not exclusive), copies are
  neither atomic nor synced, and no directory is ever synced. There opendal only moves the bytes,
  into a staged file; `staged_files` does the rest.

Commit point: the store's answer to the last request of `ObjectWriter.close` or `put`; for `fs`,
the sync of the directory. A crash before it leaves no object.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from ister.base import forks
from ister.base.clock import Clock
from ister.base.retry import RetryPolicy
from ister.errors import (
    AlreadyExistsError,
    ClosedError,
    ConfigError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.format.crc import Buffer
from ister.fs.local import LocalFileSystem
from ister.objectstore.backends import (
    Backend,
    check_option_names,
    config_error,
    hidden_values,
    parse_backend,
)
from ister.objectstore.base import Capabilities, ObjectInfo, ObjectWriter
from ister.objectstore.keys import check_key, check_prefix, check_range
from ister.objectstore.opendal_writer import OpendalWriter
from ister.objectstore.staged_files import StagedFiles
from ister.objectstore.store_errors import error_kind, map_store_error

if TYPE_CHECKING:
    import opendal

_logger = logging.getLogger("ister.objectstore")
_Result = TypeVar("_Result")

_CONTROL_TIMEOUT_SECONDS: Final = 20.0
"""Stat, delete and the like move no data; one that takes longer is not going to answer."""

_SYNC_THREADS: Final = 4
"""On a directory, so much of an object at a time is synced while the rest is still being written:
the disk works meanwhile, and completing the object waits for its last part alone."""

_PROBE_FOLDER: Final = ".ister-probe"

_library: Final = forks.Library("opendal")

_RANGE_STATUS: Final = "{ status: 416,"
_TOO_SHORT: Final = (
    # An answer is whole and shorter than the range that was asked for.
    "reader got too little data",
    # Azurite's answer to a range that begins at the end: from there to the byte before.
    "header content range is invalid: end is less than start",
)
"""What opendal says of a range that goes beyond the object, where the store does not say it."""


class OpendalStore:
    """A store behind an opendal operator. Made by `open_store`. Thread-safe."""

    def __init__(
        self,
        *,
        operator: opendal.Operator,
        writing: opendal.Operator,
        backend: Backend,
        files: StagedFiles | None,
        clock: Clock,
        retry: RetryPolicy,
        closed: threading.Event,
        errors: tuple[type[Exception], ...],
        hidden: tuple[str, ...],
    ) -> None:
        self.location = backend.location
        self._operator = operator
        self._writing = writing
        self._scheme = backend.scheme
        self._files = files
        self._clock = clock
        self._retry = retry
        self._closed = closed
        self._errors = errors
        self._caught: tuple[type[Exception], ...] = (*errors, IsterError)
        self._hidden = hidden
        self._syncers: ThreadPoolExecutor | None = None
        if files is not None:
            self._syncers = ThreadPoolExecutor(
                _SYNC_THREADS, thread_name_prefix="ister-objectstore-sync"
            )
        self._probe_lock = threading.Lock()
        self._capabilities: Capabilities | None = None
        self._fork_error: ClosedError | None = None
        forks.register(self)

    def _after_fork(self, error: ClosedError) -> None:
        """Abandons the parent's connections and threads in a child; see `ister.base.forks`."""
        forks.reset_locks(self._closed, self._probe_lock)
        forks.leak(self._operator, self._writing)
        self._syncers = None
        self._fork_error = error
        self._closed.set()

    def __repr__(self) -> str:
        return f"<OpendalStore {self.location}>"

    # -- writing ----------------------------------------------------------------------------

    def open_writer(self, key: str, *, chunk_bytes: int, concurrent_parts: int) -> ObjectWriter:
        """Begins an object; see `ObjectStore.open_writer`.

        An object of less than a chunk goes out as one plain request when it is closed. A call of
        the writer takes at most the deadline of a part for every attempt at every part in flight.
        """
        check_key(key)
        self._check_open()
        staged = self._files.stage() if self._files is not None else None
        try:
            file = self.attempt(
                "open",
                key,
                lambda: self._writing.open(
                    staged or key, "wb", chunk=chunk_bytes, concurrent=max(1, concurrent_parts)
                ),
            )
        except BaseException:
            if self._files is not None and staged is not None:
                self._files.discard(staged)
            raise
        return OpendalWriter(
            self, key, file, files=self._files, staged=staged, chunk_bytes=chunk_bytes
        )

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        check_key(key)
        if if_absent and not self._may_create():
            raise UnsupportedOperationError(
                "put failed: this store ignores conditions", path=self.path(key)
            )
        if self._files is not None:
            self._put_file(self._files, key, data, is_exclusive=if_absent)
        elif if_absent:
            # Not repeated: the second attempt would meet the object of the first one.
            self._check_open()
            self.attempt("put", key, lambda: self._operator.write(key, data, if_not_exists=True))
        else:
            self._repeat("put", key, lambda _: self._operator.write(key, data))

    def copy(self, source: str, target: str) -> None:
        check_key(source)
        check_key(target)
        files = self._files
        if files is None:
            self._repeat("copy", source, lambda _: self._operator.copy(source, target))
            return
        self.stat(source)  # opendal would make a file of a directory's name
        staged = files.stage()
        try:
            self._repeat("copy", source, lambda _: self._operator.copy(source, staged))
            self.attempt("copy", target, lambda: files.publish(staged, target))
        except BaseException:
            files.discard(staged)
            raise

    def delete(self, key: str) -> None:
        check_key(key)
        files = self._files
        if files is not None:
            self._repeat("delete", key, lambda _: files.delete(key))
        else:
            self._repeat("delete", key, lambda _: self._operator.delete(key))

    def remove_stale_parts(self, older_than_seconds: float) -> int:
        """Removes unfinished uploads of processes that have ended; returns their number.

        On `fs` these are files, aged by their last write: a writer that pauses for longer loses
        its unfinished object. In a bucket a lifecycle rule removes them.
        """
        self._check_open()
        files = self._files
        if files is None:
            return 0
        before = self._clock.now_ns() / 1e9 - older_than_seconds
        return self.attempt("clean", "", lambda: files.remove_stale(before=before))

    # -- reading ----------------------------------------------------------------------------

    def read(self, key: str, start: int, size: int) -> bytes:
        check_key(key)
        check_range(start, size)
        return self._repeat("read", key, lambda deadline: self._read(key, start, size, deadline))

    def view(self, key: str, start: int, size: int) -> Buffer:
        files = self._files
        if files is None:
            return self.read(key, start, size)
        check_key(key)
        check_range(start, size)
        return self._repeat("read", key, lambda _: files.view(key, start, size))

    def stat(self, key: str) -> ObjectInfo:
        check_key(key)
        return self._repeat("stat", key, lambda _: self._stat(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object below a prefix; see `ObjectStore.list`.

        The whole listing is taken before the first entry is returned. Its deadline is for each
        page; a page that fails is asked for again, not the pages before it.
        """
        check_prefix(prefix)
        found: dict[str, ObjectInfo] = {}
        files = self._files
        if files is not None:
            for info in self._repeat("list", prefix, lambda _: [*files.list(prefix)]):
                found[info.key] = info
        else:
            self._repeat("list", prefix, lambda _: self._list(prefix, found))
        return iter(sorted(found.values(), key=lambda info: info.key))

    # -- the store itself -------------------------------------------------------------------

    def probe(self) -> Capabilities:
        with self._probe_lock:
            if self._capabilities is None:
                capabilities = self._probe()
                self._capabilities = capabilities
                missing = [
                    name
                    for name, is_there in (
                        ("conditional create", capabilities.conditional_create),
                        ("copy", capabilities.copy),
                    )
                    if not is_there
                ]
                if missing:
                    # For the record: whoever needs it asks before, and has another way.
                    _logger.info(
                        "the object store cannot do everything",
                        extra={"location": self.location, "missing": ", ".join(missing)},
                    )
            return self._capabilities

    def close(self) -> None:
        """Ends pauses between attempts; connections go with the last writer and the store."""
        self._closed.set()
        if self._syncers is not None:
            # A sync under way ends with the disk's answer; none is left behind.
            self._syncers.shutdown(wait=True)

    # -- for the writer ---------------------------------------------------------------------

    def attempt(self, action: str, key: str, call: Callable[[], _Result]) -> _Result:
        """Calls once; raises only `IsterError`s."""
        try:
            return call()
        except self._caught as error:
            mapped = self._map(error, action, key)
        # Outside of the block above, so that an original with secrets is not kept as the context.
        raise mapped

    def begin_sync(self, staged: str) -> Future[None] | None:
        """Begins to sync what was written of a staged file; None where that is not done."""
        if self._files is None or self._syncers is None or self._closed.is_set():
            return None
        try:
            return self._syncers.submit(self._files.sync_early, staged)
        except RuntimeError:
            return None  # the store is being closed; completing the object syncs it

    def path(self, key: str) -> str:
        """The object's full name, for people."""
        return f"{self.location.rstrip('/')}/{key}"

    # -- inside -----------------------------------------------------------------------------

    def _repeat(self, action: str, key: str, call: Callable[[float], _Result]) -> _Result:
        self._check_open()
        return self._retry.call(lambda deadline: self.attempt(action, key, lambda: call(deadline)))

    def _map(self, error: Exception, action: str, key: str) -> IsterError:
        return map_store_error(
            error,
            action,
            key,
            location=self.location,
            is_local=self._files is not None,
            secrets=self._hidden,
        )

    def _check_open(self) -> None:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._closed.is_set():
            raise ClosedError("the object store is closed", path=self.location)

    def _may_create(self) -> bool:
        known = self._capabilities
        if known is not None:
            return known.conditional_create
        return self._operator.capability().write_with_if_not_exists

    def _put_file(self, files: StagedFiles, key: str, data: bytes, *, is_exclusive: bool) -> None:
        # In this thread: opendal would pass a few bytes between several, and sync them twice.
        staged = self._repeat("put", key, lambda _: files.stage_whole(data))
        publish = partial(files.publish, staged, key, is_exclusive=is_exclusive, is_synced=True)
        try:
            self.attempt("put", key, publish)
        except BaseException:
            files.discard(staged)
            raise

    def _stat(self, key: str) -> ObjectInfo:
        if self._files is not None:
            return self._files.stat(key)
        metadata = self._operator.stat(key)
        if not metadata.is_file:
            raise NotFoundError("stat failed: a folder is not an object", path=self.path(key))
        return _info(key, metadata)

    def _read(self, key: str, start: int, size: int, deadline: float) -> bytes:
        """One attempt; short only if the store says that the object is."""
        if self._files is not None:
            # opendal would hand it out in pieces, which takes a copy and twice the time.
            return self._files.read(key, start, size)
        data = self._stream(key, start, size, deadline) if size else None
        if data is not None:
            return data
        total = self._stat(key).size
        if start >= total or not size:
            return b""
        data = self._stream(key, start, min(size, total - start), deadline)
        if data is None:
            raise UnavailableError(
                "read failed: the store returned less than the object's size", path=self.path(key)
            )
        return data

    def _stream(self, key: str, start: int, size: int, deadline: float) -> bytes | None:
        """A range, piece by piece; None if the object seems to end before it."""
        parts: list[bytes] = []
        missing = size
        try:
            file = self._operator.open(key, "rb", offset=start, size=size)
            while missing and (part := file.read(missing)):
                parts.append(part)
                missing -= len(part)
                if missing and self._clock.monotonic() >= deadline:
                    raise UnavailableError(
                        f"read failed: {size - missing} of {size} bytes came in time",
                        path=self.path(key),
                    )
        except self._errors as error:
            if not _is_beyond_end(error):
                raise
            return None
        if missing:
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _list(self, prefix: str, found: dict[str, ObjectInfo]) -> None:
        """Adds what there is to `found`; after an error, goes on behind what is there already."""
        operator = self._operator.to_async_operator()
        start_after: str | None = None
        keys = list(found)
        # Only a store that lists in order can go on in the middle.
        if keys and keys == sorted(keys) and operator.capability().list_with_start_after:
            start_after = keys[-1]

        async def collect() -> None:
            entries = await operator.list(prefix, recursive=True, start_after=start_after)
            async for entry in entries:
                if not entry.path.endswith("/") and entry.metadata.is_file:
                    found[entry.path] = _info(entry.path, entry.metadata)

        # The caller's thread may have an event loop of its own.
        with ThreadPoolExecutor(1, thread_name_prefix="ister-objectstore-list") as pool:
            pool.submit(lambda: asyncio.run(collect())).result()

    def _probe(self) -> Capabilities:
        folder = f"{_PROBE_FOLDER}/{secrets.token_hex(8)}"
        names = tuple(f"{folder}/{name}" for name in ("plain", "created", "copied"))
        plain, created, copied = names
        try:
            self.put(plain, b"plain")
            self.read(plain, 0, 5)
            capabilities = Capabilities(
                conditional_create=self._try_create(plain, created),
                copy=self._try_copy(plain, copied),
            )
        except BaseException:
            for name in names:
                with suppress(IsterError):
                    self.delete(name)
            raise
        for name in names:
            self.delete(name)
        if self._files is not None:
            self._files.remove_folder(folder)
        return capabilities

    def _try_create(self, existing: str, absent: str) -> bool:
        try:
            self._retry.call(lambda _: self.put(absent, b"created", if_absent=True))
        except UnsupportedOperationError:
            return False
        except AlreadyExistsError:
            # The first attempt's answer was lost.
            pass
        try:
            self._retry.call(lambda _: self.put(existing, b"created", if_absent=True))
        except AlreadyExistsError:
            return True
        return False

    def _try_copy(self, source: str, target: str) -> bool:
        try:
            self.copy(source, target)
        except UnsupportedOperationError:
            return False
        return True


def _info(key: str, metadata: opendal.types.Metadata) -> ObjectInfo:
    modified = metadata.last_modified
    return ObjectInfo(
        key=key,
        size=metadata.content_length,
        etag=metadata.etag,
        modified_at=modified.timestamp() if modified is not None else None,
    )


# -- settings -----------------------------------------------------------------------------------


def open_store(
    backend: str,
    root: str,
    options: Mapping[str, str],
    *,
    clock: Clock,
    call_timeout_seconds: float = 60.0,
    io_timeout_seconds: float = 20.0,
    retries: int = 4,
    rng: random.Random | None = None,
    sleep: Callable[[float], object] | None = None,
) -> OpendalStore:
    """Opens a store. Sends no request yet: `probe` checks whether it can be used.

    Args:
        backend: `fs` (or `local`), `s3`, `gcs`, `azblob` or `memory`.
        root: A directory, `s3://bucket/prefix`, `gs://bucket/prefix` or
            `azblob://container/prefix`; without a meaning for `memory`.
        options: Those of `storage.cloud.options`; others go to opendal under their own names.
            Credentials that are not given are looked for as the cloud's own tools do.
        clock: Where time comes from.
        call_timeout_seconds: No attempt of a call begins later than this, and no read goes on.
        io_timeout_seconds: The most that one request, or one piece of a body, may take.
        retries: Attempts after the first one.
        rng: For the pauses between attempts.
        sleep: Waits between attempts; for tests.

    Raises:
        ConfigError: A setting is missing, unknown or wrong.
        PermissionDeniedError, CapacityError, DiskError: The directory cannot be made.
        ClosedError: The process that this one was forked from had a store open.
    """
    try:
        import opendal  # noqa: PLC0415 - optional
        import opendal.layers  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"storage.cloud.backend {backend!r} needs a package that is not installed",
            hint="pip install opendal",
        ) from error
    _library.use()
    parsed = parse_backend(backend, root, options)
    check_option_names(parsed)
    hidden = hidden_values(options)
    errors = _library_errors()
    files = None
    if parsed.scheme == "fs":
        try:
            files = StagedFiles(parsed.root, LocalFileSystem())
        except IsterError as error:
            raise map_store_error(error, "open", "", location=parsed.location) from error
    operator = _make_operator(parsed, hidden, errors).layer(
        opendal.layers.TimeoutLayer(
            timeout=min(call_timeout_seconds, io_timeout_seconds, _CONTROL_TIMEOUT_SECONDS),
            io_timeout=io_timeout_seconds,
        )
    )
    closed = threading.Event()
    retry = RetryPolicy(
        clock=clock,
        sleep=sleep if sleep is not None else closed.wait,
        rng=rng if rng is not None else random.Random(),  # noqa: S311 - spreads load, no secret
        retries=retries,
        deadline_seconds=call_timeout_seconds,
    )
    writing = operator
    if files is None and retries:
        # Parts in flight are opendal's: only it can send one of them again. Outside of the
        # deadlines, so that each attempt has its own. Never used for a conditional create.
        writing = operator.layer(
            opendal.layers.RetryLayer(
                max_times=retries,
                factor=2.0,
                jitter=True,
                min_delay=retry.first_pause_seconds,
                max_delay=retry.pause_seconds_max,
            )
        )
    return OpendalStore(
        operator=operator,
        writing=writing,
        backend=parsed,
        files=files,
        clock=clock,
        retry=retry,
        closed=closed,
        errors=errors,
        hidden=hidden,
    )


def _library_errors() -> tuple[type[Exception], ...]:
    from opendal import exceptions  # noqa: PLC0415 - optional

    kinds = [kind for kind in vars(exceptions).values() if isinstance(kind, type)]
    return (OSError, *(kind for kind in kinds if issubclass(kind, Exception)))


def _make_operator(
    parsed: Backend, hidden: tuple[str, ...], errors: tuple[type[Exception], ...]
) -> opendal.Operator:
    import opendal  # noqa: PLC0415 - optional

    try:
        return opendal.Operator(parsed.scheme, **parsed.settings)
    except errors as error:
        failure = config_error(error, hidden)
    # Outside of the block above, so that an original with secrets is not kept as the context.
    raise failure


def _is_beyond_end(error: Exception) -> bool:
    """Whether a range was not there to be read, or not whole; the object's size tells."""
    # opendal does not translate the status of GCS and Azure.
    if error_kind(error) == "RangeNotSatisfied" or _RANGE_STATUS in str(error):
        return True
    return any(text in str(error) for text in _TOO_SHORT)
