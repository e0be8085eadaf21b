"""The JVM of a command: what of its words is passed on, its options, signals during its start."""

import logging
import os
import signal

import pytest
from py4j.protocol import Py4JNetworkError

from ister.spark.jobs.session import (
    _jvm_options,
    _start_quietly,
    forward_errors,
    hold_signals,
    is_shown,
)
from tests.support.cases import case

NOISE = """\
WARNING: Using incubator modules: jdk.incubator.vector
Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties
26/11/17 10:02:05 WARN Utils: Your hostname, vm, resolves to a loopback address: 127.0.0.1
Setting default log level to "WARN".
To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).
Setting Spark log level to "ERROR".

"""
WORDS = """\
26/11/17 10:02:10 ERROR Executor: Exception in task 0.0
java.lang.OutOfMemoryError: Java heap space
	at org.apache.spark.Task.run(Task.scala:1)
WARNING: something else
JAVA_HOME is not set
"""


def test_greetings_are_left_out_and_errors_are_not(capfd):
    reading, writing = os.pipe()
    os.write(writing, (NOISE + WORDS + NOISE).encode())
    os.close(writing)
    forward_errors(reading)
    assert capfd.readouterr().err == WORDS


def test_options_of_the_user_come_after_ours(monkeypatch):
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xmx1g")
    with _jvm_options("-XX:TieredStopAtLevel=1"):
        assert os.environ["SPARK_SUBMIT_OPTS"] == "-XX:TieredStopAtLevel=1 -Xmx1g"
    assert os.environ["SPARK_SUBMIT_OPTS"] == "-Xmx1g"
    monkeypatch.delenv("SPARK_SUBMIT_OPTS")
    with _jvm_options("-XX:TieredStopAtLevel=1"):
        pass
    assert "SPARK_SUBMIT_OPTS" not in os.environ


def test_signal_during_the_start_of_a_jvm_is_delivered_afterwards():
    """Goal: PySpark loses no JVM. It forgets one whose start it was interrupted in."""
    steps = []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def start():
        with hold_signals():
            signal.raise_signal(signal.SIGINT)
            steps.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert steps == ["started"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_jvm_is_started_with_signals_held(monkeypatch):
    def interrupt(conf, options):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the JVM has started")

    monkeypatch.setattr("pyspark.java_gateway.launch_gateway", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        _start_quietly({})
    assert "the JVM has started" in str(caught.value.__context__)


def test_interruption_is_not_logged_as_an_error():
    """Py4J logs one with a traceback before it raises it again, and a JVM that has ended."""
    follows, refused = ValueError("broken"), Py4JNetworkError("no connection")
    follows.__context__ = KeyboardInterrupt()
    refused.__context__ = ConnectionRefusedError("refused")
    errors = {KeyboardInterrupt(): False, follows: False, refused: False, ValueError("x"): True}
    for error, expected in errors.items():
        with case(error):
            record = logging.LogRecord(
                "root", logging.ERROR, "", 1, "failed", None, (type(error), error, None)
            )
            assert is_shown(record) is expected
    assert is_shown(logging.LogRecord("root", logging.ERROR, "", 1, "failed", None, None))
