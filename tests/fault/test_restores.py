"""etcd is put back to a snapshot under three brokers: what was acknowledged since stays.

Brokers, etcd and the bucket are real. A round: messages are sent, etcd is saved at a random moment,
more messages are sent, topics move, everything is killed, etcd is put back, everything starts. Each
topic then reads as it was acknowledged and goes on behind it, or says that it does not; after
`ister metadata accept` all of them do. Bucket and disks are whole, so nothing may be missing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ister.client import Client
from ister.errors import IsterError
from tests.servers.broker import lay_over
from tests.servers.cluster import BrokerCluster
from tests.support.scale import nightly, scaled
from tests.support.writer_child import new_seed, say_replay

ROUNDS = scaled(1, 20)
BURSTS = scaled(12, 60)
TOPICS = [f"/default/t{number}" for number in range(3)]
MODES = {
    "synced": ("synced", {}),
    "tiered": ("tiered", {}),
    "bucket": ("tiered", {"storage": {"mode": "bucket", "wal": {"dir": None}}}),
}
ANSWER_SECONDS = scaled(15.0, 30.0)


@dataclass
class Load:
    """Producers, and what they were told."""

    client: Client
    ack: str
    acked: dict[str, dict[int, bytes]] = field(default_factory=lambda: {t: {} for t in TOPICS})
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def send(self, topic: str, count: int) -> None:
        """Sends messages, and waits until all are acknowledged.

        Raises:
            IsterError: The topic does not take them.
            AssertionError: One got the offset of another one.
        """
        with self.client.producer(
            topic, create=True, ack=self.ack, timeout=ANSWER_SECONDS
        ) as producer:
            sent = [b"%d of %s" % (next(self.numbers), topic.encode()) for _ in range(count)]
            answers = {payload: producer.send(payload) for payload in sent}
            for payload, answer in answers.items():
                offset = answer.result(ANSWER_SECONDS)
                before = self.acked[topic].get(offset)
                assert before is None, f"{topic}: {offset} of {before} was given to {payload}"
                self.acked[topic][offset] = payload

    def check(self, topic: str) -> int:
        """Reads a topic and compares it with what was acknowledged; returns how much was read.

        Raises:
            IsterError: It cannot be read.
        """
        table = self.client.read_arrow(topic, columns=["offset", "payload"]).read_all()
        rows = zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True)
        found = dict(rows)
        missing = {o: p for o, p in self.acked[topic].items() if found.get(o) != p}
        assert not missing, f"{topic}: {len(missing)} acknowledged messages missing: {missing}"
        return len(found)


def go_on(load: Load) -> dict[str, IsterError]:
    """Sends to every topic and reads it; which of them refuse, and why."""

    def use(topic: str) -> IsterError | None:
        try:
            load.send(topic, 5)
            load.check(topic)
        except IsterError as error:
            return error
        return None

    with ThreadPoolExecutor(len(TOPICS)) as pool:
        answers = dict(zip(TOPICS, pool.map(use, TOPICS), strict=True))
    return {topic: error for topic, error in answers.items() if error is not None}


def accept(cluster: BrokerCluster) -> None:
    """`ister metadata accept` on every node; its exit code tells about open topics, too."""
    for broker in cluster.brokers:
        config = broker.directory / "ister.yml"
        done = subprocess.run(
            [sys.executable, "-m", "ister", "metadata", "accept", "--yes", f"--config={config}"],
            capture_output=True,
            text=True,
            check=False,
        )
        print(done.stdout, done.stderr)


def move_some(load: Load, rng: random.Random) -> None:
    """Topics change their owners, so that later terms begin."""
    nodes = [broker["node"] for broker in load.client.admin.brokers()]
    for topic in TOPICS:
        if rng.random() < 0.5:
            with contextlib.suppress(IsterError):
                load.client.admin.move_topic(topic, rng.choice(nodes))


def run_round(
    cluster: BrokerCluster, load: Load, rng: random.Random, snapshot: Path
) -> dict[str, object]:
    """One restore; everything that was acknowledged is read, at the latest after an acceptance.

    Returns:
        What was acknowledged and read so far, and which topics refused before the acceptance.
    """
    at = rng.randrange(1, BURSTS)
    reached = threading.Event()

    def save() -> None:
        reached.wait(ANSWER_SECONDS)
        cluster.etcd.save_snapshot(snapshot)

    saving = threading.Thread(target=save)
    saving.start()
    for number in range(BURSTS):
        if number == at:
            reached.set()
        load.send(rng.choice(TOPICS), rng.randrange(1, 10))
        if number == BURSTS // 2:
            move_some(load, rng)
    reached.set()
    saving.join()
    for topic in TOPICS:
        load.send(topic, rng.randrange(1, 20))
    for broker in cluster.brokers:
        broker.kill()
    cluster.etcd.restore_snapshot(snapshot)
    snapshot.unlink()
    cluster.start_all()
    refused = go_on(load)
    if refused:
        accept(cluster)
        assert go_on(load) == {}
    read = sum(load.check(topic) for topic in TOPICS)
    return {
        "snapshot at burst": at,
        "acked": sum(len(acked) for acked in load.acked.values()),
        "read": read,
        "refused": {topic: str(error) for topic, error in refused.items()},
    }


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", ["tiered", nightly("synced"), nightly("bucket")])
def test_etcd_that_was_put_back_loses_no_message(tmp_path, request, mode):
    """Goal: what was acknowledged after the snapshot is read after the restore, or named.

    Method: rounds at random moments, on the same topics.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    rng = random.Random(seed)
    ack, changes = MODES[mode]
    settings: dict[str, object] = {}
    lay_over(settings, changes)
    with (
        BrokerCluster(tmp_path / "cluster", settings=settings) as cluster,
        Client(cluster.addresses, timeout=ANSWER_SECONDS) as client,
    ):
        load = Load(client, ack)
        # A topic that the snapshot does not have is for `ister recover`.
        for topic in TOPICS:
            load.send(topic, 1)
        for number in range(ROUNDS):
            figures = run_round(cluster, load, rng, tmp_path / "snapshot.db")
            print(json.dumps({"round": number} | figures), flush=True)
