"""Which tests share a process of `pytest --dist loadfile`.

The tests of a file share one, and so do all files with a test that takes the fixture `spark`: a JVM
takes seconds to start, and is slow until it is warm.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

_ROOT = Path(__file__).resolve().parents[2]
_TAKES_SPARK = re.compile(r"^def test_\w+\([^)]*\bspark\b", re.MULTILINE)


class FilesAndSpark(LoadFileScheduling):
    """See the module header."""

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        return "spark" if _has_session(path) else path


@cache
def _has_session(path: str) -> bool:
    text = (_ROOT / path).read_text()
    # Some files have a fixture of this name that is no session.
    is_own = "def spark(" in text and "get_spark" not in text
    return _TAKES_SPARK.search(text) is not None and not is_own
