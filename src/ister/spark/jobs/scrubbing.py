"""`scrub`: every descriptor and every byte is looked at, and what is wrong is healed if asked to.

    driver: catalog and bucket, side by side ─► tasks: each object, frame by frame ─► findings
    repair: tasks: the object again, under a new name ─► driver: one transaction each

Owns: which findings there are, in which order they are healed, and what becomes of each. Does not
own: how an object is checked (`object_check`), how it is made again (`healing`), faults between
descriptors (`topic_survey`), who may change a topic (`ownership`).

Invariants:

- a fault is one only if the descriptor is still the same after the object was found bad: uploads,
  merges and retention go on meanwhile;
- a descriptor is changed only for one whose object was read back whole; one is removed only where
  others, whose objects are whole, have all of its offsets;
- objects that nobody names are told of, not touched: the topic's owner collects them.

What a crash leaves: objects that no descriptor names. The next run finds what is still wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ister import failpoints
from ister.config import CloudBackend, Config
from ister.errors import ConflictError, CorruptDataError, InvariantError, IsterError
from ister.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from ister.limits import KIB
from ister.metadata.base import Delete, Put, RevisionIs
from ister.model import TopicName
from ister.spark.jobs.balance import run_balanced
from ister.spark.jobs.healing import KEPT_HINT, Healed, Wound, epoch_floor, heal
from ister.spark.jobs.job import Job, open_job, parse_topics
from ister.spark.jobs.object_check import Checked, ObjectChecker
from ister.spark.jobs.progress import Progress
from ister.spark.jobs.report import JobReport
from ister.spark.jobs.tasks import run_tasks
from ister.spark.jobs.topic_survey import Entry, Finding, Survey, read_pages, survey_topic
from ister.spark.place import Place
from ister.tier.names import object_key, parse_object_id
from ister.tier.ownership import OwnedTopic
from ister.topic.local_tail import LocalTail

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

__all__ = ["CheckItem", "check_object", "scrub", "scrub_topics"]

_log = logging.getLogger("ister.spark.jobs.scrubbing")

# What changes under a scrub is looked at again.
_ROUNDS: Final = 3
# How many descriptors, with their indexes, the driver holds at a time.
_ITEMS_MAX: Final = 2048
_CANDIDATES_MAX: Final = 64
_ITEM_BYTES_MIN: Final = 256 * KIB


def scrub(
    spark: SparkSession,
    config: str | Mapping[str, Any] | Config | Place | None = None,
    *,
    broker: str | None = None,
    topics: str | Sequence[str] | None = None,
    repair: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> JobReport:
    """Checks every object of topics, and what the metadata store says about them.

    Args:
        spark: A classic session.
        config: Where the log is: a config file, a data directory, settings; None with `broker`.
        broker: A broker's Flight address, which repairs may get messages from.
        topics: Names and patterns; all topics by default.
        repair: Heal what can be healed, from local files or from a good copy in the bucket.
        dry_run: Only look at the metadata and list the bucket.
        progress: Who is told how far it has come.

    Returns:
        For each topic how many `objects`, `bytes` and `messages` were checked, and its `findings`.
        A fault that was not healed is an error.

    Raises:
        NotFoundError: A topic does not exist.
        ConfigError: The settings do not make sense.
        UnavailableError: A store does not answer.
    """
    with open_job("scrub", spark, config, broker=broker, dry_run=dry_run, progress=progress) as job:
        scrub_topics(job, job.topics(parse_topics(topics)), repair=repair)
    return job.report


def scrub_topics(job: Job, topics: Sequence[str], *, repair: bool = False) -> None:
    """Checks topics, within a job that is under way; what is found is in the job's report.

    Raises:
        FencedError: The job's lease has ended.
    """
    scrubs = [_TopicScrub(job, name) for name in topics]
    pending = [item for item in scrubs if item.look()]
    failpoints.reach("pipeline.after_plan")
    if job.dry_run:
        for item in pending:
            item.judge()
    else:
        for number in range(_ROUNDS):
            if number:
                # What a look has found stands until the next one, so none comes after the last.
                pending = [item for item in pending if item.has_changed and item.look()]
            if not pending:
                break
            _check(job, pending)
            for item in pending:
                item.conclude()
            if repair:
                _repair(job, pending)
    for item in scrubs:
        item.report(repair=repair)


# -- in a task ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckItem:
    """An object to be checked. Pickled."""

    topic: str
    key: str
    """Of its descriptor."""
    revision: int
    descriptor: bytes
    """As it is stored."""
    size_bytes: int


def check_object(place: Place, item: CheckItem) -> Checked:
    """Checks one object.

    Raises:
        UnavailableError: The store does not answer.
    """
    history = place.history()
    settings = place.config.storage
    checker = ObjectChecker(
        TopicName.parse(item.topic),
        history.objects,
        chunk_bytes=settings.cloud_reader.fetch_chunk_size,
        index_every_messages=settings.uploader.index_every_messages,
        # The kernel reads files ahead by itself, and other tasks have the other processors.
        ahead=None if history.config.storage.cloud.backend in _DIRECTORIES else history.ahead,
        clock=history.clock,
        metrics=history.metrics,
    )
    return checker.check(decode_descriptor(item.descriptor, key=item.key))


# -- checking -------------------------------------------------------------------------------


_DIRECTORIES: Final = (CloudBackend.FS, CloudBackend.LOCAL)
_Key: TypeAlias = tuple[str, int]
"""A descriptor's key and revision."""


