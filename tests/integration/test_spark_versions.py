"""The suites of Spark on the other versions that Ister supports.

Those are the lines of `constraints-spark.txt`. `make` installs each into a directory of its own in
`.venv`, which comes first on the import path of a process that runs the suites. `make test` runs a
few tests of batches and streams on the oldest version besides the newest, which is the
environment's; `make nightly` runs the suites whole on all versions, and those of SQL and the jobs.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scale import IS_NIGHTLY, nightly, scaled

_TESTS = Path(__file__).resolve().parents[1]
_VERSIONS = re.findall(
    r"(?m)^pyspark==(\S+)$", (_TESTS.parent / "constraints-spark.txt").read_text()
)
_SUITES = ["integration/test_spark_batch.py", "integration/test_spark_stream.py"]
_NIGHTLY_SUITES = [
    "integration/test_spark_sql.py",
    *(f"integration/test_jobs_{job}.py" for job in ("scrub", "compact", "replay")),
]
# By day: reading, columns, views, writing, restarts, and what Spark before 4.2 does otherwise.
_SMOKE = [
    "test_range_through_spark_is_what_filtering_leaves",
    "test_columns_and_users_schema_through_spark",
    "test_temporary_view_in_sql",
    "test_all_columns_go_round_from_topic_to_topic",
    "test_restart_goes_on_with_the_same_text_and_ignores_start_options",
    "test_available_now_is_one_limited_batch_that_restarts_continue",
]
# Spark 4.0 gives a Python process of a stream ten seconds to start, whatever the machine.
_WAS_TOO_SLOW = "Python worker failed to connect back"
_ATTEMPTS = scaled(3, 1)
_SECONDS = scaled(900, 2400)


@pytest.mark.timeout(_ATTEMPTS * _SECONDS + 60)
@pytest.mark.parametrize("version", [_VERSIONS[0], *map(nightly, _VERSIONS[1:])])
def test_batch_and_stream_suites_pass(version, tmp_path):
    _run_suites(version, _SUITES, tmp_path, at_least=scaled(len(_SMOKE), 40))


@pytest.mark.timeout(_ATTEMPTS * _SECONDS + 60)
@pytest.mark.parametrize("version", [nightly(version) for version in _VERSIONS])
def test_views_and_jobs_work(version, tmp_path):
    _run_suites(version, _NIGHTLY_SUITES, tmp_path, at_least=15)


def _run_suites(version, suites, tmp_path, *, at_least):
    spark = Path(os.environ.get("ISTER_SPARKS", sys.prefix)) / f"spark-{version}"
    if not spark.is_dir():
        pytest.skip(
            f"PySpark {version} is not in {spark}: `make test` and `make nightly` install it"
        )
    selected = [] if IS_NIGHTLY else ["-m", "not nightly", "-k", " or ".join(_SMOKE)]
    path = [str(spark), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
        # PySpark 4.0 and 4.1 leave a socket to the garbage collector.
        *("-W", "ignore:unclosed:ResourceWarning", "--basetemp", str(tmp_path / "suites")),
        *selected,
        *(str(_TESTS / suite) for suite in suites),
    ]
    for _ in range(_ATTEMPTS):
        done = subprocess.run(
            command,
            cwd=_TESTS.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "ISTER_EXPECTS_SPARK": version},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode == 0 or _WAS_TOO_SLOW not in done.stdout:
            break
    summary = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", summary)[1]) >= at_least, summary
