"""One round of `export`: plan, write files in tasks, commit.

    plan: what topics hold, minus what tables have ─► tasks write files ─► one commit per table

Owns: the plan, the right to export a topic into a table, and when a table is committed: once its
last task has finished, and before that if much is waiting. Does not own: what is in a commit
(`export_commit`), tables (`ister.spark.tables`), what a task does (`export_task`). See `export_job`
for the guarantees.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from ister.base import failpoints
from ister.base.limits import GIB, MIB
from ister.base.positions import to_milliseconds
from ister.base.retry import retry_unavailable
from ister.bucket.fence import Fence
from ister.errors import (
    ConflictError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    OffsetOutOfRangeError,
)
from ister.spark.jobs.export_commit import (
    LETTERS_MARK,
    Destination,
    ExportTable,
    TableCommitter,
    TopicExport,
)
from ister.spark.jobs.export_schema import PayloadSchemas, add_columns, layout_of
from ister.spark.jobs.export_task import ExportItem, TableOutput, export_item
from ister.spark.jobs.job import Job
from ister.spark.jobs.leases import LeaseKeeper
from ister.spark.jobs.tasks import run_tasks
from ister.spark.offset_resolver import Head, OffsetResolver
from ister.spark.options import ReadOptions
from ister.spark.planner import Partition, TopicRange, plan
from ister.spark.tables.base import Addition
from ister.spark.tables.columns import LETTERS
from ister.spark.tables.json_schema import with_types
from ister.spark.tables.opening import TablePlace, dead_letters_name, open_table, table_name
from ister.spark.tables.ranges import Ranges, count, intersect, normalise, show, subtract

if TYPE_CHECKING:
    from ister.spark.jobs.export_job import ExportSettings

_log = logging.getLogger("ister.spark.jobs.export")

_COMMIT_BYTES_PER_SLOT: Final = 1 * GIB
"""About how many bytes of messages are committed before the rest is done, for each slot: a minute's
work or less, which is what a crash costs."""
_COMMIT_FILES: Final = 10_000
"""And how many files: a commit of more takes long, and much memory."""
_TASK_BYTES_MIN: Final = 8 * MIB
"""Less than this is not divided among tasks."""
_SHOWN_RANGES: Final = 20


class ExportRound:
    """One round of an export: adds to the tables what they do not have yet."""

    def __init__(self, job: Job, settings: ExportSettings) -> None:
        self._job = job
        self._settings = settings
        self._run = secrets.token_hex(8)
        self._place = TablePlace(
            config=job.place.config,
            format=settings.format,
            catalog=settings.catalog,
            storage_options=settings.storage_options,
        )
        self._schemas = PayloadSchemas(job, settings)
        self._destinations: dict[str, Destination] = {}
        self._committer = TableCommitter(job)
        self._fences: dict[str, Fence] = {}

    def run(self, topics: Sequence[str]) -> None:
        """Exports topics; the result is in the job's report."""
        job = self._job
        try:
            with LeaseKeeper(
                job.store,
                ttl_seconds=job.place.config.storage.metadata.lease_ttl_seconds,
                clock=job.clock,
                thread="ister-export-lease",
            ) as leases:
                self._prepare(topics, leases)
                failpoints.reach("pipeline.after_plan")
                if not job.dry_run:
                    self._export()
                    self._end()
        finally:
            for destination in self._destinations.values():
                for each in destination.tables:
                    each.table.close()

    # -- the plan ---------------------------------------------------------------------------

    def _prepare(self, topics: Sequence[str], leases: LeaseKeeper) -> None:
        if not topics:
            return
        resolver, found = self._heads(topics)
        for head in found:
            with self._job.own_failure(head.topic):
                self._add(head, leases)
        # After the keys are taken: no other export of these topics changes the tables now.
        for destination in self._destinations.values():
            exports, destination.exports = destination.exports, []
            try:
                exports = self._refresh(destination, exports, leases)
            except InvariantError:
                raise
            except IsterError as error:
                for item in exports:
                    self._job.report.of(item.topic)
                    self._job.report.fail(error, item.topic)
                continue
            for item in exports:
                with self._job.own_failure(item.topic):
                    self._plan(resolver, item)
                    destination.exports.append(item)
                    # The bucket's part is exported.
                    item.head.check_reach(self._settings.end)
                    self._check_undone(item)
            destination.is_whole = len(destination.exports) == len(exports)

    def _add(self, head: Head, leases: LeaseKeeper) -> None:
        """Adds a topic to its table, and takes the lease to export it."""
        schema = self._schemas.of(head.topic)
        destination = self._destination(head.topic)
        fences: list[Fence] = []
        if not self._job.dry_run:
            names = self._exclusive_names(destination, head.topic)
            fences = [self._take(leases, name, head.topic) for name in names]
        destination.exports.append(
            TopicExport(head=head, destination=destination, schema=schema, fences=fences)
        )

    def _heads(self, topics: Sequence[str]) -> tuple[OffsetResolver, list[Head]]:
        """Returns what topics hold; a topic that fails does not stop the others."""
        place = self._job.place

        def resolver_of(names: Sequence[str]) -> OffsetResolver:
            options = ReadOptions.parse(
                {
                    "topic": ",".join(names),
                    "config": "given",
                    "includeTail": str(self._settings.include_tail).lower(),
                },
                is_streaming=False,
            )
            return OffsetResolver(place, options)

        every = resolver_of(topics)
        try:
            found = retry_unavailable(lambda: every.heads(catches_up=self._settings.include_tail))
            return every, list(found.values())
        except IsterError:
            heads: list[Head] = []
            for name in topics:
                with self._job.own_failure(name):
                    heads += resolver_of([name]).heads().values()
            return every, heads

    def _destination(self, topic: str) -> Destination:
        """Returns the table of a topic, opened once."""
        settings = self._settings
        name = table_name(settings.to, topic, settings.format)
        known = self._destinations.get(name)
        if known is None:
            clock = self._job.clock
            letters = None
            if self._schemas.is_typed:
                given = settings.dead_letters
                other = None if given is None else table_name(given, topic, settings.format)
                where = dead_letters_name(name, other)
                letters = ExportTable(
                    table=open_table(where, self._place, clock=clock), is_letters=True
                )
            rows = ExportTable(table=open_table(name, self._place, clock=clock), is_letters=False)
            known = Destination(name=name, rows=rows, letters=letters)
            self._check_apart(known)
            self._destinations[name] = known
        return known

    def _check_apart(self, new: Destination) -> None:
        """Checks that no table gets both rows and dead letters."""
        every = [each for one in (*self._destinations.values(), new) for each in one.tables]
        letters, rows = (
            {each.table.location for each in every if each.is_letters is wanted}
            for wanted in (True, False)
        )
        both = rows & letters
        if both:
            raise InvalidRequestError(
                "dead letters would go into a table of rows",
                path=min(both),
                hint="name another table for them: dead_letters (--dead-letters)",
            )

    def _take(self, leases: LeaseKeeper, name: str, topic: str) -> Fence:
        if name not in self._fences:
            key = self._job.keys.export(hashlib.sha256(name.encode()).hexdigest()[:32])
            about = {"job": "export", "topic": topic}
            self._fences[name] = leases.take(key, about, topic=topic)
        return self._fences[name]

    def _exclusive_names(self, destination: Destination, topic: str) -> list[str]:
        """Names what only one export may write at a time."""
        names = []
        for each in destination.tables:
            if not each.table.has_exclusive_commits():
                names.append(each.table.location)  # the lease is the only protection
            elif not each.is_letters:
                names.append(f"{each.table.location}\n{topic}")
        return names

    def _refresh(
        self, destination: Destination, exports: Sequence[TopicExport], leases: LeaseKeeper
    ) -> list[TopicExport]:
        """Opens a table for this round, and reads which offsets it has.

        Returns the exports whose columns the table can have.
        """
        fitting: list[TopicExport] = []
        wanted = pa.schema([])
        for export in exports:
            with self._job.own_failure(export.topic):
                wanted = add_columns(wanted, export.schema, topic=export.topic)
                fitting.append(export)
        if not fitting:
            return fitting
        if not self._job.dry_run:
            self._open(destination, fitting, wanted)
            for each in destination.tables:
                leases.renew_also(partial(each.table.renew, self._run))
        for each in destination.tables:
            each.coverage = retry_unavailable(each.table.coverage)
            self._check_kind(each)
        return fitting

    def _open(
        self, destination: Destination, exports: Sequence[TopicExport], wanted: pa.Schema
    ) -> None:
        """Opens a table, and determines what tasks write to it."""
        for each in destination.tables:
            layout = each.table.open(LETTERS if each.is_letters else wanted)
            each.output = TableOutput(target=each.table.target(self._run), layout=layout)
        output = destination.rows.output
        for export in exports:
            export.output = output
            if export.schema is not None and output is not None:
                own = layout_of(output.layout, export.schema.columns.names)
                export.output = TableOutput(target=output.target, layout=own)
                export.members = with_types(export.schema.members, output.layout.schema)

    def _check_kind(self, each: ExportTable) -> None:
        """Checks that a table has only rows, or only dead letters."""
        names = [name for found in each.coverage.topics.values() for name in found]
        if any((LETTERS_MARK in name) is not each.is_letters for name in names):
            raise ConflictError(
                "the table has rows, not dead letters"
                if each.is_letters
                else "the table has dead letters, not rows",
                path=each.table.location,
                hint="name another table for dead letters: dead_letters (--dead-letters)",
            )

    def _plan(self, resolver: OffsetResolver, item: TopicExport) -> None:
        """Plans what to read: what the topic holds, without what the table has."""
        job, head = self._job, item.head
        self._check_same(item)
        self._check_letters(item)
        start, end = self._bounds(resolver, head)
        covered = item.covered_in(item.destination.rows)
        item.missing = subtract(normalise([(start, end)]), covered)
        ranges = [resolver.range_of(head, first, last) for first, last in item.missing]
        item.partitions = _divide_evenly(ranges, self._settings.file_mb * MIB, job.slots)
        fields = job.report.of(head.topic)
        fields["table"] = item.destination.rows.table.location
        fields["end"] = end
        if gap := self._gap(head, covered):
            _log.warning(
                "messages expired before they were exported",
                extra={"topic": head.topic, "gap": str(gap)},
            )
            fields["gap"] = [list(one) for one in gap[:_SHOWN_RANGES]]
        if job.dry_run:
            fields["messages"] = count(item.missing)
            fields["bytes"] = item.bytes
            fields["ranges"] = [list(one) for one in item.missing[:_SHOWN_RANGES]]
        else:
            job.report.add(head.topic, messages=0, dead_letters=0, files=0, bytes=0, commits=0)

    def _check_letters(self, item: TopicExport) -> None:
        """Checks that no dead letters of rows in the table were lost in a rollback."""
        letters, head = item.destination.letters, item.head
        if letters is None or letters.coverage.before is None:
            return
        undone = normalise(
            one
            for name in letters.coverage.before.topics.get(head.topic, {})
            if name.partition(LETTERS_MARK)[0] == head.incarnation
            for one in letters.coverage.undone(head.topic, name)
        )
        if lost := intersect(undone, item.covered_in(item.destination.rows)):
            raise ConflictError(
                "the table of dead letters was rolled back, and the table of rows was not: dead "
                f"letters of the offsets {show(lost)} are missing",
                topic=head.topic,
                offset=lost[0][0],
                path=letters.table.location,
                hint="roll the table of rows back to the same time: what both lack is exported "
                "again; or name another table for dead letters: dead_letters (--dead-letters)",
            )

    def _check_undone(self, item: TopicExport) -> None:
        """Checks that the topic has all that the table lost when it was rolled back."""
        head, table = item.head, item.destination.rows.table
        undone = item.destination.rows.coverage.undone(head.topic, head.incarnation)
        if not undone:
            return
        _log.warning(
            "the table was rolled back: what it lacks is exported again",
            extra={"topic": head.topic, "path": table.location, "ranges": show(undone)},
        )
        if expired := intersect(undone, ((0, head.earliest),)):
            # What the topic has is exported.
            raise ConflictError(
                f"the table was rolled back to before it had the offsets {show(expired)}, and the "
                "topic does not have them any more",
                topic=head.topic,
                offset=expired[0][0],
                path=table.location,
                hint="restore the newer version of the table if they are needed; exports of new "
                "messages go on without them",
            )

    def _gap(self, head: Head, covered: Ranges) -> Ranges:
        """Returns what expired after the table's first rows, before it was exported."""
        if not covered:
            return ()
        first = covered[0][0]
        if isinstance(self._settings.start, int):
            first = max(first, self._settings.start)
        return subtract(normalise([(first, head.earliest)]), covered)

    def _check_same(self, item: TopicExport) -> None:
        """Checks that the table's rows belong to this topic."""
        head, rows = item.head, item.destination.rows
        others = rows.coverage.other_incarnations(head.topic, head.incarnation)
        if others and not self._settings.accept_remade:
            raise ConflictError(
                "the topic was deleted and created again, and the table has rows of the old one: "
                "it would have offsets twice",
                topic=head.topic,
                path=rows.table.location,
                hint="export into another table, or accept both: accept_remade (--accept-remade)",
            )
        epoch = rows.coverage.epoch_of(head.topic, head.incarnation)
        if epoch is None:
            return
        given_up = head.given_up_from(epoch)
        covered = item.covered_in(rows)
        if given_up is not None and covered and covered[-1][1] > given_up:
            raise ConflictError(
                f"a disk was lost, and the topic's new owner continued at {given_up}: the table "
                "has rows of lost messages, whose offsets other messages have now",
                topic=head.topic,
                offset=given_up,
                path=rows.table.location,
                hint="export into another table",
            )

    def _bounds(self, resolver: OffsetResolver, head: Head) -> tuple[int, int]:
        """Resolves the settings' range, as far as the topic has messages."""
        settings = self._settings
        start, end = head.earliest, head.end
        if isinstance(settings.start, datetime):
            time_ms = to_milliseconds(settings.start)
            start = resolver.resolve(head, "start", "latest", time_ms=time_ms)
        elif settings.start is not None:
            # Expired messages may be in the table already.
            start = max(settings.start, head.earliest)
            if settings.start > head.end:
                raise OffsetOutOfRangeError(
                    "start is beyond the end",
                    topic=head.topic,
                    offset=settings.start,
                    earliest=head.earliest,
                    next=head.end,
                )
        if isinstance(settings.end, datetime):
            end = resolver.resolve(head, "end", "latest", time_ms=to_milliseconds(settings.end))
        elif settings.end is not None:
            end = min(settings.end, head.end)
        return start, max(start, end)

    # -- tasks and commits ------------------------------------------------------------------

    def _export(self) -> None:
        job = self._job
        exports = {item.topic: item for one in self._destinations.values() for item in one.exports}
        items: list[ExportItem] = []
        for export in exports.values():
            own = list(self._items(export))
            export.destination.items_left += len(own)
            items += own
        total = sum(item.partition.bytes for item in items)
        job.progress.begin("exporting", total, "bytes")
        results = run_tasks(
            job.spark,
            items,
            partial(export_item, job.place),
            weigh=lambda item: item.partition.bytes,
            name="ister export",
        )
        try:
            for done in results:
                export = exports[done.item.topic]
                destination = export.destination
                destination.items_left -= 1
                job.progress.advance(done.item.partition.bytes, done.item.topic)
                if done.error is not None:
                    job.report.fail(done.error, export.topic)
                elif done.result is not None:
                    destination.add(export, done.item, done.result)
                if destination.items_left == 0 or self._is_much(destination):
                    self._committer.commit(destination)
        finally:
            job.progress.end()
            for destination in self._destinations.values():
                self._committer.discard(destination)

    def _is_much(self, destination: Destination) -> bool:
        """Returns whether so much is waiting that it is committed before the rest is done."""
        return (
            destination.bytes_done >= _COMMIT_BYTES_PER_SLOT * self._job.slots
            or destination.files_done >= _COMMIT_FILES
        )

    def _items(self, export: TopicExport) -> Iterator[ExportItem]:
        head, letters = export.head, export.destination.letters
        if export.output is None:
            return
        lettered = () if letters is None else export.covered_in(letters)
        for partition in export.partitions:
            ranges = normalise((part.start, part.end) for part in partition.slices)
            yield ExportItem(
                topic=head.topic,
                partition=partition,
                identities={head.topic: head.identity},
                table=export.output,
                members=export.members,
                letters=None if letters is None else letters.output,
                lettered=intersect(lettered, ranges),
                file_mb=self._settings.file_mb,
                zstd_level=self._settings.zstd_level,
            )

    def _end(self) -> None:
        """Ends the round, and removes what killed exports left."""
        grace = self._job.place.config.storage.cloud.orphan_grace_minutes * 60.0
        for destination in self._destinations.values():
            if destination.rows.output is None:
                continue
            check = self._committer.check_of(destination.exports[:1])
            for each in destination.tables:
                table = each.table
                if destination.exports and destination.is_whole:
                    self._record_rollback(each, check)
                table.end(self._run)
                if not destination.exports:
                    continue
                try:
                    table.tidy(grace, check=check)
                except IsterError as error:
                    _log.info(
                        "leftovers not removed",
                        extra={"path": table.location, "error": str(error)},
                    )

    @staticmethod
    def _record_rollback(each: ExportTable, check: Callable[[], None]) -> None:
        """Has a table that was rolled back, and got nothing since, record what it has.

        Its own upkeep may remove what says so now.
        """
        if each.coverage.before is None:
            return
        try:
            if each.table.coverage().before is not None:
                each.table.commit(Addition(id=secrets.token_hex(8), topics=()), check=check)
        except IsterError as error:
            _log.info(
                "rollback not recorded", extra={"path": each.table.location, "error": str(error)}
            )


def _divide_evenly(ranges: Sequence[TopicRange], file_bytes: int, slots: int) -> list[Partition]:
    """Plans files of at most about `file_bytes`, as many as keep all slots busy to the end.

    On 2 slots, 7 tasks of the same size take as long as 8, and these are smaller.
    """
    whole = plan(ranges, split_bytes=file_bytes)
    wanted = -(-len(whole) // slots) * slots
    wanted = min(wanted, sum(part.bytes for part in whole) // _TASK_BYTES_MIN)
    if len(whole) >= wanted:
        return whole
    share = sum(part.weight for part in whole) // wanted
    # Objects are not cut everywhere: with no play, what is left over would be one file more.
    return plan(ranges, split_bytes=share + share // (wanted + 1))
