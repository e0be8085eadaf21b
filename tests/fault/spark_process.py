"""A Spark driver that does what it is told, one command after the other, until it is killed.

Run by `spark_child.py` as a process of its own, with the settings of its session as JSON in the
only argument. Commands come as one line of JSON each on standard input, whose end is the end:

    stream   options of source and sink, a checkpoint: with `now` until all is copied that is there
             at its start, else for so many `seconds` or `batches`, or for ever; with `again` it is
             started anew when it fails
    read     options: a batch read, whose rows go `into` a file of Arrow
    copy     options of source and sink: a batch read, written to a topic

It says, one line of JSON each:

    ready                 the session is there
    batch NUMBER          a micro-batch is done
    tasks NUMBER          so many tasks of the running stages are done
    done FIGURES          the command has ended well
    failed TEXT           it has not

A message that is copied carries the offset that it was read from as its attribute `source`.

A stream's sink takes two options of its own. `failpoints` arms the process that commits, and no
other. `broken` forgets which batch it writes: the tests have to catch that. A batch read takes
`pause`, the seconds that a task waits after each batch of rows, and `trace`, a file that it adds a
byte to before that.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ister.base import failpoints
from ister.spark import IsterDataSource
from ister.spark.batch import BatchReader
from ister.spark.options import ReadOptions, WriteOptions
from ister.spark.sink import StreamWriter

_POLL_SECONDS = 0.03
_TEXT_MAX = 20_000
_SLOW_STARTS_MAX = 20
_IS_SLOW = "Python worker failed to connect back"
"""What Spark says if a process that plans, or commits, takes more than ten seconds to start, as it
does on a busy machine. Nobody was killed, so the query is started again."""

_COPIED = ("payload", "publish_time", "producer_name", "routing_key")
_MARK = "map('source', cast(offset AS string)) AS attributes"


_OWN_OPTIONS = ("failpoints", "broken", "pause", "trace")


class ForgetfulWriter(StreamWriter):
    """What no sink may be: each commit is of another batch."""

    def _commit(self, messages, *, writer, batch):
        super()._commit(messages, writer=writer, batch=time.time_ns())


class SlowReader(BatchReader):
    """One whose tasks take their time, so that something can happen to them."""

    pause = 0.0
    trace = ""

    def read(self, partition):
        for rows in super().read(partition):
            yield rows
            with open(self.trace, "ab") as file:
                file.write(b".")
            time.sleep(self.pause)


class ArmedSource(IsterDataSource):
    """The data source, whose commits can be told where to die, and whose tasks to be slow."""

    @classmethod
    def name(cls):
        return "ister_armed"

    def __init__(self, options):
        given = {name.lower(): value for name, value in options.items()}
        self.own = {name: given.pop(name) for name in _OWN_OPTIONS if name in given}
        super().__init__(given)

    def reader(self, schema):
        reader = SlowReader(ReadOptions.parse(self.options, is_streaming=False), schema)
        reader.pause, reader.trace = float(self.own["pause"]), self.own["trace"]
        return reader

    def streamWriter(self, schema, overwrite):  # noqa: N802 - Spark's name
        # Spark uses a process again, also for a query that is told something else.
        failpoints.disarm()
        failpoints.arm_from_environment(self.own.get("failpoints", ""))
        kind = ForgetfulWriter if "broken" in self.own else StreamWriter
        options = WriteOptions.parse(self.options, is_streaming=True)
        return kind(options, schema, overwrite=overwrite)


class Driver:
    """The session, and where to say what has happened in it."""

    def __init__(self, spark: SparkSession, voice: int) -> None:
        self._spark = spark
        self._voice = voice
        self._lock = threading.Lock()
        self.batches = 0
        """How many the last stream has told of."""

    def say(self, kind: str, value: object = None) -> None:
        """One line, one write."""
        with self._lock:
            os.write(self._voice, (json.dumps([kind, value]) + "\n").encode())

    def obey(self, command: dict) -> None:
        try:
            figures = getattr(self, f"_{command.pop('do')}")(**command)
        except PySparkException as error:
            self.say("failed", str(error)[:_TEXT_MAX])
        else:
            self.say("done", figures)

    # -- commands -----------------------------------------------------------------------------

    def _stream(self, source, sink, checkpoint, now=False, seconds=None, batches=None, again=False):
        deadline = time.monotonic() + seconds if seconds is not None else float("inf")
        wanted = batches if batches is not None else float("inf")
        self.batches = failures = slow_starts = 0
        while True:
            rows = self._spark.readStream.format("ister").options(**source).load()
            writer = rows.selectExpr(*_COPIED, _MARK).writeStream.format("ister_armed")
            writer = writer.options(**sink).option("checkpointLocation", checkpoint)
            query = (writer.trigger(availableNow=True) if now else writer).start()
            try:
                self._watch(query, deadline, wanted)
            except PySparkException as error:
                if _IS_SLOW in str(error) and slow_starts < _SLOW_STARTS_MAX:
                    slow_starts += 1
                elif again:
                    failures += 1
                else:
                    raise
            else:
                return {"batches": self.batches, "failures": failures}
            finally:
                query.stop()

    def _watch(self, query, deadline: float, wanted: float) -> None:
        """Tells of batches until the query has ended, time is up, or there were enough of them."""
        last = None
        has_ended = False
        while not has_ended and time.monotonic() < deadline and self.batches < wanted:
            has_ended = query.awaitTermination(_POLL_SECONDS)
            progress = query.lastProgress
            if progress and progress["batchId"] != last and progress["numInputRows"]:
                last = progress["batchId"]
                self.batches += 1
                self.say("batch", last)

    def _read(self, options, into):
        rows = self._load(options)
        with self._told_of_tasks():
            table = rows.toArrow()
        with pa.OSFile(into, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return {"rows": table.num_rows}

    def _copy(self, source, sink):
        rows = self._load(source).selectExpr(*_COPIED, _MARK)
        with self._told_of_tasks():
            rows.write.format("ister").options(**sink).mode("append").save()
        return {}

    def _load(self, options):
        kind = "ister_armed" if "pause" in options else "ister"
        return self._spark.read.format(kind).options(**options).load()

    def _told_of_tasks(self) -> TaskTeller:
        return TaskTeller(self._spark, self.say)


class TaskTeller:
    """Says how many tasks are done while a block runs."""

    def __init__(self, spark: SparkSession, say) -> None:
        self._tracker = spark.sparkContext.statusTracker()
        self._say = say
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last = 0
        while not self._is_over.wait(_POLL_SECONDS):
            stages = map(self._tracker.getStageInfo, self._tracker.getActiveStageIds())
            done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
            if done != last:
                last = done
                self._say("tasks", done)


def main() -> int:
    # Java has this process's standard output as well, and is not part of the conversation.
    voice = os.dup(1)
    os.dup2(2, 1)
    builder = SparkSession.builder
    for name, value in json.loads(sys.argv[1]).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(ArmedSource)
    driver = Driver(spark, voice)
    driver.say("ready")
    for line in sys.stdin:
        driver.obey(json.loads(line))
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
