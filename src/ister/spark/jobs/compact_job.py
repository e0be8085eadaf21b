"""`compact`: merges small objects of topics into larger ones, as frames or as Parquet.

    descriptors ─► groups of neighbours ─► task: one new object each ─► swap, in one transaction
                                                                          │
                        old objects stay until their grace is over ◄──────┘

Owns: which topics, when a merged object replaces others, and what happens to it if it does not.
Does not own: which objects go together (`ister.bucket.compaction_plan`, `ister.bucket.resort`), the
merging (`ister.bucket.merge`), the transaction (`ister.bucket.ownership`).

Invariants:

- a topic has the same messages at the same offsets before and after, except for those that
  `latest-per-key` removes: each has a later message of its key that stays, or the key's last
  message is an expired tombstone;
- `latest-per-key` removes no message that may be a row of an open batch (`find_open_batch`), and no
  producer's newest one, by which its next ones are told from those that come again;
- an object becomes part of a topic only while the job's lease is valid, the descriptors that it
  replaces are those that were merged, and it is in the bucket with its size;
- groups that lose messages are swapped in the order of offsets. A tombstone goes after all other
  messages of its key, so that none of them comes back.

Runs of express objects are merged in any case. `run` also re-sorts them every few minutes, while
it holds the lease (`resort_topics`): in the groups, and into the objects, that the topic's owner
would make.

Readers continue: a reader looks up the object of an offset again when one is gone, and old objects
stay for `grace_minutes`, at least an hour.

What a crash leaves: topics with some groups merged, objects that no descriptor names, and staged
offsets. The latter two are removed when they are old enough, by the topic's owner, or by `gc` if
the topic has none.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol

from ister.base import failpoints
from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.base.model import AckLevel, TopicName
from ister.bucket.compaction_plan import MergeGroup, PlanSettings, plan_compaction
from ister.bucket.express_collection import stays_by_age
from ister.bucket.merge import merge_objects
from ister.bucket.names import object_key, staging_prefix
from ister.bucket.orphans import at_least
from ister.bucket.ownership import OwnedTopic
from ister.bucket.resort import find_first_run, plan_resort
from ister.bucket.writer_files import OpenBatch, find_open_batch
from ister.config import Keep, ObjectFormat, UploaderConfig
from ister.errors import (
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    NotFoundError,
    UnavailableError,
)
from ister.format.descriptor import FORMAT_PARQUET, ObjectDescriptor
from ister.format.records import decode_topic
from ister.spark.jobs.job import Job, JobConfig, TopicNames, open_job, parse_topics
from ister.spark.jobs.job_report import ErrorFields, JobProgress, JobReport, error_as_fields
from ister.spark.jobs.tasks import Done, SparkOrRunner, run_tasks
from ister.spark.location import LogLocation
from ister.spark.workers import compile_for
from ister.topic.stores import upload_settings

if TYPE_CHECKING:
    from ister.spark.jobs.latest_per_key import KeyedTopic, Latest

_log = logging.getLogger("ister.spark.jobs.compaction")

# Very many tiny objects take a round for each power of a hundred; changed groups are planned again.
_ROUNDS_MAX: Final = 6
_READS_MAX: Final = 3
_ZSTD_LEVEL_MAX: Final = 22
_TARGET_MB_MAX: Final = 2048
_UNCOUNTED: Final = "removed messages not counted: too many for a dry run"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactSettings:
    """How topics are compacted; see `compact`."""

    format: str = "dnb1"
    keep: str = "all"
    target_mb: int = 128
    min_objects: int = 4
    grace_minutes: float | None = None
    tombstone_hours: float = 24
    zstd_level: int = 3

    def __post_init__(self) -> None:
        """Checks the settings."""
        _check_one_of("format", self.format, ObjectFormat)
        _check_one_of("keep", self.keep, Keep)
        if self.keep == Keep.LATEST_PER_KEY and self.format != ObjectFormat.PARQUET:
            raise InvalidRequestError(
                "keep latest-per-key requires the format parquet",
                hint="frames cannot have gaps: --keep latest-per-key --format parquet",
            )
        _check_between("target_mb", self.target_mb, 1, _TARGET_MB_MAX)
        _check_between("min_objects", self.min_objects, 1, 100)
        _check_between("zstd_level", self.zstd_level, 1, _ZSTD_LEVEL_MAX)
        _check_between("tombstone_hours", self.tombstone_hours, 0, None)
        if self.grace_minutes is not None:
            _check_between("grace_minutes", self.grace_minutes, 0, None)

    @property
    def keeps_latest(self) -> bool:
        """Whether only the latest message of each key stays."""
        return self.keep == Keep.LATEST_PER_KEY

    @property
    def plan(self) -> PlanSettings:
        """The settings of the planner."""
        return PlanSettings(
            format=str(self.format),
            target_bytes=self.target_mb * MIB,
            min_objects=self.min_objects,
        )


def _check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    names = [str(item) for item in known]
    if value not in names:
        raise InvalidRequestError(f"invalid {name} {value!r}", hint=" or ".join(names))


def _check_between(name: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        limit = f" to {high:g}" if high is not None else " or more"
        raise InvalidRequestError(f"invalid {name} {value!r}", hint=f"{low:g}{limit}")


def compact(
    spark: SparkOrRunner,
    config: JobConfig = None,
    *,
    broker: str | None = None,
    topics: TopicNames = None,
    format: str = "dnb1",
    keep: str = "all",
    target_mb: int = 128,
    min_objects: int = 4,
    grace_minutes: float | None = None,
    tombstone_hours: float = 24,
    zstd_level: int = 3,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Merges adjacent small objects of topics.

    Running it again right away does nothing. Brokers and readers may keep running.

    Args:
        spark: A session, classic or Connect; None for a dry run, which runs in this process.
        config: Where the log is; see `open_job`.
        broker: Flight addresses of brokers; see `open_job`.
        topics: Names and patterns; all topics by default.
        format: Format of merged objects: `dnb1`, or `parquet`, which also rewrites large ones.
        keep: `all` messages, or `latest-per-key`: of each routing key the newest message in the
            bucket, and everything without a key. Requires `parquet`. Offsets do not change.
        target_mb: Approximate size of merged objects, in MiB of messages (Parquet files are
            smaller); objects of half that size are left alone.
        min_objects: Minimum number of neighbours to merge.
        grace_minutes: How long old objects stay for readers, at least an hour; by default
            `storage.cloud.orphan_grace_minutes`.
        tombstone_hours: With `latest-per-key`: the newest message of a key is removed, too, if its
            payload is empty and it was published longer ago than this.
        zstd_level: Compression level of Parquet, 1 to 22.
        dry_run: Plan only.
        progress: Receives the job's progress.

    Returns:
        For each topic `objects` and `bytes` that were merged, the number and size of new objects
        (`merged`, `new_bytes`), `removed_messages`, groups that changed meanwhile (`skipped`), and
        the unfinished batch for which `latest-per-key` leaves messages alone (`waits`).
        A failing topic is in `errors`; others go on.

    Raises:
        InvalidRequestError: A setting is invalid.
        NotFoundError: A topic does not exist.
        ConfigError: The settings are invalid, or only one process could use them.
        UnavailableError: A store does not respond.
    """
    settings = CompactSettings(
        format=format,
        keep=keep,
        target_mb=target_mb,
        min_objects=min_objects,
        grace_minutes=grace_minutes,
        tombstone_hours=tombstone_hours,
        zstd_level=zstd_level,
    )
    with open_job(
        "compact", spark, config, broker=broker, dry_run=dry_run, progress=progress
    ) as job:
        compact_topics(job, job.topics(parse_topics(topics)), settings)
    return job.report


