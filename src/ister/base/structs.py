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
        make_decoder(kind)
        _known.add(kind)
    return kind


def make_decoder(kind: type[_Type]) -> msgspec.json.Decoder[_Type]:
    """Returns a decoder; the type need not be hashable."""
    with _lock:
        return msgspec.json.Decoder(kind)
