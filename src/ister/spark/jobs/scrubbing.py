"""`scrub`: checks every descriptor and every byte of topics, and repairs what is wrong if asked.

    driver: compare catalog and bucket ─► tasks: check each object, frame by frame ─► findings
    repair: tasks: make the object again, under a new name ─► driver: one transaction each

Owns: the order of steps. Does not own: what becomes of a finding (`topic_scrub`), how an object is
checked (`ister.rescue.object_check`) or made again (`ister.rescue.mend`).

Invariants:

- a fault counts only if the descriptor is unchanged after its object was found bad: uploads, merges
  and retention continue meanwhile;
- a descriptor is changed only for an object that was read back intact, and removed only if others,
  whose objects are intact, have all of its offsets;
- objects that no descriptor names are reported, not removed: the topic's owner collects them.

What a crash leaves: objects that no descriptor names. The next run finds what is still wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from typing import Final

from ister.base import failpoints
from ister.base.limits import GIB, KIB, MIB
from ister.base.model import TopicName
from ister.bucket.express import find_runs
from ister.bucket.names import TopicKeys
from ister.client.frames import BrokerFrames
from ister.errors import IsterError, UnavailableError
from ister.format.descriptor import ObjectDescriptor, decode_descriptor
from ister.rescue.mend import BROKER, LOCAL, DamagedRange, RepairResult, Source, mend, object_source
from ister.rescue.object_check import Checked, ObjectChecker
from ister.spark.jobs.job import Job, JobConfig, TopicNames, open_job, parse_topics
from ister.spark.jobs.job_report import JobProgress, JobReport
from ister.spark.jobs.tasks import SparkOrRunner, run_tasks
from ister.spark.jobs.topic_scrub import BadObject, CheckItem, MissingRange, TopicScrub
from ister.spark.location import LogLocation
from ister.spark.owners import connect
from ister.topic.stores import upload_settings

_log = logging.getLogger("ister.spark.jobs.scrubbing")

# Topics that change meanwhile are surveyed again.
_ROUNDS: Final = 3
# How many descriptors, with their indexes, the driver holds at a time.
_ITEMS_MAX: Final = 2048
_ITEM_BYTES_MIN: Final = 256 * KIB
# Nothing waits for a commit, and in the time that a task costs a slot checks a hundred megabytes.
_BUNDLE_BYTES: Final = 4 * GIB
# Every chunk costs some Python code, which takes as long as checking half a megabyte. So chunks are
# larger than those of readers.
_CHUNK_BYTES_MIN: Final = 8 * MIB


def scrub(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    broker: str | None = None,
    topics: TopicNames = None,
    repair: bool = False,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Checks every object of topics, and their metadata.

    Args:
        spark: A session, classic or Connect; None for a dry run, which runs in this process.
        config: Where the log is; see `open_job`.
        broker: Flight addresses of brokers; see `open_job`.
        topics: Names and patterns; all topics by default.
        repair: Repair what can be repaired, from local files or a good copy in the bucket.
        dry_run: Only read the metadata and list the bucket.
        progress: Receives the job's progress.

    Returns:
        For each topic how many `objects`, `bytes` and `messages` were checked, and its `findings`.
        A fault that was not repaired is an error.

    Raises:
        NotFoundError: A topic does not exist.
        ConfigError: The settings are invalid.
        UnavailableError: A store does not respond.
    """
    with open_job("scrub", spark, config, broker=broker, dry_run=dry_run, progress=progress) as job:
        scrub_topics(job, job.topics(parse_topics(topics)), repair=repair)
    return job.report


def scrub_topics(job: Job, topics: Sequence[str], *, repair: bool = False) -> None:
    """Checks topics within a job; the result is in the job's report."""
    # Once for all topics, and only if one has a fault.
    express_runs = cache(partial(_find_runs, job))
    scrubs = [TopicScrub(job, name, express_runs) for name in topics]
    pending = [item for item in scrubs if item.survey_again()]
    failpoints.reach("pipeline.after_plan")
    if job.dry_run:
        for item in pending:
            item.judge()
    else:
        for number in range(_ROUNDS):
            if number:
                # Findings stand until the next survey, so there is none after the last round.
                pending = [item for item in pending if item.has_changed and item.survey_again()]
            if not pending:
                break
            _check(job, pending)
            for item in pending:
                item.collect_findings()
            if repair:
                _repair(job, pending)
    for item in scrubs:
        item.report(repair=repair)


# -- in a task ------------------------------------------------------------------------------


def _find_runs(job: Job) -> dict[TopicName, list[ObjectDescriptor]]:
    """Reads the footers of all express objects: a topic may need a run that nothing names."""
    found = find_runs(job.history.objects, on_damage=lambda error: _log.warning("%s", error))
    return found.by_topic


