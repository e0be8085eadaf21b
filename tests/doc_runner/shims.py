"""Programs that documents name and tests do not run: what they are asked for has to make sense.

`install(directory)` puts one script for each into a directory that comes first on the PATH. What is
only checked is noted in `$DOCS_CHECKED`, a line each; a command that makes no sense fails, as it
would for a reader. `ister` and `python` are real: they only go to the interpreter that has the
Spark session already where they would start another one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tomllib
from pathlib import Path

_HERE = Path(__file__).resolve()
_ROOT = _HERE.parents[2]

CHECKED = (
    *("pip", "uv", "make", "docker", "kubectl"),
    *("systemctl", "systemd-analyze", "sudo", "useradd"),
)

_DOCKER = frozenset(
    {"build", "compose", "run", "up", "down", "ps", "logs", "exec", "stop", "pull", "config"}
)
_KUBECTL = frozenset(
    {
        *("apply", "create", "delete", "get", "logs", "describe", "rollout", "exec"),
        *("port-forward", "kustomize"),
    }
)
_SYSTEMCTL = frozenset(
    {"enable", "disable", "start", "stop", "restart", "reload", "status", "daemon-reload"}
)
# These take a value of their own, which is no file and no sub-command.
_VALUED = frozenset(
    {
        "-t",
        "--target",
        "--profile",
        "--tag",
        "-p",
        "-n",
        "--namespace",
        "--name",
        "-e",
        "-v",
        "-u",
        "-l",
        "--python",
    }
)


def install(directory: Path, real: Path) -> None:
    """Writes the scripts.

    Args:
        directory: Where to.
        real: The directory of the real `ister` and `python`.
    """
    directory.mkdir()
    for name in CHECKED:
        _script(directory / name, f'exec "{real}/python" -I "{_HERE}" {name} "$@"')
    job = f'exec "{real}/python" -I "{_HERE}" --ask command "$@"'
    _script(
        directory / "ister",
        f"""case "$1 $2" in
    "pipeline run"|"pipeline status"|"pipeline --help"|"pipeline -h") ;;
    "pipeline "*)
        case "$*" in *--help*|*spark://*) ;; *) {job} ;; esac ;;
esac
exec "{real}/ister" "$@" """,
    )
    for name in ("python", "python3"):
        _script(
            directory / name,
            f"""case "$1 $2" in
    "-m venv") exec "{real}/python" -I "{_HERE}" venv "$3" ;;
    "-m pip") shift 2; exec "{real}/python" -I "{_HERE}" pip "$@" ;;
esac
if [ -f "$1" ] && grep -q pyspark "$1"; then
    exec "{real}/python" -I "{_HERE}" --ask script "$@"
