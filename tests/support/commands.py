"""Commands of `ister` in the process of a test, and data directories that they are given."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import yaml

from ister.cli.main import main
from ister.config import load_config
from ister.topic.log import Log

TOPIC = "/default/orders"


class Terminal(io.StringIO):
    """A standard file that is a terminal."""

    def isatty(self) -> bool:
        return True


def run_json(capsys: Any, *arguments: object) -> tuple[int, Any]:
    """The exit code of a command, and the JSON that it printed."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def check_fields(printed: Any, **fields: object) -> None:
    """Fails unless an object of JSON has these fields; it may have others."""
    assert {name: printed.get(name, "missing") for name in fields} == fields


class DataDirectory:
    """A data directory with a config file, for commands without a broker.

    Args:
        path: The directory.
        node: Told apart from others that share bucket and metadata.
        storage: Settings of `storage`.
    """

    def __init__(self, path: Path, *, node: str = "", **storage: Any) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.config = path / f"ister{node}.yml"
        self.wal = path / f"wal{node}"
        self.files = self.wal / TOPIC.strip("/")
        self.write(**storage)

    def write(self, **storage: Any) -> None:
        """Writes the config file; places are beside the files of messages."""
        storage["wal"] = {"dir": str(self.wal), **storage.get("wal", {})}
        self.config.write_text(yaml.safe_dump({"storage": storage}))

    def open(self) -> Log:
        """The log, without threads of its own."""
        return Log(load_config(str(self.config)), background=False)

    def objects(self, folder: str = "objects", *, topic: str = TOPIC) -> Path:
        """The directory of a topic's objects in the bucket."""
        return self.path / "objects" / "storage" / "topics" / topic.strip("/") / folder

    def lose_metadata(self) -> None:
        """Removes the metadata store."""
        for path in self.path.glob("metadata.db*"):
            path.unlink()

    def contents(self) -> dict[str, bytes]:
        """Every file with its content."""
        found = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.path)): path.read_bytes() for path in found}

    def run(self, capsys: Any, *arguments: object) -> tuple[int, Any]:
        """A command with this directory: its exit code, and the JSON that it printed."""
        return run_json(capsys, *arguments, "--config", self.config)
