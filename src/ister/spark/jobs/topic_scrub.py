"""The scrub of one topic: its findings, whether each could be repaired, and the repairs.

Owns: what becomes of each finding. Does not own: how objects are checked (`object_check`) or made
again (`ister.rescue.mend`), faults between descriptors (`catalog_check`), the right to change a
topic (`ownership`), the order of steps (`scrubbing`). Runs on the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ister.base import failpoints
from ister.base.model import TopicName
from ister.bucket.names import ObjectName, object_key, parse_object_id
from ister.bucket.ownership import OwnedTopic
from ister.errors import ConflictError, CorruptDataError, InvariantError, IsterError
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    FORMAT_PARQUET,
    ObjectDescriptor,
    encode_descriptor,
)
from ister.format.offset_ranges import merge_ranges, missing_from
from ister.metadata.base import Delete, Put, RevisionIs
from ister.rescue.catalog_check import (
    DescriptorEntry,
    ScrubFinding,
    Survey,
    read_pages,
    survey_topic,
)
from ister.rescue.mend import KEPT_HINT, DamagedRange, RepairResult, epoch_floor
from ister.rescue.object_check import Checked
from ister.spark.jobs.job import Job
from ister.spark.jobs.job_report import ErrorFields
from ister.spark.owners import ask
from ister.topic.local_tail import LocalTail

_log = logging.getLogger("ister.spark.jobs.scrubbing")

_CANDIDATES_MAX: Final = 64

ObjectKey: TypeAlias = tuple[str, int]
"""A descriptor's key and revision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckItem:
    """An object to check. Pickled to a task."""

    topic: str
    key: str
    """The descriptor's key."""
    revision: int
    descriptor: bytes
    """The descriptor as it is stored."""
    size_bytes: int


@dataclass(slots=True)
class BadObject:
    """A missing or damaged object, or one with a wrong descriptor."""

    entry: DescriptorEntry
    checked: Checked
    findings: list[ScrubFinding]

    @property
    def is_suspect(self) -> bool:
        """Whether the object is intact, but not the one that its descriptor was made for.

        Only its checksum tells: another program may have put other messages there.
        """
        right, said = self.checked.right, self.entry.described.checksum
        return right is not None and said is not None and right.checksum != said

    @property
    def right(self) -> ObjectDescriptor | None:
        """The correct descriptor of an object that is intact and certainly the right one."""
        return None if self.is_suspect else self.checked.right


@dataclass(slots=True)
class MissingRange:
    """Offsets that no descriptor has."""

    finding: ScrubFinding
    key: str | None = None
    """The key of an unreadable descriptor, if there is one."""
    revision: int = 0