class Planner(Protocol):
    """Chooses other objects than `plan_compaction` does."""

    def begin(self, owned: OwnedTopic) -> int | None:
        """Returns the offset from which on descriptors are read; None if nothing is to be done."""
        ...

    def plan(self, descriptors: Sequence[ObjectDescriptor]) -> list[MergeGroup]:
        """Returns the groups to merge, ascending."""
        ...


def compact_topics(
    job: Job, topics: Sequence[str], settings: CompactSettings, *, planner: Planner | None = None
) -> None:
    """Compacts topics within a job; the result is in its report.

    With a `planner` nothing else is done: leftovers of earlier merges stay.
    """
    _Compaction(job, settings, planner).run(topics)


@dataclass(slots=True)
class _TopicPlan:
    """The plan for one topic, as of when its objects were read."""

    name: str
    owned: OwnedTopic
    everything: list[tuple[ObjectDescriptor, int]]
    """All objects, without the indexes of frames, each with its key's revision."""
    groups: list[_PlannedGroup] = field(default_factory=list)
    waits: OpenBatch | None = None
    """The open batch whose rows, and everything above them, stay."""


@dataclass(slots=True)
class _PlannedGroup:
    """Objects that become one, or one that loses messages."""

    plan: _TopicPlan
    old: list[tuple[ObjectDescriptor, int]]
    is_merge: bool
    """Whether to rewrite it even if all messages stay."""
    latest: Latest | None = None
    """What stays; None for everything."""
    result: Done[_MergeItem, ObjectDescriptor] | None = None
    """Its task's result, while an earlier group is awaited."""

    @property
    def end(self) -> int:
        """The offset after its last message."""
        return self.old[-1][0].end

    @property
    def size_bytes(self) -> int:
        """How much is read."""
        return sum(described.size_bytes for described, _ in self.old)


