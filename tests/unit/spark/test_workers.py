"""What workers do once."""

import os
import platform
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pytest

from ister.base.limits import MIB
from ister.spark import workers

CHUNK_BYTES = 12 * MIB
FILE_BYTES = 96 * MIB
ROUNDS = 5


def faults_of_reading(path, *, in_thread):
    """How many pages the system gave this process while it read a file, chunk by chunk."""

    def read():
        # All at once: an arena of a thread has 64 MiB, and returns a second one as a whole.
        return [os.pread(fd, CHUNK_BYTES, at) for at in range(0, FILE_BYTES, CHUNK_BYTES)]

    def read_often():
        read()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(ROUNDS):
            read()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    workers.keep_buffers()
    fd = os.open(path, os.O_RDONLY)
    try:
        if not in_thread:
            return read_often()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(read_often).result()
    finally:
        os.close(fd)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for that")
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_worker_reads_into_memory_that_it_has(spark, tmp_path, in_thread):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, FILE_BYTES)
    read = partial(faults_of_reading, in_thread=in_thread)
    (faults,) = spark.sparkContext.parallelize([str(path)], 1).map(read).collect()
    # Of new memory each round takes one chunk at least.
    assert faults < ROUNDS * CHUNK_BYTES // resource.getpagesize() // 2


def pool_of_a_worker(_):
    workers.keep_buffers()
    return pa.default_memory_pool().backend_name


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for that")
def test_arrow_in_a_worker_reuses_buffers_too(spark):
    pools = spark.sparkContext.parallelize([0], 1).map(pool_of_a_worker).collect()
    assert pools == ["system"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for that")
def test_a_process_that_spark_starts_to_plan_or_commit_is_a_worker(tmp_path):
    # Spark starts `python -m pyspark.daemon pyspark.sql.worker…`, and these have no task.
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "daemon.py").write_text(
        "import pyarrow, ister.spark.workers as workers\n"
        "workers.keep_buffers()\n"
        "print(pyarrow.default_memory_pool().backend_name)\n"
    )
    command = [sys.executable, "-m", "pyspark.daemon"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == "system\n"


def test_a_program_of_the_users_is_left_alone(monkeypatch):
    monkeypatch.setattr(workers, "_keeps_buffers", False)
    pool = pa.default_memory_pool().backend_name
    workers.keep_buffers()
    assert not workers._keeps_buffers
    assert pa.default_memory_pool().backend_name == pool
