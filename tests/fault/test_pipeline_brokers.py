"""One Spark application for all brokers of a metadata store, while they die and topics move.

The brokers are real processes with disks of their own, a three-node etcd and an S3 server. They
upload nothing themselves but topics with `ack: tiered`, and Spark is on a machine without their
files: whatever else gets into the bucket, and whatever Spark sees of a tail, has gone through the
right broker.
"""

import itertools
import json
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress

import pytest
from pyspark.errors import PySparkException

from ister.errors import IsterError
from ister.spark.jobs.compact_job import compact
from ister.spark.jobs.export_job import export
from ister.spark.jobs.replay_job import replay
from ister.spark.jobs.scrubbing import scrub
from ister.spark.jobs.service import run
from ister.spark.jobs.tier_job import tier
from tests.servers.cluster import LEASE_SECONDS, BrokerCluster
from tests.servers.ports import free_port
from tests.support.machine import Task
from tests.support.pipeline_world import PipelineWorld, exported
from tests.support.scale import scaled
from tests.support.spark_session import get_spark
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.support.writer_child import new_seed, say_replay

SETTINGS = {
    "storage": {
        "uploader": {"engine": "spark", "interval_seconds": 1, "max_object_bytes": 4096},
        "cloud": {"orphan_grace_minutes": 60},
    }
}

ROUNDS = scaled(8, 40)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cluster")
    # By day, a lease that outlasts a machine which is busy with Sparks of other tests.
    lease = scaled(8, LEASE_SECONDS)
    with BrokerCluster(directory, settings=SETTINGS, lease_seconds=lease) as cluster:
        yield cluster


@pytest.fixture
def world(shared, tmp_path):
    shared.restore()
    config = shared.save_config(tmp_path / "spark.yml")
    with PipelineWorld(shared, config, f"world-{next(_numbers)}") as world:
        yield world


@pytest.fixture(scope="module")
def spark():
    return get_spark()


def test_one_application_covers_the_topics_of_all_brokers(world, spark, tmp_path):
    """Goal: no job and no read depends on the broker that a topic has, or on naming one.

    Method: a topic at each of three brokers, some in the bucket and a tail. A stream copies them
    into topics that it creates; then each job, once for all.
    """
    config, everything = world.config, f"/{world.namespace}/*"
    topics = [world.topic(f"plain-{number}", at=number) for number in range(3)]
    world.send(*topics, count=40)
    report = tier(spark, config, topics=everything)
    assert report.ok, report.errors
    assert world.in_bucket(*topics) == world.sent_to(*topics)
    world.send(*topics, count=20)
    assert world.read(spark, *topics) == world.sent_to(*topics)
    # Addresses that are given do not stand in the way, also if nobody is there.
    several = f"127.0.0.1:{free_port()},{world.cluster.brokers[1].flight}"
    assert world.read(spark, *topics, broker=several) == world.sent_to(*topics)
    copies = {topic: topic.replace("plain", "copy") for topic in topics}
    reading = spark.readStream.format("ister").options(
        config=config, topic=",".join(topics), startingOffsets="earliest"
    )
    rows = reading.load().selectExpr("replace(topic, 'plain', 'copy') topic", "payload")
    writing = rows.writeStream.format("ister").options(
        config=config, checkpointLocation=str(tmp_path / "checkpoint")
    )
    writing.trigger(availableNow=True).start().awaitTermination()
    copied = world.at_brokers(*copies.values())
    for topic, copy in copies.items():
        assert sorted(copied[copy].values()) == sorted(world.acked[topic].values())
    assert len(set(world.cluster.owners(copies.values()).values())) > 1, "all at one broker"
    report = replay(spark, config, source=topics[0], target=f"/{world.namespace}/replayed")
    assert report.ok, report.errors
    again = world.at_brokers(f"/{world.namespace}/replayed")
    assert [*again.values()] == [*world.sent_to(topics[0]).values()]
    reading = spark.read.format("ister").options(config=config, topicPattern=f"{everything[:-1]}.*")
    counted = {row.topic: row["count"] for row in reading.load().groupBy("topic").count().collect()}
    assert counted == dict.fromkeys([*topics, *copies.values(), *again], 60)
    to = str(tmp_path / "parquet" / "{topic}")
    report = export(spark, config, topics=everything, to=to, include_tail=True)
    assert report.ok, report.errors
    assert exported(tmp_path, *topics) == world.sent_to(*topics)
    for job in (tier, compact, scrub):
        more = {"min_objects": 2} if job is compact else {}
        report = job(spark, config, topics=everything, **more)
        assert report.ok, (job, report.errors)
    assert world.in_bucket(*topics) == world.sent_to(*topics)
    assert world.in_bucket(*copies.values()) == copied
    assert world.read(spark, *topics) == world.sent_to(*topics)


