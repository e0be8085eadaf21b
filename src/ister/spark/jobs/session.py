"""The Spark session of a job that was started by a command, and the signals that stop it.

Owns: the settings that jobs need, how the JVM of a command is started, which lines of its standard
error are shown, and what SIGINT and SIGTERM do meanwhile. Does not own: sessions of programs.

At every start Spark prints the profile of its logger, its log level, and warnings about host names
and modules. A command drops these lines, and copies all others: errors, and the last output of a
process that dies. If the setting `spark.log.level` is given, everything is shown.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final

from ister.base import threads
from ister.base.extras import missing_extra
from ister.errors import ConfigError, UnavailableError

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
# Compiling for speed costs a short command more than it gains: its work is done by Python workers.
_SHORT_OPTIONS: Final = "-XX:TieredStopAtLevel=1"
_JVM_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
# How long to read what a JVM that cannot start prints, before it closes its end.
_LAST_WORDS_SECONDS: Final = 1.0
_LOG_LEVEL: Final = "spark.log.level"
_NOISE: Final = re.compile(
    r"WARNING: Using incubator modules"
    r"|Using Spark's default log4j profile"
    r"|Setting (default|Spark) log level to"
    r"|To adjust logging level use"
    r"|\d\d/\d\d/\d\d \d\d:\d\d:\d\d (WARN|INFO) "
    r"|\s*$"
)
# The root logger, and those of Py4J whose records are not filtered by it.
_PY4J_LOGGERS: Final = (None, "py4j.java_gateway", "py4j.clientserver")
_LOCAL_CONF: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@contextmanager
def open_session(
    master: str,
    conf: Mapping[str, str] | None = None,
    *,
    name: str = "ister",
    is_quiet: bool = False,
    is_short: bool = False,
) -> Iterator[SparkSession]:
    """Opens a session for jobs, and stops it at the end.

    Args:
        master: `local[*]`, `spark://host:7077`, … as Spark has it.
        conf: Spark settings, which override those of jobs.
        name: The application's name.
        is_quiet: Whether to hide what Spark prints at every start, unless `conf` has a
            `spark.log.level`. Only for a process without another session.
        is_short: Whether the JVM starts faster and compiles less: for a short job whose work is
            done by Python workers.

    Raises:
        ConfigError: PySpark is missing or too old, the master is invalid, or this process has a
            session.
        UnavailableError: Spark does not start; without Java, for example.
    """
    try:
        from pyspark.errors import PySparkException  # noqa: PLC0415 - an extra
        from pyspark.sql import SparkSession  # noqa: PLC0415

        import_module("ister.spark.compat")  # raises for a Spark that is too old
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
    settings |= {"spark.master": master, "spark.app.name": name}
    try:
        with _jvm_options(_SHORT_OPTIONS if is_short else ""):
            if is_quiet and _LOG_LEVEL not in (conf or {}):
                _start_quietly(settings)
            builder = SparkSession.builder
            for key, value in settings.items():
                builder = builder.config(key, value)
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


@contextmanager
def _jvm_options(options: str) -> Iterator[None]:
    """Sets options for a JVM that is started meanwhile; the user's own take precedence."""
    before = os.environ.get(_JVM_OPTIONS)
    os.environ[_JVM_OPTIONS] = f"{options} {before or ''}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_JVM_OPTIONS]
        else:
            os.environ[_JVM_OPTIONS] = before


def _start_quietly(settings: Mapping[str, str]) -> None:
    """Starts the JVM and its Spark context, and filters the JVM's standard error."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - an extra
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415

    # Advice to programmers, which a command's user cannot follow.
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"pyspark\.")
    for name in _PY4J_LOGGERS:
        logging.getLogger(name).addFilter(is_shown)
    conf = SparkConf().setAll(list(settings.items()))
    reading, writing = os.pipe()
    try:
        # PySpark forgets a JVM if it is interrupted here, and that JVM would never end.
        with hold_signals():
            gateway = launch_gateway(conf, {"stderr": writing})  # type: ignore[no-untyped-call]
    except Exception:
        os.close(writing)
        threads.start("ister-spark-stderr", forward_errors, reading).join(_LAST_WORDS_SECONDS)
        raise
    os.close(writing)
    threads.start("ister-spark-stderr", forward_errors, reading)
    SparkContext(conf=conf, gateway=gateway)


def is_shown(record: logging.LogRecord) -> bool:
    """Leaves out what Py4J logs with a traceback and raises too.

    That is a call that was interrupted, and the calls of other threads when the JVM ends then.
    """
    # Comes with PySpark, and has no types.
    from py4j.protocol import Py4JNetworkError  # type: ignore[import-untyped] # noqa: PLC0415

    error = record.exc_info[1] if record.exc_info else None
    while error is not None and not isinstance(error, KeyboardInterrupt | Py4JNetworkError):
        error = error.__context__
    return error is None


def forward_errors(reading: int) -> None:
    """Copies lines from a file descriptor to standard error, except Spark's usual ones."""
    with os.fdopen(reading, "rb") as lines:
        for line in lines:
            if not _NOISE.match(line.decode(errors="replace")):
                sys.stderr.buffer.write(line)
                sys.stderr.flush()


# -- signals --------------------------------------------------------------------------------


@contextmanager
def stop_on_signals(stop: threading.Event | None) -> Iterator[threading.Event]:
    """Yields an event that the first SIGINT or SIGTERM sets; a second one acts as before.

    Signals are left alone if this is not called on the main thread.
    """
    stopping = stop if stop is not None else threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: object) -> None:
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)
        stopping.set()

    for number in before:
        signal.signal(number, end)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delivers a SIGINT or SIGTERM that comes meanwhile at the end.

    Signals are left alone if this is not called on the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if held:
            signal.raise_signal(held[0])
