"""`ister completion SHELL`: prints a completion script for a shell.

Owns: the command, and how arguments are completed: as files or directories, by their metavars, or
as names of topics, subscriptions, namespaces, subjects and contexts. Does not own: the scripts,
which are `shtab`'s; where names come from (`known_names`).

For names, a script runs `ister completion SHELL --names KIND` with the line so far. What that
prints is offered as it is: no shell evaluates it.
"""

from __future__ import annotations

import argparse
import os
from typing import Final

from ister.cli.known_names import KINDS, known_names
from ister.cli.output import Subparsers, add_command
from ister.cli.parser import Parser, walk_commands

_SHELLS: Final = ("bash", "zsh", "fish", "tcsh")
_FILES: Final = frozenset({"FILE", "PATH", "URL-or-PATH"})
_DIRECTORIES: Final = frozenset({"DIR"})
_TOPICS: Final = frozenset({"TOPIC", "SOURCE", "TARGET"})

_BASH: Final = """
# $1: the word so far
_ister_{kind}() {{
  ister completion bash --names {kind} --prefix="$1" \\
    --line="${{COMP_LINE:0:$COMP_POINT}}" 2>/dev/null
}}
"""
_ZSH: Final = """
_ister_names() {
  local -a names
  names=("${(@f)$(ister completion zsh --names $1 --line="$LBUFFER" 2>/dev/null)}")
  compadd -- "${(@)names:#}"
}
"""

_NOTES: Final = """\
where it goes:
  bash  ~/.local/share/bash-completion/completions/ister, or: eval "$(ister completion bash)"
  zsh   a file _ister in a directory of $fpath, such as ~/.zfunc
  fish  ~/.config/fish/completions/ister.fish
  tcsh  a file that ~/.tcshrc sources
"""


def register(commands: Subparsers) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "completion",
        help="print a completion script for a shell",
        description="Prints a script for a shell that completes commands, options, choices, "
        "files and directories, and the names of topics, subscriptions, namespaces, schema "
        "subjects and contexts. Names come from the broker of the command line, or from its "
        "--data or --config; there are none if no broker answers within a second.",
        examples=(
            "ister completion bash > ~/.local/share/bash-completion/completions/ister",
            "ister completion zsh > ~/.zfunc/_ister",
        ),
        notes=_NOTES,
    )
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))
    # For the scripts alone.
    parser.add_argument("--names", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--prefix", metavar="TEXT", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--line", metavar="TEXT", default=os.environ.get("COMMAND_LINE", ""), help=argparse.SUPPRESS
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.names is not None:
        for name in known_names(options.names, options.line, options.prefix):
            print(name)
        return 0
    # What is completed is the whole command, which is made of modules such as this one.
    from ister.cli.main import make_parser  # noqa: PLC0415

    print(make_script(make_parser(), options.shell))
    return 0


def make_script(parser: Parser, shell: str) -> str:
    """The script for a shell.

    The parser of the whole command is changed, and good for nothing else afterwards.
    """
    import shtab  # noqa: PLC0415 - only this needs it

    for command in walk_commands(parser):
        for action in command.arguments:
            kind = _kind_of(command.prog, action)
            if kind is not None:
                action.complete = _names(kind)  # type: ignore[attr-defined]
            elif action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in _DIRECTORIES:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell=shell)
    return script


def _kind_of(prog: str, action: argparse.Action) -> str | None:
    """Which names an argument of a command takes."""
    if action.metavar in _TOPICS:
        return "topics"
    group = prog.partition(" ")[2].partition(" ")[0]
    if action.dest == "subscription" and group == "dlq":
        return None  # one of the topic in which messages failed, which the line does not name
    if action.dest in ("subscription", "namespace", "subject", "context"):
        return f"{action.dest}s"
    if action.dest == "name" and group in ("context", "namespaces"):
        return "contexts" if group == "context" else group
    return None


def _names(kind: str) -> dict[str, str | dict[str, str]]:
    """How names are completed, in `shtab`'s form."""
    line = "(commandline -cp)"
    return {
        "bash": f"_ister_{kind}",
        # The space keeps `_arguments` from adding arguments of its own.
        "zsh": f" _ister_names {kind}",
        "fish": f"(ister completion fish --names {kind} --line {line} 2>/dev/null)",
        # Tcsh has the line in the environment.
        "tcsh": f"`ister completion tcsh --names {kind}`",
        "preamble": {"bash": _BASH.format(kind=kind), "zsh": _ZSH},
    }