class TopicScrub:
    """The scrub of one topic: what was found, and what became of it. Used by one thread."""

    def __init__(
        self,
        job: Job,
        topic: str,
        express_runs: Callable[[], Mapping[TopicName, Sequence[ObjectDescriptor]]],
    ) -> None:
        """Takes a topic; `express_runs` finds the runs of all express objects."""
        self._job = job
        self.topic = topic
        self._express_runs = express_runs
        self._name = TopicName.parse(topic)
        self._catalog = job.catalog(topic)
        self.survey: Survey | None = None
        self.has_changed = False
        """Whether the topic has to be surveyed again."""
        self.failures: dict[ObjectKey, ErrorFields] = {}
        """Objects that could not be checked."""
        self._errors: list[IsterError] = []
        self._checked: dict[ObjectKey, Checked] = {}
        self._repaired: list[ScrubFinding] = []
        self.bad: list[BadObject] = []
        self.missing_ranges: list[MissingRange] = []
        self._owned: OwnedTopic | None = None

    def survey_again(self) -> bool:
        """Reads the catalog and lists the bucket; returns whether that succeeded."""
        grace = self._job.place.config.storage.cloud.orphan_grace_minutes * 60
        if self.survey is not None:
            self._repaired += [finding for finding in self.survey.findings if finding.repaired]
        self.has_changed = False
        self.bad, self.missing_ranges, self._owned, self.failures = [], [], None, {}
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
        """Returns how much is still to be read."""
        return sum(
            entry.described.size_bytes
            for entry in self._entries()
            if (entry.key, entry.revision) not in self._checked
        )

    def _entries(self) -> list[DescriptorEntry]:
        survey = self.survey
        return [] if survey is None else [*survey.entries, *survey.misplaced]

    def items(self) -> Iterator[CheckItem]:
        """Yields the objects to check, with their complete descriptors."""
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
        """Records what a task has found."""
        self._checked[item.key, item.revision] = checked
        self.failures.pop((item.key, item.revision), None)

    # -- findings ---------------------------------------------------------------------------

    def collect_findings(self) -> None:
        """Turns what tasks have found into findings."""
        survey = self.survey
        if survey is None:
            return
        for entry in survey.entries:
            checked = self._checked.get((entry.key, entry.revision))
            if checked is None:
                if (entry.key, entry.revision) not in self.failures:
                    self.has_changed = True  # merged, replaced or expired meanwhile
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
                ScrubFinding(
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
            self.bad.append(BadObject(entry, checked, findings))
        self.judge()

    def judge(self) -> None:
        """Decides whether each fault could be repaired, as far as that shows without trying."""
        survey = self.survey
        if survey is None:
            return
        unreadable = {start: (key, revision) for key, revision, start in survey.unreadable}
        for finding in survey.findings:
            if finding.kind == "gap":
                self.missing_ranges.append(MissingRange(finding))
            elif finding.kind == "unreadable_descriptor" and finding.start in unreadable:
                key, revision = unreadable[finding.start]
                self.missing_ranges.append(MissingRange(finding, key, revision))
        files = self._files() if survey.has_faults else []
        for item in self.bad:
            self._judge_object(item, files)
        for missing in self.missing_ranges:
            self._judge_missing(missing, files)

    def _is_current(self, entry: DescriptorEntry) -> bool:
        found = self._catalog.store.get(entry.key)
        return found is not None and found.revision == entry.revision

    def _explain_overlap(self, entry: DescriptorEntry, checked: Checked) -> None:
        for finding in self._findings_of(entry):
            problem = checked.problems[0]
            finding.reason += f"; its own object: {problem.kind}, {problem.reason}"

    def _findings_of(self, entry: DescriptorEntry) -> list[ScrubFinding]:
        survey = self.survey
        kinds = ("overlap", "misplaced_descriptor")
        return [
            finding
            for finding in (survey.findings if survey is not None else [])
            if finding.kind in kinds
            and finding.object == entry.described.object_id
            and finding.start == entry.described.start
        ]

    def _judge_object(self, item: BadObject, files: list[tuple[int, int]]) -> None:
        described = item.entry.described
        others = self._candidates(described.start, described.end, item)
        have = _cover([*files, *map(_range, others)])
        for finding in item.findings:
            if item.right is not None:
                finding.repairable = True
                continue
            if described.kept:
                # Every other source has messages that were removed.
                finding.lost = missing_from(have, finding.start or 0, finding.end or 0)
                finding.repairable = any(
                    one.format != FORMAT_EXPRESS and _range(one) == _range(described)
                    for one in others
                )
                finding.hint = None if finding.repairable else KEPT_HINT
                continue
            if item.is_suspect:
                finding.repairable = not missing_from(_cover(files), *_range(described))
                finding.reason += "; another copy is needed to tell whether the object or its "
                finding.reason += "descriptor is wrong"
                continue
            finding.lost = missing_from(have, finding.start or 0, finding.end or 0)
            finding.repairable = not finding.lost

    def _judge_missing(self, missing: MissingRange, files: list[tuple[int, int]]) -> None:
        finding = missing.finding
        start, end = finding.start or 0, finding.end
        candidates = self._candidates(start, end, None)
        have = _cover([*files, *map(_range, candidates)])
        if end is None:
            finding.repairable = any(low <= start < high for low, high in have)
        else:
            finding.lost = missing_from(have, start, end)
            finding.repairable = not finding.lost
        names = [one.object_id for one in candidates if one.format != FORMAT_EXPRESS]
        if names:
            finding.reason += f"; the bucket has {', '.join(names[:3])}"

    def _files(self) -> list[tuple[int, int]]:
        """Returns the offsets that the owner's files have, here or by its broker."""
        survey, job = self.survey, self._job
        if survey is None:
            return []
        try:
            local = self.local_files()
            snapshot = local.snapshot() if local is not None else None
            if snapshot is not None:
                return [(snapshot.trimmed, snapshot.synced)]
            status = ask(
                job.place, self.topic, lambda client: client.watermarks([self.topic])[self.topic]
            )
            if status.incarnation == survey.record.incarnation:
                return [(status.trimmed, status.synced)]
        except IsterError as error:
            _log.info(
                "local files cannot be read", extra={"topic": self.topic, "error": str(error)}
            )
        return []

    def local_files(self) -> LocalTail | None:
        """Opens the owner's files, if they are on this machine."""
        survey = self.survey
        if survey is None:
            return None
        return self._job.place.local_tail(self.topic, survey.record.node, survey.record.incarnation)

    def _candidates(
        self, start: int, end: int | None, but: BadObject | None
    ) -> tuple[ObjectDescriptor, ...]:
        """Returns objects that may have offsets of a range: frames, Parquet, and express runs.

        Of runs, also those that no descriptor names.
        """
        survey = self._surveyed()
        record = survey.record
        limit = 1 << 63 if end is None else end
        bad = None if but is None else but.entry.described.object_id

        def may_have(start_other: int, end_other: int) -> bool:
            return start_other < limit and start < end_other

        def is_own(epoch: int, end_other: int) -> bool:
            return epoch_floor(record, end_other) <= epoch <= record.epoch

        found = [
            _by_name(item.object_id, item.name, item.size_bytes)
            for item in survey.others
            if item.name is not None
            and item.state not in ("under way", "later")
            and may_have(item.name.start, item.name.end)
            and is_own(item.name.epoch, item.name.end)
        ]
        for entry in self._entries():
            # An overlapping object, or one whose descriptor says too little.
            object_id = entry.described.object_id
            name = parse_object_id(object_id)
            checked = self._checked.get((entry.key, entry.revision))
            if (
                name is not None
                and may_have(name.start, name.end)
                and checked is not None
                and checked.messages
                and object_id != bad
            ):
                found.append(_by_name(object_id, name, checked.bytes))
        found.sort(key=lambda one: (one.format == FORMAT_PARQUET, one.object_id))
        runs = [
            run
            for run in self._express_runs().get(self._name, ())
            if may_have(run.start, run.end)
            and run.incarnation == record.incarnation
            and is_own(run.epoch, run.end)
            and run.object_id != bad
        ]
        return *tuple(dict.fromkeys(found))[:_CANDIDATES_MAX], *runs[:_CANDIDATES_MAX]

    # -- repairs ----------------------------------------------------------------------------

    def damaged_ranges(self) -> list[tuple[DamagedRange, BadObject | MissingRange]]:
        """Returns the ranges whose objects have to be made again."""
        found: list[tuple[DamagedRange, BadObject | MissingRange]] = []
        for item in self.bad:
            described = item.entry.described
            if item.right is None:
                found.append((self._damaged_range(described.start, described.end, item), item))
        for missing in self.missing_ranges:
            start, end = missing.finding.start or 0, missing.finding.end
            found.append((self._damaged_range(start, end, None), missing))
        return found

    def _damaged_range(self, start: int, end: int | None, item: BadObject | None) -> DamagedRange:
        survey = self._surveyed()
        return DamagedRange(
            topic=self.topic,
            epoch=survey.record.epoch,
            incarnation=survey.record.incarnation,
            node=survey.record.node,
            start=start,
            end=end,
            reach=survey.current or 0,
            old=None if item is None else item.entry.described,
            others=self._candidates(start, end, item),
        )

    def _surveyed(self) -> Survey:
        if self.survey is None:
            raise InvariantError("a topic is repaired before it is surveyed")
        return self.survey

    def owned(self) -> OwnedTopic:
        """Takes the right to change the topic."""
        if self._owned is None:
            owned = self._job.act(self.topic)
            record = self._surveyed().record
            if (owned.record.epoch, owned.record.incarnation) != (record.epoch, record.incarnation):
                self.has_changed = True
                raise ConflictError("the topic has a new owner", topic=self.topic)
            self._owned = owned
        return self._owned

    def fail(self, error: IsterError) -> None:
        """Records why repairs stop; the same reason once."""
        if str(error) not in map(str, self._errors):
            self._errors.append(error)

    def fix_descriptors(self) -> None:
        """Replaces wrong descriptors of objects that are intact."""
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
                self._settle(item.findings, is_done, "its descriptor was replaced")
                if is_done and not is_same:
                    self._close_missing(right)

    def _close_missing(self, right: ObjectDescriptor) -> None:
        """Settles gaps that a replaced descriptor fills; the rest is surveyed again."""
        self.has_changed = True
        for missing in list(self.missing_ranges):
            start, end = missing.finding.start or 0, missing.finding.end
            if right.start <= start and end is not None and end <= right.end:
                self.missing_ranges.remove(missing)
                self._settle([missing.finding], True, f"{right.object_id} has them")

    def _has_room(self, entry: DescriptorEntry, right: ObjectDescriptor) -> bool:
        """Returns whether a descriptor may grow: no other has the offsets that it gets."""
        return right.start == entry.described.start and all(
            other is entry
            or other.described.start >= right.end
            or other.described.end <= right.start
            for other in self._surveyed().entries
        )

    def restore(self, item: BadObject, result: RepairResult) -> None:
        """Replaces a bad object by a new one."""
        if not result.objects:
            for finding in item.findings:
                finding.reason += f"; not repaired: {result.reason}"
                finding.repairable = False
                finding.hint = result.hint
            return
        with _Commit(self):
            is_done = self.owned().replace(
                item.entry.described, result.objects[0], item.entry.revision
            )
            self._settle(item.findings, is_done, f"made again from {', '.join(result.sources)}")

    def fill(self, missing: MissingRange, result: RepairResult) -> None:
        """Adds new objects where no descriptor is."""
        finding = missing.finding
        for made in result.objects:
            if self.has_changed or self._errors:
                return  # another process may be filling it
            with _Commit(self):
                self._publish(missing, made)
        if self.has_changed or self._errors:
            return
        finding.lost = list(result.lost)
        finding.repaired = not result.lost
        if result.objects:
            names = ", ".join(made.object_id for made in result.objects[:3])
            finding.reason += f"; {names} made from {', '.join(result.sources)}"
        if result.lost:
            finding.repairable = False
            finding.reason += f"; not repaired: {result.reason}"

    def _publish(self, missing: MissingRange, made: ObjectDescriptor) -> None:
        owned = self.owned()
        if made.start < owned.record.expired_before:
            self.has_changed = True  # expired meanwhile
            return
        if missing.key is not None and made.start == missing.finding.start:
            is_done = owned.transact(
                [RevisionIs(missing.key, missing.revision)],
                [Put(missing.key, encode_descriptor(made))],
            )
            self.has_changed = self.has_changed or not is_done
        elif owned.last is not None and made.end <= owned.last.start:
            owned.insert(made)
        elif owned.last is None or owned.last.end == made.start:
            owned.commit(made)
        else:
            self.has_changed = True

    def remove_superfluous(self) -> None:
        """Removes descriptors whose offsets others have, if those are intact."""
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
            have = _cover(map(_range, needed))
            if missing_from(have, described.start, described.end):
                for finding in findings:
                    finding.repairable = False
                    finding.reason += "; not repaired: the others that have its offsets are damaged"
                continue
            with _Commit(self):
                if is_misplaced:
                    is_done = self.owned().transact(
                        [RevisionIs(entry.key, entry.revision)], [Delete(entry.key)]
                    )
                else:
                    is_done = self.owned().remove(described, entry.revision)
                self._settle(findings, is_done, "the descriptor was removed")

    def fix_pointer(self) -> None:
        """Sets the pointer to the newest object."""
        for finding in self._surveyed().findings:
            if finding.kind == "pointer":
                with _Commit(self):
                    is_done = self.owned().mend_current()
                    self._settle([finding], is_done, "it was set")

    def _settle(self, findings: Sequence[ScrubFinding], is_done: bool, how: str) -> None:
        if not is_done:
            self.has_changed = True
            return
        for finding in findings:
            finding.repaired = finding.repairable = True
            finding.lost = []
            finding.reason += f"; repaired: {how}"

    # -- the report -------------------------------------------------------------------------

    def report(self, *, repair: bool) -> None:
        """Adds what was found, and what became of it, to the job's report."""
        report = self._job.report
        survey = self.survey
        fields = report.of(self.topic)
        current = [] if survey is None else survey.findings
        findings = [*self._repaired, *current]
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
            "lost": [list(item) for item in merge_ranges(lost for f in left for lost in f.lost)],
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

    def _as_error(self, finding: ScrubFinding, *, repair: bool) -> ErrorFields:
        what = finding.kind.replace("_", " ")
        where = f" {finding.object}" if finding.object else ""
        at = f", byte {finding.position}" if finding.position is not None else ""
        span = ""
        if finding.start is not None:
            upto = f" to {finding.end}" if finding.end is not None else " on"
            span = f", offsets from {finding.start}{upto}"
        hint = None
        if finding.repairable and not repair:
            hint = "`ister pipeline scrub --repair` repairs it"
        elif finding.lost:
            ranges = ", ".join(f"{start} to {end}" for start, end in finding.lost)
            hint = f"no copy has the offsets {ranges}"
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
    """One change of a topic: records an error, and lets the job continue."""

    def __init__(self, scrubbed: TopicScrub) -> None:
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
            self._scrub.has_changed = True  # another process was faster: survey again
        else:
            self._scrub.fail(error)
        return True


def _range(described: ObjectDescriptor) -> tuple[int, int]:
    return described.start, described.end


def _cover(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return merge_ranges(one for one in ranges if one[0] < one[1])


def _by_name(object_id: str, name: ObjectName, size_bytes: int) -> ObjectDescriptor:
    """A descriptor made from an object's name alone."""
    return ObjectDescriptor(
        object_id=object_id,
        start=name.start,
        end=name.end,
        size_bytes=size_bytes,
        format=name.format,
        messages=name.end - name.start,
    )
