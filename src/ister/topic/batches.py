"""Batches that count once: staged rows become messages of a topic, however often that is asked for.

    tasks ─► staged files ─► manifest ─► begin ─► rows ─► synced ─► done ─► staged files go
             (bucket)        (bucket)    (metadata)  (topic)          (metadata)

A short manifest is a part of the record that begins the batch, and no object.

A writer has a name and numbers its batches, as a streaming query does. Its newest batch is
remembered with the topic. A request for a batch that is done is answered with "known". If some rows
of the batch are in the topic, the remaining rows of the *first* request are appended, from its
manifest: a repeated request may bring the same rows in another order, or other rows.

    number      older than the newest one      ConflictError
    the same    another count of rows          ConflictError, once the first request's rows are in
                other rows (by their digest)   `is_other`; the rows of the first request are in

The record of a done batch says where its rows are (`runs`), and the log is not read: compaction
and retention may have removed them. Rows can only vanish by a take-over after a disk was lost,
which is a later entry of the lineage that starts below the batch's end; the runs say how many rows
are below that.

Which rows of a batch are in that is not done is read from the log itself: each carries the batch's
identity (in Danube's `producer_id`) and its number in the batch (in `request_id`). Rows are
appended in that order, so the highest number found is where to continue. Other producers may append
in between. So no job removes a message above `end` of such a record (`counted_from`); if that holds
up jobs for long, the owner counts the rows, and writes down where they are (`settle`).

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.limits import KIB, MIB
from ister.base.model import AckLevel, Codec, TopicName
from ister.bucket.names import shared_staging_prefix, staging_prefix
from ister.bucket.ownership import OwnedTopic
from ister.bucket.shared_staging import StagedNeeds
from ister.bucket.writer_files import read_files
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
from ister.format.records import BatchRun, WriterRecord, decode_writer, encode_writer
from ister.format.staged_rows import (
    BLOCK_HEADER_SIZE,
    DIGEST_MODULUS,
    decode_block,
    join_batches,
    parse_block_size,
)
from ister.metadata.base import Absent, Compare, Delete, Put, RevisionIs
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
# What a record says about where rows are; what is beyond that is read from the log.
_RUNS_MAX: Final = 256
_RENEW_SECONDS: Final = 300
_HINT: Final = (
    "if the checkpoint was restored or copied, or the query changed, a new name in the option "
    "`writer`, or a new checkpoint, appends them; see 'Checkpoints: copy, restore, reset' in "
    "docs/SPARK.md"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedBatch:
    """Rows in the bucket that are to become messages of one topic."""

    writer: str
    """The writer's name; its batches are distinguished by their numbers."""
    batch: int
    files: tuple[StagedFile, ...]
    """In the order in which rows are appended."""
    is_repeatable: bool = True
    """Whether the same batch may be asked for again; else nothing is remembered once it is in.
    If not, and without files, this only forgets the writer's newest batch, if that is done."""

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
    is_other: bool = False
    """Whether other rows were in the topic, of an earlier request for the same batch, and those of
    this one were not appended."""


