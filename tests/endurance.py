"""A broker that is killed every 8 seconds under programs of both clients, and a judge of its own.

    python -m tests.endurance --seconds 600 --seed 1 --engine native
    python -m tests.endurance --seconds 1800 --seed 1 --brokers 3 --kills 100

Two topics, subscriptions of all four kinds, consumers that come and leave, nacks, seeks back, and
a process of consumers that is stopped with SIGSTOP, or killed, every few seconds. In the end
producers stop, and everything has to arrive. Nothing is lost, nothing comes out of order: judged by
`tests.support.endurance_judge` from what the programs wrote down, not from what the broker has.

With several brokers (three-node etcd, S3, `ack: tiered`) one after the other dies, and its topics
have to be served by the others: see `tests.support.cluster_run`.

Ends with one JSON line; the exit code says whether all of it held. `--keep` leaves the records.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.servers.broker import BrokerProcess
from tests.servers.cluster import BrokerCluster
from tests.support.cluster_run import CLUSTER_SETTINGS, ClusterRun, faults_of
from tests.support.endurance_load import EnduranceLoad
from tests.support.endurance_program import Options

KILL_SECONDS = 8.0
SETTINGS = {
    "storage": {"wal": {"rotate_max_bytes": 1 << 20}},
    "dispatch": {
        "max_unacked_messages": 100,
        "progress_flush_interval_seconds": 1,
        "progress_min_offset_delta": 100,
    },
}


class Endurance:
    """The run with one broker: the broker, the programs, and what disturbs them."""

    def __init__(self, directory: Path, seconds: float, seed: int, engine: str) -> None:
        self._directory = directory
        self._seconds = seconds
        self._seed = seed
        self._engine = engine
        self._broker = BrokerProcess(directory / "broker", settings=SETTINGS, engine=engine)
        self._failures: list[str] = []
        self._rss_max = 0

    def run(self) -> dict[str, object]:
        """Runs for the time given, and returns the summary."""
        started = time.monotonic()
        with self._broker:
            options = Options(addresses=[self._broker.address])
            with EnduranceLoad(self._directory, self._seed, options) as load:
                try:
                    load.start()
                    self._disturb_all(load, time.monotonic() + self._seconds)
                    load.drain()
                    self._broker.stop()
                except Exception as error:  # the rest of the report is wanted all the same
                    self._failures.append(f"{type(error).__name__}: {error}")
        load.read()
        verdict = load.judge.check()
        return {
            "endurance": "ok" if verdict.is_clean and not self._failures else "failed",
            "seconds": round(time.monotonic() - started, 1),
            "seed": self._seed,
            "engine": self._engine,
            **load.counts,
            **verdict.figures,
            "broker_rss_mib_max": self._rss_max >> 20,
            **verdict.kinds(),
            "failures": [*self._failures, *verdict.shown()],
        }

    def _disturb_all(self, load: EnduranceLoad, until: float) -> None:
        kill_at = time.monotonic() + KILL_SECONDS
        while (now := time.monotonic()) < until:
            load.check_alive()
            if now >= kill_at:
                kill_at += KILL_SECONDS
                self._rss_max = max(self._rss_max, self._broker.rss_bytes())
                self._broker.kill()
                load.disturbed("kills")
                self._broker.start()
            load.disturb_guests()
            time.sleep(0.05)


def run_cluster(options: argparse.Namespace, directory: Path, seed: int) -> dict[str, object]:
    """The run with several brokers."""
    faults = faults_of(
        seed,
        kills=options.kills,
        pauses=options.pauses,
        restarts=options.restarts,
        etcd_kills=options.etcd_kills,
        cuts=options.cuts,
    )
    with BrokerCluster(
        directory / "cluster",
        brokers=options.brokers,
        settings=CLUSTER_SETTINGS,
        has_client_cables=options.cuts > 0,
        engine=options.engine,
    ) as cluster:
        return ClusterRun(
            cluster, directory / "run", seed, faults, seconds_max=options.seconds
        ).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="no disturbance after so long")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--engine", choices=["grpcio", "native"], default="grpcio")
    parser.add_argument("--keep", action="store_true", help="leave records and logs, and say where")
    parser.add_argument("--brokers", type=int, default=1, help="more than one need etcd and S3")
    several = parser.add_argument_group("with several brokers")
    several.add_argument("--kills", type=int, default=100, help="kill -9 of a broker")
    several.add_argument("--pauses", type=int, default=0, help="SIGSTOPs past the lease")
    several.add_argument("--restarts", type=int, default=0, help="rolling restarts of all brokers")
    several.add_argument("--etcd-kills", type=int, default=0, help="kills of etcd's leader")
    several.add_argument("--cuts", type=int, default=0, help="cuts from etcd, bucket and clients")
    options = parser.parse_args()
    seed = options.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    words = f"--seconds {options.seconds:g} --seed {seed} --engine {options.engine}"
    if options.brokers > 1:
        words += f" --brokers {options.brokers} --kills {options.kills} --pauses {options.pauses}"
        words += f" --restarts {options.restarts} --etcd-kills {options.etcd_kills}"
        words += f" --cuts {options.cuts}"
    print(f"replay: python -m tests.endurance {words}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="ister-endurance-"))
    if options.brokers > 1:
        summary = run_cluster(options, directory, seed)
    else:
        summary = Endurance(directory, options.seconds, seed, options.engine).run()
    print(json.dumps(summary))
    is_ok = summary["endurance"] == "ok"
    if options.keep or not is_ok:
        print(f"records and logs: {directory}", file=sys.stderr)
    else:
        shutil.rmtree(directory)
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
