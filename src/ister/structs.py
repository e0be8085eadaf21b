"""Types that msgspec reads JSON as, made safe for threads.

msgspec looks at the fields of a struct or dataclass when the type is first used, and shares what it
has found before it is complete: a second thread that uses the type meanwhile crashes the process.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

_Type = TypeVar("_Type")

_lock = threading.Lock()
_known: set[object] = set()


def known(kind: type[_Type]) -> type[_Type]:
    """Returns a struct or dataclass whose fields msgspec knows; one thread looks at them."""
    if kind not in _known:
        with _lock:
            msgspec.json.Decoder(kind)
            _known.add(kind)
    return kind
