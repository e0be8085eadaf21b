"""`ister bench jobs` runs, obeys its contract and compares like with like. No times are judged."""

import json
import os
import subprocess
import sys
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import jobs
from benchmarks.jobs_data import fill_bucket, fill_local, link_place, make_json_rows, object_paths
from benchmarks.jobs_helpers import Helpers
from benchmarks.measurement import file_paths
from ister.api import open_history
from ister.cli.main import main
from ister.errors import InvariantError, UnavailableError
from ister.limits import KIB, MIB
from ister.spark.jobs.job_report import JobReport

TOPIC = "/default/orders"


@pytest.mark.nightly
def test_quick_run_prints_its_results_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "_ROUNDS", 1)
    monkeypatch.setattr(jobs, "_TABLE_BYTES", 200 * MIB)
    monkeypatch.setattr(jobs, "_SCRUBBED_BYTES", 100 * MIB)
    assert main(["bench", "jobs", "--quick", "--json", "--dir", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bench"] == "jobs"
    results = {result["name"]: result for result in printed["results"]}
    targets = {
        name: (result["target_on"], result["sense"], result["target"])
        for name, result in results.items()
    }
    growth = "growth of a Python worker's resident memory"
    assert len(results) == len(printed["results"])
    assert targets == {
        "tier of 4 topics of 1 MiB, 1 KiB messages": ("ratio", "at least", 0.6),
        "compact to Parquet, 100 B messages": ("ratio", "at least", 2.0),
        "compact to Parquet, 1 KiB messages": ("ratio", "at least", 2.0),
        "export to Parquet, 100 B messages": ("ratio", "at least", 2.0),
        "export to Parquet, 1 KiB messages": ("ratio", "at least", 2.0),
        "scrub of 4 objects, 1 KiB messages": ("ratio", "at least", 0.8),
        "exports of 100 topics: commits": ("value", "at most", 1),
        f"{growth}, tier of 4 MiB": ("value", "at most", 256),
        f"{growth}, scrub of 4 MiB": ("value", "at most", 256),
        f"{growth}, export of 4 MiB": ("value", "at most", 256),
        f"{growth}, compact of 4 MiB": ("value", "at most", 256),
        "growth of the driver's resident memory, all four jobs of 4 MiB": ("value", "at most", 64),
    }
    for name, result in results.items():
        # What a worker has already it need not take again.
        assert result["value"] > 0 or name.startswith("growth")
        assert result["limit"] > 0 or name.startswith("growth")
        assert isinstance(result["met"], bool)
        if result["target_on"] == "ratio":
            assert "processor time" in result["note"]
    assert list(tmp_path.iterdir()) == []


# -- what jobs work on ----------------------------------------------------------------------


def test_payloads_are_json_that_compresses_like_it():
    for message_bytes in [100, KIB]:
        rows = make_json_rows(500, message_bytes, topic=TOPIC)
        payloads = rows["payload"].to_pylist()
        assert {len(payload) for payload in payloads} == {message_bytes}, message_bytes
        assert len(set(payloads)) == 500, message_bytes
        assert json.loads(payloads[0])["order"] == 10_000_000, message_bytes
        whole = b"".join(payloads)
        assert 2 < len(whole) / len(zlib.compress(whole)) < 10, message_bytes


def test_linked_place_is_the_same_and_one_of_its_own(tmp_path):
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    fill_bucket(source, [TOPIC], 3 * MIB, KIB, object_bytes=MIB)
    assert link_place(source, target) == target
    found = []
    for place in (source, target):
        with open_history(place) as history:
            topic = history.topic(TOPIC)
            found.append((topic.earliest, topic.tiered, pa.Table.from_batches(topic.read_arrow())))
    assert found[0] == found[1]
    assert 2.9 * MIB < found[0][1] * (KIB + 80) <= 3 * MIB
    paths = object_paths(target, TOPIC)
    assert len(paths) >= 3
    os.unlink(paths[0])
    assert len(object_paths(source, TOPIC)) == len(paths)
    # What is changed in place is a copy.
    assert not os.path.samefile(f"{source}/metadata.db", f"{target}/metadata.db")


def test_local_topics_have_nothing_in_the_bucket(tmp_path):
    fill_local(str(tmp_path), [f"{TOPIC}-1", f"{TOPIC}-2"], MIB, KIB)
    assert object_paths(str(tmp_path)) == []
    sizes = [
        sum(map(os.path.getsize, file_paths(f"{tmp_path}/wal{TOPIC}-{number}")))
        for number in (1, 2)
    ]
    assert sizes == [pytest.approx(MIB, rel=0.05)] * 2


# -- what jobs are compared with ------------------------------------------------------------


def test_helpers_copy_and_read_every_byte(tmp_path):
    files, target = tmp_path / "files", tmp_path / "target"
    files.mkdir()
    target.mkdir()
    paths = []
    for number in range(3):
        path = files / f"wal.{number}.log"
        path.write_bytes(os.urandom(MIB + number))
        paths.append(str(path))
    with Helpers() as helpers:
        assert helpers.copy([paths[:2], paths[2:]], str(target)) == 3 * MIB + 3
        assert helpers.read(str(files), [os.path.basename(path) for path in paths]) == 3 * MIB + 3
        assert helpers.copy([], str(target)) == 0
    copies = sorted(path.read_bytes() for path in target.rglob("object-*"))
    originals = [(files / f"wal.{number}.log").read_bytes() for number in range(3)]
    assert copies == sorted([originals[0] + originals[1], originals[2]])


def test_helper_that_fails_is_an_error(tmp_path, capfd):
    with Helpers() as helpers, pytest.raises(UnavailableError, match="copies and reads"):
        helpers.read(str(tmp_path), ["none"])
    assert "NotFound" in capfd.readouterr().err


def test_helper_ends_with_whoever_tells_it_what_to_do():
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.jobs_helpers"],
        input="",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert child.stdout == "ready\n"


def _write(path, rows, **settings):
    table = pa.table({"offset": range(rows), "payload": [b"x" * 20] * rows})
    pq.write_table(table, path, **{"compression": "zstd", "use_dictionary": False, **settings})
    return [str(path)]


def test_files_of_both_sides_have_all_rows_and_the_same_coding(tmp_path):
    path = tmp_path / "x.parquet"
    jobs._check_files(_write(path, 5), 5)
    with pytest.raises(InvariantError, match="5 rows of 6"):
        jobs._check_files(_write(path, 5), 6)
    with pytest.raises(InvariantError, match="SNAPPY"):
        jobs._check_files(_write(path, 5, compression="snappy"), 5)
    with pytest.raises(InvariantError, match="dictionary"):
        jobs._check_files(_write(path, 5, use_dictionary=["payload"]), 5)


def test_speed_of_a_job_that_failed_counts_for_nothing():
    report = JobReport("tier", started_at=0, dry_run=False)
    report.add(TOPIC, bytes=7)
    assert jobs._check_done(report)[0]["bytes"] == 7
    report.fail(UnavailableError("gone"), TOPIC)
    with pytest.raises(InvariantError, match=r"tier failed.*gone"):
        jobs._check_done(report)


def test_growth_of_the_driver_is_that_of_its_peak():
    """In a process of its own: what other tests leave behind may be given back at any moment.

    Twice the size, because pages of libraries may be given back as well.
    """
    script = (
        "import dataclasses, json\n"
        "from benchmarks.jobs_memory import MemoryWatch\n"
        "watch = MemoryWatch()\n"
        # Written to: pages of zeros that nobody has touched are not there yet.
        "grown = [watch.measure(lambda: len(b'x' * (128 << 20))), watch.measure(lambda: None)]\n"
        "print(json.dumps([dataclasses.asdict(one) for one in grown]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, after = json.loads(done.stdout)
    assert 64 < peak["driver_mib"] < 256
    # There is no JVM here.
    assert (peak["worker_mib"], peak["workers"], peak["jvm_mib"]) == (0, 0, 0)
    # It was gone before the second one began.
    assert after["driver_mib"] < 64


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
        "sys.exit(main(['bench', 'jobs', '--quick']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'ister[spark]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_java_it_says_so_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    assert main(["bench", "jobs", "--quick", "--dir", str(tmp_path)]) == 1
    assert "ister bench jobs needs Java" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