def check_writer_name(name: str) -> None:
    """Refuses a writer name that cannot be part of a key."""
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

    `gate`: admits the rows; None admits all that the topic itself takes.

    Raises:
        InvalidRequestError: A name or a key is not one of this topic's staging.
        ConflictError: The batch is older than the writer's newest one, or has another number of
            rows than before; half a batch cannot be finished; or another writer uses this name.
        NotFoundError: A staged file is lost; nothing was appended.
        UnavailableError: A store does not answer; ask again.
    """
    check_writer_name(staged.writer)
    return _Appending(topic, owned, objects, staged, clock=clock, gate=gate).run()


def settle(topic: Topic, owned: OwnedTopic, objects: ObjectStore, *, clock: Clock) -> None:
    """Writes down where the rows of open batches are, so that jobs need not wait for these batches.

    Call it while no batch is appended (`Topic._append_alone`).

    Raises:
        CorruptDataError: A record, or a message, cannot be read.
    """
    prefix = owned.catalog.keys.writer("")
    for found in owned.catalog.store.range(prefix):
        staged = StagedBatch(writer=found.key.removeprefix(prefix), batch=0, files=())
        _Appending(topic, owned, objects, staged, clock=clock, gate=None).settle()


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
        if not staged.files and not staged.is_repeatable:
            if record is not None and record.is_done and record.batch <= staged.batch:
                self._change(revision, Delete(self._key))
            return AppendedBatch(start=0, end=0, rows=0, is_known=True)
        begun: _Begun | None = None
        if record is not None and record.batch > staged.batch:
            self._remove(staged.files)
            raise self._older_error(record)
        if record is not None and record.batch == staged.batch:
            synced = self._topic.flush()
            runs = self._find_rows(record, synced)
            if record.is_done and (runs is None or _count(runs) == record.rows):
                self._remove(staged.files)
                return self._answer(record, is_known=True)
            begun = self._resume(record, revision, runs or [], synced)
        elif record is not None and not record.is_done:
            # The writer went on without it: asked for again, it had no rows for this topic.
            revision = self._carry_on(record, revision)
        if begun is None:
            begun = self._begin(revision)
        done = self._append(begun)
        failpoints.reach("batch.before_done")
        self._finish(done, begun.revision)
        failpoints.reach("batch.after_done")
        self._clean_up(begun)
        self._remove(staged.files)
        return self._answer(done, is_known=False)

    def settle(self) -> None:
        """Writes down where the rows of the writer's batch are, unless it is done."""
        record, revision = self._load()
        if record is None or record.is_done:
            return
        synced = self._topic.flush()
        runs = self._find_rows(record, synced) or []
        self._change(revision, Put(self._key, encode_writer(self._settled(record, runs, synced))))

    def _carry_on(self, record: WriterRecord, revision: int | None) -> int | None:
        """Finishes an older batch that was appended in part; returns the revision of the record."""
        synced = self._topic.flush()
        begun = self._resume(record, revision, self._find_rows(record, synced) or [], synced)
        if begun is None:
            return revision
        done = self._append(begun)
        revision = self._change(begun.revision, Put(self._key, encode_writer(done)))
        self._clean_up(begun)
        return revision

    def _answer(self, done: WriterRecord, *, is_known: bool) -> AppendedBatch:
        """The result for a batch that is in, after a comparison with the request's rows."""
        staged, digest = self._staged, _digest_of(self._staged.files)
        if done.rows != staged.rows:
            raise ConflictError(
                f"batch {done.batch} of the writer {staged.writer!r} is in the topic with "
                f"{done.rows} rows, and comes again with {staged.rows}, which were not appended",
                topic=self._topic.name,
                offset=done.start,
                hint=_HINT,
            )
        return AppendedBatch(
            start=done.start,
            end=done.end,
            rows=done.rows,
            is_known=is_known,
            is_other=None not in (digest, done.digest) and digest != done.digest,
        )

    def _older_error(self, record: WriterRecord) -> ConflictError:
        staged = self._staged
        return ConflictError(
            f"batch {staged.batch} is older than the newest one of the writer {staged.writer!r}, "
            f"{record.batch}: its {staged.rows} rows were not appended",
            topic=self._topic.name,
            hint=_HINT,
        )

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

    def _find_rows(self, record: WriterRecord, synced: int) -> list[BatchRun] | None:
        """Where the batch's rows are that are in, always its first ones; None if all are.

        Rows of a done batch are in unless a take-over, or the end of the log, has cut them off.
        """
        later = (one.start for one in self._owned.record.lineage if one.epoch > record.epoch)
        cut = min((synced, *later))
        if record.is_done and (record.rows == 0 or record.end <= cut):
            return None
        runs = [
            BatchRun(run.first, run.offset, min(run.rows, cut - run.offset))
            for run in record.runs
            if run.offset < cut
        ]
        if not record.is_done:
            # What is above the cut now may be rows that were appended after it.
            self._scan(record, runs, min(record.end, cut), synced)
        elif _count(record.runs) < record.rows:
            begin = runs[-1].offset + runs[-1].rows if runs else min(record.start, cut)
            self._scan(record, runs, begin, cut)
        return runs

    def _scan(self, record: WriterRecord, runs: list[BatchRun], start: int, end: int) -> None:
        """Adds the runs of rows that a range of the log has."""
        topic = self._topic
        start = max(start, topic.earliest)
        if start >= end:
            return
        mine = pa.scalar(_identity_of(record, self._staged.writer), pa.uint64())
        columns = ("offset", "producer_id", "request_id")
        for batch in topic.scan_arrow(start, end=end, columns=columns):
            rows = batch.filter(pc.equal(batch["producer_id"], mine))
            offsets = rows["offset"].cast(pa.int64())
            numbers = rows["request_id"].cast(pa.int64())
            distances = pc.subtract(offsets, numbers)
            is_next = pc.equal(distances.slice(1), distances.slice(0, max(len(rows) - 1, 0)))
            starts = [at + 1 for at in pc.indices_nonzero(pc.invert(is_next)).to_pylist()]
            for begin, stop in pairwise([0, *starts, len(rows)] if len(rows) else []):
                row, last = numbers[begin].as_py(), numbers[stop - 1].as_py()
                _add_run(runs, BatchRun(row, offsets[begin].as_py(), last - row + 1))

    def _settled(self, record: WriterRecord, runs: list[BatchRun], synced: int) -> WriterRecord:
        """The record of a batch that is not done, with the rows that are in below `synced`."""
        kept = tuple(runs[:_RUNS_MAX])
        is_whole = len(kept) == len(runs)
        return replace(
            record,
            is_done=False,
            # After a disk was lost, offsets are assigned again, and rows may have lower ones now.
            start=min(record.start, synced),
            end=synced if is_whole else kept[-1].offset + kept[-1].rows,
            runs=kept,
            epoch=self._owned.epoch,
        )

    def _resume(
        self, record: WriterRecord, revision: int | None, runs: list[BatchRun], synced: int
    ) -> _Begun | None:
        """How to finish a batch that may be appended in part; None to begin it again.

        Raises:
            ConflictError: A part of it is in the topic, and the rest is lost.
        """
        have = _count(runs)
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
        record = replace(self._settled(record, runs, synced), updated_at=self._now_seconds())
        revision = self._change(revision, Put(self._key, encode_writer(record)))
        return _Begun(record=record, revision=revision, files=files, runs=runs)

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
            digest=_digest_of(staged.files),
        )
        revision = self._change(revision, Put(self._key, encode_writer(record)))
        failpoints.reach("batch.after_begin")
        return _Begun(record=record, revision=revision, files=staged.files, runs=[])

    def _append(self, begun: _Begun) -> WriterRecord:
        """Appends the rows that are missing; returns the record of the batch that is done."""
        topic, runs = self._topic, begun.runs
        identity = _identity_of(begun.record, self._staged.writer)
        number = _count(runs)
        missing = ((rows, rows.nbytes) for rows in self._missing_rows(begun))
        for rows in join_batches(missing, bytes_min=_JOINED_BYTES_MIN):
            for part in _cut(rows):
                if self._gate is not None:
                    self._gate.wait(part.num_rows)
                self._renew(begun)
                at = topic.append_arrow(part, producer_id=identity, first_request_id=number)
                _add_run(runs, BatchRun(number, at.start, len(at)))
                number += part.num_rows
                failpoints.reach("batch.after_rows")
        end = runs[-1].offset + runs[-1].rows if runs else begun.record.start
        if end > 0:
            # What is remembered in the metadata store is durable, so the rows have to be first.
            if topic.ack is AckLevel.TIERED:
                topic.upload()
            else:
                topic.flush()
        return replace(
            begun.record,
            is_done=True,
            end=end,
            epoch=self._owned.epoch,
            updated_at=self._now_seconds(),
            files=None,
            runs=tuple(runs[:_RUNS_MAX]),
        )

    def _renew(self, begun: _Begun) -> None:
        """Shows that a batch is under way which takes long: the records of old jobs are removed."""
        now = self._now_seconds()
        if now - begun.record.updated_at >= _RENEW_SECONDS:
            begun.record = replace(begun.record, updated_at=now)
            begun.revision = self._change(
                begun.revision, Put(self._key, encode_writer(begun.record))
            )

    def _missing_rows(self, begun: _Begun) -> Iterator[pa.RecordBatch]:
        """The rows that are not in the topic yet, in their order."""
        skip = _count(begun.runs)
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

    def _clean_up(self, begun: _Begun) -> None:
        """Removes what a batch that is done does not need any more."""
        self._remove(begun.files)
        self._release(begun.files)
        if begun.record.files is None:
            self._delete(begun.record.manifest)

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