def test_a_topic_that_cannot_be_reached_is_an_error_and_others_go_on(world, spark, tmp_path):
    """Goal: of a dead broker's topics, what the bucket has is read, and the rest is never ok.

    Method: a broker dies with a tail on its disk, and with a topic that was handed to it whole.
    """
    config, everything = world.config, f"/{world.namespace}/*"
    tail, other = world.topic("tail", at=0), world.topic("other", at=1)
    tiered = world.topic("tiered", at=0, ack="tiered")
    world.send(tail, other, tiered, count=20)
    assert tier(spark, config, topics=everything).ok
    before = world.in_bucket(tail, other, tiered)
    world.send(tail, other, count=10)
    world.cluster.brokers[0].kill()
    world.wait_until_nobody_has(tail)
    seen = {**world.sent_to(tail, other, tiered), tail: before[tail]}
    node = world.node(0)
    with pytest.raises(PySparkException, match=f"node {node} is not running") as caught:
        world.read(spark, tail, other, tiered)
    assert tail in str(caught.value)
    reachable = {"includeUnreachableTail": "false"}
    assert world.read(spark, tail, other, tiered, **reachable) == seen
    to = str(tmp_path / "parquet" / "{topic}")
    for report in (
        tier(spark, config, topics=everything),
        export(spark, config, topics=everything, to=to, include_tail=True),
    ):
        (error,) = report.errors
        assert (error["topic"], report.ok) == (tail, False)
        assert f"node {node} is not running" in error["message"]
        assert f"offset {len(before[tail])}" in error["message"]
    assert exported(tmp_path, tail, other, tiered) == seen
    assert world.in_bucket(other) == world.sent_to(other)
    report = replay(spark, config, source=tail, target=f"/{world.namespace}/replayed")
    assert [error["code"] for error in report.errors] == ["ABORTED"]
    world.cluster.start_all()
    assert world.read(spark, tail, other, tiered) == world.sent_to(tail, other, tiered)
    for job in (tier, scrub):
        report = job(spark, config, topics=everything)
        assert report.ok, report.errors
    assert world.in_bucket(tail, other, tiered) == world.sent_to(tail, other, tiered)


@pytest.mark.nightly
def test_a_topic_that_was_taken_over_is_read_to_its_new_end(world, spark):
    """Goal: messages that were given up are not waited for, and what comes after them is seen."""
    topic = world.topic("given-up", at=2)
    world.send(topic, count=20)
    assert tier(spark, world.config, topics=topic).ok
    kept = world.in_bucket(topic)[topic]
    world.send(topic, count=5)
    world.cluster.brokers[2].kill()
    world.wait_until_nobody_has(topic)
    eventually(lambda: _take_over(world, topic), "another broker takes it over")
    world.acked[topic] = dict(kept)
    assert world.read(spark, topic) == {topic: kept}
    assert tier(spark, world.config, topics=topic).ok
    world.send(topic, count=5)
    assert len(world.acked[topic]) == 25
    assert world.read(spark, topic) == world.sent_to(topic)
    assert tier(spark, world.config, topics=topic).ok
    assert world.in_bucket(topic) == world.sent_to(topic)


