"""`replay`: copies messages of one topic to another one, through a function or a query.

    source, [start, end) ─► chunks ─► tasks: transform, stage ─► driver: chunk n is batch n ─► done

Owns: the arguments, that only one run of a replay is active at a time, the plan's life in the
metadata store, the order of chunks, the report. Does not own: what a plan is (`replay_plan`), the
user's function (`transforms`) or query (`replay_sql`), staged files (`ister.spark.row_staging`),
how a batch is appended once (`ister.topic.batches`).

Exactly once: a replay has a name, its plan is fixed when it first starts, and each chunk is a batch
of the writer `replay-<name>`, committed as the sink commits its micro-batches; the newest one is
recorded with the target, and stays recorded: a driver that slept for longer than its lease, and
commits when another one has finished, adds nothing. The same command continues with the first
missing chunk, or does nothing if all exist.

Messages keep the order of the source's offsets (through SQL: see `replay_sql`). While a chunk is
committed, the next one is staged. Through a function, messages never leave the Python workers: a
DataFrame would carry each of them into the JVM and back.

What a crash leaves: the plan, staged files (removed when they are old), and a batch that was begun,
which the next run finishes.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, Required, TypedDict

import msgspec

from ister.base import failpoints
from ister.base.clock import SystemClock
from ister.base.limits import MIB
from ister.base.model import COLUMNS, TopicName
from ister.base.positions import format_time
from ister.base.retry import backoff_seconds, retry_unavailable
from ister.bucket.names import TopicKeys
from ister.bucket.orphans import REPLAY_PREFIX
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
from ister.format.manifest import StagedFile
from ister.format.records import decode_writer
from ister.metadata.base import Absent, Put
from ister.spark.jobs import replay_plan
from ister.spark.jobs.job import Job, JobConfig, find_job_place, open_job
from ister.spark.jobs.job_report import ErrorFields, JobProgress, JobReport
from ister.spark.jobs.replay_plan import ReplayPlan
from ister.spark.jobs.tasks import SparkOrRunner, first_line, run_tasks
from ister.spark.jobs.transforms import Transform, TransformSource, identify, parse_transform
from ister.spark.location import LogLocation
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.option_values import OffsetsOption
from ister.spark.options import ReadOptions
from ister.spark.planner import Partition, plan
from ister.spark.read_task import ReadTask, TopicIdentity
from ister.spark.row_staging import Committer, StagedRowFile, remove_staged
from ister.topic.batches import StagedBatch, check_writer_name

if TYPE_CHECKING:
    from ister.spark.jobs.replay_sql import SqlReplay

_log = logging.getLogger("ister.spark.jobs.replaying")

_CHUNK_BYTES: Final = 64 * MIB
_LEASES: Final = 1.5
"""How many lease times a run waits for another that may have been killed."""
_SPLIT_BYTES: Final = 16 * MIB
_SAMPLE_BYTES_MAX: Final = 256 * MIB
_TIMEOUT_SECONDS: Final = 120.0
_ATTEMPTS: Final = 3
_PAUSE_SECONDS: Final = 2.0
_PAUSE_SECONDS_MAX: Final = 10.0


def replay(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    broker: str | None = None,
    source: str,
    target: str,
    transform: Callable[..., object] | str | None = None,
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
    progress: JobProgress | None = None,
) -> JobReport:
    """Replays a range of one topic into another one, exactly once.

    Args:
        spark: A session, classic or Connect; None for a dry run, which runs in this process.
        config: Where the log is; see `open_job`.
        broker: Flight addresses of brokers; see `open_job`. Without brokers the log is opened here
            for each commit.
        source: The topic to read.
        target: The topic to append to; another one.
        transform: A function, `module:function` or `file.py:function`: see
            `ister.spark.jobs.transforms`. Without one, and without `sql`, messages are copied.
        sql: A query over the view `messages`: see `ister.spark.jobs.replay_sql`.
        per_message: Whether the function takes messages, not record batches; by default its
            signature shows it.
        start: An offset, a time, `earliest` (default) or `latest`.
        end: Where to end, excluded; `latest` by default, which is the topic's end when the replay
            first starts.
        name: Identifies the replay: up to 100 letters, digits, `-` and `_`. By default derived from
            source, target, transform and range.
        create: Create the target if it does not exist.
        mark: Add the attribute `ister-source-offset` to each message.
        dry_run: Show a plan and a sample, and change nothing.
        sample: Number of messages that a dry run shows.
        chunk_bytes: Approximate size of a commit; 64 MiB by default. A query has one commit.
        progress: Receives the job's progress.

    Returns:
        What was done. A failure of the transform is in its errors, with the message's offset; what
        came before it stays, and the same call continues from there.

    Raises:
        InvalidRequestError: An argument is invalid.
        ConflictError: The same replay is running elsewhere.
        As `open_job`.
    """
    request = ReplayRequest(
        source=str(TopicName.parse(source)),
        target=str(TopicName.parse(target)),
        transform=parse_transform(transform) if isinstance(transform, str) else transform,
        sql=sql,
        per_message=per_message,
        start=start,
        end=end,
        name=name,
        is_created=create,
        is_marked=mark,
        sample=sample,
        chunk_bytes=chunk_bytes or _CHUNK_BYTES,
    )
    place = find_job_place(config, broker)
    with ExitStack() as opened:
        job = _open(opened, spark, place, request, dry_run=dry_run, progress=progress)
        try:
            _Replay(job, request).run()
        except InvariantError:
            raise
        except _TaskFailedError as error:
            job.report.fail(error.fields)
        except IsterError as error:
            job.report.fail(error)
        finally:
            job.progress.end()
    return job.report


def _open(
    opened: ExitStack,
    spark: SparkOrRunner,
    place: LogLocation,
    request: ReplayRequest,
    *,
    dry_run: bool,
    progress: JobProgress | None,
) -> Job:
    """Opens the job; waits for the lease of a run that was killed a moment ago."""
    metadata = place.config.storage.metadata
    deadline = SystemClock.monotonic() + _LEASES * metadata.lease_ttl_seconds
    pause = threading.Event()
    while True:
        try:
            return opened.enter_context(
                open_job(
                    "replay",
                    spark,
                    place,
                    dry_run=dry_run,
                    progress=progress,
                    exclusive=lambda keys: keys.job(f"replay-{request.lock}"),
                )
            )
        except ConflictError:
            if SystemClock.monotonic() >= deadline:
                raise
        pause.wait(min(1.0, metadata.lease_ttl_seconds / 5))


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """The arguments, checked."""

    source: str
    target: str
    transform: Callable[..., object] | TransformSource | None
    sql: str | None
    per_message: bool | None
    start: replay_plan.Where
    end: replay_plan.Where
    name: str | None
    is_created: bool
    is_marked: bool
    sample: int
    chunk_bytes: int

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if self.source == self.target:
            raise InvalidRequestError(
                "source and target are the same topic",
                topic=self.target,
                hint="choose another target",
            )
        if self.transform is not None and self.sql is not None:
            raise InvalidRequestError("both a transform and SQL are given", hint="pass one of them")
        if self.name is not None:
            check_writer_name(f"{REPLAY_PREFIX}{self.name}")
        _ = self.identity

    @cached_property
    def identity(self) -> str:
        """The name of the transform."""
        if isinstance(self.transform, TransformSource):
            found = self.transform.identity
        elif self.transform is not None:
            try:
                found = identify(self.transform)
            except InvalidRequestError:
                if self.name is None:
                    raise
                found = f"named {self.name}"
        else:
            # As it was written: white space may be significant in a query.
            found = "copy" if self.sql is None else f"sql {self.sql.strip()}"
        return f"{found} marked" if self.is_marked else found

    @property
    def lock(self) -> str:
        """Identifies runs of the same replay, without reading anything."""
        if self.name is not None:
            return f"{self.name}-{hashlib.sha256(self.target.encode()).hexdigest()[:8]}"
        return self.name_for("")

    def name_for(self, incarnation: str) -> str:
        """Returns the replay's name, for a source of this incarnation."""
        return self.name or replay_plan.name_replay(
            source=self.source,
            incarnation=incarnation,
            target=self.target,
            transform=self.identity,
            start=self.start,
            end=self.end,
        )


