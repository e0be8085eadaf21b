"""`benchmarks jobs`: the pipeline's jobs on Spark, each beside the same work without them.

    tier       50 topics of 20 MiB            copying the same files with opendal, two processes
    compact    a topic, to Parquet            Spark: read.format("ister"), write.parquet
    export     the same, to a directory       the same
    scrub      4 topics of 1 GiB              reading the same objects with opendal, and crc32
    commits    100 topics into one table      one commit
    memory     all four, of the 50 topics     the same with half of them

Everything is in the page cache. Sides take turns, the first one last in every other round, and what
was written is on the disk before the next turn. A job counts from its call to its report, with its
session started and after a small one on other topics; the processes that it is compared with are
running, too. Jobs sync what they write, and so does the copy; Spark's writer does not.

Both writers of Parquet have zstd of the same level, dictionaries for the same columns and the same
type for times. `compact` writes all fields, not only the connector's nine columns. Memory is that
of the driver's Python process and of Spark's Python workers.

Spark runs in a process of its own (`python -m benchmarks.jobs DIRECTORY SIZES`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final, TextIO, cast

from benchmarks.measurement import Run, file_paths, median, spread, take_turns, warm_page_cache
from ister.api import open_bucket
from ister.base.extras import missing_extra
from ister.base.limits import GIB, KIB, MIB
from ister.errors import InvariantError, check

try:
    import pyarrow.parquet as pq
    from pyspark.sql import SparkSession

    from benchmarks.jobs_data import fill_bucket, fill_local, link_place, object_paths
    from benchmarks.jobs_helpers import Helpers
    from benchmarks.jobs_memory import Growth, MemoryWatch
    from benchmarks.spark_process import (
        check_java,
        hand_over,
        open_session,
        results_output,
        run_process,
        time_work,
    )
    from ister.spark.jobs.compact_job import compact
    from ister.spark.jobs.export_job import export
    from ister.spark.jobs.job_report import JobReport
    from ister.spark.jobs.scrubbing import scrub
    from ister.spark.jobs.tier_job import tier
    from ister.spark.source import IsterDataSource
except ImportError as error:
    raise missing_extra("benchmarks jobs", "spark", error) from error

_MESSAGE_SIZES: Final = (100, KIB)
_TOPICS: Final = 50
_TOPIC_BYTES: Final = 20 * MIB
_TABLE_BYTES: Final = 768 * MIB
_OBJECT_BYTES: Final = 16 * MIB
"""Of the objects that are merged."""
_SCRUBBED_TOPICS: Final = 4
_SCRUBBED_BYTES: Final = GIB
"""Of each topic: a Spark job takes tenths of a second, in which a gigabyte is read."""
_MANY_BYTES: Final = 64 * KIB
"""The size of each of the topics whose commits are counted."""
_WARM_UP_BYTES: Final = 2 * MIB
_WARM_UP: Final = "/default/warm"
_ROUNDS: Final = 5
_ZSTD_LEVEL: Final = 3
_TIER_TARGET: Final = 0.6
_PARQUET_TARGET: Final = 2.0
_SCRUB_TARGET: Final = 0.8
_EXPORTED_TOPICS: Final = 100
_WORKER_GROWTH_TARGET_MIB: Final = 256.0
_DRIVER_GROWTH_TARGET_MIB: Final = 64.0

# Where both sides have dictionaries, and where neither has: as exports do.
_SPARK_WRITE: Final = {
    "compression": "zstd",
    "parquet.compression.codec.zstd.level": str(_ZSTD_LEVEL),
    "parquet.enable.dictionary#payload": "false",
    "parquet.enable.dictionary#offset": "false",
    "parquet.enable.dictionary#publish_time": "false",
}
_SPARK_CONF: Final = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What the process with Spark is told."""

    rounds: int
    topics: int
    topic_bytes: int
    table_bytes: int
    scrubbed_bytes: int


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    check_java("benchmarks jobs")
    sizes = _Sizes(
        rounds=_ROUNDS,
        topics=run.scaled(_TOPICS, at_least=4),
        topic_bytes=run.scaled(_TOPIC_BYTES, at_least=MIB),
        table_bytes=run.scaled(_TABLE_BYTES),
        scrubbed_bytes=run.scaled(_SCRUBBED_BYTES),
    )
    crowd_bytes = sizes.topics * sizes.topic_bytes
    scrubbed_bytes = _SCRUBBED_TOPICS * sizes.scrubbed_bytes
    run.need_disk(5 * crowd_bytes + 4 * sizes.table_bytes + 2 * scrubbed_bytes)
    run.say("writing topics")
    fill_local(run.path("small"), [f"{_WARM_UP}-{n}" for n in (1, 2)], _WARM_UP_BYTES, KIB)
    fill_local(run.path("crowd"), _crowd(sizes), sizes.topic_bytes, KIB)
    for message_bytes in _MESSAGE_SIZES:
        fill_bucket(
            run.path("table"),
            [_table_topic(message_bytes)],
            sizes.table_bytes,
            message_bytes,
            object_bytes=_OBJECT_BYTES,
        )
    scrubbed = [f"/default/scrubbed-{number}" for number in range(_SCRUBBED_TOPICS)]
    fill_bucket(run.path("scrubbed"), scrubbed, sizes.scrubbed_bytes, KIB)
    fill_bucket(run.path("many"), _many(), _MANY_BYTES, KIB)
    run.say("starting Spark")
    told = json.dumps(asdict(sizes))
    for result in run_process(run, "benchmarks.jobs", run.directory, told):
        run.results.append(result)
        run.say(f"{result.name}: {result.value:.4g} {result.unit}")


