"""`replay`: copies messages of one topic to another one, through a function or a query.

    source, [start, end) ─► chunks ─► tasks: transform, stage ─► driver: chunk n is batch n ─► done

Owns: the arguments, and that only one run of a replay is active at a time. Does not own: a run
(`replay_run`), the plan (`replay_plan`), the user's function (`transforms`) or query
(`replay_sql`), how a batch is appended once (`ister.topic.batches`).

Exactly once: a replay has a name, its plan is fixed when it first starts, and each chunk is a batch
of the writer `replay-<name>`, whose newest batch is recorded with the target. The same command
continues with the first missing chunk, or does nothing if all exist.

Messages keep the order of the source's offsets (through SQL: see `replay_sql`). While a chunk is
committed, the next one is staged.

What a crash leaves: the plan, staged files (removed when they are old), and a batch that was begun,
which the next run finishes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ister.base.clock import SystemClock
from ister.base.limits import MIB
from ister.base.model import TopicName
from ister.bucket.orphans import REPLAY_PREFIX
from ister.bucket.pipeline import PipelineKeys
from ister.errors import ConflictError, InvalidRequestError, InvariantError, IsterError
from ister.spark.jobs import replay_plan
from ister.spark.jobs.job import Job, JobConfig, find_job_place, open_job
from ister.spark.jobs.job_report import JobReport
from ister.spark.jobs.progress import JobProgress
from ister.spark.jobs.replay_run import ReplayRun, TaskFailedError
from ister.spark.jobs.runners import SparkOrRunner
from ister.spark.jobs.transforms import TransformSource, identify, parse_transform
from ister.spark.location import LogLocation
from ister.topic.batches import check_writer_name

_CHUNK_BYTES: Final = 64 * MIB
# Spark starts a handful of processes for each query.
_SQL_CHUNK_BYTES: Final = 256 * MIB
_LEASES: Final = 1.5
"""How many lease times a run waits for another that may have been killed."""


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
        chunk_bytes: Approximate size of a commit; 64 MiB by default, with SQL 256 MiB.
        progress: Receives the job's progress.

    Returns:
        What was done. A failure of the transform is in its errors, with the message's offset; what
        came before it stays, and the same call continues from there.

    Raises:
        InvalidRequestError: An argument is invalid.
        ConflictError: The same replay is running elsewhere.
        As `open_job`.
    """
    request = ReplayRequest.of(
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
    with _opened(spark, place, request, dry_run=dry_run, progress=progress) as job:
        try:
            ReplayRun(job, request).run()
        except InvariantError:
            raise
        except TaskFailedError as error:
            job.report.fail(error.fields)
        except IsterError as error:
            job.report.fail(error)
        finally:
            job.progress.end()
    return job.report


@contextmanager
def _opened(
    spark: SparkOrRunner,
    place: LogLocation,
    request: ReplayRequest,
    *,
    dry_run: bool,
    progress: JobProgress | None,
) -> Iterator[Job]:
    """Opens the job; waits for the lease of a run that was killed a moment ago."""
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


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """The arguments, checked."""

    source: str
    target: str
    transform: Callable[..., object] | TransformSource | None
    identity: str
    """The name of the transform."""
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
        transform: Callable[..., object] | str | None,
        sql: str | None,
        per_message: bool | None,
        start: replay_plan.Where,
        end: replay_plan.Where,
        name: str | None,
        is_created: bool,
        is_marked: bool,
        sample: int,
        chunk_bytes: int,
    ) -> ReplayRequest:
        """Checks the arguments of `replay`.

        Raises:
            InvalidRequestError: An argument is invalid.
        """
        source, target = str(TopicName.parse(source)), str(TopicName.parse(target))
        if source == target:
            raise InvalidRequestError(
                "source and target are the same topic", topic=target, hint="choose another target"
            )
        if transform is not None and sql is not None:
            raise InvalidRequestError("both a transform and SQL are given", hint="pass one of them")
        if name is not None:
            check_writer_name(f"{REPLAY_PREFIX}{name}")
        found: Callable[..., object] | TransformSource | None
        if isinstance(transform, str):
            found = parse_transform(transform)
            identity = found.identity
        elif transform is not None:
            found = transform
            try:
                identity = identify(transform)
            except InvalidRequestError:
                if name is None:
                    raise
                identity = f"named {name}"
        else:
            found = None
            # As it was written: white space may be significant in a query.
            identity = f"sql {sql.strip()}" if sql is not None else "copy"
        if is_marked:
            identity += " marked"
        return cls(
            source=source,
            target=target,
            transform=found,
            identity=identity,
            sql=sql,
            per_message=per_message,
            start=start,
            end=end,
            name=name,
            is_created=is_created,
            is_marked=is_marked,
            sample=sample,
            chunk_bytes=chunk_bytes,
        )

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
