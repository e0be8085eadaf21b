"""Ister: a durable topic log for Python and Spark.

    import ister

    with ister.open("./data") as log:
        topic = log.topic("/default/orders", create=True)
        offset = topic.append(b"first", attributes={"shop": "eu-1"})
        topic.wait(offset)                      # durable: survives power loss
        for message in topic.read("earliest"):
            print(message.offset, message.payload)

With a broker (`ister serve`), programs use `ister.client`; Spark reads and writes topics with
`format("ister")`, see `ister.spark`. Start with `help(ister.open)`, `help(ister.Log)` and
`help(ister.Topic)`.

`import ister` loads names, errors and little more. What opens a log is loaded when it is first
used, so that programs which only talk to a broker, and the command line, start quickly.
"""

import importlib
import logging
import threading
import warnings
from typing import TYPE_CHECKING

from ister.base import logs
from ister.base.model import AckLevel, Codec, TopicState, Watermarks
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    CommitUnknownError,
    ConfigError,
    ConflictError,
    CorruptDataError,
    DataGapError,
    DirectoryLockedError,
    DiskError,
    FencedError,
    InvalidRequestError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    StoresDifferError,
    TopicNameError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedOperationError,
    UnsupportedVersionError,
    WaitsForDiskError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from ister.api import open, open_bucket  # noqa: A004
    from ister.config import Config, load_config
    from ister.topic.log import Log
    from ister.topic.message import Message
    from ister.topic.partitioned import PartitionedTopic
    from ister.topic.reader import Reader
    from ister.topic.topic import Topic
    from ister.topic.uploads import UploadResult

__all__ = [
    "AckLevel",
    "AlreadyExistsError",
    "CapacityError",
    "ClosedError",
    "Codec",
    "CommitUnknownError",
    "Config",
    "ConfigError",
    "ConflictError",
    "CorruptDataError",
    "DataGapError",
    "DirectoryLockedError",
    "DiskError",
    "FencedError",
    "InvalidRequestError",
    "IsterError",
    "Log",
    "Message",
    "MessageTooLargeError",
    "NotFoundError",
    "OffsetOutOfRangeError",
    "PartitionedTopic",
    "PermissionDeniedError",
    "Reader",
    "StoresDifferError",
    "Topic",
    "TopicNameError",
    "TopicState",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedOperationError",
    "UnsupportedVersionError",
    "UploadResult",
    "WaitTimeoutError",
    "WaitsForDiskError",
    "Watermarks",
    "load_config",
    "open",
    "open_bucket",
]

__version__ = "0.1.0"

_HOMES = {
    "Config": "ister.config",
    "Log": "ister.topic.log",
    "Message": "ister.topic.message",
    "PartitionedTopic": "ister.topic.partitioned",
    "Reader": "ister.topic.reader",
    "Topic": "ister.topic.topic",
    "UploadResult": "ister.topic.uploads",
    "load_config": "ister.config",
    "open": "ister.api",
    "open_bucket": "ister.api",
}


_OLD_NAMES = {"Tiered": "UploadResult", "open_history": "open_bucket"}
"""Names of earlier releases, which work for one more."""


def __getattr__(name: str) -> object:
    if name in _OLD_NAMES:
        new = _OLD_NAMES[name]
        warnings.warn(
            f"ister.{name} is ister.{new} now; the old name will be removed in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        name = new
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except (ImportError, RuntimeError) as error:
        if threading.main_thread().is_alive():
            raise
        # Some modules cannot be imported any more.
        raise InvalidRequestError(
            f"ister.{name} cannot be loaded: the interpreter is shutting down",
            hint="use it before the program ends, not in an atexit handler",
        ) from error
    # Kept: the next use does not come here.
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not logging.getLogger("ister").handlers:
    logging.getLogger("ister").addHandler(logs.LastResort())