def _check(job: Job, scrubs: Sequence[_TopicScrub]) -> None:
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


def _check_batch(job: Job, scrubs: Mapping[str, _TopicScrub], batch: list[CheckItem]) -> None:
    job.check()
    for done in run_balanced(
        job.spark,
        batch,
        partial(check_object, job.place),
        weigh=lambda item: max(item.size_bytes, _ITEM_BYTES_MIN),
        name="ister scrub",
    ):
        item = done.item
        job.progress.advance(item.size_bytes, item.topic)
        if done.result is not None:
            scrubs[item.topic].take(item, done.result)
        elif done.error is not None:
            scrubs[item.topic].failures[item.key, item.revision] = done.error


@dataclass(slots=True)
class _Bad:
    """An object that something is wrong with."""

    entry: Entry
    checked: Checked
    findings: list[Finding]

    @property
    def is_suspect(self) -> bool:
        """Whether the object is whole and another one than its descriptor was made for.

        Its checksum is the only thing that tells: somebody may have put other messages there.
        """
        right, said = self.checked.right, self.entry.described.checksum
        return right is not None and said is not None and right.checksum != said

    @property
    def right(self) -> ObjectDescriptor | None:
        """The true descriptor of an object that is whole, and surely the one that was meant."""
        return None if self.is_suspect else self.checked.right


@dataclass(slots=True)
class _Hole:
    """Offsets that no descriptor has."""

    finding: Finding
    key: str | None = None
    """Where something is stored that is no descriptor."""
    revision: int = 0


