"""Batches that count once: staged rows become messages of a topic, however often that is asked for.

    tasks ─► staged files ─► manifest ─► begin ─► rows ─► synced ─► done ─► staged files go
             (bucket)        (bucket)    (metadata)  (topic)          (metadata)

A short manifest is a part of the record that begins the batch, and no object.

A writer has a name and numbers its batches, as a streaming query does. Its newest batch is
remembered with the topic. A request for a batch that is done is answered with "known". If some rows
of the batch are in the topic, the remaining rows of the *first* request are appended, from its
manifest: a repeated request may bring the same rows in another order, or other rows.

Which rows are in already is read from the log itself: each carries the batch's identity (in
Danube's `producer_id`) and its number in the batch (in `request_id`). Rows are appended in that
order, so the highest number found is where to continue. Other producers may append in between.
After a disk was lost, the same search shows that a finished batch is not in the topic any more.

A staged file may have rows of several topics, each of which is a batch of its own. So this removes
no such file that a request names: the driver does, when all topics have their rows. Only files of
an earlier request, whose driver is gone, are removed here, by the last topic that needed them.

Owns: the order of these steps. Does not own: the staging of files, the topic's lock; only the
topic's owner calls this, one call at a time per topic.

What a crash leaves, by the step it came after: staged files (swept when they are old); a batch that
is begun, which the next request finishes; staged files of a batch that is done (swept).

Readers may see the first rows of a batch before its last ones, as with every producer.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ister import failpoints
from ister.bucket.names import shared_staging_prefix, staging_prefix
from ister.bucket.ownership import OwnedTopic
from ister.bucket.shared_staging import StagedNeeds
from ister.bucket.writer_files import read_files
from ister.clock import Clock
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.format.manifest import StagedFile, encode_manifest
from ister.format.records import WriterRecord, decode_writer, encode_writer
from ister.format.staged_rows import (
    BLOCK_HEADER_SIZE,
    decode_block,
    join_batches,
    parse_block_size,
)
from ister.limits import KIB, MIB
from ister.metadata.base import Absent, Compare, Delete, Put, RevisionIs
from ister.model import AckLevel, Codec, TopicName
from ister.objectstore.base import ObjectStore
from ister.topic.topic import Topic

_log = logging.getLogger("ister.topic.batches")

_WRITER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,119}")
_ATTEMPTS: Final = 5
_BLOCK_BYTES_MAX: Final = 1024 * MIB
# A longer list of files is an object of its own, instead of a part of the writer's record.
_SHORT_MANIFEST_BYTES_MAX: Final = 8 * KIB
# Bytes of a staged file that are read at once.
_READ_BYTES: Final = 8 * MIB
# Rows encoded under the topic's lock at once: a few milliseconds for other producers.
_ENCODE_BYTES: Final = 4 * MIB
# Smaller batches are joined: an append has a fixed cost, more than that of a few rows.
_JOINED_BYTES_MIN: Final = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedBatch:
    """Rows in the bucket that are to become messages of one topic."""

    writer: str
    """The writer's name; its batches are distinguished by their numbers."""
    batch: int
    files: tuple[StagedFile, ...]
    """In the order in which rows are appended."""
    is_repeatable: bool = True
    """Whether the same batch may be asked for again; else nothing is remembered once it is in."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(file.rows for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedBatch:
    """The result of appending a batch."""

    start: int
    end: int
    """All of its rows have offsets in `start` up to, not including, `end`."""
    rows: int
    is_known: bool
    """Whether it was in the topic already."""


def check_writer_name(name: str) -> None:
    """Refuses a writer name that cannot be part of a key.

    Raises:
        InvalidRequestError: It cannot.
    """
    if not _WRITER_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"a writer's name cannot be {name!r}",
            hint="up to 120 ASCII letters, digits, '_' and '-', a letter or digit first",
        )


class Gate(Protocol):
    """Decides whether the rows of a batch may enter the topic."""

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to check; if not, the rows are not read twice."""
        ...

    def check(self, rows: pa.RecordBatch) -> None:
        """Called with all rows of a batch before the first one is appended.

        Raises:
            IsterError: They are refused, and nothing is appended.
        """
        ...

    def wait(self, count: int) -> None:
        """Called before so many rows are appended; may wait, where the topic has a rate.

        Raises:
            UnavailableError: The wait was cancelled; a repeated call appends the rest.
        """
        ...