def _take_over(world, topic):
    try:
        world.client.admin.take_over(topic, confirm=True)
    except IsterError:
        return False
    return True


@pytest.mark.nightly
def test_one_pipeline_uploads_for_all_brokers_and_goes_on_when_one_dies(world, spark):
    """Goal: one `pipeline run` uploads the topics of every broker, wherever they are by then.

    Method: while it runs, a topic moves, and a broker is killed with a tail on its disk: the others
    are uploaded meanwhile, and the tail when the broker is back.
    """
    topics = [world.topic(f"plain-{number}", at=number) for number in range(3)]
    stop = threading.Event()
    with ExitStack() as stack:
        running = Task(run, spark, world.config, stop=stop)
        stack.callback(running.join, PATIENCE_SECONDS)
        stack.callback(stop.set)
        world.send(*topics, count=10)
        wait_until_uploaded(world, topics)
        world.move(topics[1], 0)
        world.send(topics[2], count=10)
        world.cluster.brokers[2].kill()
        world.send(*topics[:2], count=10)
        wait_until_uploaded(world, topics[:2])
        world.cluster.start_all()
        wait_until_uploaded(world, topics)
    report = running.result()
    assert report.more["tier"]["tiered_messages_total"] == 60
    assert world.in_bucket(*topics) == world.sent_to(*topics)
    assert world.read(spark, *topics) == world.sent_to(*topics)


def wait_until_uploaded(world, topics):
    """Waits until the bucket has what was acknowledged."""

    def is_uploaded():
        found = world.in_bucket(*topics)
        return all(world.acked[topic].items() <= found[topic].items() for topic in topics)

    eventually(is_uploaded, "everything is uploaded")


# -- under load -------------------------------------------------------------------------------


