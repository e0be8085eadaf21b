"""`ister bench spark` runs, obeys its contract and compares like with like. No times are judged."""

import json
import subprocess
import sys

import pytest

from benchmarks import spark
from benchmarks.measurement import Run
from benchmarks.spark_sources import NullSource, WatchedSource, make_rows, read_notes
from ister.cli.main import main
from ister.errors import InvariantError, UnavailableError
from ister.limits import KIB, MIB
from ister.spark import location
from ister.spark.source import IsterDataSource

TOPIC = "/default/orders"


@pytest.fixture(autouse=True)
def _closed_connections():
    """A task's process ends with its connections; here they are this one's."""
    yield
    location._close_all()


def _filled(tmp_path, *, size_bytes=6 * MIB, **settings):
    """The options that read a topic in a bucket."""
    spark._fill(str(tmp_path), TOPIC, size_bytes, KIB, **settings)
    return {"config": str(tmp_path), "topic": TOPIC}


def _reader(source):
    return source.reader(source.schema())


@pytest.mark.nightly
def test_quick_run_prints_its_results_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(spark, "_ROUNDS", 1)
    # Compiling from nothing takes longer than all the rest.
    monkeypatch.setattr(spark, "_start_child", lambda side, *, cache: 0.25)
    assert main(["bench", "spark", "--quick", "--json", "--dir", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bench"] == "spark"
    results = {result["name"]: result for result in printed["results"]}
    assert len(results) == len(printed["results"]) == 17
    for result in results.values():
        assert result["value"] > 0
        assert result["limit"] > 0
        assert result["ratio"] == pytest.approx(result["value"] / result["limit"], rel=0.01)
        assert (result["target"] is None) == (result["met"] is None)
    targets = {
        name: (result["target_on"], result["sense"], result["target"])
        for name, result in results.items()
        if result["target"] is not None
    }
    assert targets == {
        "decode to Arrow, 100 B messages, one core": ("value", "at least", 6e6),
        "decode to Arrow, 1 KiB messages, one core": ("value", "at least", 2000),
        "growth of a Python worker's resident memory, object of 26 MiB in one task": (
            "value",
            "at most",
            200,
        ),
        "trigger of a stream with 4000 pending objects": ("ratio", "at most", 1.5),
        "scan with Spark, 100 B messages": ("ratio", "at least", 0.9),
        "scan with Spark, 1 KiB messages": ("ratio", "at least", 0.9),
        "write with Spark, 100 B messages": ("ratio", "at least", 0.5),
        "write with Spark, 1 KiB messages": ("ratio", "at least", 0.5),
        "write with Spark into 300 new topics": ("ratio", "at most", 4),
        "staged files of a write into 300 or 10 topics": ("ratio", "at most", 1),
    }
    assert list(tmp_path.iterdir()) == []


# -- what is compared -----------------------------------------------------------------------


def test_null_source_has_the_shape_of_the_topic(tmp_path):
    options = _filled(tmp_path)
    plan = spark._plan({**options, "splitBytes": "2m"})
    null = _reader(
        NullSource({"plan": json.dumps(plan), "message_bytes": str(KIB), "topic": TOPIC})
    )
    read = _reader(IsterDataSource({**options, "splitBytes": "2m"}))
    theirs, ours = null.partitions(), read.partitions()
    assert len(theirs) == len(ours) > 1
    for their, our in zip(theirs, ours, strict=True):
        for prebuilt, batch in zip(null.read(their), read.read(our), strict=True):
            assert prebuilt.schema.equals(batch.schema)
            assert prebuilt.num_rows == batch.num_rows
            # Offsets differ, and nothing else that has a size.
            assert prebuilt.nbytes == pytest.approx(batch.nbytes, rel=0.01)


def test_null_source_has_the_columns_asked_for():
    source = NullSource(
        {"plan": "[[2, 3]]", "message_bytes": "9", "topic": TOPIC, "columns": "payload,offset"}
    )
    reader = _reader(source)
    (partition,) = reader.partitions()
    batches = list(reader.read(partition))
    assert source.schema().names == ["payload", "offset"]
    assert [batch.num_rows for batch in batches] == [2, 3]
    assert {len(value) for value in batches[1]["payload"].to_pylist()} == {9}


def test_rows_are_all_different_and_as_rich_as_asked():
    rows = make_rows(1000, 16, topic=TOPIC, is_rich=True)
    assert len(set(rows["payload"].to_pylist())) == 1000
    assert dict(rows["attributes"][999].as_py()).keys() == {"region", "trace"}
    assert rows["routing_key"].null_count == 0
    plain = make_rows(1000, 16, topic=TOPIC)
    assert plain["attributes"][999].as_py() == []
    assert plain["routing_key"].null_count == 1000


def test_frames_are_all_decoded_whatever_a_chunk_cuts():
    rows = make_rows(999, 100, topic=TOPIC)
    chunks, count = spark._make_chunks(9 * MIB, rows)
    assert len(chunks) == 3
    assert spark._decode(chunks, count) > 0
    with pytest.raises(InvariantError, match="every frame"):
        spark._decode(chunks[:-1], count)


@pytest.mark.nightly
def test_start_is_measured_in_a_new_process(tmp_path):
    assert spark._start_child("numba", cache=str(tmp_path)) > 0
    assert spark._start_loops() > 0
    with pytest.raises(UnavailableError, match="nonsense"):
        spark._start_child("nonsense", cache=str(tmp_path))


# -- what is watched ------------------------------------------------------------------------


def test_watched_task_notes_its_growth(tmp_path):
    options = _filled(tmp_path / "data")
    reader = _reader(WatchedSource({**options, "report": str(tmp_path)}))
    (partition,) = reader.partitions()
    count = sum(batch.num_rows for batch in reader.read(partition))
    (note,) = read_notes(str(tmp_path), "read")
    assert note["rows"] == count > 5000
    assert note["growth_mib"] >= 0
    assert read_notes(str(tmp_path), "read") == []


def test_memory_is_measured_with_one_task_and_one_object_only(tmp_path):
    options = _filled(tmp_path, size_bytes=12 * MIB, max_object_bytes=8 * MIB)
    with pytest.raises(InvariantError, match="one object"):
        spark._check_one_object({**options, "splitBytes": "1t"})
    spark._fill(str(tmp_path), f"{TOPIC}-2", 12 * MIB, KIB, max_object_bytes=64 * MIB)
    spark._check_one_object({**options, "topic": f"{TOPIC}-2", "splitBytes": "1t"})


# -- what is missing ------------------------------------------------------------------------


def test_without_pyspark_it_says_what_to_install():
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pyspark':\n"
        "            raise ModuleNotFoundError('absent', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from ister.cli.main import main\n"
        "sys.exit(main(['bench', 'spark', '--quick']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pyspark, which is not installed" in done.stderr
    assert "pip install 'ister[spark]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("has_home", [True, False])
def test_without_java_it_says_so_before_anything_is_written(
    has_home, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    if has_home:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    else:
        monkeypatch.delenv("JAVA_HOME", raising=False)
    assert main(["bench", "spark", "--quick", "--dir", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Java 17" in shown.err
    assert list(tmp_path.iterdir()) == []


def test_spark_that_does_not_start_is_an_error_that_says_why(tmp_path, monkeypatch):
    java = tmp_path / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho broken for a test >&2\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    sizes = spark._Sizes(rounds=1, written_bytes=MIB, object_bytes=(MIB, MIB))
    with (
        Run.begin("spark", str(tmp_path), is_quick=True) as run,
        pytest.raises(UnavailableError, match=r"Spark failed: .*JAVA_GATEWAY_EXITED"),
    ):
        list(spark._run_spark(run, sizes))
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