fi
exec "{real}/python" "$@" """,
        )


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _refuse(reason: str) -> None:
    sys.exit(f"documents: {reason}")


def _find(name: str) -> Path | None:
    """A file that a command names: in the page's directory, or in the project's."""
    for base in (Path(), _ROOT):
        if (base / name).exists():
            return base / name
    return None


def _check_files(arguments: list[str], *flags: str) -> None:
    for flag, value in itertools.pairwise(arguments):
        if flag in flags and _find(value) is None:
            _refuse(f"there is no file {value}")


def _words(arguments: list[str]) -> list[str]:
    """The arguments without options and their values."""
    words: list[str] = []
    is_value = False
    for argument in arguments:
        if is_value:
            is_value = False
        elif argument.startswith("-"):
            is_value = argument in _VALUED or argument in ("-f", "--file")
        else:
            words.append(argument)
    return words


def _pip(arguments: list[str]) -> None:
    if arguments[:1] != ["install"]:
        _refuse(f"pip {' '.join(arguments)}")
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = "\n".join(
        [*project["dependencies"], *(one for group in extras.values() for one in group)]
    )
    for argument in _words(arguments[1:]):
        name, _, wanted = argument.rstrip("]").partition("[")
        if name == "ister":
            _refuse("say `pip install .`: nothing else has been published")
        if name not in {".", "./"} and not re.search(rf"^{re.escape(name)}\b", known, re.MULTILINE):
            _refuse(f"{name} is no dependency of the project")
        if name in {".", "./"}:
            for extra in filter(None, wanted.split(",")):
                if extra not in extras:
                    _refuse(f"pyproject.toml has no extra {extra}")


def _uv(arguments: list[str]) -> None:
    match arguments:
        case ["venv", *rest]:
            _venv(_words(rest) or [".venv"])
        case ["pip", *rest]:
            _pip(rest)
        case ["build"]:
            pass
        case _:
            _refuse(f"uv {' '.join(arguments)}")


def _make(arguments: list[str]) -> None:
    makefile = (_ROOT / "Makefile").read_text()
    for target in (word for word in _words(arguments) if "=" not in word):
        if f"\n{target}:" not in makefile:
            _refuse(f"the Makefile has no target {target}")


def _docker(arguments: list[str]) -> None:
    words = _words(arguments)
    if not words or words[0] not in _DOCKER or (words[0] == "compose" and words[1] not in _DOCKER):
        _refuse(f"docker {' '.join(arguments)}")
    _check_files(arguments, "-f", "--file")


def _kubectl(arguments: list[str]) -> None:
    words = _words(arguments)
    if not words or words[0] not in _KUBECTL:
        _refuse(f"kubectl {' '.join(arguments)}")
    _check_files(arguments, "-f", "--filename", "-k")
    if words[0] == "create" and "--from-file" in " ".join(arguments):
        for argument in arguments:
            if argument.startswith("--from-file="):
                _check_files(["-f", argument.rpartition("=")[2]], "-f")


def _systemctl(arguments: list[str]) -> None:
    words = _words(arguments)
    if not words or words[0] not in _SYSTEMCTL:
        _refuse(f"systemctl {' '.join(arguments)}")
    for unit in words[1:]:
        name = unit if "." in unit else f"{unit}.service"
        if not list((_ROOT / "deploy").rglob(name)):
            _refuse(f"deploy has no unit {name}")


def _sudo(arguments: list[str]) -> None:
    """What would be done as root is copying files that exist, and what is checked anyway."""
    if not arguments:
        _refuse("sudo without a command")
    name, rest = arguments[0], arguments[1:]
    if name in _CHECKS:
        _CHECKS[name](rest)
    elif name in {"cp", "install"}:
        words = _words([one for one in rest if not re.fullmatch(r"-[a-zA-Z]*[mog]?|\d{3,4}", one)])
        for source in words[:-1]:
            if not source.startswith("/") and _find(source) is None:
                _refuse(f"there is no file {source}")
    elif name not in {"mkdir", "chown", "chmod", "useradd", "python3", "sh", "journalctl"}:
        _refuse(f"sudo {name}")


def _venv(arguments: list[str]) -> None:
    """Where a reader would get an environment, the tests' own one is on the PATH already."""
    scripts = Path(arguments[0], "bin")
    scripts.mkdir(parents=True, exist_ok=True)
    (scripts / "activate").write_text("# the tests' environment is active\n")


def _pass(arguments: list[str]) -> None:
    """There is nothing to check."""


_CHECKS = {
    "pip": _pip,
    "uv": _uv,
    "make": _make,
    "docker": _docker,
    "kubectl": _kubectl,
    "systemctl": _systemctl,
    "systemd-analyze": _pass,
    "sudo": _sudo,
    "useradd": _pass,
    "venv": _venv,
}


def main() -> None:
    """`NAME ARGUMENTS…`, or `--ask KIND ARGUMENTS…`."""
    if sys.argv[1] == "--ask":
        sys.path.insert(0, str(_HERE.parents[2]))
        from tests.doc_runner.interpreter import ask  # noqa: PLC0415 - the path is known only now

        request = {
            "kind": sys.argv[2],
            "arguments": sys.argv[3:],
            "directory": os.getcwd(),
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name.startswith(("ISTER_", "AWS_", "S3_", "ETCD_"))
            },
        }
        sys.exit(ask(os.environ["DOCS_INTERPRETER"], request, [0, 1, 2], None))
    name, arguments = sys.argv[1], sys.argv[2:]
    _CHECKS[name](arguments)
    with open(os.environ["DOCS_CHECKED"], "a") as notes:
        notes.write(json.dumps([name, *arguments]) + "\n")


if __name__ == "__main__":
    main()
