"""`ister bench history` runs, obeys its contract and ends its server. No times are judged."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import history
from benchmarks.measurement import Run
from ister.cli.main import main
from ister.errors import UnavailableError
from ister.limits import MIB

CHUNKS = "chunks fetched for"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(history, "_HISTORY_BYTES", 200 * MIB)
    monkeypatch.setattr(history, "_ROUNDS", 1)


@pytest.fixture
def servers(monkeypatch):
    found = []
    wait = history._wait_for_server

    def note(server, *arguments):
        found.append(server)
        wait(server, *arguments)

    monkeypatch.setattr(history, "_wait_for_server", note)
    return found


def run_quick(tmp_path, capsys):
    assert main(["bench", "history", "--quick", "--json", "--dir", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert len({result["name"] for result in results}) == 3
    for result in results:
        assert result["value"] > 0
        assert result["limit"] > 0
        assert result["ratio"] == pytest.approx(result["value"] / result["limit"], rel=0.01)
        assert (result["target"] is None) == (result["met"] is None)
    assert list(tmp_path.iterdir()) == []
    return results


def test_quick_run_reads_from_a_server_that_ends_with_it(tmp_path, capsys, servers):
    results = run_quick(tmp_path, capsys)
    assert all("S3" in result["note"] for result in results if result["target"] is not None)
    (server,) = servers
    assert server.poll() is not None


def test_without_rclone_the_bucket_is_a_directory(tmp_path, capsys, servers, monkeypatch):
    monkeypatch.setattr(history, "_find_rclone", lambda: None)
    results = run_quick(tmp_path, capsys)
    assert "no rclone" in results[0]["note"]
    (chunks,) = [result for result in results if result["name"].startswith(CHUNKS)]
    assert chunks["met"] is True
    assert servers == []


def test_server_ends_when_the_benchmark_fails(tmp_path, servers):
    with (
        pytest.raises(ZeroDivisionError),
        Run.begin("history", str(tmp_path), is_quick=True) as run,
        history._bucket(run),
    ):
        raise ZeroDivisionError
    (server,) = servers
    assert server.poll() is not None


def test_server_that_does_not_start_is_an_error(tmp_path):
    with (
        Run.begin("history", str(tmp_path), is_quick=True) as run,
        pytest.raises(UnavailableError, match="did not start"),
        history._serve_s3(run, "/bin/false", "a,b"),
    ):
        pass


def test_server_ends_when_the_benchmark_is_killed():
    script = (
        "import subprocess, time\n"
        "from benchmarks.history import _ending_with_parent\n"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=_ending_with_parent())\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    if _is_running(pid):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("it outlived the process that started it")


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
