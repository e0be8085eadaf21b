"""The parent's side of `tier_process.py`: starts it, listens, stops or ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.support.oracle import History
from tests.support.writer_child import WriterChild


class TierChild(WriterChild):
    """A process of its own that reports into a history; a context manager it never outlives.

    Args:
        settings: The tree that it opens.
        history: Where its lines go.
        options: For `tier_process.py`, by name.
        failpoints: For ISTER_FAILPOINTS.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        history: History,
        *,
        failpoints: str | None = None,
        **options: object,
    ) -> None:
        # Not the parent's: it starts another program. What it keeps is the same.
        self.history = history
        self.lines: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.states: set[str] = set()
        self.did: Counter[str] = Counter()
        """What it has told to have ended well."""
        self.begun: list[str] = []
        """What it has told to be about to begin."""
        self.acked: list[tuple[float, int]] = []
        """When each wait had ended, on the machine's monotonic clock, and for which offset."""
        self.is_late = False
        self._rest = b""
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ISTER_")}
        if failpoints:
            environment["ISTER_FAILPOINTS"] = failpoints
        arguments = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            json.dump(settings, file)
        self._settings = Path(file.name)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.tier_process", file.name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environment,
        )
        self.pid = self._process.pid

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)  # type: ignore[arg-type]
        self._settings.unlink(missing_ok=True)

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        with open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    def listen_until_stopped(self, seconds: float) -> None:
        """Takes lines until the process has been stopped, and what it had said before."""
        deadline = time.monotonic() + seconds
        while not self.is_stopped:
            assert self.listen(0.05), f"it has ended: {self.complaints()}"
            assert time.monotonic() < deadline, f"not stopped in {seconds} s"
        self.listen(0.1)

    def _note(self, line: str) -> None:
        kind, *words = line.split(" ")
        match kind, words:
            case "did", [what]:
                self.lines[kind] += 1
                self.did[what] += 1
            case "failed", [what, name]:
                self.lines[kind] += 1
                self.errors[f"{what}:{name}"] += 1
            case "begin", [what, topic]:
                self.lines[kind] += 1
                self.begun.append(f"{what} {topic}")
            case "wrong", [text]:
                raise AssertionError(f"the child says: {text}")
            case "ack", [topic, message_id, offset, level, moment]:
                self.acked.append((float(moment), int(offset)))
                super()._note(f"ack {topic} {message_id} {offset} {level}")
            case _:
                super()._note(line)
