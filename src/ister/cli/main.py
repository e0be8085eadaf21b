"""The `ister` command: arguments in, exit code out.

Owns: the parser of all sub-commands, how errors are shown, exit codes. Does not own: what a command
does; each module of `ister.cli` registers its own parser and sets `run`.

Exit codes: 0 done, 1 failed (or the command found damage), 2 wrong usage. Errors go to standard
error with a hint; a traceback is shown only for bugs of Ister.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from ister import __version__, logs
from ister.cli import (
    auth,
    bench,
    brokers,
    completion,
    config,
    consume,
    danube,
    demo,
    inspect,
    namespaces,
    pipeline,
    produce,
    recover,
    repair,
    serve,
    subscriptions,
    top,
    topics,
    up,
)
from ister.cli.errors_out import print_errors
from ister.cli.output import print_error
from ister.cli.parser import Parser
from ister.errors import InvariantError, IsterError

_EXIT_FAILED: Final = 1

_GROUPS: Final = {
    "run": ("up", "serve", "demo"),
    "messages": ("produce", "consume"),
    "resources": ("topics", "subscriptions", "namespaces", "brokers", "top"),
    "Spark": ("pipeline",),
    "inspect and repair": ("inspect", "repair", "recover", "danube"),
    "settings and access": ("config", "auth", "completion"),
    "measure": ("bench",),
}
"""Commands as the help shows them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    `arguments` are without the program's name; those of the process by default.

    Raises:
        SystemExit: With 2 after wrong usage, with 0 after `--help` and `--version`.
    """
    options = make_parser().parse_args(arguments)
    # Commands print their findings; the log is only for errors that need attention.
    logs.configure(level="ERROR", as_text=True)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        if sys.stdout is not None:  # `>&-` leaves none
            sys.stdout.flush()
    except InvariantError:
        raise
    except IsterError as error:
        print_errors([error])
        return _EXIT_FAILED
    except KeyboardInterrupt:
        print_error("interrupted")
        return _EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would try to flush once more at
        # exit and complain, so the rest goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_FAILED
    return code


def make_parser() -> Parser:
    """The parser of the whole command."""
    parser = Parser(
        prog="ister",
        usage="ister COMMAND …",
        description="A durable topic log: messages go to local files, then to a bucket, and "
        "are read from both as one log. Run `ister COMMAND --help` for help on a command.",
        epilog="examples:\n"
        "  ister up\n"
        "  echo hello | ister produce /default/greetings\n"
        "  ister consume /default/greetings --subscription me --from earliest --limit 1\n"
        "\nExit codes: 0 done, 1 failed, 2 wrong usage.",
        groups=_GROUPS,
    )
    parser.add_argument("--version", action="version", version=f"ister {__version__}")
    commands = parser.add_subparsers(prog="ister", metavar="COMMAND", required=True)
    for module in (
        up,
        serve,
        demo,
        produce,
        consume,
        topics,
        subscriptions,
        namespaces,
        brokers,
        top,
        pipeline,
        inspect,
        repair,
        recover,
        danube,
        config,
        auth,
        completion,
        bench,
    ):
        module.register(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
