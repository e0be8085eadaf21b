"""The process with Spark that benchmarks share: it is counted whole, and ends with its parent."""

import os
import subprocess
import sys

import pytest

from benchmarks.spark_process import check_java, cpu_seconds, read_processes
from ister.errors import ConfigError


def test_processor_time_of_a_child_counts():
    before = cpu_seconds()
    subprocess.run(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True
    )
    assert cpu_seconds() - before >= 0.25


def test_processes_are_found_with_their_parents():
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        try:
            found = read_processes()
            assert found[child.pid].parent == os.getpid()
            assert os.getpid() in found
        finally:
            child.kill()


def test_without_java_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="ister bench example needs Java"):
        check_java("ister bench example")


def test_process_with_spark_ends_with_the_one_that_started_it():
    script = (
        "import time\n"
        "from benchmarks.spark_process import end_with_parent\n"
        "end_with_parent()\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout.readline() == b"up\n"
            child.stdin.close()
            assert child.wait(timeout=60) == 1
        finally:
            child.kill()
