"""The interpreter behind the Python blocks of pages, and the one Spark session of all of them.

A process that listens on a Unix socket. Each connection brings one request, with the caller's
standard files attached, which are this process's own while it is at work:

    {"kind": "python", "page", "line", "code", …}                   a block, in its page's names
    {"kind": "command", "arguments", "directory", "environment"}    `ister pipeline JOB …`
    {"kind": "script", "arguments", "directory", "environment"}     `python FILE …` that uses Spark
    {"kind": "spark"}                                               start Spark, and say how it went

Spark is started by whoever needs it first and is never stopped by what is run here: jobs and
programs get the same session. One request is answered after the other.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import inspect
import json
import linecache
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_REQUEST_BYTES_MAX = 1 << 20


class Interpreter:
    """Namespaces of pages, and a loop for what they await."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._spaces: dict[str, dict[str, Any]] = {}
        self._has_spark = False

    def run(self, request: Mapping[str, Any]) -> int:
        kind = request["kind"]
        if kind == "python":
            with _environment(request["environment"]):
                return self._python(request)
        self._share_spark()
        if kind == "spark":
            _session()
            return 0
        with _environment(request["environment"]):
            if kind == "command":
                return _exit_code(lambda: _run_command(request["arguments"]))
            return _exit_code(lambda: _run_script(request["arguments"]))

    def _python(self, request: Mapping[str, Any]) -> int:
        page, code = request["page"], request["code"]
        if "pyspark" in code or "spark" in code:
            self._share_spark()
        space = self._spaces.setdefault(page, {"__name__": "__main__"})
        name = f"<{page}:{request['line']}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        try:
            program = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(program, space)
            if inspect.iscoroutine(result):
                self._loop.run_until_complete(result)
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    def _share_spark(self) -> None:
        """Whoever asks for a session gets the one of this process, and nobody stops it."""
        if self._has_spark:
            return
        self._has_spark = True
        _session()
        from pyspark.sql import SparkSession  # noqa: PLC0415 - only where it is needed

        from ister.spark.jobs import session as jobs_session  # noqa: PLC0415

        @contextlib.contextmanager
        def open_session(
            master: str, conf: Mapping[str, str] | None = None, **more: object
        ) -> Iterator[SparkSession]:
            yield _session()

        jobs_session.open_session = open_session
        SparkSession.stop = lambda self: None


def _session() -> Any:
    from tests.support.spark_session import get_spark  # noqa: PLC0415 - starts a JVM

    return get_spark()


def _run_command(arguments: list[str]) -> int:
    from ister.cli.main import main as command  # noqa: PLC0415 - only where it is needed

    return command(arguments)


def _run_script(arguments: list[str]) -> int:
    kept, sys.argv = sys.argv, arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.argv = kept
        del sys.path[0]
    return 0


def _exit_code(work: Any) -> int:
    try:
        return int(work() or 0)
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
            return 1
        return int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """The caller's settings of Ister, and nothing else of its environment."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("ISTER_")}
    for name in kept:
        del os.environ[name]
    os.environ.update({k: v for k, v in wanted.items() if not k.startswith(("SPARK", "PYSPARK"))})
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update(kept)


@contextlib.contextmanager
def _files(files: list[int], directory: str) -> Iterator[None]:
    """The caller's standard files and directory, for as long as the request takes."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in range(3)]
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(directory)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in enumerate(kept):
            os.dup2(file, number)
            os.close(file)
        os.chdir("/")


def _serve(listener: socket.socket, interpreter: Interpreter) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            data, files, _, _ = socket.recv_fds(connection, _REQUEST_BYTES_MAX, 3)
            if not data:
                continue
            try:
                request = json.loads(data)
                if request["kind"] == "end":
                    return
                with _files(files, request["directory"]):
                    code = _exit_code(functools.partial(interpreter.run, request))
            finally:
                for file in files:
                    os.close(file)
            # Whoever does not wait any more has given up on it.
            with contextlib.suppress(OSError):
                connection.sendall(f"{code}\n".encode())


def _end_with_caller(pipe: int) -> None:
    """Whoever started this process holds the other end."""
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """`python -m tests.doc_runner.interpreter SOCKET`."""
    path = sys.argv[1]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        print("ready", flush=True)
        threading.Thread(target=_end_with_caller, args=(os.dup(0),), daemon=True).start()
        _serve(listener, Interpreter())


def ask(path: str, request: Mapping[str, Any], files: list[int], seconds: float | None) -> int:
    """Sends a request; the exit code of what was run."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(seconds)
        caller.connect(path)
        socket.send_fds(caller, [json.dumps(request).encode()], files)
        answer = caller.recv(64)
    return int(answer) if answer else 1


if __name__ == "__main__":
    main()
