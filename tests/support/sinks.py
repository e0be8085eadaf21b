"""The stream sink as Spark uses it, without Spark: tasks, commits, and where the topics are."""

import contextlib
import inspect
import itertools
from contextlib import contextmanager
from functools import partial

import pyarrow as pa
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from ister.base import failpoints
from ister.spark import location, sink
from ister.spark.options import WriteOptions
from ister.spark.sink import StreamWriter
from tests.servers.flight import FlightTopics
from tests.support.cases import case
from tests.support.machine import payloads
from tests.support.streams import A, Home
from tests.support.tier_checks import memory_directory

QUERY = "5e6a3f0e-3a58-4b1c-9d67-2a4f8b6a1c11"
OTHER = "0b7c1f9d-6f0a-4c57-8b0e-1d2e3f4a5b6c"

PLAIN = StructType([StructField("payload", BinaryType())])
BY_TOPIC = StructType([StructField("topic", StringType()), StructField("payload", BinaryType())])


class CrashError(Exception):
    """Where a test wants a commit to end."""


class FakeTask:
    """What Spark tells a task about itself."""

    def __init__(self, partition, query, batch):
        self.partition = partition
        self._properties = {"sql.streaming.queryId": query, "streaming.sql.batchId": str(batch)}

    def partitionId(self):  # noqa: N802 - here and below: Spark's names
        return self.partition

    def getLocalProperty(self, name):  # noqa: N802
        return self._properties.get(name)


class Sink:
    """A query with this sink, as Spark runs it."""

    def __init__(self, monkeypatch, options, *, query=QUERY, schema=PLAIN):
        self._monkeypatch = monkeypatch
        self._options = options
        self._query = query
        self._schema = schema

    def writer(self):
        """Spark makes a new one for the tasks and another one for the commit of every batch."""
        options = WriteOptions.parse(self._options, is_streaming=True)
        return StreamWriter(options, self._schema, overwrite=False)

    def write(self, batch, partition, *blocks):
        """One task: its message."""
        task = FakeTask(partition, self._query, batch)
        with self._monkeypatch.context() as patch:
            patch.setattr(sink, "TaskContext", type("Context", (), {"get": lambda: task}))
            return self.writer().write(map(self._block, blocks))

    def _block(self, rows):
        if callable(rows):
            rows = rows()
        if self._schema is PLAIN:
            return pa.record_batch({"payload": pa.array(rows, pa.binary())})
        topics, texts = zip(*rows, strict=True)
        return pa.record_batch(
            {"topic": pa.array(topics, pa.string()), "payload": pa.array(texts, pa.binary())}
        )

    def stage(self, batch, parts):
        """All tasks of a batch: rows by partition."""
        return [self.write(batch, number, rows) for number, rows in enumerate(parts)]

    def commit(self, messages, batch):
        """As Spark does it: an error is followed by `abort` with all messages."""
        try:
            self.writer().commit(messages, batch)
        except BaseException:
            self.writer().abort(messages, batch)
            raise

    def run(self, batch, parts):
        """A whole batch."""
        self.commit(self.stage(batch, parts), batch)


class Here:
    """Topics that the sink writes to, and how they are read: by themselves."""

    def __init__(self, home, log=None):
        self._home = home
        self._log = log

    def texts(self, name=A):
        """The payloads in a topic."""
        if self._log is not None:
            return payloads(self._log.topic(name).read())
        return payloads(self._home.read(name))

    def opened(self):
        """The log, open for a moment unless it is already."""
        return contextlib.nullcontext(self._log) if self._log is not None else self._home.open()

    def topics(self):
        if self._log is not None:
            return self._log.topics()
        with self._home.open() as log:
            return log.topics()


@contextmanager
def place_for(where, home):
    """Options of the sink for a place, and what reads its topics."""
    if where == "directory":
        yield {"config": home.config}, Here(home)
        return
    with home.open() as log, FlightTopics(log) as server:
        yield {"broker": server.address, "config": home.remote_config()}, Here(home, log)


def in_both_places(names=(), cases=((),), *, is_partitioned=False):
    """Runs a test for each case, with new topics in a directory, and behind a broker.

    The test may take `make`, which makes sinks that write to topic A unless told, `there`, `home`,
    and `names`.
    """

    def decorate(test):
        wanted = inspect.signature(test).parameters

        def run(monkeypatch):
            for kind, values in itertools.product(("directory", "broker"), cases):
                with case(kind, *values), memory_directory() as directory:
                    home = Home(directory)
                    with place_for(kind, home) as (options, there):
                        if is_partitioned:
                            make_partitions(there)
                        given = {
                            "make": partial(make_sink, monkeypatch, options),
                            "there": there,
                            "home": home,
                            **dict(zip(names, values, strict=True)),
                        }
                        test(**{name: given[name] for name in wanted})
                failpoints.disarm()
                location._close_all()

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate


def make_sink(monkeypatch, options, *, query=QUERY, schema=PLAIN, **more):
    given = {**options, **more}
    if schema is PLAIN:
        given.setdefault("topic", A)
    return Sink(monkeypatch, given, query=query, schema=schema)


def crash_at(point, *, visit=1, error=CrashError):
    """Raises at a point, once."""
    visits = 0

    def act():
        nonlocal visits
        visits += 1
        if visits == visit:
            raise error(point)

    failpoints.arm(point, act)


IN_PARTS = [f"{A}-part-{number}" for number in range(3)]


def make_partitions(there):
    """Gives topic A three partitions."""
    with there.opened() as log:
        for name in IN_PARTS:
            log.topic(name, create=True)
