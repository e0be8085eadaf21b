"""`compact`: merges small objects of topics into larger ones, as frames or as Parquet.

    descriptors ─► groups of neighbours ─► task: one new object each ─► swap, in one transaction
                                                                          │
                        old objects stay until their grace is over ◄──────┘

Owns: which topics, when a merged object takes the place of others, and what becomes of it if it
does not. Does not own: which objects go together (`ister.tier.compaction_plan`), the merging
(`ister.tier.merge`), the transaction (`ister.tier.ownership`).

Invariants:

- a topic has the same messages at the same offsets before and after, but for those that
  `latest-per-key` removes: each of them has a later one of its key that stays, or one that was a
  tombstone for long enough;
- an object becomes part of a topic only while the job's lease holds, the descriptors that it
  replaces are those that were merged, and it is in the bucket with its size;
- groups from which messages are removed are swapped in the order of offsets. A tombstone goes last
  of all messages of its key, so that none of them ever comes back.

Who reads goes on: a reader looks up the object of an offset anew when one is gone, and old objects
are there for `grace_minutes` in any case.

What a crash leaves: topics of which some groups are merged and some are not, objects that no
descriptor names, and staged offsets; the latter two are removed when they are old enough, by the
topic's owner, or by the next run for topics that nobody has open.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ister import failpoints
from ister.config import Config, Keep, ObjectFormat
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
from ister.limits import MIB
from ister.model import TopicName
from ister.spark.jobs.job import Job, open_job, parse_topics
from ister.spark.jobs.progress import Progress
from ister.spark.jobs.report import JobReport, error_as_fields
from ister.spark.jobs.tasks import Done, run_tasks
from ister.spark.place import Place
from ister.spark.workers import compile_for
from ister.tier.compaction_plan import MergeGroup, PlanSettings, plan_compaction
from ister.tier.merge import merge_objects
from ister.tier.names import object_key, objects_prefix, parse_object_id, staging_prefix
from ister.tier.orphans import collect_orphans
from ister.tier.ownership import OwnedTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ister.spark.jobs.latest_per_key import KeyedTopic, Latest

__all__ = ["CompactSettings", "compact", "compact_topics"]

_log = logging.getLogger("ister.spark.jobs.compaction")

# Very many tiny objects take a round for each power of a hundred; groups that have changed are
# planned again.
_ROUNDS_MAX: Final = 6
_READS_MAX: Final = 3
_ZSTD_LEVEL_MAX: Final = 22
_TARGET_MB_MAX: Final = 2048


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
        """Refuses what makes no sense.

        Raises:
            InvalidRequestError: Names the setting.
        """
        _check_one_of("format", self.format, ObjectFormat)
        _check_one_of("keep", self.keep, Keep)
        if self.keep == Keep.LATEST_PER_KEY and self.format != ObjectFormat.PARQUET:
            raise InvalidRequestError(
                "keep latest-per-key needs the format parquet",
                hint="frames have no holes: --keep latest-per-key --format parquet",
            )
        _check_between("target_mb", self.target_mb, 1, _TARGET_MB_MAX)
        _check_between("min_objects", self.min_objects, 1, 100)
        _check_between("zstd_level", self.zstd_level, 1, _ZSTD_LEVEL_MAX)
        _check_between("tombstone_hours", self.tombstone_hours, 0, None)
        if self.grace_minutes is not None:
            _check_between("grace_minutes", self.grace_minutes, 0, None)

    @property
    def keeps_latest(self) -> bool:
        """Whether messages go for which there are later ones."""
        return self.keep == Keep.LATEST_PER_KEY

    @property
    def plan(self) -> PlanSettings:
        """The same for the planner."""
        return PlanSettings(
            format=str(self.format),
            target_bytes=self.target_mb * MIB,
            min_objects=self.min_objects,
        )


def _check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    names = [str(item) for item in known]
    if value not in names:
        raise InvalidRequestError(f"{name} {value!r}", hint=f"it is {' or '.join(names)}")


def _check_between(name: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        upto = f" up to {high:g}" if high is not None else " or more"
        raise InvalidRequestError(f"{name} {value!r}", hint=f"it is {low:g}{upto}")


def compact(
    spark: SparkSession,
    config: str | Mapping[str, Any] | Config | Place | None = None,
    *,
    broker: str | None = None,
    topics: str | Sequence[str] | None = None,
    format: str = "dnb1",
    keep: str = "all",
    target_mb: int = 128,
    min_objects: int = 4,
    grace_minutes: float | None = None,
    tombstone_hours: float = 24,
    zstd_level: int = 3,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> JobReport:
    """Merges adjacent small objects of topics.

    Running it again right after does nothing. Brokers may go on, and so may readers.

    Args:
        spark: A classic session.
        config: Where the log is: a config file, a data directory, settings; None with `broker`.
        broker: The Flight address of a broker, for the settings if `config` is not given.
        topics: Names and patterns, as a list or with commas; all topics by default.
        format: What merged objects are: `dnb1`, or `parquet`, which also rewrites large ones.
        keep: `all` messages, or `latest-per-key`: of each routing key the newest message in the
            bucket, and everything without a key. Needs `parquet`. Offsets stay as they are.
        target_mb: About how large objects become, in MiB of messages (Parquet files are smaller);
            objects of half of that are left alone.
        min_objects: Fewer neighbours than this are not worth it.
        grace_minutes: How long the old objects stay for those who are reading them;
            `storage.cloud.orphan_grace_minutes` by default.
        tombstone_hours: With `latest-per-key`: the newest message of a key goes, too, if its
            payload is empty and it was published longer ago than this.
        zstd_level: How hard Parquet is compressed, 1 to 22.
        dry_run: Only say what would be done.
        progress: Who is told how far it has come.

    Returns:
        What was done; of each topic `objects` and `bytes` that were merged, into how many objects
        (`merged`, `new_bytes`), `removed_messages`, groups that have changed meanwhile (`skipped`)
        and old objects that were removed (`collected`). A topic's failure is in `errors`, and
        others go on.

    Raises:
        InvalidRequestError: A setting makes no sense.
        NotFoundError: There is no topic of a name.
        ConfigError: The settings do not make sense, or only one process could use them.
        UnavailableError: A store does not answer.
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


