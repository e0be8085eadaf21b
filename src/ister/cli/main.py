"""The `ister` command: arguments in, exit code out.

Owns: the parser of all sub-commands, how errors are shown, exit codes. Does not own: what a command
does; each module of `ister.cli` registers its own parser and sets `run`.

Exit codes: 0 done, 1 failed (or the command found damage), 2 wrong usage. Errors go to standard
error with a hint; a traceback is shown only for bugs of Ister.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

from ister import __version__
from ister.base import logs
from ister.cli.errors_out import print_errors
from ister.cli.output import Subparsers, add_command, print_error
from ister.cli.parser import Parser
from ister.errors import InvariantError, IsterError

_EXIT_FAILED: Final = 1
_UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of standard output, which may be a file; those of other files have a name."""

_GROUPS: Final = {
    "run": ("up", "serve"),
    "messages": ("produce", "consume", "dlq"),
    "resources": ("topics", "subscriptions", "namespaces", "schema", "brokers", "top"),
    "Spark": ("pipeline",),
    "inspect and repair": ("inspect", "backup", "repair", "recover", "metadata", "danube"),
    "settings and access": ("config", "context", "auth", "completion"),
    "about": ("status", "version", "help"),
}
"""Commands as the help shows them."""

_COMMANDS: Final = {
    "up": "run a broker and the pipeline on Spark",
    "serve": "run a broker, with a dashboard",
    "produce": "publish messages from standard input, a file or the command line",
    "consume": "print the messages of a topic, with or without a subscription",
    "dlq": "list, show, requeue and drop dead letters",
    "topics": "list, describe, create, delete and move topics",
    "subscriptions": "list, describe, seek and remove subscriptions",
    "namespaces": "list, create and delete namespaces",
    "schema": "list, show, register and check schemas",
    "brokers": "list, drain and balance the brokers of a cluster",
    "top": "show rates, lag, blocked subscriptions and upload lag of all topics, live",
    "pipeline": "upload, merge, check, clean up, export and replay topics with Spark",
    "inspect": "inspect stored files and objects",
    "backup": "copy a data directory while a broker uses it",
    "repair": "restore damaged files from the bucket, and objects from files",
    "recover": "rebuild lost metadata from the bucket",
    "metadata": "compare the metadata store with the bucket and the local files",
    "danube": "exchange metadata with Danube",
    "config": "check and show settings, print an example",
    "context": "name brokers with their TLS settings and tokens, and switch between them",
    "auth": "create API keys and tokens; list, grant and revoke roles",
    "completion": "print a completion script for a shell",
    "status": "show the brokers, and what is blocked or far behind",
    "version": "print the version",
    "help": "show the help of a command",
}
"""The line about each command in the help; the same as its module registers. Modules are loaded
when their command is used: all of them take half a second."""

_MODULES: Final = {
    **dict.fromkeys(("version", "help", "status"), "about"),
    "context": "contexts",
    "up": "serve",
}
"""Modules with another name than their command."""

_MOVED: Final = {
    "bench": "in a checkout of the project: `python -m benchmarks`, or `make bench`",
    "demo": "in a checkout of the project: `make demo`",
}
"""Commands of the past, and what to use."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    `arguments` are without the program's name; those of the process by default.

    Raises:
        SystemExit: With 2 after wrong usage, with 0 after `--help` and `--version`.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every locale has our dashes; bytes are written without it.
        sys.stdout.reconfigure(errors="backslashreplace")
    options = make_parser(only=given[0] if given else "").parse_args(given)
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
        _discard_output()  # the reader of our output has gone (`| head`)
        return _EXIT_FAILED
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _discard_output()
        print_error(f"cannot write the output: {error.strerror}")
        return _EXIT_FAILED
    return code


def _discard_output() -> None:
    """Makes the rest of the output go nowhere.

    Python would try to flush it once more at exit, and complain.
    """
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser(*, only: str | None = None) -> Parser:
    """The parser of the whole command.

    With `only`, the other commands have their names and no arguments, and are not loaded.
    """
    parser = Parser(
        prog="ister",
        usage="ister COMMAND …",
        description="A durable topic log: messages go to local files, then to a bucket, and "
        "are read from both as one log. Run `ister COMMAND --help` for help on a command.",
        epilog="examples:\n"
        "  ister up\n"
        "  ister produce greetings hello\n"
        "  ister consume greetings --subscription me -n 1\n"
        "\nExit codes: 0 done, 1 failed, 2 wrong usage.",
        groups=_GROUPS,
    )
    parser.moved = _MOVED
    parser.add_argument("--version", action="version", version=f"ister {__version__}")
    commands = cast(
        "Subparsers", parser.add_subparsers(prog="ister", metavar="COMMAND", required=True)
    )
    for name, line in _COMMANDS.items():
        if only in (None, name):
            home = _MODULES.get(name, name)
            module = importlib.import_module(f"ister.cli.{home}")
            register = getattr(module, "COMMANDS", {}).get(name) or module.register
            register(commands)
        else:
            add_command(commands, name, help=line)
    return parser


if __name__ == "__main__":
    sys.exit(main())
