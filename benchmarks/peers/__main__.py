"""`make peers`: measures every contender, one after the other, and writes the page.

    python -m benchmarks.peers [--scale 0.05] [--cache DIRECTORY] [--only redis,ister-flight]

A full run writes docs/BENCHMARKS.md and docs/images/peers.svg. A shorter run, or one of some
contenders only, prints its page and writes no file. Peers are installed into `--cache`, which is
kept, or else into a temporary directory, which is removed. Each contender's data is in the same
directory, and is removed before the next one starts. Exit code 1: a measurement failed. A peer that
cannot be installed is not a failure: the page says that it is missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import install
from benchmarks.peers.cases import MESSAGE_BYTES
from benchmarks.peers.contender import MissingError
from benchmarks.peers.measure import CONTENDERS
from benchmarks.peers.page import Row, page, plot
from benchmarks.peers.statistics import quantile

_ROOT = Path(__file__).parents[2]
_TITLES = {
    "ister-flight": "Ister, `ister.client`",
    "ister-danube": "Ister, Danube's client, grpcio",
    "ister-danube-native": "Ister, Danube's client, native",
    "ister-open": "Ister, `ister.open`",
    "nats": "NATS JetStream",
    "redis": "Redis Streams",
    "rabbitmq": "RabbitMQ Streams",
    "kafka": "Kafka",
}
_INSTALLS: dict[str, Callable[[Path], None]] = {
    "nats": install.install_python,
    "redis": lambda cache: install.install_debian(cache, "redis-server"),
    "rabbitmq": lambda cache: install.install_debian(cache, "rabbitmq-server"),
    "kafka": install.install_kafka,
}
_TIMEOUT_SECONDS = 400.0


def _install(cache: Path, names: list[str]) -> dict[str, str]:
    """Installs what the peers need; returns why a peer is missing, by name."""
    missing: dict[str, str] = {}
    peers = [name for name in names if name in _INSTALLS]
    for name in peers:
        print(f"installing {name}", file=sys.stderr, flush=True)
        try:
            install.install_python(cache)
            _INSTALLS[name](cache)
        except MissingError as error:
            missing[name] = str(error)
    return missing


def _measure(
    name: str, durability: str, cache: Path, data: Path, scale: float
) -> dict[str, object]:
    """Measures one contender in a process of its own, and returns what that prints."""
    python = sys.executable if name.startswith("ister") else str(install.python_of(cache))
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=data))
    command = [python, "-m", "benchmarks.peers.measure", name, durability]
    command += ["--directory", str(directory), "--cache", str(cache), "--scale", str(scale)]
    if durability == "unsynced":
        command.append("--restart")
    # What the contender before has left in the page cache must not slow this one down.
    os.sync()
    child = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = child.communicate(timeout=_TIMEOUT_SECONDS)
    except BaseException as error:
        child.terminate()
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return {"missing": f"not done after {_TIMEOUT_SECONDS:.0f} s", "failed": True}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if child.returncode:
        return {"missing": "the measurement failed", "failed": True}
    return json.loads(said.splitlines()[-1])


def _bare_syncs(directory: Path, seconds: float) -> tuple[float, float]:
    """Returns how often a loop writes and syncs in a second, and its p50 in milliseconds."""
    payload = os.urandom(MESSAGE_BYTES)
    times = []
    with (directory / "bare").open("wb", buffering=0) as file:
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            one = time.perf_counter()
            file.write(payload)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - one)
    (directory / "bare").unlink()
    return len(times) / sum(times), quantile(times, 0.5) * 1e3


def _system(directory: Path) -> str:
    """Describes the machine in one line."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    found = ("", "unknown")
    with open("/proc/mounts", encoding="utf-8") as file:
        for line in file:
            _, place, kind, *_ = line.split()
            if directory.is_relative_to(place) and len(place) >= len(found[0]):
                found = (place, kind)
    return (
        f"{os.cpu_count()} cores ({models[0] if models else platform.machine()}), {memory:.0f} GiB "
        f"of memory, Linux {platform.release()}, data on {found[1]}, Python "
        f"{platform.python_version()}"
    )


def _run(options: argparse.Namespace, cache: Path) -> int:
    names = options.only.split(",") if options.only else list(CONTENDERS)
    began, load = time.monotonic(), os.getloadavg()[0]
    print(f"load average {load:.2f}", file=sys.stderr, flush=True)
    missing = _install(cache, names)
    rows: list[Row] = []
    is_failed = False
    with tempfile.TemporaryDirectory(prefix="data-", dir=cache) as data_name:
        data = Path(data_name)
        before = _bare_syncs(data, 2 * options.scale)
        measuring = time.monotonic()
        for durability in ("synced", "unsynced"):
            for name in names:
                result = {"missing": missing[name]} if name in missing else {}
                result = result or _measure(name, durability, cache, data, options.scale)
                is_failed |= bool(result.pop("failed", False))
                rows.append(Row(name=name, title=_TITLES[name], durability=durability, **result))
        per_second, p50_ms = max(before, _bare_syncs(data, 2 * options.scale))
        machine = {
            "system": _system(data),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "load": (load, os.getloadavg()[0]),
            "minutes": (time.monotonic() - measuring) / 60,
            "scale": options.scale,
            "bare_per_second": per_second,
            "bare_p50_ms": p50_ms,
        }
    text = page(rows, machine)
    if options.scale == 1 and not options.only:
        (_ROOT / "docs" / "BENCHMARKS.md").write_text(text)
        (_ROOT / "docs" / "images" / "peers.svg").write_text(plot(rows))
        print("wrote docs/BENCHMARKS.md and docs/images/peers.svg")
    else:
        print(text)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)
    return 1 if is_failed else 0


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="make peers")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a shorter trial run")
    parser.add_argument("--cache", type=Path, help="directory that keeps the peers' packages")
    parser.add_argument("--only", help="contenders to measure, separated by commas")
    options = parser.parse_args()
    if options.cache is not None:
        options.cache.mkdir(parents=True, exist_ok=True)
        return _run(options, options.cache.resolve())
    with tempfile.TemporaryDirectory(prefix="ister-peers-") as directory:
        return _run(options, Path(directory).resolve())


if __name__ == "__main__":
    sys.exit(main())
