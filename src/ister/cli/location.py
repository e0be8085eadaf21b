"""Which log a command works on: `--data DIR`, `--config FILE`, `ISTER_CONFIG`, `./ister-data`.

Owns: these arguments, and the settings that they lead to. Does not own: what settings mean
(`ister.config`), or opening anything.

A directory that is named has to exist: a command that inspects or repairs a log must not
make an empty one where a name was misspelt.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Annotated, Final, Self

from ister.base.model import TopicName
from ister.cli.command import Arg, add_json_argument
from ister.errors import ConfigError, InvalidRequestError, NotFoundError, TopicNameError

# Settings and stores are loaded when they are used: commands that talk to a broker need neither.
if TYPE_CHECKING:
    from ister.base.clock import Clock
    from ister.config import Config, StorageConfig
    from ister.objectstore.base import ObjectStore

DATA_DEFAULT: Final = "./ister-data"
CONFIG_VARIABLE: Final = "ISTER_CONFIG"


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--data`, `--config` and `--json`."""
    Place.add_arguments(parser)
    add_json_argument(parser)


class Place:
    """The log of a command, as its options name it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds `--data` and `--config`."""
        place = parser.add_mutually_exclusive_group()
        place.add_argument(
            "--data",
            metavar="DIR",
            help=f"data directory (default: ${CONFIG_VARIABLE} if set, else {DATA_DEFAULT})",
        )
        place.add_argument("--config", metavar="FILE", help="config file (YAML)")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """The log that was named."""
        return cls(options)

    @property
    def is_there(self) -> bool:
        """Whether the log is named by the user, or in its default place."""
        return has_place(self.options)

    def load(self) -> Config:
        """Its settings; see `load_place`."""
        return load_place(self.options)


def parse_topic(text: str) -> TopicName:
    """A topic's name, for argparse; one without a slash is in the namespace `default`."""
    try:
        return TopicName.parse(text if "/" in text else f"/default/{text}")
    except TopicNameError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def topic_name(text: str) -> str:
    """Like `parse_topic`, as a text."""
    return str(parse_topic(text))


Topic = Annotated[str, Arg("topic name, such as /default/orders", "TOPIC", topic_name)]


def has_place(options: argparse.Namespace) -> bool:
    """Whether the log is named by the user, or in its default place."""
    is_named = bool(options.data or options.config or os.environ.get(CONFIG_VARIABLE))
    return is_named or os.path.isdir(DATA_DEFAULT)


def check_config_name(file: str) -> str:
    """Returns the name of a config file.

    Raises:
        ConfigError: It is not the name of one.
    """
    if not file.endswith((".yml", ".yaml")):
        raise ConfigError(
            "the name of a config file must end with .yml or .yaml",
            path=file,
            hint="use --data for a directory",
        )
    return file


def load_place(options: argparse.Namespace) -> Config:
    """The settings of the log that the arguments name.

    Raises:
        NotFoundError: There is no such directory.
        ConfigError: The config file cannot be used.
    """
    from ister.config import load_config  # noqa: PLC0415

    file: str | None = options.config
    if file is None and options.data is None:
        file = os.environ.get(CONFIG_VARIABLE) or None
    if file is not None:
        return load_config(check_config_name(file))
    directory: str = options.data if options.data is not None else DATA_DEFAULT
    if not os.path.isdir(directory):
        raise NotFoundError(
            "data directory not found", path=directory, hint="pass --data DIR or --config FILE"
        )
    # The slash keeps a directory with an odd name from being taken for a config file.
    return load_config(os.path.join(directory, ""))


def wal_root(storage: StorageConfig) -> str | None:
    """Where the topics' directories are; None for a log that has only a bucket.

    Raises:
        InvalidRequestError: Nowhere: this log is in memory.
    """
    from ister.config import StorageMode  # noqa: PLC0415

    if storage.mode is StorageMode.BUCKET:
        return None
    if storage.mode is StorageMode.MEMORY or storage.wal.dir is None:
        raise InvalidRequestError(
            "this log is in memory only", hint="only its own process can read it"
        )
    return os.path.abspath(storage.wal.dir)


def require_bucket(storage: StorageConfig) -> None:
    """Makes sure that the log has a bucket, and one that another process sees.

    Raises:
        InvalidRequestError: It has not.
    """
    from ister.config import CloudBackend  # noqa: PLC0415

    if not storage.mode.has_bucket:
        raise InvalidRequestError(
            f"storage.mode is {storage.mode.value!r}, so this log has no bucket",
            hint="storage.mode 'wal_cloud' and 'bucket' have one",
        )
    if storage.cloud.backend is CloudBackend.MEMORY:
        raise InvalidRequestError("the bucket of this log is in the memory of its own process")


def open_bucket(storage: StorageConfig, clock: Clock) -> ObjectStore:
    """The log's bucket, which has to exist.

    Raises:
        InvalidRequestError: It has none.
        NotFoundError: Its directory does not exist.
        ConfigError: Its settings do not make sense.
    """
    from ister.config import CloudBackend  # noqa: PLC0415
    from ister.topic.stores import open_objects  # noqa: PLC0415

    require_bucket(storage)
    cloud = storage.cloud
    is_directory = cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL)
    if is_directory and not os.path.isdir(cloud.root or ""):
        raise NotFoundError("bucket not found", path=cloud.root, hint="check storage.cloud")
    return open_objects(storage, clock)