def _crowd(sizes: _Sizes) -> list[str]:
    return [f"/default/orders-{number:03d}" for number in range(sizes.topics)]


def _many() -> list[str]:
    return [f"/default/many-{number:03d}" for number in range(_EXPORTED_TOPICS)]


def _table_topic(message_bytes: int) -> str:
    return f"/default/orders-{message_bytes}"


def _say(message_bytes: int) -> str:
    return "1 KiB messages" if message_bytes == KIB else f"{message_bytes} B messages"


# -- the process with Spark -----------------------------------------------------------------


def _be_spark(directory: str, told: str, output: TextIO) -> None:
    """What the process with Spark does."""
    sizes = _Sizes(**json.loads(told))
    run = Run("jobs", directory, is_quick=False, progress=False)
    with (
        open_session("benchmarks jobs", directory, _SPARK_CONF) as spark,
        Helpers() as helpers,
    ):
        spark.dataSource.register(IsterDataSource)
        bench = _Bench(run, spark, helpers, sizes)
        bench.warm_up()
        # First: memory that other jobs have left behind would hide growth.
        measurements: list[Callable[[], None]] = [
            bench.measure_memory,
            bench.measure_tier,
            bench.measure_scrub,
            *(partial(bench.measure_parquet, size) for size in _MESSAGE_SIZES),
            bench.count_commits,
        ]
        for measure in measurements:
            measure()
            hand_over(run, output)


