"""A replay in a process of its own, which is killed at a point that the environment names."""

import sys

from ister.spark.jobs.replay_job import replay
from tests.support.spark_session import get_spark

if __name__ == "__main__":
    config, source, target = sys.argv[1:]
    report = replay(
        get_spark(),
        config,
        source=source,
        target=target,
        transform="tests.support.replay_functions:only_even",
        chunk_bytes=2_000,
    )
    sys.exit(0 if report.ok else str(report.errors))