def compact_topics(job: Job, topics: Sequence[str], settings: CompactSettings) -> None:
    """Compacts topics within a job; what was done is in its report.

    Args:
        job: Under whose lease.
        topics: Their names.
        settings: As those of `compact`.

    Raises:
        FencedError: The job's lease has ended.
        UnavailableError: The metadata store does not answer.
    """
    _Compaction(job, settings).run(topics)


@dataclass(slots=True)
class _TopicPlan:
    """What is to be done with a topic, as of when it was looked at."""

    name: str
    owned: OwnedTopic
    everything: list[tuple[ObjectDescriptor, int]]
    """All of its objects, without the indexes of frames, each with its key's revision."""
    groups: list[_PlannedGroup] = field(default_factory=list)


@dataclass(slots=True)
class _PlannedGroup:
    """Objects that become one, or one that loses messages."""

    plan: _TopicPlan
    old: list[tuple[ObjectDescriptor, int]]
    is_merge: bool
    """Whether it is worth rewriting even if all messages stay."""
    latest: Latest | None = None
    """What stays; None for everything."""
    result: Done[_MergeItem, ObjectDescriptor] | None = None
    """What has become of it, while an earlier group is waited for."""

    @property
    def size_bytes(self) -> int:
        """What has to be read."""
        return sum(described.size_bytes for described, _ in self.old)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergeItem:
    """What a task is told. Pickled."""

    number: int
    topic: str
    epoch: int
    incarnation: str
    objects: tuple[ObjectDescriptor, ...]
    latest: Latest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How merged objects are read and written: as uploads are."""

    chunk_bytes: int
    concurrent_parts: int
    index_every_messages: int


class _Compaction:
    """One run of the job. Used by one thread."""

    def __init__(self, job: Job, settings: CompactSettings) -> None:
        self._job = job
        self._settings = settings
        storage = job.place.config.storage
        self._orphan_grace_seconds = storage.cloud.orphan_grace_minutes * 60
        grace_minutes = settings.grace_minutes
        self._grace_seconds = (
            self._orphan_grace_seconds if grace_minutes is None else grace_minutes * 60
        )
        self._merge = partial(_merge, job.place, str(settings.format), settings.zstd_level)
        self._run_id = secrets.token_hex(8)

    def run(self, topics: Sequence[str]) -> None:
        """Collects, and merges until there is nothing left to merge."""
        job = self._job
        for topic in topics:
            job.report.add(topic, objects=0, merged=0, bytes=0)
            if not job.dry_run:
                self._guarded(topic, self._collect)
        pending = list(topics)
        for number in range(_ROUNDS_MAX):
            job.check()
            # Once is enough to remove what is superseded; later rounds only merge.
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

    def _guarded(self, topic: str, work: Any) -> Any:  # noqa: ANN401 - what `work` returns
        """Calls `work(topic)`; an error is the topic's own."""
        try:
            return work(topic)
        except InvariantError:
            raise
        except NotFoundError as error:
            if error.topic != topic:
                self._job.report.fail(error, topic)
            return None  # it was deleted meanwhile
        except IsterError as error:
            self._job.report.fail(error, topic)
            return None

    # -- plan -------------------------------------------------------------------------------

    def _plan(self, topic: str, removes: bool) -> _TopicPlan | None:
        """What is to be done with a topic; None if nothing is."""
        plan: _TopicPlan | None = self._guarded(topic, partial(self._look, removes=removes))
        return plan

    def _look(self, topic: str, *, removes: bool) -> _TopicPlan | None:
        owned = self._job.act(topic)
        everything = _read_objects(owned)
        plan = _TopicPlan(topic, owned, everything)
        descriptors = [described for described, _ in everything]
        groups = plan_compaction(descriptors, self._settings.plan)
        merged = {group.start for group in groups}
        if removes:
            groups = _with_the_rest(topic, descriptors, groups)
        revisions = {id(described): revision for described, revision in everything}
        plan.groups = [
            _PlannedGroup(
                plan, [(d, revisions[id(d)]) for d in group.objects], group.start in merged
            )
            for group in groups
        ]
        return plan if plan.groups else None

    def _find_latest(self, plans: list[_TopicPlan]) -> list[_TopicPlan]:
        """The plans with what each group loses; without groups that lose and merge nothing."""
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
            found, errors = find_latest(
                job.spark,
                job.place,
                [_keyed(plan) for plan in plans],
                tombstones_before_ms=before_ms,
                run=None if job.dry_run else self._staged_name,
            )
            job.progress.advance(total)
        finally:
            job.progress.end()
        left: list[_TopicPlan] = []
        for plan, latest in zip(plans, found, strict=True):
            if error := errors.get(plan.name):
                job.report.fail(error, plan.name)
                continue
            for group, stays in zip(plan.groups, latest, strict=True):
                group.latest = stays if stays.removed else None
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
        """Merges and swaps all groups; the topics that are worth another look."""
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
        progress = _Outcome()
        job.progress.begin("merging", sum(group.size_bytes for group in groups), "bytes")
        try:
            for done in run_tasks(
                job.spark,
                items,
                self._merge,
                weigh=lambda item: sum(described.size_bytes for described in item.objects),
                name="ister compact",
            ):
                group = groups[done.item.number]
                group.result = done
                for ready in _in_order(group) if removes else (group,):
                    self._settle(ready, progress, removes=removes)
                job.progress.advance(group.size_bytes, group.plan.name)
        finally:
            job.progress.end()
        return [plan.name for plan in plans if plan.name in progress.again - progress.failed]

    def _settle(self, group: _PlannedGroup, outcome: _Outcome, *, removes: bool) -> None:
        """What a task has made becomes part of its topic, or goes."""
        done, name = group.result, group.plan.name
        if done is None:
            raise InvariantError("a group is settled when its task is done")
        made = done.result
        if removes and name in outcome.broken:
            # An earlier group still has what this one may have the tombstones of.
            if made is not None:
                self._discard(group, made)
            outcome.skip(self._job, group)
            return
        try:
            if made is None:
                self._note_failure(group, done.error or {}, outcome)
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
            # The topic has changed hands; its new owner's objects are planned anew.
            _log.info("changed hands", extra={"topic": name, "error": str(error)})
            if made is not None:
                self._discard(group, made)
            outcome.skip(self._job, group)
        except UnavailableError as error:
            # Whether it was committed is not known: the new object stays, whatever it is.
            outcome.fail(self._job, group, error)
        except InvariantError:
            raise
        except IsterError as error:
            if made is not None:
                self._discard(group, made)
            self._note_failure(group, error_as_fields(error), outcome)

    def _commit(self, group: _PlannedGroup, made: ObjectDescriptor) -> bool:
        """Swaps descriptors; False if they are not those any more that were merged."""
        job = self._job
        failpoints.reach("pipeline.before_commit")
        job.check()
        self._check_there(group.plan, made)
        until = int(job.clock.now_ns() / 1e9 + self._grace_seconds)
        if not group.plan.owned.swap(group.old, made, until=until):
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
        """Makes sure that a merged object is there, and that nobody is about to collect it.

        Raises:
            NotFoundError: It is gone, or so old that it may go at any moment.
        """
        key = object_key(TopicName.parse(plan.name), made.object_id)
        info = self._job.history.objects.stat(key)
        age = self._job.clock.now_ns() / 1e9 - (info.modified_at or float("inf"))
        is_safe = not self._orphan_grace_seconds or age < self._orphan_grace_seconds / 2
        if info.size != made.size_bytes or not is_safe:
            raise NotFoundError(
                "a merged object is not there any more, or not for long",
                topic=plan.name,
                path=key,
                hint="it waited too long for its commit: a longer "
                "storage.cloud.orphan_grace_minutes keeps it",
            )

    def _note_failure(
        self, group: _PlannedGroup, error: Mapping[str, Any], outcome: _Outcome
    ) -> None:
        if error.get("code") == NotFoundError.code and self._has_changed(group):
            outcome.skip(self._job, group)  # somebody else has merged, or retention removed it
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
                "a merged object is left for later",
                extra={"topic": plan.name, "object": made.object_id, "error": str(error)},
            )

    # -- garbage ----------------------------------------------------------------------------

    def _collect(self, topic: str) -> None:
        """Removes what earlier merges have left, where no owner does.

        Only where the catalog has every offset that any object has: if it has forgotten some, the
        next owner, or `ister recover`, still wants those objects.
        """
        job = self._job
        catalog = job.catalog(topic)
        if catalog.owner() is not None:
            return
        store, name = job.history.objects, TopicName.parse(topic)
        owned = job.act(topic)
        there = [info.key.removeprefix(objects_prefix(name)) for info in _list(job, name)]
        covered = _covered(described for described, _ in catalog.descriptors())
        floor = owned.record.expired_before
        for object_id in there:
            parsed = parse_object_id(object_id)
            if parsed is not None and not _is_covered(
                max(parsed.start, floor), parsed.end, covered
            ):
                _log.info("not collected", extra={"topic": topic, "object": object_id})
                return
        try:
            removed = collect_orphans(
                owned,
                store,
                grace_seconds=self._orphan_grace_seconds,
                clock=job.clock,
                metrics=job.metrics,
            )
        except FencedError:
            job.fence.check()
            return  # somebody has opened it, and collects by itself
        if removed:
            job.report.add(topic, collected=len(removed))
        self._sweep_staged(name)

    def _sweep_staged(self, topic: TopicName) -> None:
        """Removes offsets that killed runs have staged."""
        from ister.spark.jobs.latest_per_key import STAGED_PREFIX  # noqa: PLC0415 - numpy

        objects = self._job.history.objects
        oldest = self._job.clock.now_ns() / 1e9 - self._orphan_grace_seconds
        for info in list(objects.list(staging_prefix(topic))):
            is_old = info.modified_at is not None and info.modified_at < oldest
            if is_old and info.key.startswith(staging_prefix(topic) + STAGED_PREFIX):
                objects.delete(info.key)

    @property
    def _staged_name(self) -> str:
        from ister.spark.jobs.latest_per_key import STAGED_PREFIX  # noqa: PLC0415 - numpy

        return f"{STAGED_PREFIX}{self._run_id}"

    def _remove_staged(self, plans: Sequence[_TopicPlan]) -> None:
        """Removes the offsets that this run has staged: everything is swapped, or given up."""
        for plan in plans:
            name = TopicName.parse(plan.name)
            try:
                objects = self._job.history.objects
                for info in list(objects.list(staging_prefix(name, self._staged_name))):
                    objects.delete(info.key)
            except IsterError as error:
                _log.warning(
                    "staged offsets are left for later",
                    extra={"topic": plan.name, "error": str(error)},
                )