class _TopicScrub:
    """One topic under way: what was found, and what has become of it. Used by one thread."""

    def __init__(self, job: Job, topic: str) -> None:
        self._job = job
        self.topic = topic
        self._name = TopicName.parse(topic)
        self._catalog = job.catalog(topic)
        self.survey: Survey | None = None
        self.has_changed = False
        """Whether it has to be looked at again."""
        self.failures: dict[_Key, dict[str, Any]] = {}
        """Objects that could not be checked."""
        self._errors: list[IsterError] = []
        self._checked: dict[_Key, Checked] = {}
        self._healed: list[Finding] = []
        self.bad: list[_Bad] = []
        self.holes: list[_Hole] = []
        self._owned: OwnedTopic | None = None

    # -- looking ----------------------------------------------------------------------------

    def look(self) -> bool:
        """Reads the catalog and lists the bucket; whether that could be done."""
        grace = self._job.place.config.storage.cloud.orphan_grace_minutes * 60
        if self.survey is not None:
            self._healed += [finding for finding in self.survey.findings if finding.repaired]
        self.has_changed = False
        self.bad, self.holes, self._owned, self.failures = [], [], None, {}
        try:
            self.survey = survey_topic(
                self._catalog,
                self._job.history.objects,
                grace_seconds=grace,
                clock=self._job.clock,
            )
        except InvariantError:
            raise
        except IsterError as error:
            self._errors.append(error)
            return False
        return True

    def unchecked_bytes(self) -> int:
        """How much is to be read."""
        return sum(
            entry.described.size_bytes
            for entry in self._entries()
            if (entry.key, entry.revision) not in self._checked
        )

    def _entries(self) -> list[Entry]:
        survey = self.survey
        return [] if survey is None else [*survey.entries, *survey.misplaced]

    def items(self) -> Iterator[CheckItem]:
        """The objects to be checked, with all that their descriptors say."""
        known = {(entry.key, entry.revision): entry for entry in self._entries()}
        for found in read_pages(self._catalog):
            entry = known.get((found.key, found.revision))
            if entry is not None and (found.key, found.revision) not in self._checked:
                yield CheckItem(
                    topic=self.topic,
                    key=found.key,
                    revision=found.revision,
                    descriptor=found.value,
                    size_bytes=entry.described.size_bytes,
                )

    def take(self, item: CheckItem, checked: Checked) -> None:
        """Takes note of what a task has found."""
        self._checked[item.key, item.revision] = checked
        self.failures.pop((item.key, item.revision), None)

    # -- what it means ----------------------------------------------------------------------

    def conclude(self) -> None:
        """Makes findings of what tasks have found."""
        survey = self.survey
        if survey is None:
            return
        for entry in survey.entries:
            checked = self._checked.get((entry.key, entry.revision))
            if checked is None:
                if (entry.key, entry.revision) not in self.failures:
                    self.has_changed = True  # merged, replaced or expired under the scrub
                continue
            if not checked.problems:
                continue
            if not self._is_current(entry):
                self.has_changed = True
                continue
            if entry.described.start in survey.superfluous:
                self._explain_overlap(entry, checked)
                continue
            findings = [
                Finding(
                    kind=problem.kind,
                    topic=self.topic,
                    object=entry.described.object_id,
                    start=problem.start,
                    end=problem.end,
                    position=problem.position,
                    offset=problem.offset,
                    reason=problem.reason,
                )
                for problem in checked.problems
            ]
            survey.findings += findings
            self.bad.append(_Bad(entry, checked, findings))
        self.judge()

    def judge(self) -> None:
        """Whether each fault could be healed, as far as that can be told without trying."""
        survey = self.survey
        if survey is None:
            return
        unreadable = {start: (key, revision) for key, revision, start in survey.unreadable}
        for finding in survey.findings:
            if finding.kind == "gap":
                self.holes.append(_Hole(finding))
            elif finding.kind == "unreadable_descriptor" and finding.start in unreadable:
                key, revision = unreadable[finding.start]
                self.holes.append(_Hole(finding, key, revision))
        files = self._files() if _has_faults(survey) else []
        for item in self.bad:
            self._judge_object(item, files)
        for hole in self.holes:
            self._judge_hole(hole, files)

    def _is_current(self, entry: Entry) -> bool:
        found = self._catalog.store.get(entry.key)
        return found is not None and found.revision == entry.revision

    def _explain_overlap(self, entry: Entry, checked: Checked) -> None:
        for finding in self._findings_of(entry):
            problem = checked.problems[0]
            finding.reason += f"; its own object: {problem.kind}, {problem.reason}"

    def _findings_of(self, entry: Entry) -> list[Finding]:
        survey = self.survey
        kinds = ("overlap", "misplaced_descriptor")
        return [
            finding
            for finding in (survey.findings if survey is not None else [])
            if finding.kind in kinds
            and finding.object == entry.described.object_id
            and finding.start == entry.described.start
        ]

    def _judge_object(self, item: _Bad, files: list[tuple[int, int]]) -> None:
        described = item.entry.described
        others = self._ranges(self._candidates(described.start, described.end, item))
        have = [*files, *others]
        for finding in item.findings:
            if item.right is not None:
                finding.repairable = True
                continue
            if described.kept:
                # Everybody else has messages that were removed.
                finding.lost = _subtract(finding.start or 0, finding.end or 0, have)
                finding.repairable = (described.start, described.end) in others
                finding.hint = None if finding.repairable else KEPT_HINT
                continue
            if item.is_suspect:
                finding.repairable = not _subtract(described.start, described.end, files)
                finding.reason += "; whether the object or its descriptor is wrong, only another "
                finding.reason += "copy can tell"
                continue
            finding.lost = _subtract(finding.start or 0, finding.end or 0, have)
            finding.repairable = not finding.lost

    def _judge_hole(self, hole: _Hole, files: list[tuple[int, int]]) -> None:
        finding = hole.finding
        start, end = finding.start or 0, finding.end
        candidates = self._candidates(start, end, None)
        have = [*files, *self._ranges(candidates)]
        if end is None:
            finding.repairable = any(low <= start < high for low, high in have)
        else:
            finding.lost = _subtract(start, end, have)
            finding.repairable = not finding.lost
        if candidates:
            finding.reason += f"; the bucket has {', '.join(name for name, _ in candidates[:3])}"

    def _files(self) -> list[tuple[int, int]]:
        """The offsets that the owner's files have, here or as it says."""
        survey, job = self.survey, self._job
        if survey is None:
            return []
        try:
            local = self.local_files()
            snapshot = local.snapshot() if local is not None else None
            if snapshot is not None:
                return [(snapshot.trimmed, snapshot.synced)]
            client = job.place.flight()
            if client is not None:
                status = client.watermarks([self.topic])[self.topic]
                if status.incarnation == survey.record.incarnation:
                    return [(status.trimmed, status.synced)]
        except IsterError as error:
            _log.info("local files", extra={"topic": self.topic, "error": str(error)})
        return []

    def local_files(self) -> LocalTail | None:
        """The owner's files, if they are on this machine."""
        survey = self.survey
        if survey is None:
            return None
        return LocalTail.find(
            self._job.place.config.storage.wal.dir,
            self._name,
            survey.record.node,
            survey.record.incarnation,
            clock=self._job.clock,
            metrics=self._job.metrics,
        )

    def _candidates(
        self, start: int, end: int | None, but: _Bad | None
    ) -> tuple[tuple[str, int], ...]:
        """Objects that may have offsets of a range: names and sizes, frames first."""
        survey = self.survey
        if survey is None:
            return ()
        record = survey.record
        limit = 1 << 63 if end is None else end
        found = [
            (item.object_id, item.size_bytes)
            for item in survey.others
            if item.name is not None
            and item.state not in ("under way", "later")
            and item.name.start < limit
            and start < item.name.end
            and epoch_floor(record, item.name.end) <= item.name.epoch <= record.epoch
        ]
        for entry in self._entries():
            # One that overlaps, or one whose descriptor says too little.
            name = parse_object_id(entry.described.object_id)
            checked = self._checked.get((entry.key, entry.revision))
            if (
                name is not None
                and name.start < limit
                and start < name.end
                and checked is not None
                and checked.messages
                and (but is None or entry.described.object_id != but.entry.described.object_id)
            ):
                found.append((entry.described.object_id, checked.bytes))
        found.sort(key=lambda item: (item[0].endswith(".parquet"), item[0]))
        return tuple(dict.fromkeys(found))[:_CANDIDATES_MAX]

    def _ranges(self, candidates: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
        names = [parse_object_id(object_id) for object_id, _ in candidates]
        return [(name.start, name.end) for name in names if name is not None]

    # -- healing ----------------------------------------------------------------------------

    def wounds(self) -> list[tuple[Wound, _Bad | _Hole]]:
        """What has to be made again."""
        found: list[tuple[Wound, _Bad | _Hole]] = []
        for item in self.bad:
            described = item.entry.described
            if item.right is None:
                others = self._candidates(described.start, described.end, item)
                found.append((self._wound(described.start, described.end, others, described), item))
        for hole in self.holes:
            start, end = hole.finding.start or 0, hole.finding.end
            found.append((self._wound(start, end, self._candidates(start, end, None), None), hole))
        return found

    def _wound(
        self,
        start: int,
        end: int | None,
        others: tuple[tuple[str, int], ...],
        old: ObjectDescriptor | None,
    ) -> Wound:
        survey = self._surveyed()
        return Wound(
            topic=self.topic,
            epoch=survey.record.epoch,
            incarnation=survey.record.incarnation,
            node=survey.record.node,
            start=start,
            end=end,
            reach=survey.current or 0,
            old=old,
            others=others,
        )

    def _surveyed(self) -> Survey:
        if self.survey is None:
            raise InvariantError("a topic is looked at before it is healed")
        return self.survey

    def owned(self) -> OwnedTopic:
        """The right to change the topic.

        Raises:
            FencedError: The topic has changed since it was looked at.
        """
        if self._owned is None:
            owned = self._job.act(self.topic)
            record = self._surveyed().record
            if (owned.record.epoch, owned.record.incarnation) != (record.epoch, record.incarnation):
                self.has_changed = True
                raise ConflictError("the topic has changed hands", topic=self.topic)
            self._owned = owned
        return self._owned

    def fail(self, error: IsterError) -> None:
        """Takes note of why healing goes no further; of the same reason once."""
        if str(error) not in map(str, self._errors):
            self._errors.append(error)

    def describe_rightly(self) -> None:
        """Puts the true descriptors of objects that are whole in the place of wrong ones."""
        for item in self.bad:
            right, entry = item.right, item.entry
            if right is None:
                continue
            is_same = (right.start, right.end) == (entry.described.start, entry.described.end)
            if not is_same and not self._has_room(entry, right):
                continue
            with _Commit(self):
                if is_same:
                    is_done = self.owned().replace(entry.described, right, entry.revision)
                else:
                    is_done = self.owned().transact(
                        [RevisionIs(entry.key, entry.revision)],
                        [Put(entry.key, encode_descriptor(right))],
                    )
                self._settle(item.findings, is_done, "its descriptor was made anew")
                if is_done and not is_same:
                    self._close_holes(right)

    def _close_holes(self, right: ObjectDescriptor) -> None:
        """A descriptor has grown into a gap, or has shrunk: what is left of that is looked for."""
        self.has_changed = True
        for hole in list(self.holes):
            start, end = hole.finding.start or 0, hole.finding.end
            if right.start <= start and end is not None and end <= right.end:
                self.holes.remove(hole)
                self._settle([hole.finding], True, f"{right.object_id} has them")

    def _has_room(self, entry: Entry, right: ObjectDescriptor) -> bool:
        """Whether a descriptor may grow: nobody else has what it gets."""
        return right.start == entry.described.start and all(
            other is entry
            or other.described.start >= right.end
            or other.described.end <= right.start
            for other in self._surveyed().entries
        )

    def restore(self, item: _Bad, healed: Healed) -> None:
        """Puts a new object in the place of a bad one."""
        if not healed.objects:
            for finding in item.findings:
                finding.reason += f"; not healed: {healed.reason}"
                finding.repairable = False
                finding.hint = healed.hint
            return
        with _Commit(self):
            is_done = self.owned().replace(
                item.entry.described, healed.objects[0], item.entry.revision
            )
            self._settle(item.findings, is_done, f"made again from {', '.join(healed.sources)}")

    def fill(self, hole: _Hole, healed: Healed) -> None:
        """Puts new objects where no descriptor is."""
        finding = hole.finding
        for made in healed.objects:
            if self.has_changed or self._errors:
                return  # somebody else may be filling it
            with _Commit(self):
                self._publish(hole, made)
        if self.has_changed or self._errors:
            return
        finding.lost = list(healed.lost)
        finding.repaired = not healed.lost
        if healed.objects:
            names = ", ".join(made.object_id for made in healed.objects[:3])
            finding.reason += f"; {names} made from {', '.join(healed.sources)}"
        if healed.lost:
            finding.repairable = False
            finding.reason += f"; not healed: {healed.reason}"

    def _publish(self, hole: _Hole, made: ObjectDescriptor) -> None:
        owned = self.owned()
        if made.start < owned.record.expired_before:
            self.has_changed = True  # retention was faster
            return
        if hole.key is not None and made.start == hole.finding.start:
            is_done = owned.transact(
                [RevisionIs(hole.key, hole.revision)], [Put(hole.key, encode_descriptor(made))]
            )
            self.has_changed = self.has_changed or not is_done
        elif owned.last is not None and made.end <= owned.last.start:
            owned.insert(made)
        elif owned.last is None or owned.last.end == made.start:
            owned.commit(made)
        else:
            self.has_changed = True

    def remove_superfluous(self) -> None:
        """Takes descriptors out whose offsets others have, if those are whole."""
        survey = self._surveyed()
        not_whole = [
            item.entry.described
            for item in self.bad
            if not all(finding.repaired for finding in item.findings)
        ]
        unknown = [
            entry.described
            for entry in survey.entries
            if (entry.key, entry.revision) not in self._checked
        ]
        needed = [
            entry.described
            for entry in survey.entries
            if entry.described.start not in survey.superfluous
            and entry.described not in not_whole
            and entry.described not in unknown
        ]
        for entry in [*survey.entries, *survey.misplaced]:
            is_misplaced = entry in survey.misplaced
            described = entry.described
            if not is_misplaced and described.start not in survey.superfluous:
                continue
            findings = self._findings_of(entry)
            if _subtract(described.start, described.end, [(d.start, d.end) for d in needed]):
                for finding in findings:
                    finding.repairable = False
                    finding.reason += "; not healed: the others that have its offsets are not whole"
                continue
            with _Commit(self):
                if is_misplaced:
                    is_done = self.owned().transact(
                        [RevisionIs(entry.key, entry.revision)], [Delete(entry.key)]
                    )
                else:
                    is_done = self.owned().remove(described, entry.revision)
                self._settle(findings, is_done, "the descriptor was removed")

    def mend_pointer(self) -> None:
        """Has the pointer name the newest object."""
        for finding in self._surveyed().findings:
            if finding.kind == "pointer":
                with _Commit(self):
                    is_done = self.owned().mend_current()
                    self._settle([finding], is_done, "it was set")

    def _settle(self, findings: Sequence[Finding], is_done: bool, how: str) -> None:
        if not is_done:
            self.has_changed = True
            return
        for finding in findings:
            finding.repaired = finding.repairable = True
            finding.lost = []
            finding.reason += f"; healed: {how}"

    # -- the report -------------------------------------------------------------------------

    def report(self, *, repair: bool) -> None:
        """Says what was found and what became of it."""
        report = self._job.report
        survey = self.survey
        fields = report.of(self.topic)
        current = [] if survey is None else survey.findings
        findings = [*self._healed, *current]
        faults = [finding for finding in findings if finding.is_fault]
        left = [finding for finding in faults if not finding.repaired]
        others = [] if survey is None else survey.others
        if self._job.dry_run:
            entries = self._entries()
            objects, size = len(entries), sum(entry.described.size_bytes for entry in entries)
            fields |= {"objects": objects, "bytes": size}
        else:
            fields |= {
                "objects": len(self._checked),
                "bytes": sum(checked.bytes for checked in self._checked.values()),
                "messages": sum(checked.messages for checked in self._checked.values()),
            }
        fields |= {
            "faults": len(faults),
            "repaired": len(faults) - len(left),
            "lost": [list(item) for item in _merge(lost for f in left for lost in f.lost)],
            "orphans": sum(finding.kind == "orphan" for finding in findings),
            "unnamed": {
                state: sum(item.state == state for item in others)
                for state in sorted({item.state for item in others})
            },
            "unnamed_bytes": sum(item.size_bytes for item in others),
            "findings": [finding.as_json() for finding in findings],
        }
        for error in self._errors:
            report.fail(error, self.topic)
        for failure in self.failures.values():
            report.fail(failure, self.topic)
        for finding in left:
            report.fail(self._as_error(finding, repair=repair))

    def _as_error(self, finding: Finding, *, repair: bool) -> dict[str, Any]:
        what = finding.kind.replace("_", " ")
        where = f" {finding.object}" if finding.object else ""
        at = f", byte {finding.position}" if finding.position is not None else ""
        span = ""
        if finding.start is not None:
            upto = f" up to {finding.end}" if finding.end is not None else " on"
            span = f", offsets from {finding.start}{upto}"
        hint = None
        if finding.repairable and not repair:
            hint = "`ister pipeline scrub --repair` heals it"
        elif finding.lost:
            ranges = ", ".join(f"{start} up to {end}" for start, end in finding.lost)
            hint = f"nobody has the offsets {ranges}"
        hint = finding.hint or hint
        return {
            "code": CorruptDataError.code,
            "message": f"{what}{where}{span}{at}: {finding.reason}",
            "topic": self.topic,
            "offset": finding.offset if finding.offset is not None else finding.start,
            "path": object_key(self._name, finding.object) if finding.object else None,
            "hint": hint,
        }


class _Commit:
    """One change of a topic: what stands in its way is noted, and the job goes on."""

    def __init__(self, scrubbed: _TopicScrub) -> None:
        self._scrub = scrubbed

    def __enter__(self) -> None:
        failpoints.reach("pipeline.before_commit")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if error is None:
            failpoints.reach("pipeline.after_commit")
            return False
        if isinstance(error, InvariantError) or not isinstance(error, IsterError):
            return False
        if isinstance(error, ConflictError):
            self._scrub.has_changed = True  # somebody was faster: look again
        else:
            self._scrub.fail(error)
        return True


# -- healing --------------------------------------------------------------------------------


def _repair(job: Job, scrubs: Sequence[_TopicScrub]) -> None:
    hurt = [item for item in scrubs if item.survey is not None and _has_faults(item.survey)]
    if not hurt:
        return
    failpoints.reach("scrub.before_repair")
    by_topic = {item.topic: item for item in hurt}
    targets: dict[Wound, _Bad | _Hole] = {}
    for item in hurt:
        item.describe_rightly()
        targets |= dict(item.wounds())
    job.progress.begin("healing", len(targets), "objects")
    try:
        job.check()
        for done in run_tasks(
            job.spark,
            list(targets),
            partial(heal, job.place),
            weigh=lambda wound: wound.old.size_bytes if wound.old is not None else _ITEM_BYTES_MIN,
            name="ister scrub, repair",
        ):
            wound, healed, scrubbed = done.item, done.result, by_topic[done.item.topic]
            job.progress.advance(1, wound.topic)
            if done.error is not None:
                job.report.fail(done.error, wound.topic)
                continue
            if healed is None:
                continue
            if _is_wanting(healed) and not healed.has_local_files and scrubbed.local_files():
                # The files are with the driver alone.
                healed = heal(job.place, wound)
            target = targets[wound]
            if isinstance(target, _Bad):
                scrubbed.restore(target, healed)
            else:
                scrubbed.fill(target, healed)
    finally:
        job.progress.end()
    for item in hurt:
        item.remove_superfluous()
        item.mend_pointer()
    failpoints.reach("scrub.after_repair")


def _has_faults(survey: Survey) -> bool:
    return any(finding.is_fault for finding in survey.findings)


def _is_wanting(healed: Healed) -> bool:
    return not healed.objects or bool(healed.lost)


# -- ranges ---------------------------------------------------------------------------------


def _subtract(start: int, end: int, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of a range."""
    left: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low > start:
            left.append((start, min(low, end)))
        start = max(start, high)
        if start >= end:
            break
    if start < end:
        left.append((start, end))
    return [(low, high) for low, high in left if low < high]


def _merge(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
