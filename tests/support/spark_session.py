"""One Spark session for all tests of a process: starting a JVM takes seconds, a query does not.

Tasks that fail are tried three times, as on a cluster. Nothing listens beyond this machine, and
nothing is left behind: the JVM and its files go with the session of tests, or with the interpreter.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress

from pyspark import SparkContext
from pyspark.sql import SparkSession

_session: SparkSession | None = None
_homes: list[str] = []


def get_spark() -> SparkSession:
    """The session, started by the first call, and anew if a test has stopped it."""
    global _session  # noqa: PLW0603 - one a process is what this file is for
    if _session is not None and not _is_stopped(_session):
        return _session
    _prepare_environment()
    home = tempfile.mkdtemp(prefix="ister-spark-")
    # Such a short life is over before the thorough compiler has paid for itself.
    java = f"-Djava.io.tmpdir={home} -XX:-UsePerfData -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": java,
        "spark.local.dir": home,
        "spark.sql.warehouse.dir": os.path.join(home, "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    }
    builder = SparkSession.builder.master("local[2,3]").appName("ister tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    _session = builder.getOrCreate()
    assert _session.version == os.environ.get("ISTER_EXPECTS_SPARK", _session.version)
    _session.sparkContext.setLogLevel("ERROR")
    if not _homes:
        atexit.register(_stop_in, os.getpid())
    _homes.append(home)
    return _session


def stop_spark() -> None:
    """Ends the JVM and removes its files. May be called twice."""
    if _session is not None and not _is_stopped(_session):
        _session.stop()
    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None
        process = getattr(gateway, "proc", None)
        if process is not None:
            process.stdin.close()  # on which it ends
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
    while _homes:
        shutil.rmtree(_homes.pop(), ignore_errors=True)


def _is_stopped(session: SparkSession) -> bool:
    return session.sparkContext._jsc is None


def _prepare_environment() -> None:
    """What the JVM and its Python workers inherit."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


def _stop_in(owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of the process that started it
        stop_spark()
