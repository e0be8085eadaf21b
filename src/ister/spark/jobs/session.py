"""The Spark session of a job that was started by a command.

Owns: the settings that jobs need. Does not own: sessions of programs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ister.errors import ConfigError, UnavailableError
from ister.extras import missing_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCAL: Final = re.compile(r"local\[([^,\]]+)\]|local")
# A task whose process was killed is repeated; Spark does not do so by default for local masters.
_LOCAL_FAILURES_MAX: Final = 4

_CONF: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
    "spark.log.level": "ERROR",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_LOCAL_CONF: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@contextmanager
def open_session(
    master: str, conf: Mapping[str, str] | None = None, *, name: str = "ister"
) -> Iterator[SparkSession]:
    """Opens a session for jobs, and stops it at the end.

    Args:
        master: `local[*]`, `spark://host:7077`, … as Spark has it.
        conf: Spark settings, which override those of jobs.
        name: The application's name.

    Raises:
        ConfigError: PySpark is missing, the master is invalid, or this process has a session.
        UnavailableError: Spark does not start; without Java, for example.
    """
    try:
        from pyspark.errors import PySparkException  # noqa: PLC0415 - an extra
        from pyspark.sql import SparkSession  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra("`ister pipeline`", "spark", error) from error
    if SparkSession.getActiveSession() is not None:
        raise ConfigError(
            "a Spark session is running in this process", hint="pass that session to the job"
        )
    local = _LOCAL.fullmatch(master)
    settings = dict(_CONF)
    if local is not None:
        settings |= _LOCAL_CONF
        master = f"local[{local.group(1) or 1},{_LOCAL_FAILURES_MAX}]"
    settings |= dict(conf or {})
    # Workers on this machine run the driver's Python.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except PySparkException as error:
        raise UnavailableError(
            f"Spark does not start: {error}",
            hint="install Java 17 or later, and set JAVA_HOME",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"Spark does not start with the master {master!r}: {error}",
            hint="--master local[*], or spark://host:7077",
        ) from error
    try:
        yield spark
    finally:
        spark.stop()
