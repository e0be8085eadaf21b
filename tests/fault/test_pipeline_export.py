"""`ister pipeline run` that exports many topics into one table, killed in its commits.

Messages arrive all the time. Each offset is in the table once, and a round is one commit.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from ister.base.clock import SystemClock
from ister.bucket.pipeline import PipelineKeys, request_job
from ister.errors import ConflictError
from tests.integration.spark_topics import SparkPlace
from tests.support.exports import read_table, where
from tests.support.waiting import eventually

pytestmark = pytest.mark.nightly

TOPICS = [f"/default/t{number:02d}" for number in range(20)]
TTL = 4
LIMIT = 180.0
_CHILD = str(Path(__file__).parents[1] / "integration" / "service_child.py")
# After the record and before files have their names; before the record; and none.
_KILLS = ("export.after_table_commit=kill@1", "export.before_table_commit=kill@1", "")


class _Writer:
    """Topics that somebody goes on writing to, while a pipeline uploads and exports them."""

    def __init__(self, place: SparkPlace) -> None:
        self.log = place.open()
        self.topics = [self.log.topic(name, create=True) for name in TOPICS]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        number = 0
        while not self._stop.wait(0.05):
            for topic in self.topics:
                topic.append(b"%d" % number)
            number += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        for topic in self.topics:
            topic.flush()

    def ask(self) -> None:
        """Has the pipeline export now, and not in a minute."""
        keys = PipelineKeys(self.log.config.storage.metadata.root_prefix)
        with suppress(ConflictError):  # no pipeline is running yet
            request_job(
                self.log.stores.metadata,
                keys,
                "export",
                by="test",
                topics=None,
                clock=SystemClock(),
            )


def _start(config: str, kill: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, _CHILD, "--config", config, "--json", "--master", "local[2]"],
        env={**os.environ, "ISTER_FAILPOINTS": kill},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _commits(root: Path) -> list[dict]:
    paths = sorted(root.glob("parquet/orders/_ister/commits/*.json"))
    return [json.loads(path.read_text()) for path in paths]


def _ends(root: Path) -> dict[str, int]:
    """How far the newest commit has each topic."""
    commits = _commits(root)
    found = commits[-1]["coverage"]["topics"] if commits else {}
    return {
        topic: max(end for covered in by.values() for _, end in covered["ranges"])
        for topic, by in found.items()
    }


def test_each_offset_once_and_a_commit_for_each_round(tmp_path):
    place = SparkPlace(
        tmp_path / "data",
        metadata={"lease_ttl_seconds": TTL},
        uploader={"engine": "auto", "interval_seconds": 1},
    )
    config = str(tmp_path / "pipeline.yml")
    tree = yaml.safe_load(Path(place.config).read_text())
    never = {"every_minutes": None}
    tree["pipeline"] = {
        "export": {"to": where(tmp_path, "parquet"), "every_minutes": 1},
        **dict.fromkeys(("compact", "gc", "scrub"), never),
    }
    Path(config).write_text(yaml.safe_dump(tree))
    writer = _Writer(place)
    child = None
    try:
        for kill in _KILLS:
            before = len(_commits(tmp_path))
            child = _start(config, kill)
            if kill:

                def died(child=child) -> bool:
                    writer.ask()
                    return child.poll() is not None

                eventually(died, f"{kill} was reached", within=LIMIT, every=1.0)
                assert child.returncode == -signal.SIGKILL
            else:
                eventually(lambda: len(_commits(tmp_path)) > before + 1, "two rounds", within=LIMIT)  # noqa: B023
        writer.end()
        wanted = {topic.name: topic.watermarks.next for topic in writer.topics}

        def is_done() -> bool:
            writer.ask()
            return _ends(tmp_path) == wanted

        eventually(is_done, "everything is exported", within=LIMIT, every=1.0)
        child.send_signal(signal.SIGTERM)
        assert child.wait(LIMIT) == 0
    finally:
        writer.end()
        writer.log.close()
        if child is not None and child.poll() is None:
            child.kill()
            child.wait()
    table = read_table(tmp_path, "parquet")
    rows = sorted(zip(table["topic"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert rows == [(name, offset) for name in TOPICS for offset in range(wanted[name])]
    commits = [record for record in _commits(tmp_path) if record["files"]]
    # A round writes its files below a name of its own.
    rounds = [{file["pending"].split("/")[2] for file in record["files"]} for record in commits]
    assert all(len(names) == 1 for names in rounds)
    assert len(set.union(*rounds)) == len(commits) >= 3
    assert any(len({file["topic"] for file in record["files"]}) == 20 for record in commits)
