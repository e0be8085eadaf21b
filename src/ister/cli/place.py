"""Which log a command works on: `--data DIR`, `--config FILE`, `ISTER_CONFIG`, `./ister-data`.

Owns: these arguments, and the settings that they lead to. Does not own: what settings mean
(`ister.config`), or opening anything.

A directory that is named has to exist: a command that looks at a log, or puts one right, must not
make an empty one where a name was misspelt.
"""

from __future__ import annotations

import argparse
import os
from typing import Final

from ister.clock import Clock
from ister.config import CloudBackend, Config, StorageConfig, StorageMode, load_config
from ister.errors import ConfigError, InvalidRequestError, NotFoundError, TopicNameError
from ister.model import TopicName
from ister.objectstore.base import ObjectStore
from ister.topic.tiers import open_objects

__all__ = [
    "add_place_arguments",
    "has_place",
    "load_place",
    "open_bucket",
    "parse_topic",
    "require_bucket",
    "wal_root",
]

_DATA_DEFAULT: Final = "./ister-data"
_VARIABLE: Final = "ISTER_CONFIG"
_CONFIG_SUFFIXES: Final = (".yml", ".yaml")


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--data`, `--config` and `--json`."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--data",
        metavar="DIR",
        help=f"the data directory (default: ${_VARIABLE} if set, else {_DATA_DEFAULT})",
    )
    place.add_argument("--config", metavar="FILE", help="the config file, an ister.yml")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def parse_topic(text: str) -> TopicName:
    """A topic's name, for argparse."""
    try:
        return TopicName.parse(text)
    except TopicNameError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def has_place(options: argparse.Namespace) -> bool:
    """Whether the user said where the log is, or it is in its usual place."""
    is_named = bool(options.data or options.config or os.environ.get(_VARIABLE))
    return is_named or os.path.isdir(_DATA_DEFAULT)


def load_place(options: argparse.Namespace) -> Config:
    """The settings of the log that the arguments name.

    Raises:
        NotFoundError: There is no such directory.
        ConfigError: The config file cannot be used.
    """
    file: str | None = options.config
    if file is None and options.data is None:
        file = os.environ.get(_VARIABLE) or None
    if file is not None:
        if not file.endswith(_CONFIG_SUFFIXES):
            raise ConfigError(
                "a config file has a name that ends with .yml or .yaml",
                path=file,
                hint="--data names a directory",
            )
        return load_config(file)
    directory: str = options.data if options.data is not None else _DATA_DEFAULT
    if not os.path.isdir(directory):
        raise NotFoundError(
            "there is no such data directory",
            path=directory,
            hint="--data DIR or --config FILE says where the log is",
        )
    # The slash keeps a directory with an odd name from being taken for a config file.
    return load_config(os.path.join(directory, ""))


def wal_root(storage: StorageConfig) -> str:
    """Where the topics' directories are.

    Raises:
        InvalidRequestError: Nowhere: this log is in memory.
    """
    if storage.mode is StorageMode.MEMORY or storage.wal.dir is None:
        raise InvalidRequestError(
            "this log keeps everything in memory", hint="there is nothing to look at from outside"
        )
    return os.path.abspath(storage.wal.dir)


def require_bucket(storage: StorageConfig) -> None:
    """Makes sure that the log has a bucket, and one that another process sees.

    Raises:
        InvalidRequestError: It has not.
    """
    if storage.mode is not StorageMode.WAL_CLOUD:
        raise InvalidRequestError(
            f"storage.mode is {storage.mode.value!r}, so this log has no bucket",
            hint="only a log with storage.mode 'wal_cloud' has a second copy",
        )
    if storage.cloud.backend is CloudBackend.MEMORY:
        raise InvalidRequestError("the bucket of this log is in the memory of its process")


def open_bucket(storage: StorageConfig, clock: Clock) -> ObjectStore:
    """The log's bucket, which has to exist.

    Raises:
        InvalidRequestError: It has none.
        NotFoundError: Its directory does not exist.
        ConfigError: Its settings do not make sense.
    """
    require_bucket(storage)
    cloud = storage.cloud
    is_directory = cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL)
    if is_directory and not os.path.isdir(cloud.root or ""):
        raise NotFoundError(
            "there is no such bucket",
            path=cloud.root,
            hint="storage.cloud says where objects are",
        )
    return open_objects(storage, clock)
