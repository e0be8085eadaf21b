"""A run of several brokers under load, with faults, and what it has shown.

`ClusterRun` has the programs of `endurance_program` use a `BrokerCluster` while brokers are killed,
stopped, cut off or restarted one after the other, and etcd's leader is killed. In the end all runs
again, everything has to arrive, and the judge also gets what the bucket has:

    lost, order, doubled, disagree …   see `endurance_judge`
    served again                       how long after a fault each topic that it can have stopped
                                       acknowledged a message that was sent after the fault

A fault that has stopped a topic for longer than the limit is a failure of its own. All choices
come from the seed; when they happen depends on the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Final

from ister.client import Client
from tests.servers.broker import READY_SECONDS
from tests.servers.cluster import BrokerCluster, Link
from tests.servers.etcd import Cable
from tests.support.endurance_load import EnduranceLoad
from tests.support.endurance_program import Options
from tests.support.scale import scaled
from tests.support.waiting import eventually

__all__ = ["CLUSTER_SETTINGS", "SERVED_SECONDS", "TOPICS", "ClusterRun", "Fault", "faults_of"]

CLUSTER_SETTINGS: Final = {
    "storage": {"wal": {"rotate_max_bytes": 1 << 20}},
    "dispatch": {
        "max_unacked_messages": 100,
        "progress_flush_interval_seconds": 1,
        "progress_min_offset_delta": 100,
    },
}
TOPICS: Final = ("/default/left", "/default/right", "/default/middle")
SERVED_SECONDS: Final = 5.0
"""How long a topic may be away beyond the lease of its broker."""
BUSY_SECONDS: Final = scaled(60.0, 20.0)
"""More of it on a machine that has other things to do; the figures show what it was."""
_SECOND: Final = 1_000_000_000
_TICK_SECONDS: Final = 0.05


class Fault(StrEnum):
    """What happens to the cluster."""

    KILL = "kills"
    PAUSE = "pauses"
    RESTART = "restarts"
    ETCD_LEADER = "etcd leader kills"
    CUT_ETCD = "cuts from etcd"
    CUT_BUCKET = "cuts from the bucket"
    CUT_CLIENTS = "cuts from clients"


_LINKS: Final = {
    Fault.CUT_ETCD: Link.ETCD,
    Fault.CUT_BUCKET: Link.BUCKET,
    Fault.CUT_CLIENTS: Link.CLIENTS,
}


def faults_of(
    seed: int,
    *,
    kills: int = 0,
    pauses: int = 0,
    restarts: int = 0,
    etcd_kills: int = 0,
    cuts: int = 0,
) -> list[Fault]:
    """So many of each, in an order that the seed gives.

    `restarts` are of all brokers, one after the other; `cuts` is the number of each kind.
    """
    faults = [Fault.KILL] * kills + [Fault.PAUSE] * pauses + [Fault.RESTART] * restarts
    faults += [Fault.ETCD_LEADER] * etcd_kills
    faults += list(_LINKS) * cuts
    random.Random(f"{seed}/faults").shuffle(faults)
    return faults


class ClusterRun:
    """See the module header.

    Args:
        cluster: The brokers, running; they run when `run` returns, too, unless it failed.
        directory: For records and logs.
        seed: Of all choices.
        faults: What happens, in this order.
        options: For the programs; `ack: tiered` on three topics by default.
        seconds_max: No further fault after so long.
    """

    def __init__(
        self,
        cluster: BrokerCluster,
        directory: Path,
        seed: int,
        faults: Iterable[Fault],
        *,
        options: Options | None = None,
        seconds_max: float = float("inf"),
    ) -> None:
        self._cluster = cluster
        self._seed = seed
        self._faults = faults
        self._seconds_max = seconds_max
        self._options = options or Options(addresses=cluster.addresses, topics=TOPICS, ack="tiered")
        self._load = EnduranceLoad(directory, seed, self._options)
        self._chance = random.Random(f"{seed}/cluster")
        self._starting: dict[int, Future[None]] = {}
        self._failures: list[str] = []
        self._served: dict[Fault, list[float]] = {}
        self._taken: list[float] = []
        self._pauses: list[float] = []

    @property
    def _limit(self) -> float:
        return self._cluster.lease_seconds + SERVED_SECONDS + BUSY_SECONDS

    def run(self) -> dict[str, object]:
        """Runs all faults, and returns the summary."""
        started = time.monotonic()
        with self._load, ThreadPoolExecutor(len(self._cluster.brokers)) as self._pool:
            try:
                self._load.start()
                self._await_served(self._options.topics, time.monotonic_ns(), "start")
                for fault in self._faults:
                    if time.monotonic() - started > self._seconds_max:
                        break
                    self._inflict(fault)
                self._finish()
            except Exception as error:  # the rest of the report is wanted all the same
                self._failures.append(f"{type(error).__name__}: {error}")
            for future in self._starting.values():
                future.exception()
        for broker in self._cluster.brokers:
            self._failures += broker.failed_calls()
        self._load.read()
        verdict = self._load.judge.check()
        return {
            "endurance": "ok" if verdict.is_clean and not self._failures else "failed",
            "seconds": round(time.monotonic() - started, 1),
            "seed": self._seed,
            "brokers": len(self._cluster.brokers),
            "lease_seconds": self._cluster.lease_seconds,
            **self._load.counts,
            **verdict.figures,
            **self._figures(),
            **verdict.kinds(),
            "failures": [*self._failures, *verdict.shown()],
        }

    def _figures(self) -> dict[str, object]:
        figures: dict[str, object] = {
            f"served again after {fault} (s)": _spread(seconds)
            for fault, seconds in self._served.items()
        }
        if self._taken:
            figures["taken over from stopped brokers (s)"] = _spread(self._taken)
        if self._pauses:
            figures["pause per topic and restart (s)"] = _spread(self._pauses)
        return figures

    # -- faults -----------------------------------------------------------------------------

    def _inflict(self, fault: Fault) -> None:
        if fault is Fault.ETCD_LEADER:
            self._kill_etcd_leader()
            return
        self._await_restarts()
        owners = self._cluster.owners(self._options.topics)
        victim = self._choose_victim(owners)
        owned = [topic for topic, owner in owners.items() if owner == victim]
        match fault:
            case Fault.KILL:
                self._kill(victim, owned)
            case Fault.PAUSE:
                self._pause(victim, owned)
            case Fault.RESTART:
                for number in range(len(self._cluster.brokers)):
                    self._restart(number)
            case _:
                self._cut(victim, fault, owned)

    def _choose_victim(self, owners: Mapping[str, int | None]) -> int:
        """Mostly one that has a topic, and at first always: of the others nothing depends."""
        owning = sorted({owner for owner in owners.values() if owner is not None})
        is_any = (self._chance.random() < 0.2 and self._served) or not owning
        return self._chance.choice(self._cluster.alive() if is_any else owning)

    def _kill(self, victim: int, owned: Sequence[str]) -> None:
        """Some come back while others wait for their lease to end, the rest when all is served."""
        is_first = Fault.KILL not in self._served
        is_early = self._chance.random() < 0.3 and not is_first
        away = self._chance.uniform(0, 2 * self._cluster.lease_seconds)
        self._cluster.brokers[victim].kill()
        at = self._load.disturbed(Fault.KILL)
        if is_early:
            self._wait(away)
            self._start(victim)
        else:
            found = self._await_served(self._options.topics, at, f"the kill of broker {victim}")
            self._served.setdefault(Fault.KILL, []).extend(found[topic] for topic in owned)
            self._start(victim)
        self._await_served(self._options.topics, time.monotonic_ns(), f"broker {victim}'s return")

    def _pause(self, victim: int, owned: Sequence[str]) -> None:
        """Some go on soon after their lease has ended, the rest when all is served by others."""
        lease = self._cluster.lease_seconds
        is_long = self._chance.random() < 0.5 or Fault.PAUSE not in self._served
        self._cluster.pause(victim)
        at = self._load.disturbed(Fault.PAUSE)
        try:
            until = time.monotonic() + lease + self._chance.uniform(1, 2 * lease)
            self._await_other_owner(owned, until)
            self._wait(until - time.monotonic())
            if is_long:
                found = self._await_served(self._options.topics, at, f"the stop of broker {victim}")
                self._served.setdefault(Fault.PAUSE, []).extend(found[topic] for topic in owned)
        finally:
            self._cluster.resume(victim)
        self._load.disturbed("resumes")
        self._await_served(self._options.topics, time.monotonic_ns(), f"broker {victim}'s return")

    def _await_other_owner(self, topics: Sequence[str], until: float) -> None:
        """Notes how long it takes until each topic has another broker, whoever uses it."""
        began, left = time.monotonic(), set(topics)

        def all_taken() -> bool:
            for topic, owner in self._cluster.owners(left).items():
                if owner is not None:
                    left.discard(topic)
                    self._taken.append(time.monotonic() - began)
            return not left

        self._until(all_taken, until - time.monotonic())

    def _kill_etcd_leader(self) -> None:
        etcd = self._cluster.etcd
        leader = etcd.leader()
        etcd.kill(leader)
        at = self._load.disturbed(Fault.ETCD_LEADER)
        found = self._await_served(self._options.topics, at, "the kill of etcd's leader")
        self._served.setdefault(Fault.ETCD_LEADER, []).extend(found.values())
        etcd.start(leader)

    def _cut(self, victim: int, fault: Fault, owned: Sequence[str]) -> None:
        is_silent = self._chance.random() < 0.5
        seconds = self._chance.uniform(0.5, 2.5 * self._cluster.lease_seconds)
        self._cluster.cut(victim, _LINKS[fault], Cable.swallow if is_silent else Cable.cut)
        cut_at = self._load.disturbed(fault)
        self._wait(seconds)
        self._cluster.heal(victim, _LINKS[fault])
        at = self._load.disturbed("heals")
        found = self._await_served(self._options.topics, at, f"broker {victim}'s {fault}")
        self._served.setdefault(fault, []).extend(found.values())
        judge = self._load.judge
        pauses = [judge.longest_pause(topic, cut_at, at) for topic in owned]
        # A cut that stops no topic for a good part of its time was none.
        self._load.counts["cuts felt"] += any(pause > seconds * _SECOND / 2 for pause in pauses)

    def _restart(self, number: int) -> None:
        """SIGTERM, and the next life when that one has ended: a step of a rolling restart."""
        at = self._load.disturbed(Fault.RESTART)
        self._cluster.brokers[number].stop()
        self._load.disturbed("stopped")
        self._cluster.brokers[number].start()
        self._await_served(self._options.topics, time.monotonic_ns(), f"restart of {number}")
        until = time.monotonic_ns()
        self._pauses += [
            self._load.judge.longest_pause(topic, at, until) / _SECOND
            for topic in self._options.topics
        ]

    # -- waiting ----------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        """In the background: whether topics are served is looked at meanwhile."""
        self._starting[number] = self._pool.submit(self._cluster.brokers[number].start)

    def _await_restarts(self) -> None:
        """Returns when all brokers are back: one that starts can neither be killed nor asked."""
        starting, self._starting = list(self._starting.values()), {}
        self._until(lambda: all(one.done() for one in starting), READY_SECONDS)
        for one in starting:
            one.result()

    def _wait(self, seconds: float) -> None:
        self._until(lambda: False, seconds)

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for the condition, with an eye on the programs; whether it came true."""
        deadline = time.monotonic() + seconds
        while not (is_true := condition()) and time.monotonic() < deadline:
            self._load.check_alive()
            self._load.disturb_guests()
            self._load.read()
            time.sleep(_TICK_SECONDS)
        return is_true

    def _await_served(self, topics: Sequence[str], since: int, what: str) -> dict[str, float]:
        """Seconds from `since` until each topic acknowledged what was sent after it."""
        judge = self._load.judge
        found: dict[str, float] = {}

        def all_served() -> bool:
            for topic in topics:
                at = judge.served_at(topic, since)
                if at is not None:
                    found[topic] = (at - since) / _SECOND
            return len(found) == len(topics)

        if not self._until(all_served, self._limit):
            missing = [topic for topic in topics if topic not in found]
            self._failures.append(f"not served {self._limit:g} s after {what}: {missing}")
            found |= dict.fromkeys(missing, float("inf"))
        return found

    # -- the end ----------------------------------------------------------------------------

    def _finish(self) -> None:
        self._await_restarts()
        self._cluster.restore()
        self._load.drain()
        topics = self._options.topics
        with Client(self._cluster.addresses) as client:
            for topic in topics:
                eventually(lambda t=topic: _is_tiered(client, t), f"{topic} is not all uploaded")
        for topic in topics:
            self._load.logged(topic, self._cluster.read_history(topic))


def _is_tiered(client: Client, topic: str) -> bool:
    marks = client.admin.describe_topic(topic)
    return marks.tiered == marks.next


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Count, median, 99th percentile and maximum."""
    ordered = sorted(seconds)
    if not ordered:
        return {"count": 0}
    return {
        "count": len(ordered),
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 2),
        "max": round(ordered[-1], 2),
    }
