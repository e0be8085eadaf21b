"""How jobs get their Spark: through Connect, from a command, or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.spark_topics import SparkPlace, without_spark
from tests.support.scale import IS_NIGHTLY, scaled

ROOT = Path(__file__).parents[2]
A = "/default/a"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path[1:]]),
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
}


def jobs(directory, kind):
    """What jobs have done in a session of a kind: by day those that differ, by night all."""
    script = Path(__file__).with_name("connect_jobs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(directory), kind, scaled("few", "all")],
        capture_output=True,
        text=True,
        timeout=560,
        # Any free port instead of a fixed one.
        env={**ENVIRONMENT, "SPARK_TESTING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_jobs_run_through_spark_connect(tmp_path):
    found = jobs(tmp_path / "connect", "connect")
    topics = found.pop("topics")
    by_night = {
        "replay": [120],
        "compact": [1, 115],
        "scrub": [1, 0],
        "gc": [1, 0],
        "once": [True, ["tier", "resort", "compact", "gc"]],
        "run": [True, "stopped"],
    }
    assert found == {
        "tier": [40],
        "sample": 10,
        "replay sql": [60, 1],
        "export": [120],
        **scaled({}, by_night),
        "lake": 120,
    }
    assert topics["/default/sql"] == [str(number) for number in range(0, 120, 2)]
    if IS_NIGHTLY:
        assert topics["/default/copy"] == [str(number) for number in range(120)]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_jobs_do_the_same_on_classic_and_connect(tmp_path):
    assert jobs(tmp_path / "classic", "classic") == jobs(tmp_path / "connect", "connect")


def run(place, *words, **environment):
    program = "import sys; from ister.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "pipeline", *words, "--config", place.config],
        capture_output=True,
        text=True,
        timeout=400,
        env={**ENVIRONMENT, **environment},
        check=False,
    )


def test_command_is_quiet_and_a_job_without_work_needs_no_java(tmp_path):
    """Goal: standard error is for errors; Java is for jobs that have something to do."""
    with without_spark():
        place = SparkPlace(tmp_path / "data")
        place.fill(A, 40, uploaded=20)
    done = run(place, "tier", "--master", "local[1]")
    assert (done.returncode, done.stderr) == (0, "")
    assert "20" in done.stdout
    nowhere = {"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": str(Path(sys.executable).parent)}
    for words in (("tier",), ("tier", "--dry-run"), ("run", "--once", "tier,compact")):
        done = run(place, *words, **nowhere)
        assert (done.returncode, done.stderr) == (0, ""), words
    with without_spark():
        place.fill("/default/b", 10)
    done = run(place, "tier", **nowhere)
    assert done.returncode == 1
    assert "Java" in done.stderr
