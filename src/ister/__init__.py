"""Ister: a durable topic log for Python and Spark.

import ister

with ister.open("./data") as log:
topic = log.topic("/default/orders", create=True)
offset = topic.append(b"first", attributes={"shop": "eu-1"})
topic.wait(offset)                      # durable: survives power loss
for message in topic.read("earliest"):
print(message.offset, message.payload)
"""

from ister.api import open  # noqa: A004
from ister.config import Config, load_config
from ister.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    ConflictError,
    CorruptDataError,
    DirectoryLockedError,
    DiskError,
    InvalidRequestError,
    InvariantError,
    IsterError,
    MessageTooLargeError,
    NotFoundError,
    OffsetOutOfRangeError,
    TopicNameError,
    UnavailableError,
    UnsupportedVersionError,
    WaitTimeoutError,
)
from ister.model import AckLevel, Codec, TopicState, Watermarks
from ister.topic.log import Log
from ister.topic.message import Message
from ister.topic.reader import Reader
from ister.topic.topic import Topic

__all__ = [
    "AckLevel",
    "CapacityError",
    "ClosedError",
    "Codec",
    "Config",
    "ConfigError",
    "ConflictError",
    "CorruptDataError",
    "DirectoryLockedError",
    "DiskError",
    "InvalidRequestError",
    "InvariantError",
    "IsterError",
    "Log",
    "Message",
    "MessageTooLargeError",
    "NotFoundError",
    "OffsetOutOfRangeError",
    "Reader",
    "Topic",
    "TopicNameError",
    "TopicState",
    "UnavailableError",
    "UnsupportedVersionError",
    "WaitTimeoutError",
    "Watermarks",
    "load_config",
    "open",
]

__version__ = "0.1.0"