class _Compaction:
    """One run of the job. Used by one thread."""

    def __init__(self, job: Job, settings: CompactSettings, planner: Planner | None) -> None:
        self._job = job
        self._settings = settings
        self._planner = planner
        storage = job.place.config.storage
        self._orphan_grace_seconds = storage.cloud.orphan_grace_minutes * 60
        grace_minutes = settings.grace_minutes
        self._grace_seconds = at_least(
            self._orphan_grace_seconds if grace_minutes is None else grace_minutes * 60
        )
        self._merge = partial(_merge, job.place, str(settings.format), settings.zstd_level)
        self._run_id = secrets.token_hex(8)

    def run(self, topics: Sequence[str]) -> None:
        """Merges until there is nothing left to merge."""
        job = self._job
        for topic in topics:
            job.report.add(topic, objects=0, merged=0, bytes=0)
        pending = list(topics)
        for number in range(_ROUNDS_MAX):
            job.check()
            # The first round removes superseded messages; later rounds only merge.
            removes = self._settings.keeps_latest and number == 0
            found = [plan for topic in pending if (plan := self._plan(topic, removes)) is not None]
            try:
                plans = self._find_latest(found) if removes else found
                failpoints.reach("pipeline.after_plan")
                if job.dry_run:
                    self._describe(plans)
                    return
                pending = self._carry_out(plans, removes=removes)
            finally:
                if removes and not job.dry_run:
                    self._remove_staged(found)
            if not pending:
                return

    # -- plan -------------------------------------------------------------------------------

    def _plan(self, topic: str, removes: bool) -> _TopicPlan | None:
        """Plans a topic; None if there is nothing to do, or it failed."""
        plan: _TopicPlan | None = None
        with self._job.own_failure(topic, may_be_gone=True):
            plan = self._read_topic(topic, removes=removes)
        return plan if plan is not None and plan.groups else None

    def _read_topic(self, topic: str, *, removes: bool) -> _TopicPlan:
        owned, planner = self._job.act(topic), self._planner
        begin = 0 if planner is None else planner.begin(owned)
        everything = [] if begin is None else _read_objects(owned, begin)
        plan = _TopicPlan(topic, owned, everything)
        descriptors = [described for described, _ in everything]
        if planner is None:
            groups = plan_compaction(descriptors, self._settings.plan)
        else:
            groups = planner.plan(descriptors)
        merged = {group.start for group in groups}
        if removes:
            groups = _with_the_rest(topic, descriptors, groups)
            # After the objects: a batch that begins from here on is above all of them.
            plan.waits = find_open_batch(owned.catalog, owned.record.incarnation)
        revisions = {id(described): revision for described, revision in everything}
        plan.groups = [
            _PlannedGroup(
                plan, [(d, revisions[id(d)]) for d in group.objects], group.start in merged
            )
            for group in groups
        ]
        return plan

    def _find_latest(self, plans: list[_TopicPlan]) -> list[_TopicPlan]:
        """Finds what each group loses; drops groups that neither lose nor merge anything."""
        from ister.spark.jobs.latest_per_key import find_latest  # noqa: PLC0415 - numpy

        job = self._job
        if not plans:
            return plans
        before_ms = job.clock.now_ns() // 1_000_000 - int(
            self._settings.tombstone_hours * 3_600_000
        )
        total = sum(described.size_bytes for plan in plans for described, _ in plan.everything)
        job.progress.begin("searching", total, "bytes")
        try:
            found = find_latest(
                job.spark,
                job.place,
                [_keyed(plan) for plan in plans],
                tombstones_before_ms=before_ms,
                now_ms=job.clock.now_ns() // 1_000_000,
                run=None if job.dry_run else self._staged_name,
            )
            job.progress.advance(total)
        finally:
            job.progress.end()
        left: list[_TopicPlan] = []
        for plan, latest in zip(plans, found.latest, strict=True):
            if error := found.errors.get(plan.name):
                job.report.fail(error, plan.name)
                continue
            if plan.name in found.uncounted:
                job.report.of(plan.name)["skipped"] = _UNCOUNTED
            for group, stays in zip(plan.groups, latest, strict=True):
                waits = plan.waits
                if waits is not None and stays.removed and waits.counted_from < group.end:
                    job.report.of(plan.name)["waits"] = (
                        f"messages from offset {waits.counted_from} on stay: batch {waits.batch} "
                        f"of the writer {waits.writer} is not finished"
                    )
                elif stays.removed:
                    group.latest = stays
            plan.groups = [
                group for group in plan.groups if group.latest is not None or group.is_merge
            ]
            left.append(plan)
        return left

    def _describe(self, plans: Sequence[_TopicPlan]) -> None:
        for plan in plans:
            for group in plan.groups:
                self._job.report.add(
                    plan.name,
                    objects=len(group.old),
                    merged=1,
                    bytes=group.size_bytes,
                    **_removed(group),
                )

    # -- work -------------------------------------------------------------------------------

    def _carry_out(self, plans: Sequence[_TopicPlan], *, removes: bool) -> list[str]:
        """Merges and swaps all groups; returns the topics that may have more to merge."""
        job = self._job
        groups = [group for plan in plans for group in plan.groups]
        items = [
            _MergeItem(
                number=number,
                topic=group.plan.name,
                epoch=group.plan.owned.epoch,
                incarnation=group.plan.owned.record.incarnation,
                objects=tuple(replace(described, offset_index=()) for described, _ in group.old),
                latest=group.latest,
            )
            for number, group in enumerate(groups)
        ]
        outcome = _Outcome()
        job.progress.begin("merging", sum(group.size_bytes for group in groups), "bytes")
        try:
            for done in run_tasks(
                job.spark,
                items,
                self._merge,
                weigh=attrgetter("size_bytes"),
                name="ister compact",
            ):
                group = groups[done.item.number]
                group.result = done
                for ready in _in_order(group) if removes else (group,):
                    self._settle(ready, outcome, removes=removes)
                job.progress.advance(group.size_bytes, group.plan.name)
        finally:
            job.progress.end()
        return [plan.name for plan in plans if plan.name in outcome.again - outcome.failed]

    def _settle(self, group: _PlannedGroup, outcome: _Outcome, *, removes: bool) -> None:
        """Commits what a task has made, or removes it."""
        done, name = group.result, group.plan.name
        if done is None:
            raise InvariantError("a group is settled before its task is done")
        made = done.result
        if removes and name in outcome.broken:
            # An earlier group still has messages whose tombstones may be in this one.
            if made is not None:
                self._discard(group, made)
            outcome.skip(self._job, group)
            return
        try:
            if made is None:
                self._record_failure(group, done.error or {}, outcome)
            elif self._commit(group, made):
                outcome.again.add(name)
                self._job.report.add(
                    name,
                    objects=len(group.old),
                    merged=1,
                    bytes=group.size_bytes,
                    new_bytes=made.size_bytes,
                    **_removed(group),
                )
            else:
                self._discard(group, made)
                outcome.skip(self._job, group)
        except FencedError as error:
            self._job.fence.check()
            # The topic has a new owner, whose objects are planned again.
            _log.info("topic has a new owner", extra={"topic": name, "error": str(error)})
            if made is not None:
                self._discard(group, made)
            outcome.skip(self._job, group)
        except UnavailableError as error:
            # It may have been committed: the new object stays.
            outcome.fail(self._job, group, error)
        except InvariantError:
            raise
        except IsterError as error:
            if made is not None:
                self._discard(group, made)
            self._record_failure(group, error_as_fields(error), outcome)

    def _commit(self, group: _PlannedGroup, made: ObjectDescriptor) -> bool:
        """Swaps descriptors; False if those that were merged have changed."""
        job = self._job
        failpoints.reach("pipeline.before_commit")
        job.check()
        self._check_there(group.plan, made)
        now = job.clock.now_ns() / 1e9
        stays = partial(
            stays_by_age,
            now=now,
            grace_seconds=self._orphan_grace_seconds,
            wanted_seconds=self._grace_seconds,
        )
        until = int(now + self._grace_seconds)
        if not group.plan.owned.swap(group.old, made, until=until, stays=stays):
            return False
        failpoints.reach("pipeline.after_commit")
        _log.info(
            "compacted",
            extra={
                "topic": group.plan.name,
                "object": made.object_id,
                "objects": len(group.old),
                "bytes": made.size_bytes,
            },
        )
        return True

    def _check_there(self, plan: _TopicPlan, made: ObjectDescriptor) -> None:
        """Checks that a merged object exists, and is not about to be collected."""
        key = object_key(TopicName.parse(plan.name), made.object_id)
        info = self._job.history.objects.stat(key)
        age = self._job.clock.now_ns() / 1e9 - (info.modified_at or float("inf"))
        is_safe = not self._orphan_grace_seconds or age < self._orphan_grace_seconds / 2
        if info.size != made.size_bytes or not is_safe:
            raise NotFoundError(
                "a merged object was collected before its commit, or is about to be",
                topic=plan.name,
                path=key,
                hint="increase storage.cloud.orphan_grace_minutes",
            )

    def _record_failure(self, group: _PlannedGroup, error: ErrorFields, outcome: _Outcome) -> None:
        if error.get("code") == NotFoundError.code and self._has_changed(group):
            outcome.skip(self._job, group)  # merged by another job, or expired
        else:
            outcome.fail(self._job, group, error)

    def _has_changed(self, group: _PlannedGroup) -> bool:
        first, last = group.old[0][0], group.old[-1][0]
        there = group.plan.owned.catalog.descriptors(first.start, last.end)
        return [revision for _, revision in there] != [revision for _, revision in group.old]

    def _discard(self, group: _PlannedGroup, made: ObjectDescriptor) -> None:
        """Removes a merged object that has not become part of the topic."""
        plan = group.plan
        try:
            there = plan.owned.catalog.find(made.start)
            if there is None or there.object_id != made.object_id:
                key = object_key(TopicName.parse(plan.name), made.object_id)
                self._job.history.objects.delete(key)
        except IsterError as error:
            _log.warning(
                "merged object not removed",
                extra={"topic": plan.name, "object": made.object_id, "error": str(error)},
            )

    # -- staged offsets ---------------------------------------------------------------------

    @property
    def _staged_name(self) -> str:
        from ister.spark.jobs.latest_per_key import STAGED_PREFIX  # noqa: PLC0415 - numpy

        return f"{STAGED_PREFIX}{self._run_id}"

    def _remove_staged(self, plans: Sequence[_TopicPlan]) -> None:
        """Removes the offsets that this run staged."""
        for plan in plans:
            name = TopicName.parse(plan.name)
            try:
                objects = self._job.history.objects
                for info in list(objects.list(staging_prefix(name, self._staged_name))):
                    objects.delete(info.key)
            except IsterError as error:
                _log.warning(
                    "staged offsets not removed",
                    extra={"topic": plan.name, "error": str(error)},
                )


