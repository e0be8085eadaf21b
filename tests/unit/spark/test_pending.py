"""A stream that is far behind: a trigger reads what its batch needs, however much is pending.

Counts requests to the metadata store and descriptors, never seconds.
"""

import pytest

from benchmarks.measurement import open_tiered_log
from benchmarks.spark_pending import describe_objects, run_triggers
from ister.metadata.sqlite import SqliteMetadata
from ister.spark import location
from ister.spark.compat import ReadAllAvailable
from tests.servers.flight import FlightTopics
from tests.support.cluster import enter
from tests.support.streams import Home, a_reader, publish

pytestmark = pytest.mark.usefixtures("quick")

A = "/default/a"


@pytest.fixture
def reads(monkeypatch):
    """Requests, and the keys that they returned: one entry each."""
    seen = []
    real = SqliteMetadata.range

    def counted(self, *arguments, **named):
        found = real(self, *arguments, **named)
        seen.append(len([one for one in found if "/objects/" in one.key]))
        return found

    monkeypatch.setattr(SqliteMetadata, "range", counted)
    return seen


def make_topics(directory, sizes):
    directory.mkdir(exist_ok=True)
    settings = {
        "uploader": {"engine": "none"},
        "cloud": {"root": str(directory / "objects")},
        "metadata": {"path": str(directory / "metadata.db")},
    }
    with open_tiered_log(str(directory), settings) as log:
        for name in sizes:
            log.topic(name, create=True)
    for name, count in sizes.items():
        describe_objects(str(directory), name, count)


def test_trigger_reads_as_much_with_4000_pending_objects_as_with_400(tmp_path, reads):
    counted = {}
    for count in (400, 4000):
        make_topics(tmp_path / str(count), {A: count})
        reads.clear()
        run_triggers(str(tmp_path / str(count)), A, triggers=5)
        counted[count] = len(reads), sum(reads)
    (few_requests, few_keys), (many_requests, many_keys) = counted[400], counted[4000]
    # A search for the newest object, or for the one that a batch starts in, takes a step more.
    assert many_requests <= few_requests + 10
    assert many_keys <= 1.5 * few_keys
    # A batch has ten objects; they are read to find its end, and to plan it.
    assert many_keys <= 5 * 100


@pytest.mark.parametrize("has_files", [True, False])
def test_look_at_200_topics_takes_as_many_requests_as_at_20(tmp_path, monkeypatch, has_files):
    """Each topic took five requests, one after the other, and a call to its broker."""
    counted = {}
    for count in (20, 200):
        path = tmp_path / str(count)
        path.mkdir()
        home = Home(path)
        names = [f"/default/t{number:03}" for number in range(count)]
        with home.open() as log, FlightTopics(log) as server:
            enter(log, server.address)
            for number, name in enumerate(names):
                topic = log.topic(name, create=True)
                publish(topic, 2)
                if number % 2:
                    topic.upload()
                    publish(topic, 2)
            config = home.config if has_files else home.remote_config()
            reader = a_reader(home, config=config, topicPattern="/default/t.*")
            start = reader.initialOffset()
            publish(log.topic(names[-1]), 1)
            with monkeypatch.context() as patched:
                calls = []
                for method in ("get", "get_many", "range"):
                    patched.setattr(SqliteMetadata, method, noted(method, calls))
                asked = server.calls["watermarks"]
                end = reader.latestOffset(start, ReadAllAvailable())
                parts = reader.partitions(start, end)
                counted[count] = len(calls), server.calls["watermarks"] - asked
        assert [part.topic for part in parts[0].partition.slices] == [names[-1]]
        location._close_all()
    # The list of brokers is read once a second.
    assert counted[200][0] <= counted[20][0] + 3
    assert counted[200][1] == counted[20][1]


def noted(method, calls):
    real = getattr(SqliteMetadata, method)

    def call(self, *arguments, **named):
        calls.append(method)
        return real(self, *arguments, **named)

    return call