@dataclass(slots=True)
class _Side:
    """What one side took in every round."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def rates(self, amount: float) -> list[float]:
        """Amounts per second."""
        return [amount / seconds for seconds in self.seconds]


class _Bench:
    """The measurements, one after the other."""

    def __init__(self, run: Run, spark: SparkSession, helpers: Helpers, sizes: _Sizes) -> None:
        self._run = run
        self._spark = spark
        self._helpers = helpers
        self._sizes = sizes
        self._topics = _crowd(sizes)
        self._crowd = run.path("crowd")
        self._places = 0

    def warm_up(self) -> None:
        """Has every job load what it loads, in the driver and in both workers."""
        place = self._link(self._run.path("small"))
        _check_done(tier(self._spark, place))
        _check_done(scrub(self._spark, place))
        _check_done(self._export(place, None, f"{place}/table"))
        self._helpers.copy([file_paths(place)], f"{place}/copies")
        self._helpers.read(place, _names(place, object_paths(place)))
        _check_done(self._compact(place, None))
        shutil.rmtree(place)

    # -- jobs -------------------------------------------------------------------------------

    def _link(self, source: str) -> str:
        """A place of its own for a job."""
        return link_place(source, self._new_path())

    def _new_path(self) -> str:
        """A path that nobody has used before: workers keep connections to those that they know."""
        self._places += 1
        return self._run.path(f"place-{self._places}")

    def _compact(self, place: str, topics: Sequence[str] | None) -> JobReport:
        return compact(
            self._spark,
            place,
            topics=topics,
            format="parquet",
            min_objects=1,
            zstd_level=_ZSTD_LEVEL,
        )

    def _export(self, place: str, topics: Sequence[str] | None, target: str) -> JobReport:
        return export(self._spark, place, topics=topics, to=target, zstd_level=_ZSTD_LEVEL)

    def _take_turns(
        self, sides: Mapping[str, Callable[[], tuple[float, float]]]
    ) -> dict[str, _Side]:
        """What each side took, in seconds and in seconds of all processors."""
        found = {name: _Side() for name in sides}

        def turn(name: str, work: Callable[[], tuple[float, float]]) -> float:
            seconds, cpu = work()
            found[name].seconds.append(seconds)
            found[name].cpu.append(cpu)
            return seconds

        take_turns(
            self._sizes.rounds, {name: partial(turn, name, work) for name, work in sides.items()}
        )
        return found

    # -- tier and scrub ---------------------------------------------------------------------

    def measure_tier(self) -> None:
        """Local files into objects."""
        groups = [file_paths(os.path.join(self._crowd, "wal") + name) for name in self._topics]
        total = sum(os.path.getsize(path) for group in groups for path in group)

        def tier_all() -> tuple[float, float]:
            place = self._link(self._crowd)
            self._settle(total)
            reports: list[JobReport] = []
            taken = time_work(lambda: reports.append(tier(self._spark, place)))
            moved = sum(fields["bytes"] for fields in _check_done(reports[0]))
            check(moved == total, "tier moves every byte")
            shutil.rmtree(place)
            return taken

        def copy_all() -> tuple[float, float]:
            target = self._new_path()
            self._settle(total)
            copied: list[int] = []
            taken = time_work(lambda: copied.append(self._helpers.copy(groups, target)))
            check(copied == [total], "the copy moves every byte")
            shutil.rmtree(target)
            return taken

        sides = self._take_turns({"ister": tier_all, "plain": copy_all})
        ours, plain = sides["ister"], sides["plain"]
        sizes = self._sizes
        self._run.add(
            f"tier of {sizes.topics} topics of {sizes.topic_bytes / MIB:.0f} MiB, 1 KiB messages",
            median(ours.rates(total / 1e6)),
            "MB/s",
            limit=median(plain.rates(total / 1e6)),
            limit_name="opendal's streamed copy of the same files from two processes, an object "
            "per topic, each synced",
            at_least=_TIER_TARGET,
            on="ratio",
            note=self._describe(ours, plain, total),
        )

    def measure_scrub(self) -> None:
        """Every byte of large objects."""
        place = self._run.path("scrubbed")
        paths = object_paths(place)
        total = sum(map(os.path.getsize, paths))
        names = _names(place, paths)

        def scrub_all() -> tuple[float, float]:
            reports: list[JobReport] = []
            taken = time_work(lambda: reports.append(scrub(self._spark, place)))
            checked = sum(fields["bytes"] for fields in _check_done(reports[0]))
            check(checked == total, "scrub reads every byte")
            return taken

        def read_all() -> tuple[float, float]:
            read: list[int] = []
            taken = time_work(lambda: read.append(self._helpers.read(place, names)))
            check(read == [total], "the limit reads every byte")
            return taken

        sides_by_name = {"ister": scrub_all, "plain": read_all}
        for side in sides_by_name.values():
            side()  # has all objects in the page cache
        sides = self._take_turns(sides_by_name)
        ours, plain = sides["ister"], sides["plain"]
        self._run.add(
            f"scrub of {len(paths)} objects, 1 KiB messages",
            median(ours.rates(total / 1e6)),
            "MB/s",
            limit=median(plain.rates(total / 1e6)),
            limit_name="opendal's reading of the same objects from two processes in chunks of "
            "4 MiB, with crc32",
            at_least=_SCRUB_TARGET,
            on="ratio",
            note=self._describe(ours, plain, total),
        )

    def _settle(self, size_bytes: int) -> None:
        """Has nothing on its way to the disk, and room in memory for what will be written."""
        warm_page_cache(self._run, size_bytes)
        os.sync()

    def _describe(self, ours: _Side, plain: _Side, size_bytes: int) -> str:
        rates, limits = ours.rates(size_bytes / 1e6), plain.rates(size_bytes / 1e6)
        return (
            f"local[2], {size_bytes / 1e6:.0f} MB; median of {len(rates)} rounds, {spread(rates)} "
            f"(limit {spread(limits)}); processor time {median(ours.cpu):.2f} s "
            f"(limit {median(plain.cpu):.2f} s)"
        )

    # -- Parquet ----------------------------------------------------------------------------

    def measure_parquet(self, message_bytes: int) -> None:
        """`compact` and `export`, against Spark's writer."""
        source, topic = self._run.path("table"), _table_topic(message_bytes)
        with open_bucket(source) as history:
            opened = history.topic(topic)
            count = opened.tiered - opened.earliest
        total = sum(map(os.path.getsize, object_paths(source, topic)))
        written: dict[str, tuple[int, int]] = {}

        def turn(
            name: str, work: Callable[[str], object], files_of: Callable[[str], list[str]]
        ) -> tuple[float, float]:
            place = self._link(source)
            os.sync()
            taken = time_work(lambda: work(place))
            files = files_of(place)
            _check_files(files, count)
            written[name] = sum(map(os.path.getsize, files)), len(files)
            shutil.rmtree(place)
            return taken

        def write_with_spark(place: str) -> None:
            rows = self._spark.read.format("ister").options(config=place, topic=topic).load()
            rows.write.options(**_SPARK_WRITE).parquet(f"{place}/table")

        sides: dict[str, Callable[[], tuple[float, float]]] = {
            "compact": lambda: turn(
                "compact",
                lambda place: _check_done(self._compact(place, [topic])),
                lambda place: object_paths(place, topic, ".parquet"),
            ),
            "export": lambda: turn(
                "export",
                lambda place: _check_done(self._export(place, [topic], f"{place}/table")),
                lambda place: file_paths(f"{place}/table", ".parquet"),
            ),
            "spark": lambda: turn(
                "spark", write_with_spark, lambda place: file_paths(f"{place}/table", ".parquet")
            ),
        }
        for side in sides.values():
            side()  # compiles what the JVM compiles
        found = self._take_turns(sides)
        plain = found["spark"]
        for name, what in (("compact", "compact to Parquet"), ("export", "export to Parquet")):
            ours = found[name]
            shown = {
                side: f"{size / 1e6:.1f} MB in {files}" for side, (size, files) in written.items()
            }
            self._run.add(
                f"{what}, {_say(message_bytes)}",
                median(ours.rates(total / 1e6)),
                "MB/s",
                limit=median(plain.rates(total / 1e6)),
                limit_name="Spark: read.format('ister') and write.parquet of the same rows, zstd "
                f"of level {_ZSTD_LEVEL}",
                at_least=_PARQUET_TARGET,
                on="ratio",
                note=f"{self._describe(ours, plain, total)}; "
                f"{count / median(ours.seconds) / 1e6:.2f} M messages/s "
                f"(limit {count / median(plain.seconds) / 1e6:.2f}); files: {shown[name]} "
                f"(limit {shown['spark']})",
            )

    def count_commits(self) -> None:
        """Many topics in one table: how often a round commits."""
        place = self._link(self._run.path("many"))
        target = f"{place}/table"
        seconds, cpu = time_work(lambda: _check_done(self._export(place, None, target)))
        commits = len(file_paths(f"{target}/_ister/commits", ".json"))
        _check_done(self._export(place, None, target))
        again = len(file_paths(f"{target}/_ister/commits", ".json")) - commits
        shutil.rmtree(place)
        self._run.add(
            f"exports of {_EXPORTED_TOPICS} topics: commits",
            commits,
            "commits",
            limit=1,
            limit_name="one commit per table and round",
            at_most=1,
            note=f"local[2], {seconds:.2f} s, processor time {cpu:.2f} s; a second round without "
            f"new messages: {again}",
        )

    # -- memory -----------------------------------------------------------------------------

    def measure_memory(self) -> None:
        """How far driver and workers grow, with half of the topics and with all of them."""
        watch = MemoryWatch()
        halves = (self._topics[: len(self._topics) // 2], self._topics)
        found: dict[str, list[Growth]] = {}

        def measure(name: str, place: str, job: Callable[[str], JobReport]) -> None:
            grown = watch.measure(lambda: _check_done(job(place)))
            found.setdefault(name, []).append(grown)

        # One job after the other, those that take more later: what one leaves behind in a worker
        # counts for the next ones, too.
        places = [self._link(self._crowd) for _ in halves]
        for place, topics in zip(places, halves, strict=True):
            measure("tier", place, partial(_tier, self._spark, topics))
        for place, topics in zip(places, halves, strict=True):
            measure("scrub", place, partial(_scrub, self._spark, topics))
        for place, topics in zip(places, halves, strict=True):
            target = f"{place}/table"
            measure("export", place, partial(self._export, topics=topics, target=target))
        for place, topics in zip(places, halves, strict=True):
            measure("compact", place, partial(self._compact, topics=topics))
            shutil.rmtree(place)
        self._report_memory(found)

    def _report_memory(self, found: Mapping[str, Sequence[Growth]]) -> None:
        sizes = self._sizes
        half, whole = (
            f"{count * sizes.topic_bytes / MIB:.0f} MiB"
            for count in (sizes.topics // 2, sizes.topics)
        )
        for name, (small, large) in found.items():
            self._run.add(
                f"growth of a Python worker's resident memory, {name} of {whole}",
                large.worker_mib,
                "MiB",
                limit=small.worker_mib,
                limit_name=f"the same with {half}",
                at_most=_WORKER_GROWTH_TARGET_MIB,
                note=f"of the one that grew most, of {large.workers}, to the peak, from before the "
                "first of these jobs on, with libraries loaded",
            )
        each = ", ".join(
            f"{name} {small.driver_mib:.1f} and {large.driver_mib:.1f}"
            for name, (small, large) in found.items()
        )
        self._run.add(
            f"growth of the driver's resident memory, all four jobs of {whole}",
            max(large.driver_mib for _, large in found.values()),
            "MiB",
            limit=max(small.driver_mib for small, _ in found.values()),
            limit_name=f"the same with {half}",
            at_most=_DRIVER_GROWTH_TARGET_MIB,
            note=f"the Python process, to the peaks of: {each}; "
            "its JVM, with a heap of at most 2 GiB, has "
            f"{max(large.jvm_mib for _, large in found.values()):.0f} MiB",
        )


def _tier(spark: SparkSession, topics: Sequence[str], place: str) -> JobReport:
    return tier(spark, place, topics=topics)


def _scrub(spark: SparkSession, topics: Sequence[str], place: str) -> JobReport:
    return scrub(spark, place, topics=topics)


def _check_done(report: JobReport) -> list[dict[str, int]]:
    """What a job says of each topic.

    Raises:
        InvariantError: It failed, or found something wrong: its speed is worth nothing then.
    """
    if not report.ok:
        raise InvariantError(f"{report.job} failed: {report.errors[:1]}")
    return cast("list[dict[str, int]]", report.topics_as_json())


def _names(root: str, paths: Sequence[str]) -> list[str]:
    return [os.path.relpath(path, root) for path in paths]


def _check_files(paths: Sequence[str], count: int) -> None:
    """Makes sure that files have all rows, and are written as both sides are meant to.

    Raises:
        InvariantError: They are not.
    """
    rows = 0
    for path in paths:
        footer = pq.read_metadata(path)
        rows += footer.num_rows
        if not footer.num_row_groups:
            continue
        group = footer.row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
        payload = next(column for column in columns if column.path_in_schema == "payload")
        check(payload.compression == "ZSTD", f"{path} is compressed with {payload.compression}")
        check("DICTIONARY" not in " ".join(payload.encodings), f"{path} has a dictionary")
    check(rows == count, f"{rows} rows of {count} were written")


def main() -> int:
    """Runs the measurements; see the module header."""
    with results_output() as output:
        _be_spark(sys.argv[1], sys.argv[2], output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