class _TaskFailedError(Exception):
    """A task could not do its part; has the error as reports have it."""

    def __init__(self, fields: ErrorFields) -> None:
        super().__init__(fields["message"])
        self.fields = dict(fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A chunk that is ready for its commit."""

    number: int
    read: int
    """Number of messages it was made of."""
    bytes: int
    files: tuple[StagedFile, ...]


class _Replay:
    """One run of a replay, on the driver."""

    def __init__(self, job: Job, request: ReplayRequest) -> None:
        self._job = job
        self._request = request
        self._place = place = job.place
        options = ReadOptions(
            is_streaming=False,
            topics=(request.source,),
            starting_offsets=OffsetsOption(otherwise="earliest"),
            ending_offsets=OffsetsOption(otherwise="latest"),
        )
        self._resolver = OffsetResolver(place, options)
        self._task = ReadTask(place=place, columns=COLUMNS, fail_on_data_loss=True)
        self._transform = Transform(
            function=request.transform,
            per_message=request.per_message,
            target=request.target,
            is_marked=request.is_marked,
            payload_bytes_max=place.config.storage.max_message_size,
        )
        self._keys = TopicKeys(
            place.config.storage.metadata.root_prefix, TopicName.parse(request.target)
        )
        self._committer = Committer(
            place=place, creates=request.is_created, timeout_seconds=_TIMEOUT_SECONDS
        )
        self._sql: SqlReplay | None = None
        self._writer = ""

    def run(self) -> None:
        """Replays what is not in the target yet; the result is in the job's report."""
        head = self._head(catches_up=True)
        self._transform.check()
        with ExitStack() as opened:
            if self._request.sql is not None:
                from ister.spark.jobs.replay_sql import SqlReplay  # noqa: PLC0415 - rarely needed

                self._sql = SqlReplay(
                    self._job.spark, self._request.sql, self._task, self._resolver, self._transform
                )
                opened.callback(self._sql.close)
            if self._job.dry_run:
                self._show(head)
            else:
                self._run(head)

    def _run(self, head: Head) -> None:
        request, job = self._request, self._job
        name = request.name_for(head.incarnation)
        self._writer = f"{REPLAY_PREFIX}{name}"
        found = job.catalog(request.target).record()
        target = found[0] if found is not None and found[0].is_open else None
        if target is None and not request.is_created:
            raise NotFoundError(
                f"topic {request.target} does not exist",
                topic=request.target,
                hint="omit --no-create to create it",
            )
        # Below the target's own keys: deleted together with the topic.
        key = f"{self._keys.storage}replays/{name}"
        made = self._plan(key, head, name)
        incarnation = target.incarnation if target is not None else None
        job.report.of(request.target).update(
            self._describe(name, made), chunks=0, messages_read=0, messages=0, bytes=0
        )
        if made.done is not None and made.done == incarnation:
            self._report_done(made, head)
            return
        if made.done is not None:
            # It was done in a topic that was deleted since: plan the chunks again.
            sizes, size = self._cut(head, made.start, made.end)
            made = msgspec.structs.replace(
                made, sizes=sizes, size_bytes=size, done=None, messages=0
            )
            self._save_plan(key, made)
        failpoints.reach("pipeline.after_plan")
        chunks = made.chunks
        first = self._find_next(incarnation)
        job.report.more["state"] = "continued" if first else "done"
        job.progress.begin("replaying", made.size_bytes, "bytes")
        if first:
            job.progress.advance(made.size_bytes * first // max(len(chunks), 1), "done before")
        self._run_chunks(chunks, first)
        found = job.catalog(request.target).record()
        if found is None:
            # No message was written, so there is no topic, and nothing to remember.
            return
        messages = job.report.total("messages")
        self._save_plan(key, made.finish(incarnation=found[0].incarnation, messages=messages))

    def _head(self, *, catches_up: bool = False) -> Head:
        found = retry_unavailable(lambda: self._resolver.heads(catches_up=catches_up))
        if set(found) != {self._request.source}:
            parts = ", ".join(sorted(found)[:10])
            raise InvalidRequestError(
                "the source is partitioned", topic=self._request.source, hint=f"replay one: {parts}"
            )
        return found[self._request.source]

    # -- the plan ---------------------------------------------------------------------------

    def _resolve(self, head: Head) -> tuple[int, int]:
        request = self._request
        return retry_unavailable(
            lambda: replay_plan.resolve_range(self._resolver, head, request.start, request.end)
        )

    def _cut(self, head: Head, start: int, end: int) -> tuple[tuple[int, ...], int]:
        """Returns how many offsets each chunk of a range has, and its approximate size."""
        found = retry_unavailable(lambda: self._resolver.range_of(head, start, end))
        chunk_bytes = self._request.chunk_bytes
        if self._sql is not None:
            self._sql.check(head, start, end)
        sizes = replay_plan.cut_chunks(found, chunk_bytes=None if self._sql else chunk_bytes)
        return sizes, sum(part.bytes for part in plan([found], split_bytes=chunk_bytes))

    def _plan(self, key: str, head: Head, name: str) -> ReplayPlan:
        """Returns the saved plan; makes and saves one if there is none."""
        request, store = self._request, self._job.store
        for _ in range(_ATTEMPTS):
            found = retry_unavailable(lambda: store.get(key))
            if found is not None:
                made = ReplayPlan.decode(found.value, key=key)
                differences = made.find_differences(
                    source=request.source,
                    incarnation=head.incarnation,
                    transform=request.identity,
                    start=request.start,
                    end=request.end,
                )
                if differences:
                    raise ConflictError(
                        f"the name {name} belongs to another replay: {'; '.join(differences)}",
                        topic=request.target,
                        hint="choose another name",
                    )
                return made
            # The plan is kept, so messages on that disk would never be replayed.
            head.check_reach(request.end)
            made = self._make_plan(head)
            # After a lost answer, the next round reads what was saved.
            with suppress(CommitUnknownError):
                store.transact([self._job.fence.compare, Absent(key)], [Put(key, made.encode())])
            self._job.check()
        raise UnavailableError("the replay's plan could not be saved", path=key)

    def _make_plan(self, head: Head) -> ReplayPlan:
        request = self._request
        start, end = self._resolve(head)
        sizes, size = self._cut(head, start, end)
        return ReplayPlan(
            source=request.source,
            incarnation=head.incarnation,
            target=request.target,
            transform=request.identity,
            start=start,
            end=end,
            sizes=sizes,
            size_bytes=size,
            asked=replay_plan.asked_range(request.start, request.end),
        )

    def _save_plan(self, key: str, made: ReplayPlan) -> None:
        def save() -> bool:
            changed = self._job.store.transact([self._job.fence.compare], [Put(key, made.encode())])
            return changed is not None

        # Repeating it after a lost answer changes nothing.
        if not retry_unavailable(save):
            self._job.fence.check(self._request.target)
            raise FencedError("the job's lease has expired", topic=self._request.target)

    def _find_next(self, incarnation: str | None) -> int:
        """Returns the first chunk that may not be in the target."""
        key = self._keys.writer(self._writer)
        found = retry_unavailable(lambda: self._job.store.get(key))
        if found is None or incarnation is None:
            return 0
        record = decode_writer(found.value, key=key)
        if record.incarnation != incarnation:
            return 0
        return record.batch + 1 if record.is_done else record.batch

    # -- chunks -----------------------------------------------------------------------------

    def _run_chunks(self, chunks: list[tuple[int, int]], first: int) -> None:
        """Stages chunks, one ahead, and commits them in order."""
        with ThreadPoolExecutor(1, thread_name_prefix="ister-replay") as pool:

            def begin(number: int) -> Future[_Chunk] | None:
                if number >= len(chunks):
                    return None
                return pool.submit(self._stage_chunk, number, *chunks[number])

            waiting = begin(first)
            try:
                while waiting is not None:
                    staged = waiting.result()
                    waiting = begin(staged.number + 1)
                    self._commit(staged)
            except BaseException:
                if waiting is not None and not waiting.cancel():
                    with suppress(Exception):  # the one that is raised, or another one
                        self._remove(waiting.result().files)
                raise

    def _remove(self, files: Iterable[StagedFile]) -> None:
        remove_staged(self._place.history().objects, (file.key for file in files))

    def _stage_chunk(self, number: int, start: int, end: int) -> _Chunk:
        pause = threading.Event()
        for attempt in range(1, _ATTEMPTS + 1):
            self._job.check()
            try:
                return self._try_to_stage(number, start, end)
            except _TaskFailedError as error:
                if error.fields["code"] != UnavailableError.code or attempt == _ATTEMPTS:
                    raise
                _log.warning("chunk is retried", extra={"error": str(error)})
            pause.wait(backoff_seconds(attempt, first=_PAUSE_SECONDS, most=_PAUSE_SECONDS_MAX))
        raise InvariantError("the last attempt raises or returns")

    def _try_to_stage(self, number: int, start: int, end: int) -> _Chunk:
        head = self._head()
        parts = self._parts(head, start, end, min_partitions=self._job.slots)
        size = sum(part.partition.bytes for part in parts)
        if self._sql is not None:
            found = self._sql.stage(head, start, end, writer=self._writer, batch=number)
            return _Chunk(number=number, read=end - start, bytes=size, files=tuple(found))
        work = partial(_stage, self._task, self._transform, self._writer, number)
        name = f"ister replay: {start} up to {end}"
        try:
            done = list(
                run_tasks(
                    self._job.spark,
                    parts,
                    work,
                    weigh=lambda part: part.partition.weight,
                    name=name,
                )
            )
        except IsterError:
            raise
        except Exception as error:
            raise UnavailableError(
                f"Spark failed on messages {start} to {end}: {first_line(error)}",
                topic=self._request.source,
                offset=start,
                hint="a process may have run out of memory; the same command continues from here",
            ) from error
        done.sort(key=lambda one: one.item.partition.number)
        results = [one.result for one in done if one.result is not None]
        errors = [one.error for one in done if one.error is not None]
        files = tuple(file for _, staged in results for file in staged)
        if errors:
            self._remove(files)
            raise _TaskFailedError(errors[0])
        return _Chunk(number=number, read=sum(read for read, _ in results), bytes=size, files=files)

    def _parts(
        self, head: Head, start: int, end: int, *, min_partitions: int | None = None
    ) -> list[_Part]:
        """Divides a range among tasks."""
        found = retry_unavailable(lambda: self._resolver.range_of(head, start, end))
        planned = plan([found], split_bytes=_SPLIT_BYTES, min_partitions=min_partitions)
        return [_Part(part, {head.topic: head.identity}) for part in planned]

    def _commit(self, staged: _Chunk) -> None:
        job, target = self._job, self._request.target
        job.check()
        failpoints.reach("pipeline.before_commit")
        rows = sum(file.rows for file in staged.files)
        if rows:
            batch = StagedBatch(writer=self._writer, batch=staged.number, files=staged.files)
            # A batch that was begun is finished when it is requested again.
            appended = retry_unavailable(
                lambda: self._committer.commit({target: batch})[target], seconds=_TIMEOUT_SECONDS
            )
            # A batch that was begun earlier has the rows that it had then.
            rows = appended.rows
        failpoints.reach("pipeline.after_commit")
        job.report.add(
            target, chunks=1, messages=rows, bytes=staged.bytes, messages_read=staged.read
        )
        job.progress.advance(staged.bytes, f"chunk {staged.number}")

    # -- the report -------------------------------------------------------------------------

    def _describe(self, name: str, made: ReplayPlan) -> dict[str, object]:
        return {
            "source": self._request.source,
            "name": name,
            "start_offset": made.start,
            "next_offset": made.end,
        }

    def _report_done(self, made: ReplayPlan, head: Head) -> None:
        report = self._job.report
        report.more["state"] = "already done"
        hint = (
            f"messages {made.start} to {made.end} were replayed under this name before; another "
            "--name replays them again, for example with a changed function, and appends the result"
        )
        newer = head.end - made.end
        if self._request.end in (None, "latest") and newer > 0:
            report.more["newer_messages"] = newer
            hint += (
                f". The source has {newer} messages after the replay's end: --from {made.end}"
                + (", and another --name" if self._request.name is not None else "")
            )
        report.more["hint"] = hint

    def _show(self, head: Head) -> None:
        """Reports what would be done, with a sample."""
        request, report = self._request, self._job.report
        made = self._make_plan(head)
        report.of(request.target).update(
            self._describe(request.name_for(head.incarnation), made),
            messages_read=made.end - made.start,
            bytes=made.size_bytes,
            chunks=len(made.sizes),
        )
        report.more["state"] = "planned"
        is_any = made.end > made.start and request.sample > 0
        rows = self._sample(head, made.start, made.end) if is_any else []
        report.more["sample"] = [_as_sample(row) for row in rows]

    def _sample(self, head: Head, start: int, end: int) -> list[_Row]:
        count = self._request.sample
        if self._sql is not None:
            found: list[_Row] = self._sql.sample(head, start, end, count).to_pylist()
            return found
        # One task reads them: the first messages are those of the first parts.
        work = partial(_sample, self._task, self._transform, count)
        [done] = run_tasks(self._job.spark, [self._parts(head, start, end)], work, name="sample")
        if done.error is not None:
            raise _TaskFailedError(done.error)
        return done.result or []


class SampleJson(TypedDict):
    """A message of a sample; `payload` is None if it is not text."""

    publish_time: str | None
    producer_name: str | None
    payload: str | None
    payload_base64: str
    attributes: dict[str, str]
    routing_key: str | None
    schema_id: int | None
    schema_version: int | None


class _Row(TypedDict, total=False):
    """A row of a sample, as Arrow has it."""

    publish_time: datetime | None
    producer_name: str | None
    payload: Required[bytes | str | None]
    attributes: list[tuple[str, str]] | None
    routing_key: str | None
    schema_id: int | None
    schema_version: int | None


def _as_sample(row: _Row) -> SampleJson:
    found = row["payload"]
    payload = found.encode() if isinstance(found, str) else found or b""
    text: str | None
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = None
    moment = row.get("publish_time")
    return {
        "publish_time": format_time(moment) if isinstance(moment, datetime) else None,
        "producer_name": row.get("producer_name"),
        "payload": text,
        "payload_base64": base64.b64encode(payload).decode(),
        "attributes": dict(row.get("attributes") or {}),
        "routing_key": row.get("routing_key"),
        "schema_id": row.get("schema_id"),
        "schema_version": row.get("schema_version"),
    }


# -- in a task ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of a chunk: what one task does. Pickled."""

    partition: Partition
    identities: dict[str, TopicIdentity]


def _stage(
    task: ReadTask, transform: Transform, writer: str, batch: int, part: _Part
) -> tuple[int, list[StagedFile]]:
    """Transforms and stages a part; returns the number of messages read, and the files."""
    read = 0
    with StagedRowFile(task.place.history().objects, writer, batch) as staging:
        for messages in task.read(part.partition, part.identities):
            read += messages.num_rows
            for rows in transform.apply(messages) if messages.num_rows else ():
                staging.add(transform.target, rows)
    return read, [file for _, file in staging.files]


def _sample(task: ReadTask, transform: Transform, count: int, parts: list[_Part]) -> list[_Row]:
    """Returns the first transformed messages, of at most a part of the source."""
    found: list[_Row] = []
    size = 0
    for part in parts:
        for messages in task.read(part.partition, part.identities):
            size += messages.nbytes
            for rows in transform.apply(messages) if messages.num_rows else ():
                found += rows.slice(0, count - len(found)).to_pylist()
                if len(found) >= count:
                    return found
            if size > _SAMPLE_BYTES_MAX:
                return found
    return found