@dataclass(slots=True)
class _Outcome:
    """What became of the topics of a round."""

    again: set[str] = field(default_factory=set)
    """Topics that changed, so that there may be more to merge."""
    failed: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    """Topics of which a group was not swapped."""

    def skip(self, job: Job, group: _PlannedGroup) -> None:
        """Records that a group has changed meanwhile."""
        self.again.add(group.plan.name)
        self.broken.add(group.plan.name)
        job.report.add(group.plan.name, skipped=1)

    def fail(self, job: Job, group: _PlannedGroup, error: IsterError | ErrorFields) -> None:
        """Records that a group could not be merged."""
        self.failed.add(group.plan.name)
        self.broken.add(group.plan.name)
        job.report.fail(error, group.plan.name)


def _read_objects(owned: OwnedTopic, begin: int) -> list[tuple[ObjectDescriptor, int]]:
    """Reads the objects of a topic from an offset on, each with its key's revision.

    Objects that another job merges meanwhile may appear before and after the merge: read again.
    """
    for _ in range(_READS_MAX):
        found = [(_slim(d), revision) for d, revision in owned.catalog.descriptors(begin)]
        if all(before.end <= after.start for (before, _), (after, _) in pairwise(found)):
            break
    return found


def _slim(described: ObjectDescriptor) -> ObjectDescriptor:
    """Drops indexes, which are large for frames; Parquet's offset index has the size."""
    if described.format == FORMAT_PARQUET:
        return replace(described, publish_time_index=())
    return replace(described, offset_index=(), publish_time_index=())


