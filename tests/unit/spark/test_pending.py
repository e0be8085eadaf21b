"""A stream that is far behind: a trigger reads what its batch needs, however much is pending.

Counts requests to the metadata store and descriptors, never seconds.
"""

import pytest

from benchmarks.measurement import open_tiered_log
from benchmarks.spark_pending import describe_objects, run_triggers
from ister.metadata.sqlite import SqliteMetadata
from ister.spark import location, stream

A = "/default/a"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(stream, "_POLL_SECONDS", 0.0)
    yield
    location._close_all()


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


def test_trigger_over_many_topics_reads_a_few_objects_of_each(tmp_path, reads):
    names = [f"/default/t{number}" for number in range(12)]
    counted = {}
    for count in (20, 300):
        make_topics(tmp_path / str(count), dict.fromkeys(names, count))
        reads.clear()
        run_triggers(str(tmp_path / str(count)), ",".join(names), triggers=2)
        counted[count] = len(reads), sum(reads)
    assert counted[300][0] <= 1.2 * counted[20][0]
    assert counted[300][1] <= 1.5 * counted[20][1]
