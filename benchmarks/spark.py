"""`benchmarks spark`: topics as Arrow, as Spark tables and as Spark's sink.

    in this process      frames ─► decoder ─► Arrow; history ─► Arrow; triggers of a stream
    in processes of      the compiled loops from nothing, and from their cache
    their own            Spark, local[2]: scans, writes, memory of its Python workers

Every figure has its limit in the same run: a decoder, one crc32 and one copy of the same bytes; a
scan, a source that hands over prebuilt batches of the same shape; a write, Spark's own Parquet
writer with the same rows. Sides take turns, in reverse order in every other round; with Spark, the
ratio is the median of the rounds' ratios. Everything is in the page cache, and what was written is
on the disk before the next turn.

Spark runs in a process of its own (`python -m benchmarks.spark spark DIRECTORY SIZES`), so that
no session of this one is touched and its JVM ends with it; see `spark_process`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

from benchmarks.measurement import (
    COPY_BYTES,
    Result,
    Run,
    file_paths,
    median,
    median_ratio,
    open_tiered_log,
    spread,
    stopwatch,
    take_turns,
)
from benchmarks.replay import read_bare
from ister import kernels
from ister.api import open_bucket
from ister.base.extras import missing_extra
from ister.base.limits import KIB, MIB
from ister.base.model import Codec
from ister.errors import UnavailableError, check
from ister.format.crc import crc32

try:
    from pyspark.sql import SparkSession

    from benchmarks.spark_pending import OBJECTS, describe_objects, measure_triggers
    from benchmarks.spark_process import (
        check_java,
        hand_over,
        open_session,
        results_output,
        run_process,
        time_work,
    )
    from benchmarks.spark_sources import NullSource, WatchedSource, make_rows, read_notes
    from benchmarks.spark_topics import measure_topics
    from ister.bucket.chunks import ObjectPart
    from ister.format.arrow.decode import ColumnarDecoder, FrameFeed
    from ister.format.arrow.encode import EncodedFrames, encode_frames
    from ister.spark.batch import BatchReader, PlannedPartition
    from ister.spark.options import ReadOptions
    from ister.spark.rows import row_schema
    from ister.spark.source import IsterDataSource
except ImportError as error:
    raise missing_extra("benchmarks spark", "spark", error) from error

if TYPE_CHECKING:
    import pyarrow as pa

_MESSAGE_SIZES: Final = (100, KIB)
_TOPIC: Final = "/default/orders"
_ENVELOPE_BYTES: Final = 80
"""What a frame has besides its payload, about."""
_ROUNDS: Final = 5
_SPARK_ROUNDS: Final = 11
"""More with Spark, whose rounds differ by a third even on an idle machine."""
_STARTS: Final = 3
_FRAMES_BYTES: Final = 128 * MIB
_TOPIC_BYTES: Final = 384 * MIB
_WRITTEN_BYTES: Final = 256 * MIB
_OBJECT_BYTES: Final = (64 * MIB, 512 * MIB)
"""Of an object that one task reads, and of one that it reads in the same memory."""
_DECODE_TARGET: Final = 6e6
_DECODE_MB_TARGET: Final = 2000.0
_SCAN_TARGET: Final = 0.9
_WRITE_TARGET: Final = 0.5
_GROWTH_TARGET_MIB: Final = 200.0
_WRITE_COLUMNS: Final = "publish_time,producer_name,payload"
_WRITE_PARTITIONS: Final = 4
_TOPICS_SHARE: Final = 8
"""How much less is written into many topics: most of that time is per topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What the process with Spark is told."""

    rounds: int
    written_bytes: int
    object_bytes: tuple[int, ...]


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    check_java("benchmarks spark")
    topic_bytes = run.scaled(_TOPIC_BYTES)
    sizes = _Sizes(
        rounds=_ROUNDS if run.is_quick else _SPARK_ROUNDS,
        written_bytes=run.scaled(_WRITTEN_BYTES),
        object_bytes=tuple(run.scaled(size) for size in _OBJECT_BYTES),
    )
    topics = len(_MESSAGE_SIZES) * topic_bytes
    run.need_disk(topics + 2 * sum(sizes.object_bytes) + 5 * sizes.written_bytes)
    # Refuses to measure the loops in Python, which nobody has set targets for.
    ColumnarDecoder(_TOPIC, Codec.BINCODE2, is_compiled=True)
    for message_bytes in _MESSAGE_SIZES:
        _measure_frames(run, message_bytes)
    _measure_rich_frames(run)
    _measure_start(run)
    run.say("writing topics")
    for message_bytes in _MESSAGE_SIZES:
        _fill(run.directory, _topic_of(message_bytes), topic_bytes, message_bytes)
    for size in sizes.object_bytes:
        _fill(run.directory, _object_topic(size), size, KIB, max_object_bytes=2 * size)
    for message_bytes in _MESSAGE_SIZES:
        _measure_history(run, message_bytes)
    _measure_triggers(run)
    run.say("starting Spark")
    for result in _run_spark(run, sizes):
        run.results.append(result)
        run.say(f"{result.name}: {result.value:.4g} {result.unit}")


def _say(message_bytes: int) -> str:
    return "1 KiB messages" if message_bytes == KIB else f"{message_bytes} B messages"


def _topic_of(message_bytes: int) -> str:
    return f"{_TOPIC}-{message_bytes}"


def _object_topic(size_bytes: int) -> str:
    return f"{_TOPIC}-object-{size_bytes}"


def _rows_per_batch(message_bytes: int) -> int:
    """As many as Ister decodes at once."""
    return COPY_BYTES // (message_bytes + _ENVELOPE_BYTES)


# -- frames and columns ---------------------------------------------------------------------


def _measure_frames(run: Run, message_bytes: int) -> None:
    """How fast frames become columns, and columns frames."""
    rows = make_rows(_rows_per_batch(message_bytes), message_bytes, topic=_TOPIC)
    chunks, count = _make_chunks(run.scaled(_FRAMES_BYTES, at_least=2 * COPY_BYTES), rows)
    total = sum(map(len, chunks))
    batches = count // rows.num_rows
    seconds = take_turns(
        _ROUNDS,
        {
            "plain": lambda: _crc_and_copy(chunks),
            "decode": lambda: _decode(chunks, count),
            "encode": lambda: _encode(rows, batches),
        },
    )
    limit_name = "one crc32 and one copy of the same bytes, in chunks of 4 MiB"
    is_large = message_bytes == KIB
    # The target is in messages where they are small, and in bytes where they are not.
    unit, amount = ("MB/s", total / 1e6) if is_large else ("messages/s", float(count))
    target = _DECODE_MB_TARGET if is_large else _DECODE_TARGET
    rates = [amount / elapsed for elapsed in seconds["decode"]]
    run.add(
        f"decode to Arrow, {_say(message_bytes)}, one core",
        median(rates),
        unit,
        limit=amount / median(seconds["plain"]),
        limit_name=limit_name,
        at_least=target,
        note=f"processor time; 9 columns, {total / count:.0f} bytes per frame; median of {_ROUNDS} "
        f"rounds, {spread(rates)}; {count / median(seconds['decode']) / 1e6:.2f} M messages/s, "
        f"{total / 1e6 / median(seconds['decode']):.0f} MB/s",
    )
    rates = [amount / elapsed for elapsed in seconds["encode"]]
    run.add(
        f"encode from Arrow, {_say(message_bytes)}, one core",
        median(rates),
        unit,
        limit=amount / median(seconds["plain"]),
        limit_name=limit_name,
        note=f"processor time; median of {_ROUNDS} rounds, {spread(rates)}",
    )


def _measure_rich_frames(run: Run) -> None:
    """The same with fields that many messages do not have."""
    message_bytes = _MESSAGE_SIZES[0]
    rows = make_rows(_rows_per_batch(message_bytes), message_bytes, topic=_TOPIC, is_rich=True)
    chunks, count = _make_chunks(run.scaled(_FRAMES_BYTES, at_least=2 * COPY_BYTES), rows)
    seconds = take_turns(
        _ROUNDS, {"plain": lambda: _crc_and_copy(chunks), "decode": lambda: _decode(chunks, count)}
    )
    run.add(
        f"decode to Arrow, {_say(message_bytes)} with a routing key and two attributes, one core",
        count / median(seconds["decode"]),
        "messages/s",
        limit=count / median(seconds["plain"]),
        limit_name="one crc32 and one copy of the same bytes, in chunks of 4 MiB",
    )


def _make_chunks(size_bytes: int, rows: pa.RecordBatch) -> tuple[list[bytes], int]:
    """Frames as they come from a bucket, and how many."""
    frames = bytearray()
    count = 0
    while len(frames) < size_bytes:
        for part in _encode_batch(rows, count):
            frames += part.data
        count += rows.num_rows
    view = memoryview(frames)
    return [bytes(view[at : at + COPY_BYTES]) for at in range(0, len(frames), COPY_BYTES)], count


def _encode_batch(rows: pa.RecordBatch, first_offset: int) -> list[EncodedFrames]:
    return encode_frames(
        rows,
        topic=_TOPIC,
        codec=Codec.BINCODE2,
        first_offset=first_offset,
        now_ms=0,
        payload_bytes_max=MIB,
    )


def _encode(rows: pa.RecordBatch, batches: int) -> float:
    elapsed = _core_stopwatch()
    count = 0
    for number in range(batches):
        count += sum(part.count for part in _encode_batch(rows, number * rows.num_rows))
    seconds = elapsed()
    check(count == batches * rows.num_rows, "every row is encoded")
    return seconds


def _decode(chunks: Sequence[bytes], expected: int) -> float:
    decoder = ColumnarDecoder(_TOPIC, Codec.BINCODE2, is_compiled=True)
    feed = FrameFeed(decoder, expected_offset=0)
    elapsed = _core_stopwatch()
    count = 0
    for chunk in chunks:
        for batch in feed.feed(chunk):
            count += batch.num_rows
    seconds = elapsed()
    check(count == expected and feed.corrupt is None, "every frame is decoded")
    return seconds


def _core_stopwatch() -> Callable[[], float]:
    """Seconds of one core, which other processes do not lengthen: all of this is one thread's."""
    started = time.thread_time()
    return lambda: time.thread_time() - started