def append_staged(
    topic: Topic,
    owned: OwnedTopic,
    objects: ObjectStore,
    staged: StagedBatch,
    *,
    clock: Clock,
    gate: Gate | None = None,
) -> AppendedBatch:
    """Appends the rows of a batch, unless they are in the topic; all are durable on return.

    Args:
        topic: Where to.
        owned: The claim on the topic.
        objects: Where the rows are.
        staged: Which rows.
        clock: For the writer's record.
        gate: Admits the rows; None admits all that the topic itself takes.

    Raises:
        InvalidRequestError: A name or a key is not one of this topic's staging.
        ConflictError: Half a batch cannot be finished, or another writer uses this name.
        NotFoundError: A staged file is lost; nothing was appended.
        FencedError: Another owner has the topic.
        UnavailableError: A store does not answer; ask again.
        As `Topic.append` and `Topic.wait`.
    """
    check_writer_name(staged.writer)
    return _Appending(topic, owned, objects, staged, clock=clock, gate=gate).run()


class _Appending:
    """One request to append a batch."""

    def __init__(
        self,
        topic: Topic,
        owned: OwnedTopic,
        objects: ObjectStore,
        staged: StagedBatch,
        *,
        clock: Clock,
        gate: Gate | None,
    ) -> None:
        self._gate = gate
        self._topic = topic
        self._owned = owned
        self._objects = objects
        self._staged = staged
        self._clock = clock
        self._name = TopicName.parse(topic.name)
        self._key = owned.catalog.keys.writer(staged.writer)

    def run(self) -> AppendedBatch:
        """Appends the batch; the module header describes the steps."""
        staged = self._staged
        self._check_keys(staged.files)
        record, revision = self._load()
        if record is not None and record.batch > staged.batch:
            _log.warning(
                "an older batch was skipped: its writer has appended a newer one",
                extra={
                    "topic": self._topic.name,
                    "writer": staged.writer,
                    "batch": staged.batch,
                    "newest": record.batch,
                },
            )
            self._remove(staged.files)
            return AppendedBatch(start=record.start, end=record.start, rows=0, is_known=True)
        if record is not None and record.batch == staged.batch and self._is_in(record):
            self._remove(staged.files)
            return AppendedBatch(
                start=record.start, end=record.end, rows=record.rows, is_known=True
            )
        if record is not None and record.batch < staged.batch and not record.is_done:
            # The writer went on without it: asked for again, it had no rows for this topic.
            revision = self._carry_on(record, revision)
        begun: _Begun | None = None
        if record is not None and record.batch == staged.batch:
            begun = self._resume(record, revision)
        if begun is None:
            begun = self._begin(revision)
        end = self._append(begun)
        failpoints.reach("batch.before_done")
        record = begun.record
        done = replace(
            record,
            is_done=True,
            end=end,
            epoch=self._owned.epoch,
            updated_at=self._now_seconds(),
            files=None,
        )
        self._finish(done, begun.revision)
        failpoints.reach("batch.after_done")
        self._remove(begun.files)
        self._remove(staged.files)
        self._release(begun.files)
        if record.files is None:
            self._delete(record.manifest)
        return AppendedBatch(start=done.start, end=done.end, rows=done.rows, is_known=False)

    def _carry_on(self, record: WriterRecord, revision: int | None) -> int | None:
        """Finishes an older batch that was appended in part; returns the revision of the record."""
        begun = self._resume(record, revision)
        if begun is None:
            return revision
        end = self._append(begun)
        done = replace(
            begun.record, is_done=True, end=end, updated_at=self._now_seconds(), files=None
        )
        revision = self._change(begun.revision, Put(self._key, encode_writer(done)))
        self._remove(begun.files)
        self._release(begun.files)
        if record.files is None:
            self._delete(record.manifest)
        return revision

    # -- what is known ----------------------------------------------------------------------

    def _load(self) -> tuple[WriterRecord | None, int | None]:
        """The writer's newest batch, and the revision of its key."""
        found = self._owned.catalog.store.get(self._key)
        if found is None:
            return None, None
        record = decode_writer(found.value, key=self._key)
        if record.incarnation != self._owned.record.incarnation:
            return None, found.revision  # of a topic of the same name that was deleted
        return record, found.revision

    def _is_in(self, record: WriterRecord) -> bool:
        """Whether the rows of a finished batch are still there: a disk may have been lost since.

        Its last row tells, unless retention has taken that: then the batch was in.
        """
        topic, last = self._topic, record.end - 1
        if not record.is_done:
            return False
        if record.rows == 0 or last < topic.earliest:
            return True
        if last >= topic.flush():
            return False
        columns = ("producer_id", "request_id")
        row = topic.scan_arrow(last, end=record.end, columns=columns).read_all()
        mine = {
            "producer_id": [_identity_of(record, self._staged.writer)],
            "request_id": [record.rows - 1],
        }
        return bool(row.to_pydict() == mine)

    def _resume(self, record: WriterRecord, revision: int | None) -> _Begun | None:
        """How to finish a batch that may be appended in part; None to begin it again.

        Raises:
            ConflictError: A part of it is in the topic, and the rest is lost.
        """
        synced = self._topic.flush()
        # After a disk was lost, offsets are assigned again, and rows may have lower ones now.
        record = replace(record, start=min(record.start, synced), is_done=False)
        have, end = self._count_rows(record)
        if have == 0:
            # The new rows are as good as the first ones: the writer may have corrected them.
            return None
        try:
            files = read_files(self._objects, record)
            self._check_files(files)
        except (NotFoundError, CorruptDataError) as error:
            files = ()
            if have < record.rows:
                raise ConflictError(
                    f"{have} of {record.rows} rows of batch {record.batch} are in the topic, and "
                    f"the staged files of the rest are lost: {error.message}",
                    topic=self._topic.name,
                    offset=record.start,
                    hint="check the rows from this offset on, and start with a new checkpoint",
                ) from error
        revision = self._change(revision, Put(self._key, encode_writer(record)))
        return _Begun(record=record, revision=revision, files=files, have=have, end=end)

    def _check_files(self, files: tuple[StagedFile, ...]) -> None:
        """Checks that all files can be read, before the first row is appended."""
        self._check_keys(files)
        sizes = {key: self._objects.stat(key).size for key in {file.key: None for file in files}}
        for file in files:
            if file.position is None:
                is_whole = sizes[file.key] == file.size_bytes
            else:
                is_whole = sizes[file.key] >= file.position + file.size_bytes
            if not is_whole:
                raise CorruptDataError("a staged file has another size", path=file.key)

    def _check_keys(self, files: tuple[StagedFile, ...]) -> None:
        """Refuses keys of other objects: staged files are removed at the end."""
        own, shared = staging_prefix(self._name), shared_staging_prefix(self._staged.writer)
        for file in files:
            prefix = own if file.position is None else shared
            if not file.key.startswith(prefix) or ".." in file.key.split("/"):
                raise InvalidRequestError(
                    "a staged file is not one of this topic's",
                    topic=self._topic.name,
                    path=file.key,
                )

    def _check_codec(self, files: tuple[StagedFile, ...]) -> None:
        """Refuses rows with fields that the older codec lacks before one of them is appended.

        The writer may not have known the topic's codec; it has checked everything else.
        """
        for file in files:
            for batch in self._read_rows(file):
                for name in ("schema_id", "schema_version", "routing_key"):
                    if batch[name].null_count < batch.num_rows:
                        raise InvalidRequestError(
                            f"{self._topic.codec} has no field {name}",
                            topic=self._topic.name,
                            hint="leave the column out, or use a topic with codec bincode2",
                        )

    def _count_rows(self, record: WriterRecord) -> tuple[int, int]:
        """The number of the batch's rows in the topic, always its first ones, and their end."""
        topic = self._topic
        start = max(record.start, topic.earliest)
        mine = pa.scalar(_identity_of(record, self._staged.writer), pa.uint64())
        count, end = 0, record.start
        for batch in topic.scan_arrow(start, columns=("offset", "producer_id", "request_id")):
            rows = batch.filter(pc.equal(batch["producer_id"], mine))
            if rows.num_rows:
                count = max(count, pc.max(rows["request_id"]).as_py() + 1)
                end = pc.max(rows["offset"]).as_py() + 1
        return count, end

    # -- steps ------------------------------------------------------------------------------

    def _begin(self, revision: int | None) -> _Begun:
        """Records the batch's files; from here on these rows are the batch."""
        staged = self._staged
        self._check_files(staged.files)
        if self._topic.codec is Codec.BINCODE1:
            self._check_codec(staged.files)
        if self._gate is not None and self._gate.is_needed:
            for file in staged.files:
                for batch in self._read_rows(file):
                    self._gate.check(batch)
        prefix = staging_prefix(self._name, staged.writer, staged.batch)
        manifest = f"{prefix}manifest-{secrets.token_hex(8)}.json"
        listed = encode_manifest(staged.files)
        is_short = len(listed) <= _SHORT_MANIFEST_BYTES_MAX
        if not is_short:
            self._objects.put(manifest, listed)
        failpoints.reach("batch.after_manifest")
        # Of what is durable: what is not may be taken back, and rows would get lower offsets.
        start = self._topic.flush()
        record = WriterRecord(
            batch=staged.batch,
            is_done=False,
            start=start,
            end=start,
            rows=staged.rows,
            manifest=manifest,
            epoch=self._owned.epoch,
            incarnation=self._owned.record.incarnation,
            updated_at=self._now_seconds(),
            files=staged.files if is_short else None,
        )
        revision = self._change(revision, Put(self._key, encode_writer(record)))
        failpoints.reach("batch.after_begin")
        return _Begun(record=record, revision=revision, files=staged.files, have=0, end=start)

    def _append(self, begun: _Begun) -> int:
        """Appends the rows that are missing; returns the offset after the batch's last one."""
        topic, end = self._topic, begun.end
        identity = _identity_of(begun.record, self._staged.writer)
        number = begun.have
        missing = ((rows, rows.nbytes) for rows in self._missing_rows(begun))
        for rows in join_batches(missing, bytes_min=_JOINED_BYTES_MIN):
            for part in _cut(rows):
                if self._gate is not None:
                    self._gate.wait(part.num_rows)
                end = topic.append_arrow(part, producer_id=identity, first_request_id=number).stop
                number += part.num_rows
                failpoints.reach("batch.after_rows")
        if end > 0:
            # What is remembered in the metadata store is durable, so the rows have to be first.
            if topic.ack is AckLevel.TIERED:
                topic.upload()
            else:
                topic.flush()
        return end

    def _missing_rows(self, begun: _Begun) -> Iterator[pa.RecordBatch]:
        """The rows that are not in the topic yet, in their order."""
        skip = begun.have
        for file in begun.files:
            if file.rows < skip:
                skip -= file.rows
                continue
            for batch in self._read_rows(file):
                if skip < batch.num_rows:
                    yield batch.slice(skip)
                skip = max(0, skip - batch.num_rows)

    def _read_rows(self, file: StagedFile) -> Iterator[pa.RecordBatch]:
        """The rows of a file, which are as many as it should have, or the batch is never done."""
        topic = "" if file.position is None else self._topic.name
        rows = 0
        for header, body in self._read_blocks(file):
            batch = decode_block(header, body, key=file.key, topic=topic)
            rows += batch.num_rows
            if rows > file.rows:
                raise CorruptDataError("a staged file has more rows than it should", path=file.key)
            yield batch
        if rows < file.rows:
            raise CorruptDataError("a staged file has fewer rows than it should", path=file.key)

    def _read_blocks(self, file: StagedFile) -> Iterator[tuple[bytes, memoryview]]:
        """Yields the header and body of each block of a file; one read returns several blocks.

        A block that is larger than a read is read at once, with the header of the next one, so
        that no byte of it is copied again.
        """
        at = file.position or 0
        end = at + file.size_bytes
        data = memoryview(b"")

        def take(size: int) -> memoryview:
            nonlocal at, data
            parts: list[memoryview] = []
            while len(data) < size:
                parts.append(data)
                size -= len(data)
                wanted = min(max(size + BLOCK_HEADER_SIZE, _READ_BYTES), end - at)
                data = memoryview(self._objects.read(file.key, at, wanted))
                if not data or (len(data) < size and wanted == end - at):
                    raise CorruptDataError("a staged file is cut short", path=file.key)
                at += len(data)
            taken, data = data[:size], data[size:]
            return memoryview(b"".join((*parts, taken))) if any(parts) else taken

        while at < end or data:
            header = bytes(take(BLOCK_HEADER_SIZE))
            size = parse_block_size(header)
            if size > _BLOCK_BYTES_MAX:
                raise CorruptDataError("a staged block is damaged", path=file.key)
            yield header, take(size)

    def _finish(self, done: WriterRecord, revision: int | None) -> None:
        """The commit point: from here on the batch is in the topic."""
        if self._staged.is_repeatable:
            self._change(revision, Put(self._key, encode_writer(done)))
        else:
            self._change(revision, Delete(self._key))

    def _change(self, revision: int | None, operation: Put | Delete) -> int | None:
        """Changes the writer's key, if it still is what was read; returns its new revision."""
        store = self._owned.catalog.store
        wanted = operation.value if isinstance(operation, Put) else None
        compare: Compare = (
            Absent(self._key) if revision is None else RevisionIs(self._key, revision)
        )
        unknown: CommitUnknownError | None = None
        for _ in range(_ATTEMPTS):
            try:
                done = self._owned.transact_at([compare], [operation])
            except CommitUnknownError as error:
                done, unknown = None, error
            if done is not None:
                return None if wanted is None else done
            # The stored value shows what happened: an earlier attempt may have succeeded.
            found = store.get(self._key)
            if (found.value if found is not None else None) == wanted:
                return found.revision if found is not None else None
            if (found.revision if found is not None else None) != revision:
                raise ConflictError(
                    "another process writes batches under this writer's name",
                    topic=self._topic.name,
                    path=self._key,
                )
        raise unknown or UnavailableError(
            "the writer's record could not be changed", topic=self._topic.name, path=self._key
        )

    # -- leftovers --------------------------------------------------------------------------

    def _remove(self, files: tuple[StagedFile, ...]) -> None:
        """Removes files that have rows of this topic only."""
        for file in files:
            if file.position is None:
                self._delete(file.key)

    def _release(self, files: tuple[StagedFile, ...]) -> None:
        """Removes files of an earlier request, unless another topic needs them."""
        current = {file.key for file in self._staged.files}
        keys = {file.key: None for file in files if file.position is not None}
        store = self._owned.catalog.store
        needs = StagedNeeds(self._objects, store, self._owned.catalog.keys.root_prefix)
        for key in keys:
            if key in current:
                continue
            try:
                is_needed = needs.has(self._objects.stat(key))
            except IsterError as error:
                # Swept later.
                _log.info("staged file left behind", extra={"path": key, "error": str(error)})
            else:
                if not is_needed:
                    self._delete(key)

    def _delete(self, key: str) -> None:
        try:
            self._objects.delete(key)
        except IsterError as error:
            # Swept later: the batch is in the topic, and that is what was asked for.
            _log.info("staged file left behind", extra={"path": key, "error": str(error)})

    def _now_seconds(self) -> int:
        return self._clock.now_ns() // 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A batch whose rows are being appended."""

    record: WriterRecord
    revision: int | None
    """Of the writer's key."""
    files: tuple[StagedFile, ...]
    have: int
    """How many of its rows are in the topic."""
    end: int
    """The offset after the last of those."""


def _identity_of(record: WriterRecord, writer: str) -> int:
    """The id of a batch's rows in the log; never 0, which means no batch."""
    text = f"{record.incarnation}/{writer}/{record.batch}/{record.manifest}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") or 1


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in pieces small enough that other producers do not wait for long."""
    if not batch.num_rows:
        return
    pieces = max(1, batch.nbytes // _ENCODE_BYTES)
    rows = -(-batch.num_rows // pieces)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
