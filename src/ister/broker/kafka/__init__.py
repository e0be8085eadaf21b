"""Kafka's protocol: a door to the same topics, for programs that speak Kafka.

    protocol     requests and answers as bytes; which APIs in which versions; errors ⇄ Kafka's codes
    server       connections, their limits, one request after the other
    sasl         who calls
    records      record batches ⇄ messages
    topics       Kafka's names, ids and leaders of topics
    produce      record batches into topics, with idempotence
    fetch        messages of ranges as record batches; offsets of times
    groups       the members of a consumer group: a state machine without I/O
    coordinator  groups of this broker, their claims and committed offsets
    admin        topics, partitions, configurations
    door         which handler serves which API

Like Flight's door, it calls what all doors call: the guard, admission, the topics. The extra
`ister[kafka]` brings its libraries, so they are imported when the broker starts.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Final

from ister.base.extras import missing_extra
from ister.errors import UnavailableError

if TYPE_CHECKING:
    from ister.broker.kafka.door import KafkaDoor
    from ister.config import BrokerConfig

__all__ = ["KafkaDoor", "bind_door"]

PORT_DEFAULT: Final = 9092
_log = logging.getLogger("ister.broker.kafka")


def bind_door(config: BrokerConfig) -> KafkaDoor | None:
    """The door with its port, which serves once it is started; None if it is off.

    Without `broker.ports.kafka`, it is off as well where the extra is missing or the usual port is
    taken, and the log says so.

    Raises:
        ConfigError: The port is configured, and the extra is not installed.
        UnavailableError: The configured port is taken.
    """
    if not config.kafka.enabled:
        return None
    port = config.ports.kafka
    try:
        door = import_module("ister.broker.kafka.door")
    except ImportError as error:
        missing = missing_extra("serving Kafka's clients", "kafka", error)
        if port is not None:
            raise missing from error
        _log.info("Kafka's clients are not served", extra={"why": str(missing)})
        return None
    try:
        bound: KafkaDoor = door.KafkaDoor.bind(config, PORT_DEFAULT if port is None else port)
    except OSError as error:
        what = f"cannot listen on {config.host}:{port or PORT_DEFAULT}: {error.strerror}"
        if port is not None:
            raise UnavailableError(what, hint="is another broker running there?") from error
        _log.warning("Kafka's clients are not served", extra={"why": what})
        return None
    return bound


def __getattr__(name: str) -> object:
    if name == "KafkaDoor":
        return import_module("ister.broker.kafka.door").KafkaDoor
    raise AttributeError(name)
