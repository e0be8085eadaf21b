"""What is loaded when: `import ister`, `ister --help`, a command that talks to a broker."""

import subprocess
import sys

from ister.cli.main import make_parser

_HEAVY = {
    *("asyncio", "importlib.metadata", "msgspec", "socket", "ssl", "yaml"),
    *("aiohttp", "grpc", "numba", "numpy", "opendal", "pyarrow", "rich", "pyspark"),
    *("ister.bucket", "ister.config", "ister.format", "ister.topic.topic", "ister.wal"),
}
"""Modules that take tens of milliseconds each."""
_MODULES_MAX = 160

_PROGRAM = """
import sys

def loaded(step):
    heavy = sorted(set(sys.modules) & {heavy!r})
    print(step, len(sys.modules), *heavy)

import ister
loaded("import")
from ister.cli.main import main
for arguments in (["--help"], ["--version"], ["dlq", "list", "--help"]):
    sys.stdout, out = open("/dev/null", "w"), sys.stdout
    try:
        main(arguments)
    except SystemExit:
        pass
    sys.stdout = out
    loaded(arguments[0])
ister.open
loaded("open")
"""


def test_heavy_modules_are_loaded_when_they_are_needed():
    """Goal: `import ister` within 150 ms of CPU, `ister --help` within 200.

    Times are measured by `python -m benchmarks startup`; here what decides about them is counted.
    """
    program = _PROGRAM.replace("{heavy!r}", repr(_HEAVY))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    steps = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert set(steps) == {"import", "--help", "--version", "dlq", "open"}
    for step in ("import", "--help", "--version", "dlq"):
        count, *heavy = steps[step]
        assert heavy == [], step
        assert int(count) <= _MODULES_MAX, step
    assert "ister.topic.topic" in steps["open"]


def test_commands_that_are_not_loaded_have_the_same_line_in_the_help():
    whole, names = make_parser(), make_parser(only="")
    assert list(names.commands) == list(whole.commands)
    for name in whole.commands:
        assert names.summary(name) == whole.summary(name), name
    assert names.format_help() == whole.format_help()
