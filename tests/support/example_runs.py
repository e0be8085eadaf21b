"""Runs the scripts of `examples/` as their readers do: as processes, with nothing prepared.

A run gets a current directory and a temporary directory of its own, so that what it leaves is seen
and goes with the test, and none of what a Spark session of this process has put into the
environment.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Several times what a run takes on a machine that is busy with something else.
SECONDS_MAX = 600.0


def run_example(script: str, directory: Path | None, *, home: Path) -> str:
    """What a script prints. It has to end well.

    Args:
        script: Its path in `examples/`.
        directory: Its argument; None if it gets none.
        home: An empty or missing directory, for whatever else it leaves.
    """
    arguments = [] if directory is None else [str(directory)]
    with started_example(script, *arguments, home=home) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait() == 0, complaints(home)
    return printed


@contextmanager
def started_example(script: str, *arguments: str, home: Path) -> Iterator[subprocess.Popen[str]]:
    """A script that runs, in a process group of its own, which is killed if it takes too long."""
    temporary = home / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYSPARK_", "SPARK_", "PYTHON", "ISTER_"))
    }
    environment |= {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TMPDIR": str(temporary),
        "JDK_JAVA_OPTIONS": f"-Djava.io.tmpdir={temporary} -XX:-UsePerfData",
    }
    with (home / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / script), *arguments],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    watch = threading.Timer(SECONDS_MAX, os.killpg, (process.pid, signal.SIGKILL))
    watch.start()
    try:
        with process:
            try:
                yield process
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    finally:
        watch.cancel()
        watch.join()


def complaints(home: Path) -> str:
    """The end of what the script said on stderr."""
    return (home / "errors").read_text()[-4000:]


def rows_of_table(printed: str, title: str) -> list[list[str]]:
    """The cells of the table, drawn with lines, that follows a title."""
    lines = printed[printed.index(title) :].splitlines()[1:]
    rows: list[list[str]] = []
    for line in lines:
        cells = re.split(r"[|│┆]", line.strip())
        if len(cells) > 2:
            rows.append([cell.strip() for cell in cells[1:-1]])
        elif rows and not line.strip(" +-─═╞╪╡├┼┤└┴┘┌┬┐"):
            continue
        elif rows:
            break
    return rows
