"""Which tests share a process of `pytest --dist loadfile`, and which of them begin.

The tests of a file share one, and so do all files with a test that takes the fixture `spark`: a JVM
takes seconds to start, and is slow until it is warm. The files of the dashboard share a broker.

A run ends with its last file, so the longest ones begin. Then come, in turn, files of suites that
mostly wait for other processes and of those that compute: so processors are busy all the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

_ROOT = Path(__file__).resolve().parents[2]
_TAKES_SPARK = re.compile(r"^def test_\w+\([^)]*\bspark\b", re.MULTILINE)
# From the longest on; half a minute and more.
_LONGEST = (
    "tests/integration/test_spark_batch.py",  # and all that share its process
    "tests/integration/test_spark_versions.py",
    "tests/fault/test_cluster.py",
    "tests/browser/test_pages.py",  # and all that share its process
    "tests/docs/test_blocks.py",
    "tests/sim/test_tier_crashes.py",
    "tests/fault/test_tier_kill.py",
    "tests/integration/test_client.py",
    "tests/fault/test_kill.py",
    "tests/integration/test_two_brokers.py",
    "tests/fault/test_broker_kill.py",
    "tests/integration/test_jobs_start.py",
)
_WAITING = tuple(
    f"tests/{suite}/" for suite in ("browser", "contract", "docs", "fault", "integration")
)


class FilesAndSpark(LoadFileScheduling):
    """See the module header."""

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        if path.startswith("tests/browser/"):
            return "browser"
        return "spark" if _has_session(path) else path


def reorder(items: list[pytest.Item]) -> None:
    """Puts the tests into the order of their files; see the module header."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    items[:] = chain.from_iterable(by_file[path] for path in _in_turn(by_file))


def _in_turn(paths: Iterable[str]) -> list[str]:
    left = dict.fromkeys(paths)
    first = [path for path in _LONGEST if path in left]
    left = {path: None for path in left if path not in _LONGEST}
    waiting = [path for path in left if path.startswith(_WAITING)]
    computing = [path for path in left if not path.startswith(_WAITING)]
    mixed = chain.from_iterable(zip_longest(waiting, computing))
    return [*first, *(path for path in mixed if path is not None)]


@cache
def _has_session(path: str) -> bool:
    text = (_ROOT / path).read_text()
    # Some files have a fixture of this name that is no session.
    is_own = "def spark(" in text and "get_spark" not in text
    return _TAKES_SPARK.search(text) is not None and not is_own
