"""The programs of an endurance run, what disturbs them, and the records that they leave.

`EnduranceLoad` starts the three processes of `endurance_program`, reads their records into a
`Judge` as they grow, and ends them when everything has arrived. The runner owns the brokers, and
says when one of them is disturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from tests.support.endurance_judge import Judge, Records
from tests.support.endurance_program import Options
from tests.support.oracle import identify

ROOT = Path(__file__).resolve().parents[2]
DRAIN_SECONDS = 120.0
"""How long nothing may arrive in the end, before the rest counts as lost."""


class EnduranceLoad:
    """See the module header. A context manager: no program outlives its block.

    Args:
        directory: Where logs and records go.
        seed: Of all random choices.
        options: For the programs.
    """

    def __init__(self, directory: Path, seed: int, options: Options) -> None:
        self._directory = directory
        self._records = directory / "records"
        self._records.mkdir(parents=True)
        self._seed = seed
        self.options = options
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._news = Records(self._records)
        self._chance = random.Random(seed)
        self._guests_at = 0.0
        self._is_paused = False
        self.judge = Judge()
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs.values():
            program.kill()
            program.wait()

    # -- programs ---------------------------------------------------------------------------

    def start(self) -> None:
        """Starts all programs; returns when they are at work."""
        for role in ("residents", "guests", "producers"):
            self._launch(role)
        self._guests_at = time.monotonic() + self._chance.uniform(2, 6)

    def _launch(self, role: str, *, is_awaited: bool = True) -> None:
        number = self.counts[f"{role} started"]
        self.counts[f"{role} started"] += 1
        with (self._directory / f"{role}.log").open("ab") as log:
            program = self._programs[role] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.support.endurance_program"),
                    *(role, self.options.encode()),
                    *(str(self._records / f"{role}-{number}.jsonl"), f"{self._seed}/{number}"),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE if is_awaited else subprocess.DEVNULL,
                stderr=log,
            )
        if program.stdout is not None:
            with program.stdout as output:
                if not output.readline():
                    raise RuntimeError(f"{role} did not start: {self._last_words(role)}")

    def _last_words(self, role: str) -> str:
        return (self._directory / f"{role}.log").read_text(errors="replace")[-2000:]

    def check_alive(self) -> None:
        """Fails if a program has ended by itself."""
        for role, program in self._programs.items():
            code = program.poll()
            if code is not None:
                raise RuntimeError(f"{role} ended with {code}: {self._last_words(role)}")

    # -- records ----------------------------------------------------------------------------

    def disturbed(self, what: str) -> int:
        """Counts a disturbance, and writes it down; returns its time in nanoseconds."""
        self.counts[what] += 1
        at = time.monotonic_ns()
        self._write(("disturb", at, what))
        return at

    def logged(self, topic: str, entries: Iterable[tuple[int, bytes, str]]) -> None:
        """Writes down what the bucket has of a topic: offsets, payloads and keys."""
        at, end = time.monotonic_ns(), 0
        for offset, payload, key in entries:
            self._write(("logged", at, topic, offset, identify(payload), key))
            end = offset + 1
        self._write(("log_end", at, topic, end))

    def _write(self, record: tuple[object, ...]) -> None:
        with (self._records / "runner.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self) -> None:
        """Gives the judge what is new."""
        self.judge.feed(self._news.news())

    # -- disturbances -----------------------------------------------------------------------

    def disturb_guests(self) -> None:
        """Stops, resumes or kills the guests when it is time to; called often."""
        now = time.monotonic()
        if now < self._guests_at:
            return
        chance, guests = self._chance, self._programs["guests"]
        self._guests_at = now + chance.uniform(4, 12)
        if self._is_paused:
            self._resume_guests()
        elif chance.random() < 0.7:
            guests.send_signal(signal.SIGSTOP)
            self.disturbed("paused")
            self._guests_at = now + chance.uniform(1, 12)
            self._is_paused = True
        else:
            guests.kill()
            guests.wait()
            self.disturbed("guests killed")
            self._launch("guests", is_awaited=False)

    def _resume_guests(self) -> None:
        self._programs["guests"].send_signal(signal.SIGCONT)
        self.disturbed("resumed")
        self._is_paused = False

    # -- the end ----------------------------------------------------------------------------

    def drain(self) -> None:
        """No more disturbances and no more messages; ends the programs when all has arrived."""
        if self._is_paused:
            self._resume_guests()
        os.kill(self._programs["residents"].pid, signal.SIGUSR1)
        producers = self._programs.pop("producers")
        try:
            producers.terminate()
            if code := producers.wait(DRAIN_SECONDS):
                raise RuntimeError(f"producers ended with {code}: {self._last_words('producers')}")
        finally:
            producers.kill()
            producers.wait()
        least, deadline = 1 << 62, time.monotonic() + DRAIN_SECONDS
        while True:
            self.check_alive()
            self.read()
            left = self.judge.unfinished()
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
