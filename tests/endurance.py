"""A broker that is killed every 8 seconds under programs of both clients, and a judge of its own.

    python -m tests.endurance --seconds 600 --seed 1 --engine native

Two topics, subscriptions of all four kinds, consumers that come and leave, nacks, seeks back, and
a process of consumers that is stopped with SIGSTOP, or killed, every few seconds. In the end
producers stop, and everything has to arrive. Nothing is lost, nothing comes out of order: judged by
`fault.endurance_judge` from what the programs wrote down, not from what the broker has.

Ends with one JSON line; the exit code says whether all of it held. `--keep` leaves the records.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fault.endurance_judge import Judge, Records
from servers.broker import BrokerProcess

TESTS = Path(__file__).resolve().parent
KILL_SECONDS = 8.0
DRAIN_SECONDS = 120.0
"""How long nothing may arrive in the end, before the rest counts as lost."""
SETTINGS = {
    "storage": {"wal": {"rotate_max_bytes": 1 << 20}},
    "dispatch": {
        "max_unacked_messages": 100,
        "progress_flush_interval_seconds": 1,
        "progress_min_offset_delta": 100,
    },
}


class Endurance:
    """The run: the broker, the programs, and what disturbs them."""

    def __init__(self, directory: Path, seconds: float, seed: int, engine: str) -> None:
        self._directory = directory
        self._records = directory / "records"
        self._records.mkdir(parents=True)
        self._seconds = seconds
        self._seed = seed
        self._engine = engine
        self._broker = BrokerProcess(directory / "broker", settings=SETTINGS, engine=engine)
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._counts: Counter[str] = Counter()
        self._failures: list[str] = []
        self._judge = Judge()
        self._news = Records(self._records)
        self._rss_max = 0

    def run(self) -> dict[str, object]:
        """Runs for the time given, and returns the summary."""
        started = time.monotonic()
        try:
            self._broker.start()
            for role in ("residents", "guests", "producers"):
                self._launch(role)
            self._disturb_all(time.monotonic() + self._seconds)
            self._drain()
        except Exception as error:  # the rest of the report is wanted all the same
            self._failures.append(f"{type(error).__name__}: {error}")
        finally:
            for program in self._programs.values():
                program.kill()
                program.wait()
            self._broker.kill()
        self._judge.feed(self._news.news())
        verdict = self._judge.check()
        return {
            "endurance": "ok" if verdict.is_clean and not self._failures else "failed",
            "seconds": round(time.monotonic() - started, 1),
            "seed": self._seed,
            "engine": self._engine,
            **self._counts,
            **verdict.figures,
            "broker_rss_mib_max": self._rss_max >> 20,
            **verdict.kinds(),
            "failures": [*self._failures, *verdict.shown()],
        }

    # -- programs ---------------------------------------------------------------------------

    def _launch(self, role: str, *, is_awaited: bool = True) -> None:
        number = self._counts[f"{role} started"]
        self._counts[f"{role} started"] += 1
        with (self._directory / f"{role}.log").open("ab") as log:
            program = self._programs[role] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fault.endurance_program", role, self._broker.address),
                    *(str(self._records / f"{role}-{number}.jsonl"), f"{self._seed}/{number}"),
                ],
                cwd=TESTS,
                stdout=subprocess.PIPE if is_awaited else subprocess.DEVNULL,
                stderr=log,
            )
        if program.stdout is not None:
            with program.stdout as output:
                if not output.readline():
                    raise RuntimeError(f"{role} did not start: {self._last_words(role)}")

    def _last_words(self, role: str) -> str:
        return (self._directory / f"{role}.log").read_text(errors="replace")[-2000:]

    def _check_alive(self, *roles: str) -> None:
        for role in roles or self._programs:
            code = self._programs[role].poll()
            if code is not None:
                raise RuntimeError(f"{role} ended with {code}: {self._last_words(role)}")

    def _disturbed(self, what: str) -> None:
        self._counts[what] += 1
        with (self._records / "runner.jsonl").open("a") as file:
            file.write(json.dumps(("disturb", time.monotonic_ns(), what)) + "\n")

    # -- disturbances -----------------------------------------------------------------------

    def _disturb_all(self, until: float) -> None:
        chance = random.Random(self._seed)
        kill_at = time.monotonic() + KILL_SECONDS
        guests_at = time.monotonic() + chance.uniform(2, 6)
        is_paused = False
        while (now := time.monotonic()) < until:
            self._check_alive()
            if now >= kill_at:
                kill_at += KILL_SECONDS
                self._rss_max = max(self._rss_max, self._broker.rss_bytes())
                self._broker.kill()
                self._disturbed("kills")
                self._broker.start()
            if now >= guests_at:
                guests = self._programs["guests"]
                if is_paused:
                    guests.send_signal(signal.SIGCONT)
                    self._disturbed("resumed")
                    guests_at = now + chance.uniform(4, 12)
                elif chance.random() < 0.7:
                    guests.send_signal(signal.SIGSTOP)
                    self._disturbed("paused")
                    guests_at = now + chance.uniform(1, 12)
                else:
                    guests.kill()
                    guests.wait()
                    self._disturbed("guests killed")
                    self._launch("guests", is_awaited=False)
                    guests_at = now + chance.uniform(4, 12)
                is_paused = not is_paused and guests.poll() is None
            time.sleep(0.05)
        if is_paused:
            self._programs["guests"].send_signal(signal.SIGCONT)
            self._disturbed("resumed")

    # -- the end ----------------------------------------------------------------------------

    def _drain(self) -> None:
        """No more disturbances and no more messages; waits until all has arrived."""
        os.kill(self._programs["residents"].pid, signal.SIGUSR1)
        producers = self._programs.pop("producers")
        producers.terminate()
        if code := producers.wait(DRAIN_SECONDS):
            raise RuntimeError(f"producers ended with {code}: {self._last_words('producers')}")
        least, deadline = 1 << 62, time.monotonic() + DRAIN_SECONDS
        while True:
            self._check_alive()
            self._judge.feed(self._news.news())
            left = self._judge.unfinished()
            if not left:
                break
            if left < least:
                least, deadline = left, time.monotonic() + DRAIN_SECONDS
            if time.monotonic() > deadline:
                raise RuntimeError(f"{left} deliveries never came")
            time.sleep(0.5)
        for role, program in self._programs.items():
            program.terminate()
            if code := program.wait(DRAIN_SECONDS):
                raise RuntimeError(f"{role} ended with {code}: {self._last_words(role)}")
        self._broker.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--engine", choices=["grpcio", "native"], default="grpcio")
    parser.add_argument("--keep", action="store_true", help="leave records and logs, and say where")
    options = parser.parse_args()
    seed = options.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    print(
        f"replay: python -m tests.endurance --seconds {options.seconds:g} --seed {seed} "
        f"--engine {options.engine}",
        flush=True,
    )
    directory = Path(tempfile.mkdtemp(prefix="ister-endurance-"))
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
