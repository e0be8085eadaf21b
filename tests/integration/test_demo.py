"""The demo as people run it: whole, without Java, interrupted, and with a proof that fails."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from demo.__main__ import main
from demo.play import Player

pytestmark = pytest.mark.timeout(900)

_ROOT = Path(__file__).resolve().parents[2]
_WAIT_SECONDS = 300.0
_MESSAGES = 6000


@pytest.fixture(name="home")
def _home(tmp_path):
    """Where a demo runs: its temporary files are in `tmp`, and nothing may be left there."""
    (tmp_path / "tmp").mkdir()
    yield tmp_path
    assert os.listdir(tmp_path / "tmp") == []
    assert processes_of(tmp_path / "tmp") == []


def processes_of(directory: Path) -> list[str]:
    """Command lines of processes that have something to do with a directory."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            command = Path("/proc", entry, "cmdline").read_bytes() if entry.isdigit() else b""
        except OSError:
            continue  # it has ended
        if str(directory).encode() in command:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def start(home: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "--report", "report.html", *arguments],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "TMPDIR": str(home / "tmp"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(home: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    with start(home, *arguments, **environment) as process:
        try:
            out, error = process.communicate(timeout=_WAIT_SECONDS * 2)
        except BaseException:
            process.terminate()
            raise
    return process.returncode, out, error


@pytest.mark.nightly
def test_the_whole_demo(home):
    code, out, error = run(home, "--messages", str(_MESSAGES), "--json")
    assert code == 0, error
    figures = json.loads(out)
    assert figures["ok"] is True
    assert figures["left_out"] == figures["failures"] == []
    chain, traffic = figures["chain"], figures["traffic"]
    assert chain["messages"] == figures["messages"] == _MESSAGES
    assert chain["lost"] == 0
    assert chain["tiers"]["bucket"] == figures["tier"]["topics"][0]["end"] + sum(
        topic["end"] for topic in figures["tier"]["topics"][1:]
    )
    assert chain["tiers"]["files"] > 0
    assert sum(chain["tiers"].values()) == _MESSAGES
    assert traffic["kill"]["back_at"] > traffic["kill"]["at"] > traffic["live_from"]
    assert all(proof["ok"] for kind in figures["proofs"].values() for proof in kind)
    assert len(figures["proofs"]["sums"]) == 5
    by_type = {proof["type"]: proof for proof in figures["proofs"]["deliveries"]}
    assert set(by_type) == {"exclusive", "shared", "failover", "key_shared"}
    assert len(by_type["failover"]["consumers"]) == 2, "the one that stood by took over"
    assert len(by_type["shared"]["consumers"]) == len(by_type["key_shared"]["consumers"]) == 3
    assert [one["title"][:5] for one in figures["tier_maps"]] == ["After", "After", "At th"]
    page = (home / "report.html").read_text()
    assert figures["report"] == str(home / "report.html")
    assert "Nothing was lost" in page
    assert len(re.findall("<svg", page)) == 8
    assert re.search(r"^11  Export an Iceberg table", error, re.MULTILINE)


def test_without_java_it_says_what_to_install_and_does_the_rest(home):
    code, out, error = run(
        home,
        *("--messages", "2000", "--seed", "11"),
        PATH=str(home),
        JAVA_HOME=str(home / "none"),
    )
    assert code == 0, error
    assert "Java 17 or later" in error
    left_out = re.findall(r"^left out +(.+?): .*Java 17", out, re.MULTILINE)
    assert len(left_out) == 4
    assert re.search(r"^lost +0 of 2,000 acknowledged messages$", out, re.MULTILINE)
    assert re.search(r"from the bucket", out)
    page = (home / "report.html").read_text()
    assert "Java 17 or later" in page
    assert "Nothing was lost" in page


@pytest.mark.nightly
def test_three_brokers(home):
    code, out, error = run(home, "--cluster", "--messages", "3000", "--json")
    assert code == 0, error
    figures = json.loads(out)
    assert figures["ok"] is True
    assert figures["failures"] == []
    assert figures["chain"]["messages"] == figures["messages"] == 3000
    assert figures["chain"]["lost"] == 0
    cluster = figures["cluster"]
    assert cluster["metadata"] == "etcd"
    before, killed, _after = (one["topics"] for one in cluster["owners"])
    assert set(before.values()) == {"broker-1", "broker-2", "broker-3"}
    victim = cluster["kill"]["broker"]
    assert victim not in killed.values()
    assert set(cluster["kill"]["pauses"]) == {topic for topic in before if before[topic] == victim}
    # Its lease has to end before others may take its topics.
    assert min(cluster["kill"]["pauses"].values()) > 1
    restarted = [one["broker"] for one in cluster["rolling"]["restarts"]]
    assert restarted == ["broker-1", "broker-2", "broker-3"]
    assert all(proof["ok"] for kind in figures["proofs"].values() for proof in kind)
    page = (home / "report.html").read_text()
    assert "Nothing was lost" in page
    assert f"kill -9 {victim}" in page


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(home, number):
    with start(home, "--messages", "20000") as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Publish and consume" in line:
                break
        process.send_signal(number)
        more, error = process.communicate(timeout=_WAIT_SECONDS)
    assert process.returncode == 1, (lines, more)
    assert "interrupted" in error
    assert "Traceback" not in error, error
    assert not (home / "report.html").exists()


@pytest.mark.nightly
def test_a_proof_that_fails_ends_with_1(home, monkeypatch, capsys):
    whole = Player._chain

    def with_a_loss(self, flight, topic, done):
        for offset, number in whole(self, flight, topic, done):
            if topic != "/default/payments" or number != 17:
                yield offset, number

    monkeypatch.setattr(Player, "_chain", with_a_loss)
    monkeypatch.setattr("tempfile.tempdir", str(home / "tmp"))
    report = home / "report.html"
    code = main(["--no-spark", "--messages", "1500", "--report", str(report)])
    shown = capsys.readouterr()
    assert code == 1
    assert "a proof has failed: /default/payments: 1 lost, 1 gaps" in shown.err
    assert "FAILED" in shown.out
    assert "Something is wrong" in report.read_text()


@pytest.mark.nightly
def test_keep_leaves_the_broker_up_until_it_is_interrupted(home):
    data = home / "data"
    with start(home, "--no-spark", "--messages", "1500", "--keep", "--data", str(data)) as process:
        address = ""
        for line in process.stdout:
            if found := re.match(r" +dashboard +http://(\S+)/", line):
                address = found.group(1)
            if "Ctrl-C to stop the broker" in line:
                break
        assert address, "the dashboard's address was shown"
        assert _get(address, "/ready") == "ready"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=_WAIT_SECONDS)
    assert process.returncode == 0, f"{out}\n{err}"
    assert (data / "ister.yml").exists()
    assert processes_of(data) == []


def _get(address: str, path: str) -> str:
    give_up_at = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
                return answer.read().decode().split()[0]
        except OSError:
            if time.monotonic() > give_up_at:
                raise
