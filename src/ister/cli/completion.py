"""`ister completion SHELL`: prints a completion script for a shell.

Owns: the command, and which arguments are completed as files or directories: those whose metavar
says so. Does not own: the scripts, which are `shtab`'s.
"""

from __future__ import annotations

import argparse
from typing import Final

from ister.cli.output import Subparsers, add_command
from ister.cli.parser import Parser, walk_commands

_SHELLS: Final = ("bash", "zsh", "fish", "tcsh")
_FILES: Final = frozenset({"FILE", "PATH", "URL-or-PATH"})
_DIRECTORIES: Final = frozenset({"DIR"})

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
        "files and directories.",
        examples=(
            "ister completion bash > ~/.local/share/bash-completion/completions/ister",
            "ister completion zsh > ~/.zfunc/_ister",
        ),
        notes=_NOTES,
    )
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
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
            if action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in _DIRECTORIES:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell=shell)
    return script
