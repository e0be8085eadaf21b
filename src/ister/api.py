"""`ister.open`, the way into everything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from ister.base import failpoints, threads
from ister.base.extras import missing_extra
from ister.config import load_config
from ister.errors import IsterError
from ister.topic.log import Log
from ister.wal.signals import is_main_thread, make_shielded

if TYPE_CHECKING:
    from ister.topic.history import BucketLog


def open(  # noqa: A001 - `ister.open` is the name that users type
    source: str | os.PathLike[str] | Mapping[str, object] | None = None,
) -> Log:
    """Opens a log; use it as a context manager, or `close` it.

    Args:
        source: A directory for data, which is made where missing; the path of an `ister.yml`; a
            mapping of the same tree; or None, which keeps everything in memory.

    Raises:
        ConfigError: A setting is wrong. Names the key.
        DirectoryLockedError: Another process has the directory open.
        InvalidRequestError: The interpreter is shutting down.
        DiskError: The directory cannot be used.
    """
    if specification := os.environ.get("ISTER_FAILPOINTS"):
        failpoints.arm_from_environment(specification)
    config = load_config(source)
    threads.check_exit(needs_pool=config.storage.mode.has_bucket)
    if not is_main_thread():
        return Log(config)
    return make_shielded(lambda: Log(config), _close_quietly, "ister-open")


def _close_quietly(log: Log) -> None:
    with suppress(IsterError):
        log.close()


def open_bucket(source: str | os.PathLike[str] | Mapping[str, object]) -> BucketLog:
    """Opens a log's bucket read-only, also while another process writes to the log.

    Neither the local files nor their lock nor a broker are touched, so this works on any machine
    that reaches the bucket and the metadata store. Messages appended since the last upload (by
    default, up to ten seconds or 8 MiB a topic) are not visible.
    `Client.read_arrow` reads a topic with its tail, through the broker.

    Args:
        source: A directory for data, the path of an `ister.yml`, or a mapping of the same tree.

    Raises:
        ConfigError: A setting is wrong, or pyarrow is not installed.
    """
    try:
        from ister.topic.history import BucketLog  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise missing_extra("reading history as Arrow", "arrow", error) from error
    return BucketLog(load_config(source))
