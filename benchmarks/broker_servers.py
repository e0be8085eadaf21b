"""The two servers of `benchmarks broker`, each a process of its own.

The broker is `ister serve` itself, on either engine of its gRPC port. The other one is
`benchmarks.broker_bare`, which speaks the same protocol and keeps nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ister.config import load_config
from ister.errors import ConfigError, UnavailableError

ENGINES: Final = ("grpcio", "native")


@contextmanager
def broker(directory: str, **settings: str) -> Iterator[dict[str, Any]]:
    """A broker on a directory: its addresses and its process id."""
    command = ["-m", "ister.cli.main", "serve", "--data-dir", directory, "--json"]
    ports = ["--port", "0", "--flight-port", "0", "--http-port", "0", "--log-level", "ERROR"]
    with _serving([*command, *ports], settings) as ready:
        yield ready


@contextmanager
def bare_server(count: int, engine: str = "grpcio") -> Iterator[dict[str, Any]]:
    """A server that keeps nothing and has so many messages for consumers: its address and pid."""
    with _serving(["-m", "benchmarks.broker_bare", engine, str(count)], {}) as ready:
        yield ready


def engine_settings(engine: str) -> dict[str, str]:
    """What has a broker serve its gRPC port by an engine."""
    return {} if engine == ENGINES[0] else {"ISTER_BROKER__GRPC__ENGINE": engine}


def why_not(engine: str) -> str | None:
    """Why a broker cannot use an engine here; None if it can."""
    try:
        load_config(None, engine_settings(engine))
    except ConfigError as error:
        return str(error)
    if engine == "native" and importlib.util.find_spec("pygrpc_native") is None:
        return "the package pygrpc-native is not installed"
    return None


@contextmanager
def _serving(command: list[str], settings: dict[str, str]) -> Iterator[dict[str, Any]]:
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
    )
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - for mypy
    try:
        line = process.stdout.readline()
        if not line:
            raise UnavailableError("a server of the benchmark did not start")
        yield json.loads(line)
    finally:
        process.stdin.close()
        process.terminate()
        process.wait()
        process.stdout.close()
