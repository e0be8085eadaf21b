"""Two processes that copy and read for `benchmarks jobs`: what its jobs are compared with.

    Helpers ── a task per line ──► python -m benchmarks.jobs_helpers ── its bytes ──► Helpers

Owns: the processes. They are there, with opendal loaded, before anything is counted, and end with
whoever started them. Each takes the next task when it is done with one, as Spark's workers do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Self

from benchmarks.copying import copy_files, read_objects
from ister.config import CloudReaderConfig, UploaderConfig
from ister.errors import InvariantError, UnavailableError

_PROCESSES: Final = 2
_READY: Final = "ready"


class Helpers:
    """The processes. Used by one thread."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[str]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Starts them; they are ready when this returns.

        Raises:
            UnavailableError: One does not start.
        """
        for _ in range(_PROCESSES):
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.jobs_helpers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._stack.enter_context(child)
            self._stack.callback(child.kill)
            self._children.append(child)
        try:
            for child in self._children:
                _hear(child)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def copy(self, groups: Sequence[Sequence[str]], target: str) -> int:
        """Copies files, those of a group into objects of their own in a new directory each.

        Args:
            groups: Paths.
            target: A directory; made if it does not exist.

        Returns:
            How many bytes.

        Raises:
            UnavailableError: A process failed.
        """
        os.makedirs(target, exist_ok=True)
        tasks = [
            {"what": "copy", "paths": list(group), "target": os.path.join(target, str(number))}
            for number, group in enumerate(groups)
        ]
        return self._run(tasks)

    def read(self, root: str, names: Sequence[str]) -> int:
        """Reads objects with crc32; how many bytes.

        Raises:
            UnavailableError: A process failed.
        """
        return self._run([{"what": "read", "root": root, "names": [name]} for name in names])

    def _run(self, tasks: Sequence[dict[str, Any]]) -> int:
        waiting: SimpleQueue[dict[str, Any]] = SimpleQueue()
        for task in tasks:
            waiting.put(task)

        def feed(child: subprocess.Popen[str]) -> int:
            total = 0
            with suppress(Empty):
                while True:
                    task = waiting.get_nowait()
                    if child.stdin is None:
                        raise InvariantError("the process has an input")
                    print(json.dumps(task), file=child.stdin, flush=True)
                    total += int(_hear(child))
            return total

        with ThreadPoolExecutor(_PROCESSES) as pool:
            return sum(pool.map(feed, self._children))


def _hear(child: subprocess.Popen[str]) -> str:
    line = child.stdout.readline() if child.stdout is not None else ""
    if not line:
        raise UnavailableError("a process that copies and reads has failed")
    return line.strip()


# -- in a process of its own ----------------------------------------------------------------


def _copy(task: dict[str, Any]) -> int:
    import opendal  # noqa: PLC0415 - an optional library

    target = task["target"]
    os.mkdir(target)
    operator = opendal.Operator("fs", root=target)
    return copy_files(operator, target, "object", task["paths"], UploaderConfig())


def _read(task: dict[str, Any]) -> int:
    import opendal  # noqa: PLC0415 - an optional library

    operator = opendal.Operator("fs", root=task["root"])
    return read_objects(operator, task["names"], CloudReaderConfig().fetch_chunk_size)


def main() -> int:
    """Does what it is told until nobody is there to tell it."""
    import opendal  # noqa: F401, PLC0415 - loaded before anything is counted

    print(_READY, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print({"copy": _copy, "read": _read}[task["what"]](task), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