def _with_the_rest(
    topic: str, descriptors: Sequence[ObjectDescriptor], groups: Sequence[MergeGroup]
) -> list[MergeGroup]:
    """Adds every other object as a group of its own; ascending."""
    taken = {described.start for group in groups for described in group.objects}
    rest = [MergeGroup((d,)) for d in descriptors if d.start not in taken]
    every = sorted([*groups, *rest], key=lambda group: group.start)
    for number, group in enumerate(every):
        is_shared = number > 0 and group.start < every[number - 1].end
        if is_shared or not all(described.completed for described in group.objects):
            raise CorruptDataError(
                "an object overlaps another one, or is incomplete",
                topic=topic,
                offset=group.start,
                path=group.objects[0].object_id,
                hint="`ister pipeline scrub --repair` repairs it; without --keep "
                "latest-per-key the others can be merged",
            )
    return every


def _keyed(plan: _TopicPlan) -> KeyedTopic:
    from ister.spark.jobs.latest_per_key import KeyedTopic  # noqa: PLC0415 - numpy

    return KeyedTopic(
        name=plan.name,
        incarnation=plan.owned.record.incarnation,
        groups=tuple(
            tuple(replace(described, offset_index=()) for described, _ in group.old)
            for group in plan.groups
        ),
    )


def _removed(group: _PlannedGroup) -> dict[str, int]:
    return {} if group.latest is None else {"removed_messages": group.latest.removed}


