"""Runs `python -m demo`: the directory, what is left at the end, and the exit code.

The exit code is 0 if every proof held, and 1 if one did not or a step failed.

However it ends, by itself, by Ctrl-C, by SIGTERM or by a failure, the processes end with it, and so
does the directory, unless it was named or `--keep` was given.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Final

from demo.interrupts import SIGNALS
from demo.terminal import open_stage, print_summary
from ister.base.extras import missing_extra
from ister.cli.interrupts import SignalHandler
from ister.cli.output import print_error
from ister.errors import DiskError, NotFoundError

if TYPE_CHECKING:
    from demo.cluster import ClusterPlayer
    from demo.play import Player

_LOOK_SECONDS: Final = 0.5


def run(options: argparse.Namespace) -> int:
    """Plays the demo with the options of `python -m demo`; returns the exit code."""
    report = os.path.abspath(options.report)
    if not os.path.isdir(os.path.dirname(report)):
        raise NotFoundError(
            "there is no such directory",
            path=os.path.dirname(report),
            hint="--report says where the report goes",
        )
    try:
        from demo.cluster import ClusterPlayer  # noqa: PLC0415 - needs extras
        from demo.cluster_report import render_cluster  # noqa: PLC0415
        from demo.play import Player  # noqa: PLC0415
        from demo.report import render  # noqa: PLC0415
        from demo.story import Plan  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra("python -m demo", "broker,client", error) from error
    _check_broker()
    with (
        _ended_by_signals(),
        _directory(options.data, is_kept=options.keep) as directory,
        open_stage(stderr=options.json) as stage,
    ):
        plan = Plan(
            directory=directory,
            messages=options.messages,
            seed=options.seed,
            uses_spark=not options.no_spark,
        )
        player = ClusterPlayer(plan, stage) if options.cluster else Player(plan, stage)
        if not options.json:
            _greet(options, directory, player)

        def after() -> None:
            _write(report, (render_cluster if options.cluster else render)(player.figures))
            if options.json:
                print(json.dumps({**player.figures, "report": report}), flush=True)
            else:
                print_summary(player.figures, report=report)
            if options.keep:
                _keep(player, directory, to_stderr=options.json)

        figures = player.play(after)
    if not figures["ok"]:
        print_error("a proof has failed: " + "; ".join(figures["failures"]))
        return 1
    return 0


def _check_broker() -> None:
    """Finds out before anything is started that a broker could not be."""
    try:
        import aiohttp  # noqa: F401, PLC0415 - an extra
        import grpc  # noqa: F401, PLC0415
        import pyarrow  # noqa: F401, PLC0415
    except ImportError as error:
        raise missing_extra("python -m demo", "broker,client", error) from error


def _greet(options: argparse.Namespace, directory: str, player: Player | ClusterPlayer) -> None:
    print(f"\n  ister demo · {options.messages:,} messages · seed {options.seed} · {directory}\n")
    missing = player.figures["missing"]
    if missing and not options.no_spark:
        what = "without etcd" if options.cluster else "steps that need Spark are left out"
        print_error(what, hint="; ".join(missing))


def _keep(player: Player | ClusterPlayer, directory: str, *, to_stderr: bool) -> None:
    """Waits for Ctrl-C, with the broker up."""
    addresses = player.broker.addresses
    file = sys.stderr if to_stderr else sys.stdout
    for name, value in (
        ("dashboard", f"http://{addresses.http}/"),
        ("gRPC", addresses.grpc),
        ("Flight", addresses.flight),
        ("data", directory),
        ("settings", player.broker.config),
        ("try", f"ister topics describe /default/orders --broker {addresses.grpc}"),
    ):
        print(f"  {name:10} {value}", file=file)
    with suppress(KeyboardInterrupt):
        # Inside, because a program that reads the line may send the signal at once.
        print("  Press Ctrl-C to stop the broker; the data is kept.", file=file, flush=True)
        # In looks: a signal that comes just before the thread begins to wait does not end that.
        while not threading.Event().wait(_LOOK_SECONDS):
            pass


def _write(path: str, page: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise DiskError(
            f"the report cannot be written: {error.strerror}", errno=error.errno, path=path
        ) from error


@contextmanager
def _directory(named: str | None, *, is_kept: bool) -> Iterator[str]:
    if named is not None:
        yield os.path.abspath(named)
        return
    if is_kept:
        yield tempfile.mkdtemp(prefix="ister-demo-")
        return
    with tempfile.TemporaryDirectory(prefix="ister-demo-", ignore_cleanup_errors=True) as directory:
        yield directory


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Has signals end the demo as Ctrl-C does: everything that was started ends too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # SIGINT as well: a shell starts what runs in the background with it ignored.
    before: dict[int, SignalHandler] = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
