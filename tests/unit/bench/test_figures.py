"""What published figures depend on: how they are computed, and that like is compared with like."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import chain, http2_client, jobs, spark, upload
from benchmarks.broker_servers import ENGINES, broker, engine_settings, why_not
from benchmarks.http2 import Loop, Method
from benchmarks.measurement import (
    Run,
    file_paths,
    quantile,
    spread,
    take_turns,
)
from benchmarks.spark_sources import NullSource, make_rows
from ister.base.limits import KIB, MIB
from ister.errors import InvariantError, UnavailableError
from ister.spark import location
from ister.spark.jobs.job_report import JobReport
from ister.spark.source import IsterDataSource
from ister.wire import ister_api
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


def test_what_has_no_limit_or_was_not_measured_is_in_the_output(run):
    run.add("x", 10, "s", at_least=0.5, on="ratio")
    run.skip("x", "no such thing")
    assert (run.results[0].ratio, run.results[0].met) == (None, None)
    assert run.as_json()["skipped"] == [{"name": "x", "why": "no such thing"}]


def test_quantile_is_one_of_the_values_and_spread_the_least_and_the_most():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [quantile(values, q) for q in (0, 0.5, 0.99, 1)] == [1.0, 3.0, 5.0, 5.0]
    assert spread([3.0, 1.25, 2.0]) == "1.25 to 3"


def test_files_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("wal.10.log", "wal.log", "wal.2.log", "wal.idx"):
        (tmp_path / name).touch()
    names = [path.rpartition("/")[2] for path in file_paths(str(tmp_path))]
    assert names == ["wal.log", "wal.2.log", "wal.10.log"]


def test_directory_goes_even_after_an_error(tmp_path):
    def fail():
        with Run.begin("x", str(tmp_path), is_quick=True) as run:
            (tmp_path / run.path("file")).touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_sides_take_turns_in_both_orders():
    order = []
    found = take_turns(
        2, {"a": lambda: order.append("a") or 1.0, "b": lambda: order.append("b") or 2.0}
    )
    assert order == ["a", "b", "b", "a"]
    assert found == {"a": [1.0, 1.0], "b": [2.0, 2.0]}


# -- one side and the other -------------------------------------------------------------------


def test_gap_in_a_chain_is_noticed():
    class Message:
        offset = 7
        size_bytes = 1

    with pytest.raises(InvariantError):
        chain._check([Message()], 7)


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


def test_peak_counts_what_has_gone_again():
    """In a process of its own: what other tests leave behind may be given back at any moment."""
    script = (
        "import dataclasses, json\n"
        "from benchmarks.jobs_memory import MemoryWatch\n"
        "watch = MemoryWatch()\n"
        # Written to: pages of zeros that nobody has touched are not there yet.
        "grown = [watch.measure(lambda: len(b'x' * (128 << 20))), watch.measure(lambda: None)]\n"
        "print(json.dumps([dataclasses.asdict(one) for one in grown]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    peak, after = json.loads(done.stdout)
    # Half of it, because pages of libraries may be given back as well.
    assert 64 < peak["driver_mib"] < 256
    assert after["driver_mib"] < 64


# -- the client of the broker's figures -------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_client_counts_is_what_the_broker_has(engine, tmp_path):
    if (reason := why_not(engine)) is not None:
        pytest.skip(reason)

    def ask(method, request, answer):
        with Loop() as loop:
            connection = loop.connect(served["grpc"])
            method = Method(f"/ister.Admin/{method}")
            return answer.FromString(loop.ask(connection, method, request.SerializeToString()))

    def held(topic):
        request = ister_api.TopicName(topic=topic)
        return ask("DescribeTopic", request, ister_api.TopicDescription).next

    with broker(str(tmp_path), **engine_settings(engine)) as served:
        address, pid = served["grpc"], served["pid"]
        sent = http2_client.send(
            address, producers=8, count=200, warm_up=2, pid=pid, topic="/default/sent"
        )
        assert sent.count == len(sent.times_ms) == 200
        assert held("/default/sent") == 200 + 16
        assert sent.cpu_us > 0
        assert sent.rate == pytest.approx(200 / sent.seconds)
        assert http2_client.consume(address, count=300, topic="/default/consumed").count == 300
        request = ister_api.SubscriptionName(topic="/default/consumed", subscription="bench")
        described = ask("DescribeSubscription", request, ister_api.SubscriptionDescription)
        assert (described.cursor, described.lag) == (300, 0)
        flow = http2_client.flow(address, rate=200, seconds=0.5, topic="/default/flow")
        assert flow.count == len(flow.times_ms) == held("/default/flow") == 100
        assert flow.seconds >= 0.49
