"""`ister.open`, the way into everything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ister import failpoints
from ister.config import load_config
from ister.topic.log import Log

__all__ = ["open"]


def open(  # noqa: A001 - `ister.open` is the name that users type
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Log:
    """Opens a log; use it as a context manager, or `close` it.

    Args:
        source: A directory for data, which is made where missing; the path of an `ister.yml`; a
            mapping of the same tree; or None, which keeps everything in memory.

    Raises:
        ConfigError: A setting is wrong. Names the key.
        DirectoryLockedError: Another process has the directory open.
        DiskError: The directory cannot be used.
    """
    if specification := os.environ.get("ISTER_FAILPOINTS"):
        failpoints.arm_from_environment(specification)
    return Log(load_config(source))
