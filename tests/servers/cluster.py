"""Several brokers with disks of their own, an etcd of three nodes or one, and an S3 server.

    with BrokerCluster(tmp_path) as cluster:
        client = AsyncClient(cluster.addresses)
        cluster.brokers[0].kill()          # SIGKILL; also pause, resume, stop and start
        cluster.etcd.kill(cluster.etcd.leader())
        cluster.cut(1, Link.BUCKET)        # this broker alone loses the bucket
        cluster.restore()                  # everything runs and is connected again

Each broker reaches each etcd node, and the bucket, through a `Cable` of its own, so that one broker
can be cut off while the others notice nothing. With `has_client_cables`, clients and other brokers
reach a broker's gRPC and Flight ports through cables, too: it advertises their addresses.

Processes are ended by their ids. The directory belongs to the caller.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import grpc
import yaml

import ister
from ister import wire
from ister.topic.history import BucketLog

from .broker import BrokerProcess, lay_over
from .etcd import Cable, EtcdCluster
from .ports import free_port
from .s3 import rclone_server

LEASE_SECONDS = 3
"""Lease of the brokers. etcd grants no less than 1.5 of its election timeouts, here 2 s."""
_CALL_SECONDS = 5.0


class Link(StrEnum):
    """What a broker can be cut off from."""

    ETCD = "etcd"
    BUCKET = "bucket"
    CLIENTS = "clients"


class BrokerCluster:
    """See the module header. Use as a context manager.

    Args:
        directory: Where the brokers have their directories.
        brokers: How many.
        etcd_nodes: How many nodes etcd has.
        lease_seconds: Time to live of their leases.
        settings: Laid over the settings of all of them.
        has_client_cables: Whether clients reach brokers through cables.
        engine: What serves gRPC; as the settings say by default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        brokers: int = 3,
        etcd_nodes: int = 3,
        lease_seconds: int = LEASE_SECONDS,
        settings: Mapping[str, Any] | None = None,
        has_client_cables: bool = False,
        engine: str | None = None,
    ) -> None:
        self._directory = directory
        self._count = brokers
        self._etcd_nodes = etcd_nodes
        self.lease_seconds = lease_seconds
        self._settings = settings or {}
        self._has_client_cables = has_client_cables
        self._engine = engine
        self._stack = contextlib.ExitStack()
        self._cables: dict[tuple[int, Link], list[Cable]] = {}
        self._paused: set[int] = set()
        self.brokers: list[BrokerProcess] = []
        self.addresses: list[str] = []
        """Where clients reach each broker."""

    def __enter__(self) -> Self:
        try:
            self.etcd = self._stack.enter_context(EtcdCluster(self._etcd_nodes))
            self._s3 = self._stack.enter_context(rclone_server())
            for number in range(self._count):
                self._add_broker(number)
            self.start_all()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- what can be done to it -------------------------------------------------------------

    def start_all(self) -> None:
        """Starts those that do not run, all at once; returns when each is ready."""
        missing = [broker for broker in self.brokers if not broker.is_running]
        with ThreadPoolExecutor(max(1, len(missing))) as pool:
            list(pool.map(BrokerProcess.start, missing))

    def pause(self, number: int) -> None:
        """SIGSTOP."""
        self.brokers[number].pause()
        self._paused.add(number)

    def resume(self, number: int) -> None:
        """SIGCONT."""
        self._paused.discard(number)
        self.brokers[number].resume()

    def cut(self, number: int, link: Link, how: Callable[[Cable], None] = Cable.cut) -> None:
        """Breaks a broker's connections; `how` may also be `Cable.refuse` or `Cable.swallow`."""
        for cable in self._cables[number, link]:
            how(cable)

    def heal(self, number: int, link: Link) -> None:
        """Ends a cut."""
        for cable in self._cables[number, link]:
            cable.heal()

    def restore(self) -> None:
        """Brings everything back that was cut, paused or killed."""
        for number in list(self._paused):
            self.resume(number)
        for cables in self._cables.values():
            for cable in cables:
                cable.heal()
        self.etcd.start_killed()
        self.start_all()

    # -- what it says -----------------------------------------------------------------------

    def alive(self) -> list[int]:
        """Numbers of the brokers that run and are not paused."""
        return [
            number
            for number, broker in enumerate(self.brokers)
            if broker.is_running and number not in self._paused
        ]

    def number_of(self, url: str) -> int | None:
        """The broker at an address that a look-up gave; None if it is nobody's."""
        address = url.rpartition("/")[2]
        return self.addresses.index(address) if address in self.addresses else None

    def owners(self, topics: Iterable[str], at: int | None = None) -> dict[str, int | None]:
        """The broker that each topic is looked up at, or None while there is none.

        A broker is believed only about itself: where it names another one, that one is asked.

        Args:
            topics: Their names.
            at: The broker to ask first; the first that runs by default.
        """
        found: dict[str, int | None] = {}
        with contextlib.ExitStack() as stack:
            stubs: dict[int, Any] = {}
            for topic in topics:
                number: int | None = self.alive()[0] if at is None else at
                for _ in range(2):
                    if number not in stubs:
                        channel = stack.enter_context(
                            grpc.insecure_channel(self.brokers[number].address)
                        )
                        stubs[number] = wire.stub(channel, "danube.Discovery")
                    named = self._named(stubs[number], topic)
                    is_sure = named == number
                    number = named
                    if is_sure or named is None or named not in self.alive():
                        break
                found[topic] = number if is_sure else None
        return found

    def _named(self, stub: Any, topic: str) -> int | None:
        request = wire.danube.TopicLookupRequest(request_id=1, topic=topic)
        try:
            answer = stub.TopicLookup(request, timeout=_CALL_SECONDS)
        except grpc.RpcError:
            return None
        return self.number_of(answer.broker_url)

    def read_history(self, topic: str) -> list[tuple[int, bytes, str]]:
        """Offset, payload and key of what the bucket has of a topic; no broker is asked."""
        with self.open_bucket() as history:
            table = history.topic(topic).read_arrow().read_all()
        columns = (table.column(name).to_pylist() for name in ("offset", "payload", "routing_key"))
        return [(offset, payload, key or "") for offset, payload, key in zip(*columns, strict=True)]

    def stored_cursor(self, topic: str, subscription: str) -> int | None:
        """The cursor that a broker's death leaves; None if there is none."""
        with self.open_bucket() as history:
            prefix = history.config.storage.metadata.root_prefix
            found = history.metadata.get(f"{prefix}/subscriptions{topic}/{subscription}/progress")
        return None if found is None else int(json.loads(found.value)["offset"])

    def open_bucket(self) -> BucketLog:
        """The stores, as a process sees them that is no broker."""
        return ister.open_bucket({"storage": self._stores_of_another()})

    def save_config(self, path: Path, **sections: Any) -> str:
        """Writes an `ister.yml` for Spark, on a machine that has no broker's files; its path."""
        tree: dict[str, Any] = {"storage": self._stores_of_another()}
        lay_over(tree, {"storage": self._settings.get("storage", {})})
        lay_over(tree, sections)
        path.write_text(yaml.safe_dump(tree))
        return str(path)

    def _stores_of_another(self) -> dict[str, Any]:
        stores = self._stores(self.etcd.direct_endpoints, None)
        stores["wal"] = {"dir": str(self._directory / "unused")}
        return stores

    # -- inside -----------------------------------------------------------------------------

    def _add_broker(self, number: int) -> None:
        to_etcd = [
            self._cable(number, Link.ETCD, int(endpoint.rpartition(":")[2]))
            for endpoint in self.etcd.direct_endpoints
        ]
        to_bucket = self._cable(number, Link.BUCKET, self._s3.port)
        ports = {name: free_port() for name in ("grpc", "flight", "http")}
        settings: dict[str, Any] = {
            "broker": {"ports": ports},
            "storage": self._stores(to_etcd, f"http://{to_bucket}"),
            "dispatch": {"progress_flush_interval_seconds": 1},
        }
        address = f"127.0.0.1:{ports['grpc']}"
        if self._has_client_cables:
            address = self._cable(number, Link.CLIENTS, ports["grpc"])
            flight = self._cable(number, Link.CLIENTS, ports["flight"])
            settings["broker"]["advertised"] = {
                "broker_url": f"http://{address}",
                "flight_url": f"grpc://{flight}",
            }
        lay_over(settings, self._settings)
        self.addresses.append(address)
        self.brokers.append(
            self._stack.enter_context(
                _Unstarted(
                    self._directory / f"broker-{number}", settings=settings, engine=self._engine
                )
            )
        )

    def _cable(self, number: int, link: Link, port: int) -> str:
        cable = Cable(port)
        self._stack.callback(cable.close)
        self._cables.setdefault((number, link), []).append(cable)
        return f"127.0.0.1:{cable.port}"

    def _stores(self, endpoints: list[str], bucket: str | None) -> dict[str, Any]:
        return {
            # Uploads start at once when there is something: `ack: tiered` waits for them.
            "uploader": {"engine": "embedded", "interval_seconds": 1, "max_batch_bytes": 2048},
            "cloud": {
                "backend": "s3",
                "root": f"s3://{self._s3.bucket}/cluster",
                "options": self._s3.options(endpoint=bucket),
            },
            "metadata": {
                "backend": "etcd",
                "endpoints": endpoints,
                "lease_ttl_seconds": self.lease_seconds,
            },
        }


class _Unstarted(BrokerProcess):
    """A broker that the cluster starts, and that is killed with it."""

    def __enter__(self) -> Self:
        return self
