"""`ister pipeline status`: what the metadata store says, for programs and in words."""

import argparse
import io
import json
from contextlib import redirect_stdout

import pytest

from ister.base.clock import SystemClock
from ister.bucket.fence import Fence
from ister.bucket.pipeline import PipelineKeys
from ister.cli.pipeline import status
from ister.cli.pipeline.status import print_status
from ister.config import load_config
from ister.errors import InvalidRequestError
from ister.topic.stores import open_metadata
from tests.support.clock import ManualClock

CLOCK = ManualClock()
NOW = CLOCK.now_ns() // 1_000_000_000


@pytest.fixture
def home(tmp_path):
    (tmp_path / "wal").mkdir()
    return tmp_path


def run(home, capsys, *arguments):
    parser = argparse.ArgumentParser()
    status.register(parser.add_subparsers())
    options = parser.parse_args(["status", "--data", str(home), *arguments])
    code = options.run(options)
    return code, capsys.readouterr().out


def store_of(home):
    config = load_config(f"{home}/", {})
    return (
        open_metadata(config.storage.metadata, SystemClock()),
        PipelineKeys(config.storage.metadata.root_prefix),
    )


def test_nothing_was_ever_there(home, capsys):
    code, text = run(home, capsys)
    assert code == 0
    assert text.strip() == "No pipeline is running: brokers upload by themselves."
    code, text = run(home, capsys, "--json")
    assert json.loads(text) == {
        "ok": True,
        "job": "status",
        "is_running": False,
        "engine": "auto",
        "lease": None,
        "status": None,
        "reports": {},
        "requests": {},
        "topics": [],
        "errors": [],
    }


def test_pipeline_that_runs(home, capsys):
    store, keys = store_of(home)
    try:
        fence = Fence.take(
            store,
            keys.lease,
            id="me",
            about={"job": "run", "host": "h", "process": 7},
            ttl_seconds=60,
            clock=SystemClock(),
        )
        store.put(keys.status, json.dumps({"holder": "me", "state": "running"}).encode())
        store.put(keys.report("scrub"), b'{"job": "scrub", "started_at": 1, "errors": []}')
        store.put(keys.report("compact"), b"damaged")
        _, text = run(home, capsys, "--json")
        fields = json.loads(text)
        assert fields["is_running"] is True
        assert fields["lease"]["holder"] == "me"
        assert fields["lease"]["host"] == "h"
        assert fields["status"]["state"] == "running"
        assert list(fields["reports"]) == ["scrub"]
        fence.release()
        _, text = run(home, capsys, "--json")
        assert json.loads(text)["is_running"] is False
    finally:
        store.close()


def test_log_without_a_bucket(tmp_path, capsys):
    config = tmp_path / "ister.yml"
    config.write_text("storage: {mode: memory}")
    parser = argparse.ArgumentParser()
    status.register(parser.add_subparsers())
    options = parser.parse_args(["status", "--config", str(config), "--json"])
    with pytest.raises(InvalidRequestError, match="no pipeline"):
        options.run(options)
    assert json.loads(capsys.readouterr().out)["ok"] is False


# -- in words ---------------------------------------------------------------------------------


def fields_of(**more):
    return {
        "engine": "auto",
        "is_running": False,
        "lease": None,
        "status": None,
        "reports": {},
    } | more


LEASE = {"holder": "me", "job": "run", "host": "h", "process": 7, "since": NOW - 7200}
STATUS = {
    "holder": "me",
    "host": "h",
    "state": "running",
    "updated_at": NOW - 2,
    "cycles": 99,
    "tier": {
        "is_on": True,
        "topics": 3,
        "lag_messages": 12,
        "tiered_messages_total": 1000,
        "tiered_bytes_total": 3 * 2**20,
        "failing_topics": ["/default/a"],
        "failing_topics_total": 4,
    },
    "jobs": {
        "compact": {"next_at": NOW + 120, "last_error": None},
        "export": {"next_at": NOW, "is_running": True},
        "scrub": {"next_at": NOW + 9000, "last_error": "ValueError: no"},
    },
    "memory": {"driver_rss_bytes": 2**20, "jvm_rss_bytes": 2**29, "workers_rss_bytes": None},
}


def shown(fields, clock):
    with redirect_stdout(io.StringIO()) as out:
        print_status(fields, clock)
    return out.getvalue()


def test_running_pipeline_in_words():
    report = {"started_at": NOW - 3600, "seconds": 125.0, "errors": []}
    bad = {**report, "errors": [{"message": "no bucket"}, {"message": "other"}]}
    text = shown(
        fields_of(
            is_running=True, lease=LEASE, status=STATUS, reports={"compact": report, "replay": bad}
        ),
        CLOCK,
    )
    assert "A pipeline runs on h, process 7, since " in text
    assert "(2.0 h)" in text
    assert "3 topics, 99 cycles, 1000 messages, 3.0 MiB; 12 messages behind." in text
    assert "Failing: /default/a and 3 more." in text
    assert "Memory: driver 1.0 MiB, JVM 512.0 MiB." in text
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert "2 min" in rows["compact"]
    assert "ok" in rows["compact"]
    assert "runs now" in rows["export"]
    assert "never" in rows["export"]
    assert "ValueError: no" in rows["scrub"]
    assert "2 errors: no bucket" in rows["replay"]


def test_status_of_another_holder_does_not_count():
    lease = {**LEASE, "holder": "other"}
    text = shown(fields_of(is_running=True, lease=lease, status=STATUS), CLOCK)
    assert "It has not reported its status yet." in text
    assert "99 cycles" not in text


def test_pipeline_that_has_gone_quiet():
    status_ = {**STATUS, "updated_at": NOW - 600}
    text = shown(fields_of(is_running=True, lease=LEASE, status=status_), CLOCK)
    assert "No status for 10 min." in text


def test_without_a_pipeline_in_words():
    for engine, text in [
        ("auto", "brokers upload by themselves"),
        ("spark", "nothing is uploaded until one is"),
        ("none", "nothing is uploaded."),
    ]:
        found = shown(fields_of(engine=engine, status=STATUS), CLOCK)
        assert text in found, engine
        assert "The last one ran on h until 2023-11-14" in found, engine


def test_requests_in_words():
    requests = {
        "scrub": {"requested_at": NOW - 5, "by": "user:a", "topics": ["/d/t"], "state": "waiting"},
        "compact": {"requested_at": NOW - 60, "topics": None, "state": "failed", "error": "no"},
    }
    text = shown(fields_of(is_running=True, lease=LEASE, status=STATUS, requests=requests), CLOCK)
    assert "Asked for 5 s ago by user:a: scrub of 1 topics; waiting." in text
    assert "compact; failed: no." in text
