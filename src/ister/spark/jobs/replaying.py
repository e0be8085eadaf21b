"""`replay`: messages of one topic become messages of another one, through a function or a query.

    source, [start, end) ─► chunks ─► tasks: transform, stage ─► driver: chunk n is batch n ─► done

Owns: the order of these steps, and how a replay goes on. Does not own: the plan (`replay_plan`),
the user's function (`transforms`) or query (`replay_sql`), how a batch comes to count once
(`ister.topic.batches`).

Exactly once: a replay has a name, its plan is fixed when it is first begun, and each chunk is a
batch of the writer `replay-<name>`, whose newest batch is remembered with the target. The same
command run again goes on with the first chunk that is not in, or does nothing: everything is.

Messages keep the order of the source's offsets (through SQL: see `replay_sql`). While a chunk is
committed, the next one is being staged.

What a crash leaves: the plan, staged files (swept when they are old), and a batch that is begun,
which the next run finishes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from ister import failpoints
from ister.clock import SystemClock
from ister.config import Config
from ister.errors import (
    CommitUnknownError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.format.columnar import COLUMNS
from ister.format.manifest import StagedFile
from ister.format.records import decode_writer
from ister.limits import MIB
from ister.metadata.base import Absent, Put
from ister.model import TopicName
from ister.spark.heads import Head, Heads
from ister.spark.jobs import replay_plan
from ister.spark.jobs.job import Job, find_job_place, open_job
from ister.spark.jobs.progress import Progress
from ister.spark.jobs.replay_plan import ReplayPlan
from ister.spark.jobs.report import JobReport
from ister.spark.jobs.tasks import run_tasks
from ister.spark.jobs.transforms import Transform, identify, parse_transform
from ister.spark.options import OffsetsOption, ReadOptions
from ister.spark.patience import patiently
from ister.spark.place import Place
from ister.spark.planner import Partition, plan
from ister.spark.reading import ReadTask, TopicIdentity
from ister.spark.staging import Committer, StagedFiles, remove_staged
from ister.tier.names import TopicKeys
from ister.tier.pipeline import PipelineKeys
from ister.topic.batches import StagedBatch, check_writer_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ister.spark.jobs.replay_sql import SqlReplay

__all__ = ["replay"]

_log = logging.getLogger("ister.spark.jobs.replaying")

_CHUNK_BYTES: Final = 64 * MIB
# Spark starts a handful of processes for each query.
_SQL_CHUNK_BYTES: Final = 256 * MIB
_SPLIT_BYTES: Final = 16 * MIB
_SAMPLE_BYTES_MAX: Final = 256 * MIB
_TIMEOUT_SECONDS: Final = 120.0
_ATTEMPTS: Final = 3
_PAUSE_SECONDS: Final = 2.0
_LEASES: Final = 1.5
"""How many lease times a run waits for one that may have been killed."""


def replay(
    spark: SparkSession,
    config: str | Mapping[str, Any] | Config | Place | None = None,
    *,
    broker: str | None = None,
    source: str,
    target: str,
    transform: Callable[..., Any] | str | None = None,
    sql: str | None = None,
    per_message: bool | None = None,
    start: replay_plan.Where = None,
    end: replay_plan.Where = None,
    name: str | None = None,
    create: bool = True,
    mark: bool = False,
    dry_run: bool = False,
    sample: int = 10,
    chunk_bytes: int | None = None,
    progress: Progress | None = None,
) -> JobReport:
    """Replays a range of one topic into another one, exactly once.

    Args:
        spark: A classic session.
        config: Where the log is: a config file, a data directory, settings; None with `broker`.
        broker: The Flight address of the broker that has the topics; found in the metadata store
            by default. Without a broker the log is opened here for each commit.
        source: The topic to read.
        target: The topic to append to; another one.
        transform: A function, or `module:function`, or `file.py:function`: see
            `ister.spark.jobs.transforms`. Without one, and without `sql`, messages are copied.
        sql: A query over the view `messages`, instead: see `ister.spark.jobs.replay_sql`.
        per_message: Whether the function takes messages, not record batches; by its signature
            unless given.
        start: An offset, a point in time, `earliest` (by default), `latest`.
        end: The same for the end, which is not included; `latest` by default, which is the end of
            the topic when the replay is first begun.
        name: What tells this replay from others, up to 100 letters, digits, `-` and `_`. By
            default it follows from source, target, transform and range as they are given.
        create: Make the target if it does not exist.
        mark: Give each message the attribute `ister-source-offset`.
        dry_run: Show what would be done, with a sample, and change nothing.
        sample: How many messages a dry run shows.
        chunk_bytes: About how much is committed at a time; 64 MiB by default, with SQL 256 MiB.
        progress: Who is told how far it has come.

    Returns:
        What was done. A failure of the transform is in there, with the offset of the message; what
        came before it stays, and the same call goes on from there.

    Raises:
        InvalidRequestError: An argument makes no sense.
        ConflictError: The same replay is under way elsewhere.
        As `open_job`.
    """
    request = _Request.of(
        source=source,
        target=target,
        transform=transform,
        sql=sql,
        per_message=per_message,
        start=start,
        end=end,
        name=name,
        is_created=create,
        is_marked=mark,
        sample=sample,
        chunk_bytes=chunk_bytes or (_CHUNK_BYTES if sql is None else _SQL_CHUNK_BYTES),
    )
    place = find_job_place(config, broker)
    if place.broker is None and place.config.pipeline.broker is not None:
        place = replace(place, broker=place.config.pipeline.broker)
    with _opened(spark, place, request, dry_run=dry_run, progress=progress) as job:
        try:
            _Replaying(job, request).run()
        except InvariantError:
            raise
        except _PartFailedError as error:
            job.report.fail(error.fields)
        except IsterError as error:
            job.report.fail(error)
        finally:
            job.progress.end()
    return job.report


@contextmanager
def _opened(
    spark: SparkSession,
    place: Place,
    request: _Request,
    *,
    dry_run: bool,
    progress: Progress | None,
) -> Iterator[Job]:
    """The job; one that was killed a moment ago is waited for, until its lease has ended."""
    metadata = place.config.storage.metadata
    key = PipelineKeys(metadata.root_prefix).job(f"replay-{request.lock}")
    deadline = SystemClock.monotonic() + _LEASES * metadata.lease_ttl_seconds
    pause = threading.Event()
    while True:
        opening = open_job(
            "replay",
            spark,
            place,
            dry_run=dry_run,
            progress=progress,
            exclusive=None if dry_run else key,
        )
        try:
            job = opening.__enter__()
            break
        except ConflictError:
            if SystemClock.monotonic() >= deadline:
                raise
        pause.wait(min(1.0, metadata.lease_ttl_seconds / 5))
    try:
        yield job
    except BaseException as error:
        if not opening.__exit__(type(error), error, error.__traceback__):
            raise
    else:
        opening.__exit__(None, None, None)


# -- what is asked for ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments, checked."""

    source: str
    target: str
    transform: Any
    """A function, a `TransformSource`, or None."""
    identity: str
    """What the transform is called."""
    sql: str | None
    per_message: bool | None
    start: replay_plan.Where
    end: replay_plan.Where
    name: str | None
    is_created: bool
    is_marked: bool
    sample: int
    chunk_bytes: int

    @classmethod
    def of(
        cls,
        *,
        source: str,
        target: str,
        transform: Callable[..., Any] | str | None,
        sql: str | None,
        **others: Any,  # noqa: ANN401 - the other fields
    ) -> _Request:
        source, target = str(TopicName.parse(source)), str(TopicName.parse(target))
        if source == target:
            raise InvalidRequestError(
                "source and target are the same topic", topic=target, hint="name another target"
            )
        if transform is not None and sql is not None:
            raise InvalidRequestError("both a transform and SQL are given", hint="give one of them")
        name: str | None = others["name"]
        if name is not None:
            check_writer_name(f"replay-{name}")
        found: object = transform
        if isinstance(transform, str):
            found = parsed = parse_transform(transform)
            identity = parsed.identity
        elif transform is not None:
            try:
                identity = identify(transform)
            except InvalidRequestError:
                if name is None:
                    raise
                identity = f"named {name}"
        else:
            # As it was written: a space, or the end of a line, may be a part of what it says.
            identity = f"sql {sql.strip()}" if sql is not None else "copy"
        if others["is_marked"]:
            identity += " marked"
        return cls(
            source=source, target=target, transform=found, identity=identity, sql=sql, **others
        )

    @property
    def lock(self) -> str:
        """What two runs of the same replay have in common, before anything is looked up."""
        if self.name is not None:
            return f"{self.name}-{hashlib.sha256(self.target.encode()).hexdigest()[:8]}"
        return self.name_for("")

    def name_for(self, incarnation: str) -> str:
        """The replay's name, for a source of this incarnation."""
        return self.name or replay_plan.name_replay(
            source=self.source,
            incarnation=incarnation,
            target=self.target,
            transform=self.identity,
            start=self.start,
            end=self.end,
        )


