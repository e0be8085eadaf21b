"""What published figures depend on: how they are computed, and that like is compared with like."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import chain, jobs, spark, upload
from benchmarks.measurement import Run
from benchmarks.spark_sources import NullSource, make_rows
from ister.base.limits import KIB, MIB
from ister.errors import InvariantError, UnavailableError
from ister.spark import location
from ister.spark.jobs.job_report import JobReport
from ister.spark.source import IsterDataSource
from tests.support.cases import each

TOPIC = "/default/orders"


@pytest.fixture
def run(tmp_path):
    with Run.begin("example", str(tmp_path), is_quick=False) as run:
        yield run


def test_target_is_on_the_value_or_on_the_ratio(run):
    for target, met in [
        ({"at_least": 10}, True),
        ({"at_least": 10.1}, False),
        ({"at_most": 10}, True),
        ({"at_most": 9.9}, False),
        ({"at_least": 0.5, "on": "ratio"}, True),
        ({"at_least": 0.6, "on": "ratio"}, False),
        ({"at_most": 0.5, "on": "ratio"}, True),
        ({}, None),
    ]:
        run.add("x", 10, "s", limit=20, **target)
        result = run.results[-1]
        assert result.met is met, target
        assert result.ratio == 0.5, target


# -- one side and the other -------------------------------------------------------------------


def test_message_of_a_chain_that_is_another_one_is_noticed(tmp_path, monkeypatch):
    made = chain._payloads
    monkeypatch.setattr(chain, "_HISTORY_BYTES", 200 * MIB)
    monkeypatch.setattr(chain, "_LIVE_MESSAGES", 2000)
    monkeypatch.setattr(chain, "_ROUNDS", 1)
    monkeypatch.setattr(chain, "_payloads", lambda first, count: made(first + 1, count))
    with Run.begin("chain", str(tmp_path), is_quick=True) as run, pytest.raises(InvariantError):
        chain.run(run)


def test_copy_cuts_objects_as_ister_does(tmp_path, monkeypatch):
    settings = upload.UploaderConfig(stream_chunk_size=MIB, max_object_bytes=3 * MIB)
    monkeypatch.setattr(upload, "UploaderConfig", lambda: settings)
    (tmp_path / "files").mkdir()
    (tmp_path / "target").mkdir()
    whole = bytes(range(256)) * 30_000
    for number, part in enumerate((whole[: 5 * MIB], whole[5 * MIB :])):
        (tmp_path / "files" / f"wal.{number}.log").write_bytes(part)
    figures = upload._copy(str(tmp_path / "files"), str(tmp_path / "target"))
    copies = sorted((tmp_path / "target").iterdir())
    assert figures.size_bytes == len(whole)
    assert b"".join(path.read_bytes() for path in copies) == whole
    assert [path.stat().st_size for path in copies[:-1]] == [3 * MIB, 3 * MIB]


def test_null_source_has_the_shape_of_the_topic(tmp_path):
    spark._fill(str(tmp_path), TOPIC, 6 * MIB, KIB)
    options = {"config": str(tmp_path), "topic": TOPIC, "splitBytes": "2m"}
    plan = json.dumps(spark._plan(options))
    sources = [
        NullSource({"plan": plan, "message_bytes": str(KIB), "topic": TOPIC}),
        IsterDataSource(options),
    ]
    null, read = (source.reader(source.schema()) for source in sources)
    theirs, ours = null.partitions(), read.partitions()
    assert len(theirs) == len(ours) > 1
    for their, our in zip(theirs, ours, strict=True):
        for prebuilt, batch in zip(null.read(their), read.read(our), strict=True):
            assert prebuilt.schema.equals(batch.schema)
            assert prebuilt.num_rows == batch.num_rows
            # Offsets differ, and nothing else that has a size.
            assert prebuilt.nbytes == pytest.approx(batch.nbytes, rel=0.01)
    location._close_all()


def test_frames_are_all_decoded_whatever_a_chunk_cuts():
    chunks, count = spark._make_chunks(9 * MIB, make_rows(999, 100, topic=TOPIC))
    assert len(chunks) == 3
    assert spark._decode(chunks, count) > 0
    with pytest.raises(InvariantError):
        spark._decode(chunks[:-1], count)


@each(
    ("rows", "settings"),
    [(6, {}), (5, {"compression": "snappy"}), (5, {"use_dictionary": ["payload"]})],
)
def test_files_of_jobs_with_other_rows_or_another_coding_are_refused(tmp_path, rows, settings):
    path = str(tmp_path / "x.parquet")
    table = pa.table({"offset": range(5), "payload": [b"x" * 20] * 5})
    coding = {"compression": "zstd", "use_dictionary": False}
    pq.write_table(table, path, **coding)
    jobs._check_files([path], 5)
    pq.write_table(table, path, **(coding | settings))
    with pytest.raises(InvariantError):
        jobs._check_files([path], rows)


def test_speed_of_a_job_that_failed_counts_for_nothing():
    report = JobReport("tier", started_at=0, dry_run=False)
    report.add(TOPIC, bytes=7)
    assert jobs._check_done(report)[0]["bytes"] == 7
    report.fail(UnavailableError("gone"), TOPIC)
    with pytest.raises(InvariantError):
        jobs._check_done(report)


# -- the client of the broker's figures -------------------------------------------------------
