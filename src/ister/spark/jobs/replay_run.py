"""One run of a replay on the driver: plan, stage chunk after chunk, commit each as a batch.

Owns: the plan's life in the metadata store, the order of chunks, the report. Does not own: what a
plan is (`replay_plan`), what tasks do (`replay_task`, `replay_sql`), how a batch is appended once
(`ister.topic.batches`). See `replay_job` for the guarantees.
"""

from __future__ import annotations

import base64
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final, Required, TypedDict

import pyarrow as pa

from ister.base import failpoints
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
from ister.spark.jobs.job import Job
from ister.spark.jobs.job_report import ErrorFields
from ister.spark.jobs.replay_plan import ReplayPlan
from ister.spark.jobs.replay_task import ReplayPart, ReplayTask
from ister.spark.jobs.tasks import run_tasks
from ister.spark.jobs.transforms import Transform
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.option_values import OffsetsOption
from ister.spark.options import ReadOptions
from ister.spark.planner import plan
from ister.spark.read_task import ReadTask
from ister.spark.row_staging import Committer, remove_staged
from ister.topic.batches import StagedBatch

if TYPE_CHECKING:
    from ister.spark.jobs.replay_job import ReplayRequest
    from ister.spark.jobs.replay_sql import SqlReplay

_log = logging.getLogger("ister.spark.jobs.replaying")

_SPLIT_BYTES: Final = 16 * MIB
_TIMEOUT_SECONDS: Final = 120.0
_ATTEMPTS: Final = 3
_PAUSE_SECONDS: Final = 2.0
_PAUSE_SECONDS_MAX: Final = 10.0


