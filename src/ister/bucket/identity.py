"""Gives a bucket an id, recorded in the bucket and in the metadata store, and compares the two.

    bucket            storage/bucket.json              {"id": …}
    metadata store    <root prefix>/storage/bucket     {"id": …, "location": …}

Processes that share a metadata store but use different buckets would each find only some of the
objects. So a process that writes compares the two ids when it starts. A copied bucket has the id of
its original and is accepted.

Owns: both records. Does not own: when they are compared (`ister.topic.stores`).

The metadata store decides: an id is recorded there first (the commit point), in one transaction,
and then put into the bucket. A crash in between leaves a bucket without an id, which the next
process completes. A bucket without an id gets one only if it may be the right one: it has an object
that the metadata store names, or the store names none. Once the id was in a bucket, the location
must also be the recorded one, and no broker may be up.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, cast

import msgspec

from ister.base import threads
from ister.base.structs import known
from ister.bucket.members import read_members
from ister.bucket.names import TOPICS_PREFIX, object_key, parse_topic_of_key
from ister.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptDataError,
    IsterError,
    NotFoundError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.format.descriptor import decode_descriptor
from ister.metadata.base import Absent, Compare, MetadataStore, Put
from ister.metadata.transact import transact, unchanged
from ister.objectstore.base import ObjectStore

_log = logging.getLogger("ister.bucket.identity")

BUCKET_KEY: Final = "storage/bucket.json"

_OBJECT_BYTES_MAX: Final = 4096
# How many of the objects that the metadata store names are looked up, one for each topic.
_SAMPLES: Final = 10
_PAGE_KEYS: Final = 1000
_START_SECONDS: Final = 5.0
# Methods that first check the bucket, if that was not possible at the start.
_CHANGES: Final = frozenset(("open_writer", "put", "copy", "delete", "probe", "remove_stale_parts"))


class BucketRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bucket's id, as stored in the bucket or in the metadata store."""

    id: str
    location: str = ""
    """Where the bucket was when its id was recorded; only in the metadata store."""
    is_put: bool = False
    """Whether the bucket has had the id; only in the metadata store."""


_HINT: Final = (
    "all brokers of a cluster need the same storage.cloud; if the bucket was replaced on purpose, "
    "stop all brokers and run `ister config bucket --accept`"
)