class _PartFailedError(Exception):
    """A task could not do its part: the error as reports have it."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields["message"])
        self.fields = dict(fields)


# -- in tasks -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a task does: some of a chunk. Pickled."""

    partition: Partition
    identities: dict[str, TopicIdentity]
    batch: int


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What tasks are told besides. Pickled."""

    task: ReadTask
    transform: Transform
    writer: str

    def stage(self, part: _Part) -> tuple[int, list[StagedFile]]:
        """Transforms and stages a part; how many messages were read, and the files."""
        staging = StagedFiles(self.task.place.history().objects, self.writer, part.batch)
        read = 0
        try:
            for batch in self.task.read(part.partition, part.identities):
                if batch.num_rows:
                    read += batch.num_rows
                    for rows in self.transform.apply(batch):
                        staging.add(self.transform.target, rows)
            staging.close()
        except BaseException:
            staging.abort()
            raise
        return read, [file for _, file in staging.files]

    def sample(self, count: int, parts: list[_Part]) -> list[bytes]:
        """The first transformed messages, as Arrow streams of a batch each."""
        found: list[bytes] = []
        rows = size = 0
        for part in parts:
            for batch in self.task.read(part.partition, part.identities):
                size += batch.nbytes
                for made in self.transform.apply(batch) if batch.num_rows else ():
                    taken = made.slice(0, count - rows)
                    rows += taken.num_rows
                    found.append(_to_bytes(taken))
                    if rows >= count:
                        return found
                if size > _SAMPLE_BYTES_MAX:
                    return found
        return found


def _stage(work: _Work, part: _Part) -> tuple[int, list[StagedFile]]:
    return work.stage(part)


def _take_sample(work: _Work, count: int, parts: list[_Part]) -> list[bytes]:
    return work.sample(count, parts)


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    # A slice alone would carry along the buffers of the whole batch.
    compact = pa.RecordBatch.from_pylist(batch.to_pylist(), schema=batch.schema)
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(compact)
    data: bytes = sink.getvalue().to_pybytes()
    return data


# -- on the driver --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """A chunk that is ready to be committed."""

    number: int
    read: int
    """How many messages it was made of."""
    bytes: int
    files: tuple[StagedFile, ...]


class _Replaying:
    """One run of a replay."""

    def __init__(self, job: Job, request: _Request) -> None:
        self._job = job
        self._request = request
        place = job.place
        if place.broker is None:
            place = replace(place, broker=_find_broker(job, request.target))
        self._place = place
        self._options = ReadOptions(
            is_streaming=False,
            topics=(request.source,),
            starting_offsets=OffsetsOption(otherwise="earliest"),
            ending_offsets=OffsetsOption(otherwise="latest"),
        )
        self._heads = Heads(place, self._options)
        self._task = ReadTask(place=place, columns=COLUMNS, fail_on_data_loss=True)
        self._transform = Transform(
            function=request.transform,
            per_message=request.per_message,
            target=request.target,
            is_marked=request.is_marked,
            payload_bytes_max=place.config.storage.max_message_size,
        )
        self._sql: SqlReplay | None = None
        self._writer = ""

    def run(self) -> None:
        """See the module header."""
        request, job = self._request, self._job
        head = self._look(catches_up=True)
        self._transform.check()
        if request.sql is not None:
            self._sql = self._open_sql(request.sql)
        if job.dry_run:
            self._show(head)
            return
        name = request.name_for(head.incarnation)
        self._writer = f"replay-{name}"
        target = job.catalog(request.target).record()
        is_there = target is not None and target[0].is_open
        if not is_there and not request.is_created:
            raise NotFoundError(
                f"there is no topic {request.target}",
                topic=request.target,
                hint="leave --no-create out, and it is made",
            )
        key = self._plan_key(name)
        made = self._plan(key, head, name)
        incarnation = target[0].incarnation if target is not None and is_there else None
        fields = job.report.of(request.target)
        fields |= {
            "source": request.source,
            "name": name,
            "start_offset": made.start,
            "next_offset": made.end,
            "chunks": 0,
            "messages_read": 0,
            "messages": 0,
            "bytes": 0,
        }
        if made.done is not None and made.done == incarnation:
            self._note_known(made, head)
            return
        if made.done is not None:
            # It was done in a topic that has been deleted since: the chunks are made again.
            made = self._plan_anew(key, head, made)
        failpoints.reach("pipeline.after_plan")
        chunks = made.chunks
        first = self._find_next(incarnation)
        job.report.more["state"] = "continued" if first else "done"
        job.progress.begin("replaying", made.bytes, "bytes")
        if first:
            job.progress.advance(made.bytes * first // max(len(chunks), 1), "done before")
        self._run_chunks(chunks, first)
        self._finish(key, made)

    # -- what there is ----------------------------------------------------------------------

    def _look(self, *, catches_up: bool = False) -> Head:
        found = patiently(lambda: self._heads.look(catches_up=catches_up))
        if set(found) != {self._request.source}:
            parts = ", ".join(sorted(found)[:10])
            raise InvalidRequestError(
                "the source has partitions", topic=self._request.source, hint=f"replay one: {parts}"
            )
        return found[self._request.source]

    def _open_sql(self, query: str) -> SqlReplay:
        from ister.spark.jobs.replay_sql import SqlReplay  # noqa: PLC0415 - most do without

        return SqlReplay(self._job.spark, query, self._task, self._options, self._transform)

    def _resolve(self, head: Head) -> tuple[int, int]:
        request = self._request
        return patiently(
            lambda: replay_plan.resolve_range(self._heads, head, request.start, request.end)
        )

    def _cut(self, head: Head, start: int, end: int) -> tuple[tuple[int, ...], int]:
        """Boundaries of the chunks of a range, and about how many bytes it has."""
        found = patiently(lambda: self._heads.range_of(head, start, end))
        is_whole = self._sql is not None and not self._sql.check(head, start, end)
        boundaries = replay_plan.cut_chunks(
            found, chunk_bytes=self._request.chunk_bytes, is_whole=is_whole
        )
        size = sum(part.bytes for part in plan([found], split_bytes=self._request.chunk_bytes))
        return boundaries, size

    # -- the plan ---------------------------------------------------------------------------

    def _plan_key(self, name: str) -> str:
        root = self._job.place.config.storage.metadata.root_prefix
        # Below the target's own keys: a topic that is deleted takes it along.
        return f"{TopicKeys(root, TopicName.parse(self._request.target)).storage}replays/{name}"

    def _plan(self, key: str, head: Head, name: str) -> ReplayPlan:
        """The plan that is written down; a new one if there is none."""
        request, store = self._request, self._job.store
        for _ in range(_ATTEMPTS):
            found = patiently(lambda: store.get(key))
            if found is not None:
                made = replay_plan.decode_plan(found.value, key=key)
                differences = replay_plan.find_differences(
                    made,
                    source=request.source,
                    incarnation=head.incarnation,
                    transform=request.identity,
                    start=request.start,
                    end=request.end,
                )
                if differences:
                    raise ConflictError(
                        f"the name {name} is that of another replay: {'; '.join(differences)}",
                        topic=request.target,
                        hint="give this one another name",
                    )
                return made
            made = self._make_plan(head)
            # A lost answer is looked up by the next round.
            with suppress(CommitUnknownError):
                store.transact([self._job.fence.compare, Absent(key)], [Put(key, _encoded(made))])
            self._job.check()
        raise UnavailableError("the replay's plan could not be written down", path=key)

    def _make_plan(self, head: Head) -> ReplayPlan:
        request = self._request
        start, end = self._resolve(head)
        boundaries, size = self._cut(head, start, end)
        return ReplayPlan(
            source=request.source,
            incarnation=head.incarnation,
            target=request.target,
            transform=request.identity,
            start=start,
            end=end,
            boundaries=boundaries,
            bytes=size,
            asked=replay_plan.asked_range(request.start, request.end),
        )

    def _plan_anew(self, key: str, head: Head, made: ReplayPlan) -> ReplayPlan:
        boundaries, size = self._cut(head, made.start, made.end)
        made = replace(made, boundaries=boundaries, bytes=size, done=None, messages=0)
        self._save_plan(key, made)
        return made

    def _save_plan(self, key: str, made: ReplayPlan) -> None:
        def save() -> bool:
            changed = self._job.store.transact(
                [self._job.fence.compare], [Put(key, _encoded(made))]
            )
            return changed is not None

        # The same once more, after a lost answer, changes nothing.
        if not patiently(save):
            self._job.fence.check(self._request.target)
            raise FencedError("the lease of this job has ended", topic=self._request.target)

    def _finish(self, key: str, made: ReplayPlan) -> None:
        found = self._job.catalog(self._request.target).record()
        if found is None:
            # No message came through, so there is no topic: nothing needs to be remembered.
            return
        messages = self._job.report.total("messages")
        self._save_plan(
            key, replay_plan.finish(made, incarnation=found[0].incarnation, messages=messages)
        )

    def _note_known(self, made: ReplayPlan, head: Head) -> None:
        report = self._job.report
        report.more["state"] = "already done"
        newer = head.end - made.end
        if self._request.end in (None, "latest") and newer > 0:
            report.more["newer_messages"] = newer
            report.more["hint"] = (
                f"the source has {newer} messages after the replay's end: --from {made.end}"
                + (", and another --name" if self._request.name is not None else "")
            )

    def _find_next(self, incarnation: str | None) -> int:
        """The first chunk that is not in the target for certain."""
        root = self._job.place.config.storage.metadata.root_prefix
        keys = TopicKeys(root, TopicName.parse(self._request.target))
        key = keys.writer(self._writer)
        found = patiently(lambda: self._job.store.get(key))
        if found is None or incarnation is None:
            return 0
        record = decode_writer(found.value, key=key)
        if record.incarnation != incarnation:
            return 0
        return record.batch + 1 if record.is_done else record.batch

    # -- chunks -----------------------------------------------------------------------------

    def _run_chunks(self, chunks: list[tuple[int, int]], first: int) -> None:
        """Stages chunk after chunk, one ahead, and commits them in their order."""
        with ThreadPoolExecutor(1, thread_name_prefix="ister-replay") as pool:
            ahead: Future[_Staged] | None = None
            try:
                for number in range(first, len(chunks)):
                    staged = (
                        ahead.result()
                        if ahead is not None
                        else self._stage_chunk(number, *chunks[number])
                    )
                    ahead = None
                    if number + 1 < len(chunks):
                        ahead = pool.submit(self._stage_chunk, number + 1, *chunks[number + 1])
                    self._commit(staged)
            except BaseException:
                self._drop(ahead)
                raise

    def _drop(self, ahead: Future[_Staged] | None) -> None:
        """Removes what was staged for a chunk that will not be committed by this run."""
        if ahead is None or ahead.cancel():
            return
        with suppress(IsterError, _PartFailedError):
            remove_staged(self._place.history().objects, ahead.result().files)

    def _stage_chunk(self, number: int, start: int, end: int) -> _Staged:
        pause = threading.Event()
        for attempt in range(1, _ATTEMPTS + 1):
            self._job.check()
            try:
                return self._try_to_stage(number, start, end)
            except _PartFailedError as error:
                if error.fields["code"] != UnavailableError.code or attempt == _ATTEMPTS:
                    raise
                _log.warning("a chunk is tried again", extra={"error": str(error)})
            pause.wait(_PAUSE_SECONDS * attempt)
        raise InvariantError("the last attempt raises or returns")

    def _try_to_stage(self, number: int, start: int, end: int) -> _Staged:
        head = self._look()
        found = patiently(lambda: self._heads.range_of(head, start, end))
        spark = self._job.spark
        parts = plan(
            [found],
            split_bytes=_SPLIT_BYTES,
            min_partitions=max(spark.sparkContext.defaultParallelism, 1),
        )
        size = sum(part.bytes for part in parts)
        if self._sql is not None:
            files = self._sql.stage(head, start, end, writer=self._writer, batch=number)
            return _Staged(number=number, read=end - start, bytes=size, files=tuple(files))
        identities = {head.topic: TopicIdentity(head.incarnation, head.node)}
        items = [_Part(partition=part, identities=identities, batch=number) for part in parts]
        work = _Work(task=self._task, transform=self._transform, writer=self._writer)
        try:
            done = list(
                run_tasks(
                    spark,
                    items,
                    partial(_stage, work),
                    weigh=lambda item: item.partition.bytes,
                    name=f"ister replay: {start} up to {end}",
                )
            )
        except (PySparkException, Py4JError) as error:
            raise UnavailableError(
                f"Spark could not do messages {start} up to {end}: {_first_line(error)}",
                topic=self._request.source,
                offset=start,
                hint="a process may have run out of memory; the same command goes on from here",
            ) from error
        done.sort(key=lambda one: one.item.partition.number)
        results = [one.result for one in done if one.result is not None]
        errors = [one.error for one in done if one.error is not None]
        files = [file for _, part_files in results for file in part_files]
        if errors:
            remove_staged(self._place.history().objects, files)
            raise _PartFailedError(errors[0])
        return _Staged(
            number=number, read=sum(read for read, _ in results), bytes=size, files=tuple(files)
        )

    def _commit(self, staged: _Staged) -> None:
        job, target = self._job, self._request.target
        job.check()
        failpoints.reach("pipeline.before_commit")
        rows = sum(file.rows for file in staged.files)
        if rows:
            committer = Committer(
                place=self._place,
                creates=self._request.is_created,
                timeout_seconds=_TIMEOUT_SECONDS,
            )
            batch = StagedBatch(writer=self._writer, batch=staged.number, files=staged.files)
            # Asked for again, a batch that was begun is carried to its end.
            appended = patiently(
                lambda: committer.commit({target: batch})[target], seconds=_TIMEOUT_SECONDS
            )
            # A batch that was begun before consists of the rows that it had then.
            rows = appended.rows
        failpoints.reach("pipeline.after_commit")
        job.report.add(
            target, chunks=1, messages=rows, bytes=staged.bytes, messages_read=staged.read
        )
        job.progress.advance(staged.bytes, f"chunk {staged.number}")

    # -- a dry run --------------------------------------------------------------------------

    def _show(self, head: Head) -> None:
        request, report = self._request, self._job.report
        start, end = self._resolve(head)
        boundaries, size = self._cut(head, start, end)
        report.of(request.target).update(
            {
                "source": request.source,
                "name": request.name_for(head.incarnation),
                "start_offset": start,
                "next_offset": end,
                "messages_read": end - start,
                "bytes": size,
                "chunks": max(len(boundaries) - 1, 0),
            }
        )
        report.more["state"] = "planned"
        report.more["sample"] = self._sample(head, start, end) if end > start else []

    def _sample(self, head: Head, start: int, end: int) -> list[dict[str, Any]]:
        count = max(self._request.sample, 0)
        if not count:
            return []
        if self._sql is not None:
            table = self._sql.sample(head, start, end, count)
            return [as_sample(row) for row in table.to_pylist()]
        found = patiently(lambda: self._heads.range_of(head, start, end))
        identities = {head.topic: TopicIdentity(head.incarnation, head.node)}
        parts = [
            _Part(partition=part, identities=identities, batch=0)
            for part in plan([found], split_bytes=_SPLIT_BYTES)
        ]
        work = _Work(task=self._task, transform=self._transform, writer="replay-sample")
        # One task: the first messages are those of the first parts.
        [done] = list(
            run_tasks(self._job.spark, [parts], partial(_take_sample, work, count), name="sample")
        )
        if done.error is not None:
            raise _PartFailedError(done.error)
        return [
            as_sample(row)
            for data in done.result or []
            for row in pa.ipc.open_stream(data).read_all().to_pylist()
        ]


def _first_line(error: Exception) -> str:
    lines = [line.strip().lstrip(": ") for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("An error occurred")]
    return (said or [type(error).__name__])[0][:500]


def _encoded(made: ReplayPlan) -> bytes:
    return replay_plan.encode_plan(made)


def as_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """A message as JSON has it; `payload` where it is text."""
    payload = row["payload"]
    payload = payload.encode() if isinstance(payload, str) else payload or b""
    text: str | None
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = None
    moment = row.get("publish_time")
    return {
        "publish_time": moment.isoformat() if isinstance(moment, datetime) else None,
        "producer_name": row.get("producer_name"),
        "payload": text,
        "payload_base64": base64.b64encode(payload).decode(),
        "attributes": dict(row.get("attributes") or {}),
        "routing_key": row.get("routing_key"),
        "schema_id": row.get("schema_id"),
        "schema_version": row.get("schema_version"),
    }


def _find_broker(job: Job, target: str) -> str | None:
    """The Flight address of the broker that has the target, or of the only one there is."""
    prefix = f"{job.place.config.storage.metadata.root_prefix}/cluster/brokers/"
    addresses: dict[str, str] = {}
    for found in job.store.range(prefix):
        with suppress(ValueError, TypeError, KeyError):
            fields = json.loads(found.value)
            addresses[str(fields["node"])] = str(fields["flight_url"])
    owner = job.catalog(target).owner()
    if owner is not None:
        return addresses.get(owner[0].node) or None
    return next(iter(addresses.values())) if len(addresses) == 1 else None