def _crc_and_copy(chunks: Sequence[bytes]) -> float:
    elapsed = _core_stopwatch()
    for chunk in chunks:
        crc32(chunk)
        bytearray(chunk)
    return elapsed()


# -- the compiled loops ---------------------------------------------------------------------


def _measure_start(run: Run) -> None:
    """How long it takes in a new process until the loops are there."""
    cache = run.path("numba-cache")
    first = _start_child("start", cache=cache)
    seconds = take_turns(
        _STARTS,
        {
            "numba": lambda: _start_child("numba", cache=cache),
            "start": lambda: _start_child("start", cache=cache),
        },
    )
    limit = median(seconds["numba"])
    for name, value in (("the first on a machine", first), ("cached", median(seconds["start"]))):
        run.add(
            f"start of the compiled loops, {name}",
            value,
            "s",
            limit=limit,
            limit_name="importing numba alone",
            note="processor time, in a new process, to the first batch encoded and decoded",
        )


def _start_child(side: str, *, cache: str) -> float:
    """The seconds of processor time that a new process needs for something."""
    child = subprocess.run(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", "benchmarks.spark", side],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, kernels.CACHE_VARIABLE: cache},
    )
    if child.returncode != 0:
        raise UnavailableError(f"the process for {side} failed")
    return float(child.stdout)


