"""`ister demo`: a small shop on a real broker, from the first order to a table, with proofs.

Owns: arguments, the directory, what is left at the end, and the exit code: 0 if every proof held,
1 if one did not or a step failed. Does not own: the demo (`ister.demo`), its look (`demo_show`).

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
from typing import TYPE_CHECKING, Any, Final

from ister.cli.demo_show import open_stage, print_summary
from ister.cli.look import add_command, print_error
from ister.demo.interrupts import SIGNALS
from ister.errors import DiskError, NotFoundError
from ister.extras import missing_extra

if TYPE_CHECKING:
    from ister.demo.play import Player

    # argparse has no public name for it.
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

__all__ = ["register"]

_REPORT: Final = "ister-demo.html"
_MESSAGES: Final = 120_000
_SEED: Final = 7
_LOOK_SECONDS: Final = 0.5


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "demo",
        help="see all of it work, in under three minutes",
        description="Starts a broker in a temporary directory and lives a day of a small shop on "
        "it: publishes orders, payments and clicks, consumes them by every type of subscription, "
        "kills the broker with SIGKILL in the middle, moves everything to the bucket with Spark, "
        "compacts it, moves to an empty disk, reads all of it back, asks SQL and a stream, exports "
        "an Iceberg table; and proves that nothing was lost. Leaves a report to look at, and "
        "nothing else. Without Java it says what to install, and does the rest.",
        examples=(
            "ister demo",
            "ister demo --keep",
            "ister demo --messages 20000 --seed 42 --report shop.html",
            "ister demo --no-spark --json",
        ),
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the broker and its dashboard up until Ctrl-C, and keep the directory",
    )
    parser.add_argument(
        "--messages",
        metavar="N",
        type=int,
        default=_MESSAGES,
        help=f"how many messages the day has (default: {_MESSAGES})",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, default=_SEED, help="another one is another day"
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        default=_REPORT,
        help=f"where the report goes (default: ./{_REPORT})",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="an empty directory for the data, which then stays (default: a temporary one)",
    )
    parser.add_argument("--no-spark", action="store_true", help="leave out what needs Spark")
    parser.add_argument(
        "--json", action="store_true", help="print all figures as one JSON object at the end"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    report = os.path.abspath(options.report)
    if not os.path.isdir(os.path.dirname(report)):
        raise NotFoundError(
            "there is no such directory",
            path=os.path.dirname(report),
            hint="--report says where the report goes",
        )
    try:
        from ister.demo.play import Plan, Player  # noqa: PLC0415 - needs extras
        from ister.demo.report import render  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra("ister demo", "broker,client", error) from error
    _check_broker()
    with (
        _ended_by_signals(),
        _directory(options.data, is_kept=options.keep) as directory,
        open_stage(stderr=options.json) as stage,
    ):
        player = Player(
            Plan(
                directory=directory,
                messages=options.messages,
                seed=options.seed,
                uses_spark=not options.no_spark,
            ),
            stage,
        )
        if not options.json:
            _greet(options, directory, player)

        def after() -> None:
            _write(report, render(player.figures))
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
        raise missing_extra("ister demo", "broker,client", error) from error


def _greet(options: argparse.Namespace, directory: str, player: Player) -> None:
    print(f"\n  ister demo · {options.messages:,} messages · seed {options.seed} · {directory}\n")
    missing = player.figures["missing"]
    if missing and not options.no_spark:
        print_error("steps that need Spark are left out", hint="; ".join(missing))


def _keep(player: Player, directory: str, *, to_stderr: bool) -> None:
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
        # Within: whoever reads it may do so at once.
        print("  Ctrl-C ends the broker; the data stays.", file=file, flush=True)
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
    before: dict[int, Any] = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