@dataclass(slots=True)
class _Outcome:
    """How the topics of a round have fared."""

    again: set[str] = field(default_factory=set)
    """Those in which something has moved, so that there may be more to merge."""
    failed: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    """Those of which a group was not swapped."""

    def skip(self, job: Job, group: _PlannedGroup) -> None:
        """A group has changed meanwhile."""
        self.again.add(group.plan.name)
        self.broken.add(group.plan.name)
        job.report.add(group.plan.name, skipped=1)

    def fail(self, job: Job, group: _PlannedGroup, error: IsterError | Mapping[str, Any]) -> None:
        """A group could not be merged."""
        self.failed.add(group.plan.name)
        self.broken.add(group.plan.name)
        job.report.fail(error, group.plan.name)


def _read_objects(owned: OwnedTopic) -> list[tuple[ObjectDescriptor, int]]:
    """All objects of a topic, each with its key's revision.

    Objects that somebody merges under the walk may come as they were, and merged: once more then.
    """
    for _ in range(_READS_MAX):
        found = [(_slim(d), revision) for d, revision in owned.catalog.descriptors()]
        if all(before.end <= after.start for (before, _), (after, _) in pairwise(found)):
            break
    return found


def _slim(described: ObjectDescriptor) -> ObjectDescriptor:
    """Without indexes, of which those of frames are large, and those of Parquet tell the size."""
    if described.format == FORMAT_PARQUET:
        return replace(described, publish_time_index=())
    return replace(described, offset_index=(), publish_time_index=())


