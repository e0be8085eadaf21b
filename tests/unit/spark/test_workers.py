"""What workers do once."""

import os
import platform
import resource

import pyarrow as pa
import pytest

from ister.limits import MIB
from ister.spark import workers

CHUNK_BYTES = 4 * MIB
FILE_BYTES = 16 * MIB
ROUNDS = 10


def faults_of_reading(path):
    """How many pages the system gave this process while it read a file, chunk by chunk."""

    def read():
        position = 0
        while chunk := os.pread(fd, CHUNK_BYTES, position):  # the last one has no byte
            position += len(chunk)

    workers.keep_buffers()
    fd = os.open(path, os.O_RDONLY)
    read()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(ROUNDS):
        read()
    os.close(fd)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for that")
def test_a_worker_reads_into_memory_that_it_has(spark, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(FILE_BYTES))
    (faults,) = spark.sparkContext.parallelize([str(path)], 1).map(faults_of_reading).collect()
    # Of new memory each round takes one chunk at least.
    assert faults < ROUNDS * CHUNK_BYTES // resource.getpagesize() // 2


def pool_of_a_worker(_):
    workers.keep_buffers()
    return pa.default_memory_pool().backend_name


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked for that")
def test_arrow_in_a_worker_reuses_buffers_too(spark):
    pools = spark.sparkContext.parallelize([0], 1).map(pool_of_a_worker).collect()
    assert pools == ["system"]


def test_a_program_of_the_users_is_left_alone(monkeypatch):
    monkeypatch.setattr(workers, "_keeps_buffers", False)
    pool = pa.default_memory_pool().backend_name
    workers.keep_buffers()
    assert not workers._keeps_buffers
    assert pa.default_memory_pool().backend_name == pool
