"""`resort`: re-sorts express runs every few minutes, while `run` holds the lease.

    records ─► topics that share express objects ─► groups of runs that are due ─► compaction

Owns: which topics and runs. Does not own: which runs go together (`ister.bucket.resort`), tasks and
swaps (`compaction`). Groups and objects are the same as those of a topic's owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ister.base.clock import Clock
from ister.base.model import AckLevel, TopicName
from ister.bucket.compaction_plan import MergeGroup
from ister.bucket.ownership import OwnedTopic
from ister.bucket.resort import find_first_run, plan_resort
from ister.config import UploaderConfig
from ister.errors import CorruptDataError
from ister.format.descriptor import ObjectDescriptor
from ister.format.records import decode_topic
from ister.spark.jobs.compaction import CompactSettings, compact_topics
from ister.spark.jobs.job import Job
from ister.topic.stores import upload_settings


def resort_topics(job: Job) -> None:
    """Re-sorts the runs that are due; the result is in the job's report.

    Raises:
        FencedError: The job's lease has expired.
        UnavailableError: The metadata store does not respond.
    """
    planner = _DueRuns(job.place.config.storage.uploader, job.clock)
    compact_topics(job, _find_topics(job), CompactSettings(), planner=planner)


def _find_topics(job: Job) -> list[str]:
    """The topics that share express objects, sorted.

    Runs of topics that no longer share them are left to `compact`, which reads all descriptors.
    """
    storage = job.place.config.storage
    prefix = f"{storage.metadata.root_prefix}/topics/"
    found: list[str] = []
    for item in job.store.range(prefix):
        namespace, _, topic = item.key.removeprefix(prefix).partition("/")
        with suppress(CorruptDataError):  # opening the topic reports it
            record = decode_topic(item.value, key=item.key)
            is_express = storage.uploader.express.all_topics or record.ack is AckLevel.TIERED
            if record.is_open and is_express and topic and "/" not in topic:
                found.append(str(TopicName(namespace=namespace, topic=topic)))
    return sorted(found)


class _DueRuns:
    """Plans groups of runs that are full, or have waited long enough."""

    def __init__(self, config: UploaderConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock

    def begin(self, owned: OwnedTopic) -> int | None:
        """Returns where the oldest run starts; None without runs."""
        return find_first_run(owned.catalog, owned.last)

    def plan(self, descriptors: Sequence[ObjectDescriptor]) -> list[MergeGroup]:
        """Returns the groups that are due."""
        now, patience = self._clock.now_ns() / 1e9, self._config.express.resort_seconds
        groups = plan_resort(
            descriptors,
            upload_settings(self._config),
            is_due=lambda run: not 0 <= now - run.created_at < patience,
        )
        return [MergeGroup(group.runs) for group in groups if group.is_due]