class BucketIdentity:
    """Compares the id of a bucket with the one in the metadata store. Thread-safe."""

    def __init__(self, objects: ObjectStore, metadata: MetadataStore, *, root_prefix: str) -> None:
        self.location = objects.location
        self._objects = objects
        self._metadata = metadata
        self._root_prefix = root_prefix
        self._key = f"{root_prefix}/storage/bucket"
        self._topics = f"{root_prefix}/{TOPICS_PREFIX}"
        self._lock = threading.Lock()
        self._is_known = False

    def read(self) -> tuple[BucketRecord | None, BucketRecord | None]:
        """The record in the bucket and the one in the metadata store; None if there is none.

        Raises:
            CorruptDataError: One of them cannot be read.
        """
        recorded = self._metadata.get(self._key)
        return self._read_object(), None if recorded is None else _decode(recorded.value, self._key)

    def verify(self) -> None:
        """Like `check`, but writes nothing: an id that is missing is not an error."""
        self._compare(*self.read())

    def _compare(self, found: BucketRecord | None, recorded: BucketRecord | None) -> None:
        if found is None:
            self._require_objects(recorded)
        elif recorded is not None and found.id != recorded.id:
            raise ConflictError(
                f"{self.location} has the id {found.id}, but the metadata store expects "
                f"the bucket {_describe(recorded)}",
                path=self.location,
                hint=_HINT,
            )

    def check(self) -> None:
        """Compares the ids, and writes those that are missing; after a success, does nothing.

        Raises:
            ConflictError: They differ, or the bucket has neither an id nor any of the objects that
                the metadata store names.
            CorruptDataError, UnavailableError: As `read`.
        """
        with self._lock:
            if self._is_known:
                return
            found, recorded = self.read()
            self._compare(found, recorded)
            if recorded is None:
                recorded = self._record(found.id if found is not None else secrets.token_hex(16))
            self._compare(found or self._put_object(recorded.id), recorded)
            if not recorded.is_put:
                self._note_put()
            self._is_known = True

    def accept(self) -> BucketRecord:
        """Makes this bucket the one that the metadata store expects, whatever was recorded.

        Raises:
            ConflictError: Brokers are running, and may use another bucket; or another process
                records an id at the same time.
        """
        if members := read_members(self._metadata, self._root_prefix):
            raise ConflictError(
                f"brokers are up: {', '.join(sorted(members))}",
                hint="stop all brokers; one that was killed counts until its lease ends",
            )
        found: BucketRecord | None = None
        with suppress(CorruptDataError):
            found = self._read_object()
        # Not the recorded id: that one belongs to another bucket.
        wanted = found.id if found is not None else secrets.token_hex(16)

        def attempt() -> BucketRecord | None:
            old = self._metadata.get(self._key)
            return self._try_record(wanted, unchanged(self._key, old))

        recorded = transact(attempt, self._conflict())
        if found is None:
            self._objects.put(BUCKET_KEY, _encode(BucketRecord(wanted)))
        return recorded

    # -- the metadata store -----------------------------------------------------------------

    def _record(self, bucket_id: str) -> BucketRecord:
        """Records an id, unless another process has recorded one; returns the recorded one."""

        def attempt() -> BucketRecord | None:
            if recorded := self._try_record(bucket_id, Absent(self._key)):
                return recorded
            found = self._metadata.get(self._key)
            return None if found is None else _decode(found.value, self._key)

        return transact(attempt, self._conflict())

    def _conflict(self) -> ConflictError:
        return ConflictError("the bucket's id keeps changing", path=self._key)

    def _try_record(self, bucket_id: str, unchanged: Compare) -> BucketRecord | None:
        record = BucketRecord(bucket_id, self.location)
        is_done = self._metadata.transact([unchanged], [Put(self._key, _encode(record))])
        return record if is_done is not None else None

    def _note_put(self) -> None:
        old = self._metadata.get(self._key)
        if old is not None:
            record = msgspec.structs.replace(_decode(old.value, self._key), is_put=True)
            # If it fails, another process has noted it.
            self._metadata.transact([unchanged(self._key, old)], [Put(self._key, _encode(record))])

    def _named_objects(self) -> Iterator[str]:
        """The keys of objects that the metadata store names, one for each topic."""
        at: str | None = self._topics
        while at is not None:
            page = self._metadata.range(self._topics, start=at, limit=_PAGE_KEYS)
            at = f"{page[-1].key}\0" if len(page) == _PAGE_KEYS else None
            for item in page:
                topic = parse_topic_of_key(TOPICS_PREFIX + item.key.removeprefix(self._topics))
                folder, _, name = item.key.rpartition("/")
                if topic is None or not folder.endswith("/objects") or not name.isdigit():
                    continue
                with suppress(IsterError):
                    yield object_key(topic, decode_descriptor(item.value, key=item.key).object_id)
                    at = f"{folder}0"  # after all keys of this topic's objects
                    break

    # -- the bucket -------------------------------------------------------------------------

    def _read_object(self) -> BucketRecord | None:
        try:
            data = self._objects.read(BUCKET_KEY, 0, _OBJECT_BYTES_MAX)
        except NotFoundError:
            return None
        return _decode(bytes(data), f"{self.location}/{BUCKET_KEY}")

    def _put_object(self, bucket_id: str) -> BucketRecord:
        """Puts an id into the bucket, unless it has one; returns the one that it then has."""
        data = _encode(BucketRecord(bucket_id))
        try:
            self._objects.put(BUCKET_KEY, data, if_absent=True)
        except AlreadyExistsError:
            pass
        except UnsupportedOperationError:
            self._objects.put(BUCKET_KEY, data)
        # Some stores ignore `if_absent`: the id that is there in the end counts.
        found = self._read_object()
        if found is None:
            raise ConflictError(
                "the bucket's id was written, but cannot be read back",
                path=f"{self.location}/{BUCKET_KEY}",
            )
        return found

    def _require_objects(self, recorded: BucketRecord | None) -> None:
        """Refuses a bucket without an id that has none of the objects that it should have."""
        named = list(islice(self._named_objects(), _SAMPLES))
        for key in named:
            with suppress(NotFoundError, CorruptDataError):
                self._objects.stat(key)
                return
        # An id that was never in a bucket says nothing: its location may have been mistyped.
        is_elsewhere = (
            recorded is not None
            and recorded.is_put
            and (
                recorded.location not in ("", self.location)
                or bool(read_members(self._metadata, self._root_prefix))
            )
        )
        if named or is_elsewhere:
            expected = f"expects the bucket {_describe(recorded)}" if recorded else "names objects"
            lacks = " and none of the objects that were looked up" if named else ""
            raise ConflictError(
                f"{self.location} has no id ({BUCKET_KEY}){lacks}, but the metadata store "
                f"{expected}",
                path=self.location,
                hint=f"{_HINT}. If its objects were deleted, restore them first",
            )


class _UncheckedBucket:
    """A bucket that did not answer when it was checked: the first change checks it again."""

    def __init__(self, store: ObjectStore, identity: BucketIdentity) -> None:
        self._store = store
        self._identity = identity

    def __getattr__(self, name: str) -> object:
        if name in _CHANGES:
            self._identity.check()
        method: object = getattr(self._store, name)
        return method


def check_bucket(objects: ObjectStore, metadata: MetadataStore, *, root_prefix: str) -> ObjectStore:
    """Checks a bucket's id; returns the store to use.

    If the bucket does not answer, the returned store checks the id before the first change.

    Raises:
        ConflictError: It is not the bucket of this metadata store.
        CorruptDataError: An id cannot be read.
    """
    identity = BucketIdentity(objects, metadata, root_prefix=root_prefix)
    errors: list[Exception | None] = []

    def check() -> None:
        try:
            identity.check()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
        else:
            errors.append(None)

    # Calls to a bucket that is down are retried for a long time; a start does not wait for that.
    threads.start("ister-bucket-id", check).join(_START_SECONDS)
    error = errors[0] if errors else UnavailableError(f"no answer in {_START_SECONDS:.0f} s")
    if error is None:
        return objects
    if isinstance(error, ConflictError | CorruptDataError) or not isinstance(error, IsterError):
        raise error
    _log.warning(
        "bucket not checked yet; messages are accepted, and it is checked before the first upload",
        extra={"store": objects.location, "error": str(error)},
    )
    return cast("ObjectStore", _UncheckedBucket(objects, identity))


def _describe(record: BucketRecord) -> str:
    return f"{record.id} ({record.location})" if record.location else record.id


def _encode(record: BucketRecord) -> bytes:
    return msgspec.json.encode(record)


def _decode(data: bytes, path: str) -> BucketRecord:
    try:
        return msgspec.json.decode(data, type=known(BucketRecord))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptDataError(
            f"the bucket's id cannot be read: {error}",
            path=path,
            hint="restore it, or run `ister config bucket --accept`",
        ) from error
