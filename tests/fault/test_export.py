"""An export killed at every named step, again and again: each offset is in the table once.

Several topics share the table, and a commit. Somebody puts Iceberg and Delta tables back to what
they were, commits to them, and cleans up their history, before and after an export that dies.

Tasks run in the killed process itself, without Spark: many rounds in little time. What becomes of
executors is for the tests of the jobs on Spark.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import pytest

from ister.spark.jobs.export_job import export
from tests.integration.spark_topics import PUBLISHED_MS, SparkPlace
from tests.support.exports import (
    FORMATS,
    commit_nothing,
    forget_history,
    read_table,
    roll_back,
    state_of,
    tasks_here,
    where,
)

pytestmark = pytest.mark.nightly

TOPICS = ["/default/a", "/default/b", "/default/c"]
SCHEMA = {"properties": {"id": {"type": "integer"}, "name": {"type": "string"}}}
_TABLES = ("orders", "orders_dead_letters")
_ROUNDS = int(os.environ.get("ISTER_ROUNDS", "8"))
_LEASE_SECONDS = 6
_POINTS = (
    "pipeline.after_lease=kill@1",
    "pipeline.after_plan=kill@1",
    "pipeline.after_task=kill@1",
    "export.before_table_commit=kill@1",
    "export.after_table_commit=kill@1",
    "export.after_publish=kill@1",
    "export.after_dead_letters=kill@1",
    "pipeline.before_commit=kill@1",
    "export.before_table_commit=kill@2",
    "export.after_table_commit=kill@2",
    "export.after_publish=kill@2",
    "pipeline.after_commit=kill@1",
    "pipeline.before_report=kill@1",
)
_SCRIPT = textwrap.dedent("""
    import sys, json
    from tests.support.exports import tasks_here
    from ister.spark.jobs.export_job import export
    with tasks_here() as spark:
        report = export(spark, sys.argv[1], to=sys.argv[2], format=sys.argv[3],
                        schema=json.loads(sys.argv[4]))
    assert report.ok, report.errors
""")


def _publish(place: SparkPlace, first: int, count: int, bad: set[int]) -> None:
    with place.open() as log:
        for name in TOPICS:
            topic = log.topic(name, create=True)
            for number in range(first, first + count):
                payload = b"?" if number in bad else b'{"id":%d,"name":"n"}' % number
                topic.append(payload, publish_time=PUBLISHED_MS + number * 3_600_000)
            topic.flush()
            topic.upload()


def _rows(root: Path, format: str, name: str) -> list[tuple[str, int]]:
    table = read_table(root, format, name)
    return sorted(zip(table["topic"].to_pylist(), table["offset"].to_pylist(), strict=True))


def _run(place: SparkPlace, to: str, format: str, point: str) -> int:
    arguments = [place.config, to, format, json.dumps(SCHEMA)]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *arguments],
        env={**os.environ, "ISTER_FAILPOINTS": point},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()[-2000:]
    return done.returncode


class _Somebody:
    """Rolls both tables back to what they were after an export, now and then; and their upkeep."""

    def __init__(self, root: Path, format: str, rng: random.Random) -> None:
        self._root = root
        self._format = format
        self._rng = rng
        self._states: list[tuple[dict[str, int], list[list[tuple[str, int]]]]] = []
        self.done: Counter[str] = Counter()

    def remember(self, *, is_dead: bool) -> None:
        """Notes the tables' states, and the rows that they have, once both are certain to exist."""
        if self._format == "parquet" or (is_dead and not self._states):
            return
        states = {name: state_of(self._root, self._format, name) for name in _TABLES}
        if None not in states.values():
            self._states.append((states, self._read()))

    def roll_back(self) -> None:
        """Puts tables back, and looks at their rows; half of the time it does nothing."""
        if not self._states or self._rng.random() < 0.5:
            return
        before = sum(map(len, self._read()))
        states, rows = self._rng.choice(self._states)
        for name, state in states.items():
            roll_back(self._root, self._format, state, name)
        assert self._read() == rows
        self.done["rollbacks"] += 1
        self.done["rows that were rolled back"] += max(before - sum(map(len, rows)), 0)

    def clean_up(self) -> None:
        """Others commit, and only the current state is left."""
        if not self._states or self._rng.random() < 0.8:
            return
        for name in _TABLES:
            for _ in range(self._rng.randrange(3)):
                commit_nothing(self._root, self._format, name)
            forget_history(self._root, self._format, name)
        self._states.clear()
        self.done["histories cleaned"] += 1

    def _read(self) -> list[list[tuple[str, int]]]:
        return [_rows(self._root, self._format, name) for name in _TABLES]


@pytest.mark.parametrize("format", FORMATS)
def test_killed_and_run_again(tmp_path, format):
    seed = int(os.environ.get("ISTER_SEED") or random.SystemRandom().randrange(2**32))
    print(f"ISTER_SEED={seed} ISTER_ROUNDS={_ROUNDS} pytest tests/fault/test_export.py -k {format}")
    rng = random.Random(f"{seed} {format}")
    place = SparkPlace(tmp_path / "data", metadata={"lease_ttl_seconds": _LEASE_SECONDS})
    somebody = _Somebody(tmp_path, format, rng)
    count, bad = 0, set()
    for _ in range(_ROUNDS):
        size = rng.randrange(1, 60)
        bad.update(rng.sample(range(count, count + size), min(2, size)))
        _publish(place, count, size, bad)
        count += size
        if format != "parquet":
            somebody.roll_back()
        if _run(place, where(tmp_path, format), format, rng.choice(_POINTS)):
            somebody.done["deaths"] += 1
            # The keys of a killed export end by themselves.
            threading.Event().wait(_LEASE_SECONDS + 0.5)
            somebody.remember(is_dead=True)
        elif format != "parquet":
            _check(tmp_path, format, count, bad)
            somebody.remember(is_dead=False)
            somebody.clean_up()
    if format != "parquet":
        somebody.roll_back()
    with tasks_here() as spark:
        to = where(tmp_path, format)
        report = export(spark, place.config, to=to, format=format, schema=SCHEMA)
        assert report.ok, report.errors
    _check(tmp_path, format, count, bad)
    told = {"test": "kill -9 of exports", "format": format, "seed": seed, "rounds": _ROUNDS}
    print(json.dumps({**told, "offsets": count * len(TOPICS), **somebody.done}))


def _check(tmp_path: Path, format: str, count: int, bad: set[int]) -> None:
    good = [number for number in range(count) if number not in bad]
    for name, offsets in zip(_TABLES, (good, sorted(bad)), strict=True):
        wanted = [(topic, offset) for topic in TOPICS for offset in offsets]
        assert _rows(tmp_path, format, name) == wanted