class _Senders:
    """A producer for each topic, on a thread of its own, until it is stopped."""

    def __init__(self, world, topics):
        self._world = world
        self._is_over = threading.Event()
        self._tasks = [Task(self._send, topic) for topic in topics]

    def _send(self, topic):
        sent, acked = 0, self._world.acked[topic]
        with self._world.client.producer(topic, name="sender") as producer:
            while not self._is_over.is_set():
                batch = [f"{topic} {number}".encode() for number in range(sent, sent + 5)]
                for payload, answer in [(one, producer.send(one)) for one in batch]:
                    acked[answer.result()] = payload
                sent += len(batch)
                self._is_over.wait(0.05)

    def stop(self):
        """Returns when all that was sent is acknowledged."""
        self._is_over.set()
        for task in self._tasks:
            eventually(lambda task=task: not task.is_running, "every message is acknowledged")
            task.result()


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("brokers", [2, 3])
def test_nothing_is_lost_or_doubled_while_brokers_die_and_topics_move(
    brokers, spark, tmp_path, request
):
    """Goal: what one application reads, writes and uploads is right, whoever has a topic.

    Method: producers send to topics of both kinds, a query copies them with their tails, and one
    job uploads, while brokers are killed and started again and topics move. Batches, exports,
    merges and scrubs come between. A batch has to agree with the log in the end, and has
    everything that was acknowledged before. Only what may be on a dead broker's disk is left out on
    demand, or is an error. The query must not end.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/pipeline")
    seen, failed, done = [], Counter(), Counter()
    with ExitStack() as stack:
        cluster = stack.enter_context(
            BrokerCluster(tmp_path / "cluster", brokers=brokers, settings=SETTINGS)
        )
        config = cluster.save_config(tmp_path / "spark.yml")
        world = stack.enter_context(PipelineWorld(cluster, config, "load"))
        synced = [world.topic(f"synced-{number}", at=number) for number in range(brokers)]
        tiered = [
            world.topic(f"tiered-{number}", at=number, ack="tiered") for number in range(brokers)
        ]
        topics = [*synced, *tiered]
        stop = threading.Event()
        stack.callback(stop.set)
        tiering = Task(tier, spark, config, topics="/load/*", interval=0.5, stop=stop)
        senders = _Senders(world, topics)
        query = _copy(spark, config, topics, tmp_path / "checkpoint")
        stack.callback(query.stop)
        to = str(tmp_path / "parquet" / "{topic}")
        for _ in range(ROUNDS):
            before = world.sent_to(*topics)
            was_down = len(cluster.alive()) < brokers
            restarting = None
            fault = chance.choice(("kill", "kill", "move", "none"))
            done[fault] += 1
            if fault == "kill":
                victim = chance.choice(cluster.alive())
                cluster.brokers[victim].kill()
                restarting = Task(_start_later, cluster.brokers[victim], chance.uniform(0, 6))
                was_down = True
            elif fault == "move":
                with suppress(IsterError):
                    world.move(chance.choice(topics), chance.randrange(brokers))
            what = chance.choice(("batch", "batch", "export", "compact", "scrub"))
            done[what] += 1
            if what == "batch":
                try:
                    options = {"includeUnreachableTail": chance.choice(("true", "false"))}
                    rows = world.read(spark, *topics, **options)
                except PySparkException as error:
                    assert was_down, error
                    assert options["includeUnreachableTail"] == "true", error
                    assert "is not running: messages from offset" in str(error)
                    failed["batch: a tail is not reached"] += 1
                else:
                    seen.append(rows)
                    for topic in tiered if was_down else topics:
                        assert before[topic].items() <= rows[topic].items(), topic
            else:
                report = _carry_out(what, spark, config, to, include_tail=chance.random() < 0.5)
                assert all(error["topic"] in topics for error in report.errors if error["topic"])
                failed.update(f"{what}: {error['code']}" for error in report.errors)
            if restarting is not None:
                restarting.result()
            assert query.exception() is None, query.exception()
        senders.stop()
        wait_until_uploaded(world, topics)
        query.processAllAvailable()
        stop.set()
        tiering.result()
        report = tier(spark, config, topics="/load/*")
        assert report.ok, report.errors
        for what in ("export", "compact", "scrub"):
            report = _carry_out(what, spark, config, to, include_tail=True)
            assert report.ok, (what, report.errors)
        log = world.in_bucket(*topics)
        for topic in topics:
            # One producer, numbered, each message once.
            assert [*log[topic]] == [*range(len(log[topic]))]
            expected = [f"{topic} {number}".encode() for number in range(len(log[topic]))]
            assert [*log[topic].values()] == expected
            assert world.acked[topic].items() <= log[topic].items()
            copy = topic.replace("/load/", "/load/copy-")
            copied = world.in_bucket(copy)[copy]
            assert sorted(copied.values()) == sorted(expected), f"{copy} differs"
            for rows in seen:
                assert rows[topic].items() <= log[topic].items()
                assert [*rows[topic]] == [*range(len(rows[topic]))]
        assert exported(tmp_path, *topics) == log
        counts = {"messages": sum(map(len, log.values())), **done, **failed}
        print(json.dumps({"test": request.node.name, "seed": seed, **counts}))
        assert done["kill"] >= ROUNDS // 5


def _copy(spark, config, topics, checkpoint):
    """A query that copies topics, and never ends."""
    reading = spark.readStream.format("ister").options(
        config=config, topic=",".join(topics), startingOffsets="earliest"
    )
    rows = reading.load().selectExpr("replace(topic, '/load/', '/load/copy-') topic", "payload")
    writing = rows.writeStream.format("ister").options(
        config=config, checkpointLocation=str(checkpoint)
    )
    return writing.trigger(processingTime="500 milliseconds").start()


def _carry_out(what, spark, config, to, *, include_tail):
    sources = ["/load/synced-*", "/load/tiered-*"]
    if what == "export":
        return export(spark, config, topics=sources, to=to, include_tail=include_tail)
    if what == "compact":
        return compact(spark, config, topics=sources, min_objects=2)
    return scrub(spark, config, topics=sources)


def _start_later(broker, seconds):
    time.sleep(seconds)
    broker.start()