def check_object(place: LogLocation, item: CheckItem) -> Checked:
    """Checks one object."""
    history = place.history()
    settings = place.config.storage
    checker = ObjectChecker(
        TopicName.parse(item.topic),
        history.objects,
        chunk_bytes=max(settings.cloud_reader.fetch_chunk_size, _CHUNK_BYTES_MIN),
        index_every_messages=settings.uploader.index_every_messages,
        ahead=history.ahead,
        clock=history.clock,
        metrics=history.metrics,
    )
    return checker.check(decode_descriptor(item.descriptor, key=item.key))


# -- checking -------------------------------------------------------------------------------


def _check(job: Job, scrubs: Sequence[TopicScrub]) -> None:
    total = sum(item.unchecked_bytes() for item in scrubs)
    job.progress.begin("checking", total, "bytes")
    try:
        batch: list[CheckItem] = []
        by_topic = {item.topic: item for item in scrubs}
        for scrubbed in scrubs:
            for item in scrubbed.items():
                batch.append(item)
                if len(batch) >= _ITEMS_MAX:
                    _check_batch(job, by_topic, batch)
                    batch = []
        _check_batch(job, by_topic, batch)
    finally:
        job.progress.end()


def _check_batch(job: Job, scrubs: Mapping[str, TopicScrub], batch: list[CheckItem]) -> None:
    job.check()
    for done in run_tasks(
        job.spark,
        batch,
        partial(check_object, job.place),
        weigh=lambda item: max(item.size_bytes, _ITEM_BYTES_MIN),
        task_bytes=_BUNDLE_BYTES,
        name="ister scrub",
    ):
        item = done.item
        job.progress.advance(item.size_bytes, item.topic)
        if done.result is not None:
            scrubs[item.topic].take(item, done.result)
        elif done.error is not None:
            scrubs[item.topic].failures[item.key, item.revision] = done.error


# -- repairs --------------------------------------------------------------------------------


def _repair(job: Job, scrubs: Sequence[TopicScrub]) -> None:
    faulty = [item for item in scrubs if item.survey is not None and item.survey.has_faults]
    if not faulty:
        return
    failpoints.reach("scrub.before_repair")
    by_topic = {item.topic: item for item in faulty}
    targets: dict[DamagedRange, BadObject | MissingRange] = {}
    for item in faulty:
        item.fix_descriptors()
        targets |= dict(item.damaged_ranges())
    job.progress.begin("repairing", len(targets), "objects")
    try:
        job.check()
        for done in run_tasks(
            job.spark,
            list(targets),
            partial(repair_range, job.place),
            weigh=lambda damaged: (
                damaged.old.size_bytes if damaged.old is not None else _ITEM_BYTES_MIN
            ),
            name="ister scrub, repair",
        ):
            damaged, result, scrubbed = done.item, done.result, by_topic[done.item.topic]
            job.progress.advance(1, damaged.topic)
            if done.error is not None:
                job.report.fail(done.error, damaged.topic)
                continue
            if result is None:
                continue
            if _is_incomplete(result) and not result.has_local_files and scrubbed.local_files():
                # Only the driver has the files.
                result = repair_range(job.place, damaged)
            target = targets[damaged]
            if isinstance(target, BadObject):
                scrubbed.restore(target, result)
            else:
                scrubbed.fill(target, result)
    finally:
        job.progress.end()
    for item in faulty:
        item.remove_superfluous()
        item.fix_pointer()
    failpoints.reach("scrub.after_repair")


def _is_incomplete(result: RepairResult) -> bool:
    return not result.objects or bool(result.lost)


def repair_range(place: LogLocation, damaged: DamagedRange) -> RepairResult:
    """Makes the objects that are missing; the best sources come first."""
    history = place.history()
    keys = TopicKeys(place.config.storage.metadata.root_prefix, TopicName.parse(damaged.topic))
    with ExitStack() as stack:
        sources: list[Source] = []

        def add(source: Source) -> None:
            sources.append(source)
            stack.enter_context(closing(source.frames))

        local = place.local_tail(damaged.topic, damaged.node, damaged.incarnation)
        chunk_bytes = upload_settings(place.config.storage.uploader).read_bytes
        opened = None
        if local is not None:
            with suppress(UnavailableError):  # no checkpoint: unknown what is durable
                opened = local.source(chunk_bytes=chunk_bytes)
        if opened is not None:
            files, snapshot = opened
            add(Source(LOCAL, snapshot.trimmed, snapshot.synced, files, files))
        for described in damaged.others:
            add(object_source(history, keys, described))
        with suppress(IsterError):  # it is one source of several
            client = connect(place, damaged.topic)
            broker = BrokerFrames(client, damaged.topic, damaged.incarnation, damaged.epoch)
            add(Source(BROKER, 0, 1 << 63, broker, broker))
        if damaged.old is not None:
            # Last: the intact parts of the object itself.
            add(object_source(history, keys, damaged.old))
        return mend(history, damaged, sources)
