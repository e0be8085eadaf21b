"""What Python workers of Spark do once, whatever task comes first.

PySpark has the garbage collector go through everything behind each task of a worker that is used
again, and our libraries are a few hundred thousand objects: a tenth of a second for nothing.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

__all__ = ["spare_collector"]

_MODULES_MIN: Final = 50

_modules_seen = 0


def spare_collector() -> None:
    """Has the collector pass over what is loaded by now; at the end of a task.

    Done again only when many modules have come since: how often is bounded by how many there are,
    so nothing piles up over days.
    """
    global _modules_seen  # noqa: PLW0603 - of this process
    if len(sys.modules) < _modules_seen + _MODULES_MIN:
        return
    # First, so that no garbage is kept for good.
    gc.collect()
    gc.freeze()
    _modules_seen = len(sys.modules)
