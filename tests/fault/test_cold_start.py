"""A broker right after an install, on a busy machine: nobody it serves waits for a compiler."""

import importlib.util
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from ister import kernels
from ister.base.clock import SystemClock
from tests.servers.broker import BrokerProcess

if any(importlib.util.find_spec(name) is None for name in ("numba", "isal")):
    pytest.skip("the extra `fast` is what is tested here", allow_module_level=True)

from ister.client import Client

# Compiling takes 10 s of processor time alone, and here it has a third of two cores.
PROMPT_SECONDS = 30


def compilers_of(cache):
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"ister.kernels" in words and any(str(cache).encode() in word for word in words):
                found.append(int(entry.name))
    return found


def has_compiler(pid):
    return "llvmlite" in Path(f"/proc/{pid}/maps").read_text()


def metric(broker, name):
    with urllib.request.urlopen(f"http://{broker.http}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise AssertionError(f"no {name}")


@pytest.mark.nightly
def test_first_publish_after_an_install_waits_for_no_compiler(tmp_path):
    clock, cache = SystemClock(), tmp_path / "cache"
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    broker = BrokerProcess(
        tmp_path / "broker",
        settings={"storage": {"metadata": {"lease_ttl_seconds": 6}}},
        environment={kernels.CACHE_VARIABLE: str(cache)},
    )
    try:
        broker.start()
        with Client(broker.address, timeout=300) as client:
            producer = client.producer("/default/a", create=True)
            began = clock.monotonic()
            assert producer.publish(b"first") == 0
            assert clock.monotonic() - began < PROMPT_SECONDS
            while not (compilers := compilers_of(cache)):
                producer.publish(b"before")
            # It is served as before while somebody else compiles.
            for _ in range(20):
                began = clock.monotonic()
                producer.publish(b"meanwhile")
                assert clock.monotonic() - began < PROMPT_SECONDS
            assert compilers_of(cache) == compilers
            assert not has_compiler(broker.pid)
            assert metric(broker, "ister_lease_valid") == 1
        assert "lease expired" not in broker.log
        assert "not renewed" not in broker.log
    finally:
        broker.kill()
        for process in busy:
            process.kill()
            process.wait()
        for pid in compilers_of(cache):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
