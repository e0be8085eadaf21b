"""Ports for servers that are told where to listen, and listen there again after a restart.

None of those that the system gives to whoever asks for any: a neighbour would get one while a
server is away. Each process of the test run has ports of its own.
"""

from __future__ import annotations

import os
import random
import socket

_FIRST = 10_000
# The system's own begin at 32,768.
_COUNT_PER_PROCESS = 5_500
_PROCESSES = 4

_process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
# Another run on this machine, and what is left of the one before, are likely elsewhere.
_at = random.SystemRandom().randrange(_COUNT_PER_PROCESS)


def free_port() -> int:
    """A port of this machine alone that nobody listens on at the moment."""
    global _at  # noqa: PLW0603 - of this process
    for _ in range(_COUNT_PER_PROCESS):
        _at = (_at + 1) % _COUNT_PER_PROCESS
        port = _FIRST + _process * _COUNT_PER_PROCESS + _at
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("every port is taken")