def _in_order(group: _PlannedGroup) -> Iterator[_PlannedGroup]:
    """Yields the groups of a topic that can be settled now, each once, in order."""
    groups = group.plan.groups
    while groups and groups[0].result is not None:
        yield groups.pop(0)


# -- express runs ---------------------------------------------------------------------------


def resort_topics(job: Job) -> None:
    """Re-sorts the runs that are due; the result is in the job's report."""
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


# -- in a task ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergeItem:
    """Objects that become one. Pickled to a task."""

    number: int
    topic: str
    epoch: int
    incarnation: str
    objects: tuple[ObjectDescriptor, ...]
    latest: Latest | None
    """What stays; None for everything."""

    @property
    def size_bytes(self) -> int:
        """How much is read."""
        return sum(described.size_bytes for described in self.objects)


def _merge(place: LogLocation, format: str, zstd_level: int, item: _MergeItem) -> ObjectDescriptor:
    """Makes one object of several; no descriptor names it yet."""
    compile_for(item.size_bytes)
    history = place.history()
    storage = place.config.storage
    topic = TopicName.parse(item.topic)
    survives = None
    if item.latest is not None:
        from ister.spark.jobs.latest_per_key import LatestOffsets  # noqa: PLC0415 - numpy

        survives = LatestOffsets(history.objects, item.latest)
    made = merge_objects(
        topic,
        item.objects,
        store=history.objects,
        settings=upload_settings(storage.uploader, storage.cloud.layout),
        format=format,
        epoch=item.epoch,
        incarnation=item.incarnation,
        # Unique to the attempt: one that Spark has given up on may still be writing.
        tag=secrets.token_hex(4),
        # As old as the newest part: merging does not make messages younger for retention.
        created_at=max(described.created_at for described in item.objects),
        survives=survives,
        zstd_level=zstd_level,
    )
    if survives is not None:
        try:
            survives.check(made)
        except IsterError:
            history.objects.delete(object_key(topic, made.object_id))
            raise
    return made