def _with_the_rest(
    topic: str, descriptors: Sequence[ObjectDescriptor], groups: Sequence[MergeGroup]
) -> list[MergeGroup]:
    """The groups, and every other object as one of its own; ascending.

    Raises:
        CorruptDataError: Some objects cannot be rewritten: what they have could come back when the
            tombstones for it are gone.
    """
    taken = {described.start for group in groups for described in group.objects}
    rest = [MergeGroup((d,)) for d in descriptors if d.start not in taken]
    every = sorted([*groups, *rest], key=lambda group: group.start)
    for number, group in enumerate(every):
        is_shared = number > 0 and group.start < every[number - 1].end
        if is_shared or not all(described.completed for described in group.objects):
            raise CorruptDataError(
                "an object shares offsets with another one, or is not complete",
                topic=topic,
                offset=group.start,
                path=group.objects[0].object_id,
                hint="`ister pipeline scrub --repair` puts it right; without --keep "
                "latest-per-key the others can be merged",
            )
    return every


def _keyed(plan: _TopicPlan) -> KeyedTopic:
    from ister.spark.jobs.latest_per_key import KeyedTopic  # noqa: PLC0415 - numpy

    return KeyedTopic(
        name=plan.name,
        incarnation=plan.owned.record.incarnation,
        objects=tuple(replace(described, offset_index=()) for described, _ in plan.everything),
        groups=tuple((group.old[0][0].start, group.old[-1][0].end) for group in plan.groups),
    )


