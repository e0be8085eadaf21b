"""Runs `pip install` and says how far it is: `python -m tools.install ARGUMENTS…`.

pip prints hundreds of lines, or with `--quiet` none for minutes. This prints one line that is
rewritten in place on a terminal, and a line every ten seconds elsewhere (a log of CI). If pip
fails, everything that it printed follows. Runs before anything is installed: the standard library
alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TextIO

_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = 10.0
_UNITS: Final = {"kB": 1e-3, "MB": 1.0, "GB": 1e3, "bytes": 1e-6}


@dataclass
class Progress:
    """What pip has said so far."""

    packages: set[str] = field(default_factory=set)
    megabytes: float = 0.0
    phase: str = "collecting"

    def read(self, line: str) -> None:
        """Takes a line of pip's output."""
        if found := re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line):
            self.packages.add(found[1].lower())
        elif found := re.search(r"Downloading .*\(([\d.]+) (kB|MB|GB|bytes)\)", line):
            self.megabytes += float(found[1]) * _UNITS[found[2]]
        elif line.startswith("Building wheels"):
            self.phase = "building"
        elif line.startswith("Installing collected packages"):
            self.phase = "installing"
        elif line.startswith("Successfully installed"):
            self.phase = "installed"

    def words(self, seconds: float) -> str:
        """Describes the progress in one line."""
        minutes, rest = divmod(int(seconds), 60)
        downloaded = f", {self.megabytes:,.0f} MB downloaded" if self.megabytes else ""
        count = f"{len(self.packages)} packages"
        return f"  pip: {self.phase}, {count}{downloaded}, {minutes}:{rest:02d}"


def follow(lines: Iterable[str], progress: Progress, out: TextIO) -> list[str]:
    """Reads pip's output to its end, shows the progress meanwhile, and returns what was read."""
    is_terminal = out.isatty()
    seen: list[str] = []
    ended = threading.Event()
    began = time.monotonic()

    def show(end: str) -> None:
        text = progress.words(time.monotonic() - began)
        out.write(f"\r\033[K{text}{end}" if is_terminal else f"{text}\n")
        out.flush()

    def keep_showing() -> None:
        while not ended.wait(_TERMINAL_SECONDS if is_terminal else _LOG_SECONDS):
            show("")

    shower = threading.Thread(target=keep_showing, name="progress", daemon=True)
    shower.start()
    try:
        for line in lines:
            seen.append(line)
            progress.read(line)
    finally:
        ended.set()
        shower.join()
        show("\n")
    return seen


def main(arguments: list[str]) -> int:
    """Installs; returns pip's exit code."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off"]
    with subprocess.Popen(  # noqa: S603 - the Makefile's own words
        [*command, "--disable-pip-version-check", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as pip:
        if pip.stdout is None:
            raise AssertionError
        seen = follow(pip.stdout, Progress(), sys.stderr)
    if pip.returncode:
        sys.stderr.writelines(seen)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
