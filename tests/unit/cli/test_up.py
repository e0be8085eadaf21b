"""`ister up`: the broker alone, where there can be no pipeline; it says why in one line."""

import json
import os
import signal
import subprocess
import sys

ANY_PORTS = ("--port=0", "--flight-port=0", "--http-port=0")
WITHOUT = {
    "Java": ({"JAVA_HOME": "/nowhere"}, ""),
    "pyspark": ({}, "import sys; sys.modules['pyspark'] = None; "),
}


def run_until_ready(tmp_path, missing, *arguments):
    """Runs the command until it has said everything, then presses Ctrl-C: output, log, code."""
    environment, before = WITHOUT[missing]
    program = f"{before}from ister.cli.main import main; raise SystemExit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "up", *ANY_PORTS, *arguments],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as child:
        try:
            said = child.stdout.readline()
            while "--json" not in arguments and not said.splitlines()[-1].startswith("pipeline:"):
                said += child.stdout.readline()
            child.send_signal(signal.SIGINT)
            rest, log = child.communicate(timeout=60)
            return said + rest, log, child.returncode
        finally:
            child.kill()


def test_what_is_missing_is_said_in_one_line_and_the_broker_runs(tmp_path):
    said, log, code = run_until_ready(tmp_path, "pyspark")
    assert code == 0, log
    assert said.startswith("Ister is ready.\n")
    [line] = [line for line in (said + log).splitlines() if "pipeline" in line]
    assert line.startswith("pipeline: off, the broker uploads: ")
    assert line.endswith("pyspark is not installed (pip install 'ister[spark]')")
    assert (tmp_path / "ister-data" / "wal").is_dir()


def test_json_says_that_there_is_no_pipeline(tmp_path):
    said, log, code = run_until_ready(tmp_path, "Java", "--json")
    assert code == 0, log
    assert json.loads(said)["pipeline"] == "off"
    states = [event["state"] for line in log.splitlines() if "state" in (event := json.loads(line))]
    assert len(states) == 1
    assert "Java not found" in states[0]


def test_pipeline_that_is_required_is_refused_with_what_is_missing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ister.cli.main", "serve", "--pipeline", f"--data-dir={tmp_path}/d"],
        env={**os.environ, "JAVA_HOME": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Java not found" in done.stderr
    assert not (tmp_path / "d").exists()