class TaskFailedError(Exception):
    """A task could not do its part; has the error as reports have it."""

    def __init__(self, fields: ErrorFields) -> None:
        super().__init__(fields["message"])
        self.fields = dict(fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """A chunk that is ready for its commit."""

    number: int
    read: int
    """Number of messages it was made of."""
    bytes: int
    files: tuple[StagedFile, ...]


class ReplayRun:
    """One run of a replay, on the driver."""

    def __init__(self, job: Job, request: ReplayRequest) -> None:
        self._job = job
        self._request = request
        self._place = place = job.place
        self._options = ReadOptions(
            is_streaming=False,
            topics=(request.source,),
            starting_offsets=OffsetsOption(otherwise="earliest"),
            ending_offsets=OffsetsOption(otherwise="latest"),
        )
        self._resolver = OffsetResolver(place, self._options)
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
        """Replays what is not in the target yet; the result is in the job's report."""
        try:
            self._run()
        finally:
            if self._sql is not None:
                self._sql.close()

    def _run(self) -> None:
        request, job = self._request, self._job
        head = self._head(catches_up=True)
        self._transform.check()
        if request.sql is not None:
            self._sql = self._open_sql(request.sql)
        if job.dry_run:
            self._show(head)
            return
        name = request.name_for(head.incarnation)
        self._writer = f"{REPLAY_PREFIX}{name}"
        target = job.catalog(request.target).record()
        is_there = target is not None and target[0].is_open
        if not is_there and not request.is_created:
            raise NotFoundError(
                f"topic {request.target} does not exist",
                topic=request.target,
                hint="omit --no-create to create it",
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
            self._report_done(made, head)
            return
        if made.done is not None:
            # It was done in a topic that was deleted since: plan the chunks again.
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

    # -- source and range -------------------------------------------------------------------

    def _head(self, *, catches_up: bool = False) -> Head:
        found = retry_unavailable(lambda: self._resolver.heads(catches_up=catches_up))
        if set(found) != {self._request.source}:
            parts = ", ".join(sorted(found)[:10])
            raise InvalidRequestError(
                "the source is partitioned", topic=self._request.source, hint=f"replay one: {parts}"
            )
        return found[self._request.source]

    def _open_sql(self, query: str) -> SqlReplay:
        from ister.spark.jobs.replay_sql import SqlReplay  # noqa: PLC0415 - most do without

        return SqlReplay(self._job.spark, query, self._task, self._options, self._transform)

    def _resolve(self, head: Head) -> tuple[int, int]:
        request = self._request
        return retry_unavailable(
            lambda: replay_plan.resolve_range(self._resolver, head, request.start, request.end)
        )

    def _cut(self, head: Head, start: int, end: int) -> tuple[tuple[int, ...], int]:
        """Returns the boundaries of the chunks of a range, and its approximate size."""
        found = retry_unavailable(lambda: self._resolver.range_of(head, start, end))
        is_whole = self._sql is not None and not self._sql.check(head, start, end)
        boundaries = replay_plan.cut_chunks(
            found, chunk_bytes=self._request.chunk_bytes, is_whole=is_whole
        )
        size = sum(part.bytes for part in plan([found], split_bytes=self._request.chunk_bytes))
        return boundaries, size

    # -- the plan ---------------------------------------------------------------------------

    def _plan_key(self, name: str) -> str:
        root = self._job.place.config.storage.metadata.root_prefix
        # Below the target's own keys: deleted together with the topic.
        return f"{TopicKeys(root, TopicName.parse(self._request.target)).storage}replays/{name}"

    def _plan(self, key: str, head: Head, name: str) -> ReplayPlan:
        """Returns the saved plan; makes and saves one if there is none."""
        request, store = self._request, self._job.store
        for _ in range(_ATTEMPTS):
            found = retry_unavailable(lambda: store.get(key))
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
                        f"the name {name} belongs to another replay: {'; '.join(differences)}",
                        topic=request.target,
                        hint="choose another name",
                    )
                return made
            made = self._make_plan(head)
            # After a lost answer, the next round reads what was saved.
            with suppress(CommitUnknownError):
                store.transact(
                    [self._job.fence.compare, Absent(key)],
                    [Put(key, replay_plan.encode_plan(made))],
                )
            self._job.check()
        raise UnavailableError("the replay's plan could not be saved", path=key)

    def _make_plan(self, head: Head) -> ReplayPlan:
        request = self._request
        # The plan is kept, so messages on that disk would never be replayed.
        head.check_reach(request.end)
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
                [self._job.fence.compare], [Put(key, replay_plan.encode_plan(made))]
            )
            return changed is not None

        # Repeating it after a lost answer changes nothing.
        if not retry_unavailable(save):
            self._job.fence.check(self._request.target)
            raise FencedError("the job's lease has expired", topic=self._request.target)

    def _finish(self, key: str, made: ReplayPlan) -> None:
        found = self._job.catalog(self._request.target).record()
        if found is None:
            # No message was written, so there is no topic, and nothing to remember.
            return
        messages = self._job.report.total("messages")
        self._save_plan(
            key, replay_plan.finish(made, incarnation=found[0].incarnation, messages=messages)
        )
        # From here on the plan says that everything is in.
        newest = max(len(made.chunks) - 1, 0)
        self._committer().forget(self._request.target, self._writer, newest)

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

    def _find_next(self, incarnation: str | None) -> int:
        """Returns the first chunk that may not be in the target."""
        root = self._job.place.config.storage.metadata.root_prefix
        keys = TopicKeys(root, TopicName.parse(self._request.target))
        key = keys.writer(self._writer)
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
        """Removes what was staged for a chunk that this run will not commit."""
        if ahead is None or ahead.cancel():
            return
        with suppress(IsterError, TaskFailedError):
            files = ahead.result().files
            remove_staged(self._place.history().objects, (file.key for file in files))

    def _stage_chunk(self, number: int, start: int, end: int) -> _Staged:
        pause = threading.Event()
        for attempt in range(1, _ATTEMPTS + 1):
            self._job.check()
            try:
                return self._try_to_stage(number, start, end)
            except TaskFailedError as error:
                if error.fields["code"] != UnavailableError.code or attempt == _ATTEMPTS:
                    raise
                _log.warning("chunk is retried", extra={"error": str(error)})
            pause.wait(backoff_seconds(attempt, first=_PAUSE_SECONDS, most=_PAUSE_SECONDS_MAX))
        raise InvariantError("the last attempt raises or returns")

    def _try_to_stage(self, number: int, start: int, end: int) -> _Staged:
        head = self._head()
        found = retry_unavailable(lambda: self._resolver.range_of(head, start, end))
        spark = self._job.spark
        parts = plan(
            [found],
            split_bytes=_SPLIT_BYTES,
            min_partitions=self._job.slots,
        )
        size = sum(part.bytes for part in parts)
        if self._sql is not None:
            files = self._sql.stage(head, start, end, writer=self._writer, batch=number)
            return _Staged(number=number, read=end - start, bytes=size, files=tuple(files))
        identities = {head.topic: head.identity}
        items = [ReplayPart(partition=part, identities=identities, batch=number) for part in parts]
        work = ReplayTask(task=self._task, transform=self._transform, writer=self._writer)
        try:
            done = list(
                run_tasks(
                    spark,
                    items,
                    work.stage,
                    weigh=lambda item: item.partition.weight,
                    name=f"ister replay: {start} up to {end}",
                )
            )
        except IsterError:
            raise
        except Exception as error:
            raise UnavailableError(
                f"Spark failed on messages {start} to {end}: {_first_line(error)}",
                topic=self._request.source,
                offset=start,
                hint="a process may have run out of memory; the same command continues from here",
            ) from error
        done.sort(key=lambda one: one.item.partition.number)
        results = [one.result for one in done if one.result is not None]
        errors = [one.error for one in done if one.error is not None]
        files = [file for _, part_files in results for file in part_files]
        if errors:
            remove_staged(self._place.history().objects, (file.key for file in files))
            raise TaskFailedError(errors[0])
        return _Staged(
            number=number, read=sum(read for read, _ in results), bytes=size, files=tuple(files)
        )

    def _commit(self, staged: _Staged) -> None:
        job, target = self._job, self._request.target
        job.check()
        failpoints.reach("pipeline.before_commit")
        rows = sum(file.rows for file in staged.files)
        if rows:
            committer = self._committer()
            batch = StagedBatch(writer=self._writer, batch=staged.number, files=staged.files)
            # A batch that was begun is finished when it is requested again.
            appended = retry_unavailable(
                lambda: committer.commit({target: batch})[target], seconds=_TIMEOUT_SECONDS
            )
            # A batch that was begun earlier has the rows that it had then.
            rows = appended.rows
        failpoints.reach("pipeline.after_commit")
        job.report.add(
            target, chunks=1, messages=rows, bytes=staged.bytes, messages_read=staged.read
        )
        job.progress.advance(staged.bytes, f"chunk {staged.number}")

    def _committer(self) -> Committer:
        return Committer(
            place=self._place,
            creates=self._request.is_created,
            timeout_seconds=_TIMEOUT_SECONDS,
        )

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

    def _sample(self, head: Head, start: int, end: int) -> list[SampleJson]:
        count = max(self._request.sample, 0)
        if not count:
            return []
        if self._sql is not None:
            table = self._sql.sample(head, start, end, count)
            return [_as_sample(row) for row in table.to_pylist()]
        found = retry_unavailable(lambda: self._resolver.range_of(head, start, end))
        identities = {head.topic: head.identity}
        parts = [
            ReplayPart(partition=part, identities=identities, batch=0)
            for part in plan([found], split_bytes=_SPLIT_BYTES)
        ]
        work = ReplayTask(task=self._task, transform=self._transform, writer="replay-sample")
        # One task reads them: the first messages are those of the first parts.
        [done] = list(
            run_tasks(self._job.spark, [parts], partial(work.sample, count), name="sample")
        )
        if done.error is not None:
            raise TaskFailedError(done.error)
        return [
            _as_sample(row)
            for data in done.result or []
            for row in pa.ipc.open_stream(data).read_all().to_pylist()
        ]


def _first_line(error: Exception) -> str:
    lines = [line.strip().lstrip(": ") for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("An error occurred")]
    return (said or [type(error).__name__])[0][:500]


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