@dataclass(slots=True, kw_only=True)
class _Begun:
    """A batch whose rows are being appended."""

    record: WriterRecord
    revision: int | None
    """Of the writer's key."""
    files: tuple[StagedFile, ...]
    runs: list[BatchRun]
    """Where its rows are that are in."""


def _count(runs: Sequence[BatchRun]) -> int:
    """The number of rows that are in: the first ones of their batch."""
    return runs[-1].first + runs[-1].rows if runs else 0


def _add_run(runs: list[BatchRun], run: BatchRun) -> None:
    """Adds rows that come after those of `runs`.

    Rows between the two are in as well, although the log does not have them any more: right before
    these, as far as anybody can tell.
    """
    have = _count(runs)
    count = run.first + run.rows - have
    if count <= 0:
        return
    offset = run.offset + have - run.first
    last = runs[-1] if runs else None
    if last is not None and last.offset + last.rows == offset:
        runs[-1] = last._replace(rows=last.rows + count)
    else:
        runs.append(BatchRun(have, offset, count))


def _digest_of(files: Sequence[StagedFile]) -> int | None:
    """The digest of all rows of files; None if it is unknown."""
    digests = [file.digest for file in files if file.rows]
    known = [digest for digest in digests if digest is not None]
    return sum(known) % DIGEST_MODULUS if len(known) == len(digests) else None


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
