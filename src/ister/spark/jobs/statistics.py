"""`stats`: counts messages by topic, hour, producer and size, and estimates their compression.

    driver: topics, plan ─► tasks: columns of a partition, counted ─► driver: sums ─► report

Owns: what is read, and the report. Does not own: the numbers (`topic_stats`). Read-only. It reads
messages, because descriptors have no payload sizes, producers or keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from ister import failpoints
from ister.errors import InvalidRequestError
from ister.limits import MIB
from ister.spark.jobs.balance import run_balanced
from ister.spark.jobs.job import Job, JobConfig, TopicNames, open_job, parse_topics
from ister.spark.jobs.job_report import JobReport
from ister.spark.jobs.progress import JobProgress
from ister.spark.jobs.runners import SparkOrRunner
from ister.spark.jobs.topic_stats import COLUMNS, TopicStats, take_sample
from ister.spark.location import Place
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.options import ReadOptions
from ister.spark.planner import Partition, TopicRange, plan
from ister.spark.read_task import ReadTask, TopicIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPLIT_BYTES: Final = 32 * MIB
# Partitions of a topic in which payloads are compressed.
_SAMPLES: Final = 8


def stats(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    broker: str | None = None,
    topics: TopicNames = None,
    include_tail: bool = True,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Counts the messages of topics.

    Args:
        spark: A session, classic or Connect; None for a dry run, which runs in this process.
        config: Where the log is; see `open_job`.
        broker: Flight addresses of brokers; see `open_job`.
        topics: Names and patterns; all topics by default.
        include_tail: Also count what is not in the bucket yet, if it can be read.
        dry_run: Only report how much would be read.
        progress: Receives the job's progress.

    Returns:
        The numbers of each topic, and of all topics under `totals`.

    Raises:
        NotFoundError: A topic does not exist.
        ConfigError: The settings are invalid.
        UnavailableError: A store does not respond.
    """
    with open_job("stats", spark, config, broker=broker, dry_run=dry_run, progress=progress) as job:
        stats_of_topics(job, job.topics(parse_topics(topics)), include_tail=include_tail)
    return job.report


@dataclass(slots=True)
class _Planned:
    """The counting of one topic."""

    head: Head
    range: TopicRange
    has_tail: bool
    partitions: list[Partition] = field(default_factory=list)
    found: TopicStats = field(default_factory=TopicStats)


def stats_of_topics(job: Job, topics: Sequence[str], *, include_tail: bool = True) -> None:
    """Counts the messages of topics within a job; the result is in the job's report."""
    planned: dict[str, _Planned] = {}
    for name in topics:
        with job.own_failure(name):
            planned[name] = _plan(job, name, include_tail=include_tail)
    failpoints.reach("pipeline.after_plan")
    if job.dry_run:
        for name, item in planned.items():
            read = item.range.end - item.range.start
            size = sum(partition.bytes for partition in item.partitions)
            job.report.of(name).update(_stored(item) | {"messages": read, "bytes": size})
        return
    _count(job, planned)
    totals = TopicStats()
    for name, item in planned.items():
        job.report.of(name).update({**item.found.as_json(), **_stored(item)})
        totals.merge(item.found)
    job.report.more["totals"] = totals.as_json()


def _plan(job: Job, name: str, *, include_tail: bool) -> _Planned:
    has_tail = include_tail
    options = ReadOptions.parse(
        {"topic": name, "config": "-", "includeTail": "true"}, is_streaming=False
    )
    if include_tail:
        resolver = OffsetResolver(job.place, options)
        try:
            head = resolver.heads(catches_up=True)[name]
        except InvalidRequestError as error:
            # The bucket's part is still counted.
            has_tail = False
            job.report.fail(error, name)
    if not has_tail:
        resolver = OffsetResolver(job.place, replace(options, include_tail=False))
        head = resolver.heads()[name]
    if head.cut_error is not None:
        job.report.fail(head.cut_error, name)
    whole = resolver.range_of(head, head.earliest, head.end)
    found = _Planned(head=head, range=whole, has_tail=has_tail or not include_tail)
    found.partitions = plan([whole], split_bytes=_SPLIT_BYTES)
    return found


def _stored(item: _Planned) -> dict[str, object]:
    """Returns what the descriptors say."""
    head = item.head
    formats: dict[str, dict[str, int]] = {}
    for described in item.range.descriptors:
        known = formats.setdefault(described.format, {"objects": 0, "messages": 0, "bytes": 0})
        known["objects"] += 1
        known["messages"] += described.messages or described.end - described.start
        known["bytes"] += described.size_bytes
    stored = sum(known["bytes"] for known in formats.values())
    return {
        "earliest": head.earliest,
        "next_offset": head.end,
        "objects": sum(known["objects"] for known in formats.values()),
        "stored_bytes": stored,
        "formats": formats,
        "tail": {
            "messages": head.end - max(head.tiered, head.earliest),
            "bytes": head.tail_bytes if head.end > head.tiered else 0,
            "is_counted": item.has_tail and not head.is_cut,
        },
    }


# -- in a task ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StatItem:
    """A partition of a topic to count. Pickled."""

    topic: str
    partition: Partition
    identity: TopicIdentity
    samples: bool
    """Whether to measure its compression."""


def count_messages(place: Place, item: StatItem) -> TopicStats:
    """Counts the messages of a partition.

    Raises:
        DataGapError: Messages are gone.
        CorruptDataError: A frame is damaged.
        UnavailableError: A store or the broker does not answer.
    """
    task = ReadTask(place=place, columns=COLUMNS, fail_on_data_loss=True)
    found, sample = TopicStats(), bytearray()
    for batch in task.read(item.partition, {item.topic: item.identity}):
        found.add(batch)
        if item.samples:
            take_sample(batch, sample)
    found.add_sample(sample)
    return found


def _count(job: Job, planned: Mapping[str, _Planned]) -> None:
    items: list[StatItem] = []
    for name, topic in planned.items():
        every = max(len(topic.partitions) // _SAMPLES, 1)
        items += [
            StatItem(
                topic=name,
                partition=part,
                identity=topic.head.identity,
                samples=at % every == 0,
            )
            for at, part in enumerate(topic.partitions)
        ]
    job.progress.begin("counting", sum(item.partition.bytes for item in items), "bytes")
    try:
        for done in run_balanced(
            job.spark,
            items,
            partial(count_messages, job.place),
            weigh=lambda item: item.partition.weight,
            name="ister stats",
        ):
            item = done.item
            job.progress.advance(item.partition.bytes, item.topic)
            if done.result is not None:
                planned[item.topic].found.merge(done.result)
            elif done.error is not None:
                job.report.fail(done.error, item.topic)
    finally:
        job.progress.end()
