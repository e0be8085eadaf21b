"""A Spark driver that runs jobs of the pipeline, one after the other, until it is killed.

Run by `jobs_child.py`; the conversation is that of `spark_process.py`, with one more command:

    job      `name`, `config`, `arguments`: what to call. `failpoints` are for this process, and
             `task_failpoints` for the first process that runs a task of it, and for no other:
             `once` is the file that this process makes when it is armed

It ends with `done`, the job's report and how many tasks have failed, or with `failed` and why.
"""

from __future__ import annotations

import json
import os
import sys
import time

from pyspark.sql import SparkSession
from spark_process import Driver

from ister.base import failpoints as points
from ister.bucket import orphans
from ister.errors import IsterError
from ister.spark import jobs

_TASK_POINTS, _TASK_ONCE = "ISTER_TASK_FAILPOINTS", "ISTER_TASK_ONCE"
_LISTENER_SECONDS_MAX = 10.0


class JobsDriver(Driver):
    """The session, and the jobs in it."""

    def obey(self, command: dict) -> None:
        try:
            super().obey(command)
        except IsterError as error:
            self.say("failed", f"{error.code}: {error}")

    def _job(self, name, config, arguments, failpoints="", task_failpoints="", once=""):
        # A job arms this process when it begins, and the one before may have done so, too.
        points.disarm()
        os.environ["ISTER_FAILPOINTS"] = failpoints
        self._arm_tasks(task_failpoints, once)
        before = self._failed_tasks()
        report = getattr(jobs, name)(self._spark, config, **arguments)
        return {
            "report": report.as_json(),
            "failed_tasks": self._failed_tasks(before if once and os.path.exists(once) else None)
            - before,
        }

    def _arm_tasks(self, task_failpoints: str, once: str) -> None:
        """Spark starts other Python processes for tasks with another environment."""
        environment = self._spark.sparkContext.environment
        environment.pop(_TASK_POINTS, None)
        environment.pop(_TASK_ONCE, None)
        if task_failpoints:
            environment.update({_TASK_POINTS: task_failpoints, _TASK_ONCE: once})

    def _failed_tasks(self, awaited: int | None = None) -> int:
        """How many have, of all jobs; Spark hears of it a moment later if it is awaited."""
        tracker = self._spark.sparkContext.statusTracker()
        deadline = time.monotonic() + _LISTENER_SECONDS_MAX
        while True:
            jobs_done = map(tracker.getJobInfo, tracker.getJobIdsForGroup(None))
            stages = {stage for job in jobs_done if job is not None for stage in job.stageIds}
            infos = map(tracker.getStageInfo, stages)
            failed = sum(info.numFailedTasks for info in infos if info is not None)
            if awaited is None or failed > awaited or time.monotonic() > deadline:
                return failed
            time.sleep(0.05)


def main() -> int:
    # Java has this process's standard output as well, and is not part of the conversation.
    voice = os.dup(1)
    os.dup2(2, 1)
    # What a compaction has replaced may go at once, so that worlds see nothing needs it.
    orphans.GRACE_SECONDS_MIN = 0
    builder = SparkSession.builder
    for name, value in json.loads(sys.argv[1]).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    driver = JobsDriver(spark, voice)
    driver.say("ready")
    for line in sys.stdin:
        driver.obey(json.loads(line))
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