def _removed(group: _PlannedGroup) -> dict[str, int]:
    return {} if group.latest is None else {"removed_messages": group.latest.removed}


def _in_order(group: _PlannedGroup) -> Iterator[_PlannedGroup]:
    """The groups of a topic that can be settled now that one more is done: each once, in order."""
    groups = group.plan.groups
    while groups and groups[0].result is not None:
        yield groups.pop(0)


def _list(job: Job, topic: TopicName) -> Iterator[Any]:
    return iter(list(job.history.objects.list(objects_prefix(topic))))


def _covered(descriptors: Iterable[ObjectDescriptor]) -> list[tuple[int, int]]:
    """The ranges without a hole that objects have together."""
    covered: list[tuple[int, int]] = []
    for described in descriptors:
        if covered and described.start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], described.end))
        else:
            covered.append((described.start, described.end))
    return covered


def _is_covered(start: int, end: int, covered: Sequence[tuple[int, int]]) -> bool:
    return start >= end or any(low <= start and end <= high for low, high in covered)


# -- in a task ------------------------------------------------------------------------------


def _merge(place: Place, kind: str, zstd_level: int, item: _MergeItem) -> ObjectDescriptor:
    """Makes one object of several; nobody knows of it yet."""
    compile_for(sum(described.size_bytes for described in item.objects))
    history = place.history()
    uploader = place.config.storage.uploader
    topic = TopicName.parse(item.topic)
    survives = None
    if item.latest is not None:
        from ister.spark.jobs.latest_per_key import LatestOffsets  # noqa: PLC0415 - numpy

        survives = LatestOffsets(history.objects, item.latest)
    made = merge_objects(
        topic,
        item.objects,
        store=history.objects,
        settings=_Sizes(
            chunk_bytes=uploader.stream_chunk_size,
            concurrent_parts=uploader.concurrent_parts,
            index_every_messages=uploader.index_every_messages,
        ),
        format=kind,
        epoch=item.epoch,
        incarnation=item.incarnation,
        # Of its own for every attempt: one that Spark has given up on may still be writing.
        tag=secrets.token_hex(4),
        # As old as its newest part: merging does not make messages younger for retention.
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