def _start_loops() -> float:
    rows = make_rows(1, 1, topic=_TOPIC)
    started = time.process_time()
    kernels.load()
    (frames,) = _encode_batch(rows, 0)
    _decode([frames.data], 1)
    return time.process_time() - started


def _import_numba() -> float:
    started = time.process_time()
    import numba  # noqa: F401, PLC0415 - how long this takes is the question

    return time.process_time() - started


# -- the topics -----------------------------------------------------------------------------


def _fill(
    directory: str,
    name: str,
    size_bytes: int,
    message_bytes: int,
    *,
    max_object_bytes: int | None = None,
) -> None:
    """Makes a topic whose messages are in the bucket alone."""
    uploader: dict[str, Any] = {"engine": "none"}
    if max_object_bytes is not None:
        uploader["max_object_bytes"] = max_object_bytes
    # What a path as the only setting means, so that readers need no more.
    cloud = {"root": os.path.join(directory, "objects")}
    metadata = {"path": os.path.join(directory, "metadata.db")}
    settings = {"ack": "memory", "uploader": uploader, "cloud": cloud, "metadata": metadata}
    with open_tiered_log(directory, settings) as log:
        topic = log.topic(name, create=True)
        rows = make_rows(_rows_per_batch(message_bytes), message_bytes, topic=_TOPIC)
        for _ in range(-(-size_bytes // COPY_BYTES)):
            topic.append_arrow(rows)
        log.seal(name)


def _object_paths(directory: str, topic: str) -> list[str]:
    return file_paths(os.path.join(directory, "objects", "storage", "topics") + topic, ".dnb1")


def _measure_history(run: Run, message_bytes: int) -> None:
    """The bucket as Arrow, without Spark."""
    name = _topic_of(message_bytes)
    paths = _object_paths(run.directory, name)
    total = sum(map(os.path.getsize, paths))
    with open_bucket(run.directory) as history:
        topic = history.topic(name)
        count = topic.tiered - topic.earliest

        def read_arrow() -> float:
            elapsed = stopwatch()
            rows = sum(batch.num_rows for batch in topic.read_arrow())
            seconds = elapsed()
            check(rows == count, "every message is read")
            return seconds

        seconds = take_turns(_ROUNDS, {"plain": lambda: _read_and_crc(paths), "arrow": read_arrow})
    rates = [total / 1e6 / elapsed for elapsed in seconds["arrow"]]
    run.add(
        f"history as Arrow, {_say(message_bytes)}",
        median(rates),
        "MB/s",
        limit=total / 1e6 / median(seconds["plain"]),
        limit_name="reading the same files in chunks of 4 MiB, with crc32",
        note=f"{total / 1e6:.0f} MB in {len(paths)} objects in a directory, median of {_ROUNDS} "
        f"rounds, {spread(rates)}; {count / median(seconds['arrow']) / 1e6:.2f} M messages/s",
    )


def _measure_triggers(run: Run) -> None:
    """A stream that is far behind; the objects are in the metadata store alone."""
    directory = run.path("pending")
    os.mkdir(directory)
    topics = {count: f"{_TOPIC}-pending-{count}" for count in OBJECTS}
    for count, name in topics.items():
        _fill(directory, name, 0, KIB)
        describe_objects(directory, name, count)
    measure_triggers(run, directory, topics)


def _read_and_crc(paths: Sequence[str]) -> float:
    elapsed = stopwatch()
    read_bare(paths)
    return elapsed()


# -- the process with Spark -----------------------------------------------------------------


def _run_spark(run: Run, sizes: _Sizes) -> Iterator[Result]:
    """The results of a process with Spark, as they come; as `run_process`."""
    return run_process(run, "benchmarks.spark", "spark", run.directory, json.dumps(asdict(sizes)))


def _be_spark(directory: str, told: str, output: TextIO) -> None:
    """What the process with Spark does."""
    sizes = _Sizes(**json.loads(told))
    run = Run("spark", directory, is_quick=False, progress=False)
    report = run.path("report")
    os.mkdir(report)
    with open_session("benchmarks spark", directory) as spark:
        spark.dataSource.register(NullSource)
        spark.dataSource.register(WatchedSource)
        measurements: list[Callable[[], None]] = [
            # First: memory that other tasks have left behind would hide growth.
            lambda: _measure_memory(run, spark, sizes, report),
            *(lambda size=size: _measure_scan(run, spark, sizes, size) for size in _MESSAGE_SIZES),
            *(
                lambda size=size: _measure_write(run, spark, sizes, size, report)
                for size in _MESSAGE_SIZES
            ),
            lambda: measure_topics(
                run,
                spark,
                rounds=sizes.rounds,
                written_bytes=sizes.written_bytes // _TOPICS_SHARE,
                report=report,
            ),
        ]
        for measure in measurements:
            measure()
            hand_over(run, output)


# -- reading with Spark ---------------------------------------------------------------------


def _measure_scan(run: Run, spark: SparkSession, sizes: _Sizes, message_bytes: int) -> None:
    """A whole topic, against rows that are there already."""
    name = _topic_of(message_bytes)
    options = {"config": run.directory, "topic": name}
    plan = _plan(options)
    count = sum(map(sum, plan))
    null = {"plan": json.dumps(plan), "message_bytes": str(message_bytes), "topic": name}
    cpu: dict[str, list[float]] = {"ister": [], "null": []}

    def scan(side: str, source: str, given: Mapping[str, str]) -> float:
        def read() -> None:
            rows = spark.read.format(source).options(**given).load()
            rows.write.format("noop").mode("overwrite").save()

        seconds, used = time_work(read)
        cpu[side].append(used)
        return seconds

    sides = {
        "ister": lambda: scan("ister", "ister", options),
        "null": lambda: scan("null", NullSource.name(), null),
    }
    take_turns(1, sides)  # compiles what the JVM compiles
    cpu = {"ister": [], "null": []}
    seconds = take_turns(sizes.rounds, sides)
    rates = [count / elapsed for elapsed in seconds["ister"]]
    limits = [count / elapsed for elapsed in seconds["null"]]
    total = sum(map(os.path.getsize, _object_paths(run.directory, name)))
    run.add(
        f"scan with Spark, {_say(message_bytes)}",
        median(rates),
        "messages/s",
        limit=median(limits),
        limit_name="a source that yields prebuilt batches of the same shape",
        at_least=_SCAN_TARGET,
        on="ratio",
        ratio=median_ratio(rates, limits),
        note=f"local[2] into noop, {count} messages in {len(plan)} partitions, "
        f"{total / 1e6 / median(seconds['ister']):.0f} MB/s of objects; median of {sizes.rounds} "
        f"rounds, {spread(rates)} (limit {spread(limits)}); processor time "
        f"{median(cpu['ister']):.2f} s (limit {median(cpu['null']):.2f} s)",
    )


def _reader_of(options: Mapping[str, str]) -> BatchReader:
    return IsterDataSource(dict(options)).reader(
        row_schema(ReadOptions.parse(options, is_streaming=False).columns)
    )


def _plan(options: Mapping[str, str]) -> list[list[int]]:
    """How many rows there are in each batch of each partition of a scan."""
    reader = _reader_of(options)
    return [[batch.num_rows for batch in reader.read(part)] for part in reader.partitions()]


# -- writing with Spark ---------------------------------------------------------------------


def _measure_write(
    run: Run, spark: SparkSession, sizes: _Sizes, message_bytes: int, report: str
) -> None:
    """Rows into a new topic, against the same rows into Parquet."""
    batch = _rows_per_batch(message_bytes)
    batches = max(1, sizes.written_bytes // COPY_BYTES // _WRITE_PARTITIONS)
    count = _WRITE_PARTITIONS * batches * batch
    options = {
        "plan": json.dumps([[batch] * batches] * _WRITE_PARTITIONS),
        "message_bytes": str(message_bytes),
        "topic": _TOPIC,
        "columns": _WRITE_COLUMNS,
    }
    rows = spark.read.format(NullSource.name()).options(**options).load()
    target = run.path("written")
    cpu: dict[str, list[float]] = {"ister": [], "parquet": []}

    def write(side: str, save: Callable[[], None]) -> float:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        seconds, used = time_work(save)
        cpu[side].append(used)
        return seconds

    def to_topic() -> None:
        writer = rows.write.format(WatchedSource.name()).mode("append")
        writer.options(config=target, topic=_TOPIC, report=report).save()

    sides = {
        "ister": lambda: write("ister", to_topic),
        "parquet": lambda: write("parquet", lambda: rows.write.parquet(target)),
    }
    take_turns(1, sides)  # compiles what the JVM compiles
    for what in ("write", "commit"):
        read_notes(report, what)
    cpu = {"ister": [], "parquet": []}
    seconds = take_turns(sizes.rounds, sides)
    shutil.rmtree(target)
    staging = [note["seconds"] - note["waiting_seconds"] for note in read_notes(report, "write")]
    commits = [note["seconds"] for note in read_notes(report, "commit")]
    check(len(commits) == sizes.rounds, "every write is committed once")
    rates = [count / elapsed for elapsed in seconds["ister"]]
    limits = [count / elapsed for elapsed in seconds["parquet"]]
    run.add(
        f"write with Spark, {_say(message_bytes)}",
        median(rates),
        "messages/s",
        limit=median(limits),
        limit_name="the same rows into Parquet by Spark's writer, snappy",
        at_least=_WRITE_TARGET,
        on="ratio",
        ratio=median_ratio(rates, limits),
        note=f"local[2], {count} rows in {_WRITE_PARTITIONS} partitions, "
        f"{count * message_bytes / 1e6 / median(seconds['ister']):.0f} MB/s of payloads; median "
        f"of {sizes.rounds} rounds, {spread(rates)} (limit {spread(limits)}); processor time "
        f"{median(cpu['ister']):.2f} s (limit {median(cpu['parquet']):.2f} s); of "
        f"{median(seconds['ister']):.2f} s the commit has {median(commits):.2f} s, staging "
        f"{sum(staging) / sizes.rounds:.2f} s over all tasks",
    )


# -- memory ---------------------------------------------------------------------------------


def _measure_memory(run: Run, spark: SparkSession, sizes: _Sizes, report: str) -> None:
    """How far a Python worker grows that reads one object whole, a small and a large one."""
    growth: list[float] = []
    for size in sizes.object_bytes:
        options = {"config": run.directory, "topic": _object_topic(size), "splitBytes": "1t"}
        _check_one_object(options)
        rows = spark.read.format(WatchedSource.name()).options(**options, report=report).load()
        rows.write.format("noop").mode("overwrite").save()
        (note,) = read_notes(report, "read")
        growth.append(note["growth_mib"])
    small, large = (size / MIB for size in sizes.object_bytes)
    run.add(
        f"growth of a Python worker's resident memory, object of {large:.0f} MiB in one task",
        growth[1],
        "MiB",
        limit=growth[0],
        limit_name=f"the same with an object of {small:.0f} MiB",
        at_most=_GROWTH_TARGET_MIB,
        note="from the worker's first task on, with libraries loaded, to the peak",
    )


def _check_one_object(options: Mapping[str, str]) -> None:
    parts = _reader_of(options).partitions()
    check(
        len(parts) == 1
        and isinstance(parts[0], PlannedPartition)
        and [type(part) for part in parts[0].partition.slices] == [ObjectPart],
        "one task reads one object",
    )


def main() -> int:
    """Does what a side does; see the module header."""
    side, *arguments = sys.argv[1:]
    if side == "spark":
        with results_output() as output:
            _be_spark(arguments[0], arguments[1], output)
    else:
        print({"start": _start_loops, "numba": _import_numba}[side]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
