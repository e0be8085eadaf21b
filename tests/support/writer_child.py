"""The parent's side of `writer_process.py`: starts it, listens, ends it, keeps the history."""

from __future__ import annotations

import json
import os
import random
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from tests.support.oracle import History, settings_of
from tests.support.scale import scaled
from tests.support.waiting import eventually

_PROGRAM = "tests.support.writer_process"
_READ_BYTES = 1 << 16
_ENDING_SECONDS_MAX = 120.0


def new_seed() -> int:
    """ISTER_FAULT_SEED; else 1 in `make test`, and a random seed in `make nightly`."""
    given = os.environ.get("ISTER_FAULT_SEED")
    return int(given) if given else scaled(1, random.SystemRandom().getrandbits(32))


def say_replay(seed: int, node: str) -> None:
    """Prints how to run a test again with the same choices; pytest shows it with a failure."""
    nightly = scaled("", "ISTER_NIGHTLY=1 ")
    print(f"replay: {nightly}ISTER_FAULT_SEED={seed} python -m pytest -s {shlex.quote(node)}")


class WriterChild:
    """A writer process that reports into a history. Use as a context manager: it never outlives it.

    Args:
        place: The tree of settings that it opens; or a directory, for a log without a bucket with
            three topics and three threads that write.
        history: Where its lines go.
        failpoints: For ISTER_FAILPOINTS.
        prefix: What to run it under, `strace` for example.
        rotate_bytes: In a directory, the size of its files.
        options: For `writer_process.py`, by name: `trim_keep=100` is `--trim-keep 100`.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | Mapping[str, object],
        history: History,
        *,
        failpoints: str | None = None,
        prefix: tuple[str, ...] = (),
        rotate_bytes: int = 16384,
        **options: object,
    ) -> None:
        if not isinstance(place, Mapping):
            level = str(options.get("level", "synced"))
            place = settings_of(
                str(place), level=level, rotate_max_bytes=rotate_bytes, fsync_interval_ms=50
            )
            options = {"mode": "write", "topics": 3, "threads": 3, "tiered_share": 0.0, **options}
        arguments = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ISTER_")}
        if failpoints:
            environment["ISTER_FAILPOINTS"] = failpoints
        self.history = history
        self.lines: Counter[str] = Counter()
        """How many lines of each kind came."""
        self.errors: Counter[str] = Counter()
        """The errors told of, by class; those of other calls than appends as `what:class`."""
        self.states: set[str] = set()
        """The states told of."""
        self.did: Counter[str] = Counter()
        """What it has told to have ended well."""
        self.begun: list[str] = []
        """What it has told to be about to begin."""
        self.acked: list[tuple[float, int]] = []
        """When each wait had ended, on the machine's monotonic clock, and for which offset."""
        self.is_late = False
        """Whether acknowledgements that come from now on are promises no more; see `drain`."""
        self._rest = b""
        # A file and not a pipe: nobody reads it while the process runs.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", _PROGRAM, json.dumps(place), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environment,
        )
        self.pid = self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        with open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    # -- listening ----------------------------------------------------------------------------

    def listen(self, seconds: float, *, until: str | None = None) -> bool:
        """Takes lines for `seconds`, or until a line `until` came, or until there is no more.

        Returns:
            Whether the line came; without one to wait for, whether the process still has its pipe.
        """
        deadline = time.monotonic() + seconds
        before = self.lines[until] if until else 0
        while True:
            if until and self.lines[until] > before:
                return True
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return until is None
            if not self._take(remaining):
                return bool(until) and self.lines[until] > before

    def listen_for(self, condition: Callable[[], bool], what: str) -> None:
        """Takes lines until the condition is true, however slow the machine is."""
        eventually(
            lambda: condition() or not self.listen(0.02) or condition(), what, within=120, every=0
        )
        assert condition(), f"it has ended before {what}: {self.complaints()}"

    def listen_until_stopped(self, seconds: float) -> None:
        """Takes lines until the process has been stopped, and what it had said before."""
        deadline = time.monotonic() + seconds
        while not self.is_stopped:
            assert self.listen(0.05), f"it has ended: {self.complaints()}"
            assert time.monotonic() < deadline, f"not stopped in {seconds} s"
        self.listen(0.1)

    def drain(self) -> None:
        """Takes the lines that are there now, and holds nobody to acknowledgements after them.

        For a power cut that only the file system feels: a sync that is under way at that moment
        may still return and be reported, by a processor that a real cut would have stopped too.
        """
        stream = self._process.stdout
        assert stream is not None
        while select.select([stream], [], [], 0)[0] and self._take(0):
            pass
        self.is_late = True

    def _take(self, timeout: float) -> bool:
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], timeout)[0]:
            return True
        data = os.read(stream.fileno(), _READ_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._note(line.decode())
        return bool(data)

    def _note(self, line: str) -> None:
        kind, *words = line.split(" ")
        self.lines[kind] += 1
        history = self.history
        match kind, words:
            case "send", [topic, message_id]:
                history.send(topic, message_id)
            case "ack", [topic, message_id, offset, level, moment]:
                self.acked.append((float(moment), int(offset)))
                history.ack(
                    topic, message_id, int(offset), f"late {level}" if self.is_late else level
                )
                self.lines["late ack"] += self.is_late
            case "error", [topic, message_id, name]:
                history.error(topic, message_id)
                self.errors[name] += 1
            case "unknown", [topic, message_id, name]:
                history.unknown(topic, message_id)
                self.errors[name] += 1
            case "trim", [topic, before]:
                history.trim(topic, int(before))
            case "state", [_, state]:
                self.states.add(state)
            case "did", [what]:
                self.did[what] += 1
            case "failed", [what, name]:
                self.errors[f"{what}:{name}"] += 1
            case "begin", [what, topic]:
                self.begun.append(f"{what} {topic}")
            case "wrong", [text]:
                raise AssertionError(f"the child says: {text}")
            case (("ready" | "end" | "lifted" | "reopened"), _):
                pass
            case _:
                raise AssertionError(f"a line that no writer says: {line!r}")

    # -- ending -------------------------------------------------------------------------------

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Kills the process, takes what it still had said, and returns how it ended."""
        if self._process.poll() is None:
            os.kill(self.pid, number)
        return self.ended()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal and returns at once."""
        os.kill(self.pid, number)

    def ended(self, seconds: float = _ENDING_SECONDS_MAX) -> int:
        """Takes lines until the process has ended, and returns how: minus the signal, or its code.

        Raises:
            AssertionError: It has not ended in `seconds`.
        """
        deadline = time.monotonic() + seconds
        while self._take(max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"the writer has not ended in {seconds} s"
        assert not self._rest, f"a torn line: {self._rest!r}"
        return self._process.wait(timeout=seconds)

    def complaints(self) -> str:
        """What an ended process said on stderr."""
        self._complaints.seek(0)
        return self._complaints.read().decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._complaints.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
