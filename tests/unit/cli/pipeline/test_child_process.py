"""A pipeline beside a broker: started, restarted, ended with it; what of its output is shown."""

import json
import logging
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from ister.cli.pipeline import child_process
from ister.cli.pipeline.child_process import PipelineBeside, find_obstacle, make_command
from ister.config import load_config
from tests.support.waiting import eventually

CONFIG = {"storage": {"wal": {"dir": "/nowhere/wal"}}}


def python(text):
    return [sys.executable, "-c", text]


@contextmanager
def beside(command, **options):
    """A pipeline that is started, and stopped whatever happens."""
    pipeline = PipelineBeside(command, **options)
    pipeline.start()
    try:
        yield pipeline
    finally:
        pipeline.stop()


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- the process ------------------------------------------------------------------------------


def test_pipeline_that_dies_is_started_again():
    with beside(python("raise SystemExit(3)"), pause_seconds=0.01) as pipeline:
        eventually(lambda: pipeline.starts >= 3)
        pipeline.stop()
        starts = pipeline.starts
        pipeline.stop()
    assert pipeline.starts == starts
    assert not pipeline._thread.is_alive()


def test_pipeline_ends_with_the_broker():
    with beside(python("import time; time.sleep(600)")) as pipeline:
        pid = eventually(lambda: pipeline.pid)
        assert is_alive(pid)
        # Ctrl-C reaches the broker alone: it has a session of its own.
        assert os.getsid(pid) == pid
        pipeline.stop()
        assert pipeline.pid is None
        assert not is_alive(pid)


def test_pipeline_that_does_not_listen_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(child_process, "_END_SECONDS", 0.2)
    path = tmp_path / "ready"
    text = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(path)!r}, 'w').close(); time.sleep(600)"
    )
    with beside(python(text)) as pipeline:
        eventually(path.exists)
        pipeline.stop()
        assert pipeline.pid is None


def test_processes_of_a_pipeline_that_was_killed_do_not_stay(monkeypatch, tmp_path):
    """Such as a JVM, here one that ignores SIGTERM."""
    monkeypatch.setattr(child_process, "_JVM_END_SECONDS", 0.2)
    path = tmp_path / "pid"
    jvm = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open({str(path)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(600)"
    )
    text = f"import subprocess; subprocess.run({python(jvm)!r})"
    with beside(python(text), pause_seconds=600) as pipeline:
        said = eventually(
            lambda: path.exists() and (text := path.read_text()).endswith(".") and text
        )
        os.kill(pipeline.pid, 9)
        eventually(lambda: not is_alive(int(said[:-1])))


def test_program_that_is_not_there_does_not_harm_the_broker(caplog):
    with beside(["/nowhere/python"], pause_seconds=0.01) as pipeline:
        eventually(lambda: len(caplog.records) >= 2)
    assert pipeline.starts == 0
    assert caplog.records[0].code == "No such file or directory"


# -- its output -------------------------------------------------------------------------------


def test_states_are_shown_and_the_log_is_passed_on(caplog):
    caplog.set_level("INFO", "ister")
    lines = [
        "26/01/01 00:00:00 WARN NativeCodeLoader: Unable to load native-hadoop library",
        {"time": "1.0", "level": "INFO", "target": "ister.x", "event": "standing by", "error": "e"},
        {"time": "1.0", "level": "INFO", "target": "ister.x", "event": "pipeline started"},
        {"time": "1.0", "level": "DEBUG", "target": "ister.x", "event": "too fine"},
        {"time": "1.0", "level": "WARNING", "target": "ister.x", "event": "100 % full", "job": "j"},
        ["not", "a", "record"],
        {"ok": False, "errors": [{"message": "Spark does not start"}]},
    ]
    said = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    states = []
    with beside(
        python(f"print({said!r}); raise SystemExit(1)"), show_state=states.append, pause_seconds=600
    ):
        eventually(lambda: any("ended" in record.message for record in caplog.records))
    assert [state.split()[0] for state in states] == ["starting", "standing", "running"]
    [passed, ended] = caplog.records
    assert (passed.name, passed.levelno, passed.message) == (
        "ister.x",
        logging.WARNING,
        "100 % full",
    )
    assert passed.job == "j"
    assert (ended.code, ended.error) == (1, "Spark does not start")


def test_what_spark_said_last_is_why_it_ended(caplog):
    started = json.dumps({"level": "INFO", "target": "ister.x", "event": "pipeline started"})
    for lines, error in ((("a", "no memory"), "no memory"), (("a", started), None)):
        caplog.clear()
        with beside(python(f"print({chr(10).join(lines)!r})"), pause_seconds=600):
            eventually(lambda: caplog.records)
        assert caplog.records[0].error == error


# -- the command line -------------------------------------------------------------------------


def test_command_names_the_place_and_the_broker():
    tls = {"broker": {"tls": {"cert_file": "/c.pem", "key_file": "/k.pem"}}}
    for flight, more, expected in [
        ("127.0.0.1:6651", {}, "grpc://127.0.0.1:6651"),
        ("0.0.0.0:6651", {}, "grpc://127.0.0.1:6651"),
        ("[::]:6651", tls, "grpc+tls://127.0.0.1:6651"),
        ("[::1]:6651", {}, "grpc://[::1]:6651"),
    ]:
        command = make_command(["--data", "/d"], flight, load_config({**CONFIG, **more}, {}))
        expected_start = [sys.executable, "-m", "ister.cli.main", "pipeline", "run", "--data", "/d"]
        assert command[:7] == expected_start, flight
        assert command[command.index("--broker") + 1] == expected, flight
        assert command[command.index("--ends-with-parent") + 1] == str(os.getpid()), flight


def test_session_is_small_unless_the_config_says_otherwise():
    command = make_command(["--data", "/d"], "127.0.0.1:1", load_config(CONFIG, {}))
    assert command[command.index("--master") + 1] == "local[2]"
    assert "--conf=spark.driver.memory=512m" in command
    given = {"pipeline": {"conf": {"spark.driver.memory": "4g"}}}
    command = make_command(["--data", "/d"], "127.0.0.1:1", load_config({**CONFIG, **given}, {}))
    assert not any("spark.driver.memory" in argument for argument in command)
    assert any("UseSerialGC" in argument for argument in command)


def test_pipeline_whose_parent_is_gone_ends(tmp_path):
    """Also one whose parent was gone before it could look, and that is still starting Spark."""
    program = (
        "import threading, time\n"
        "from ister.cli.pipeline import run\n"
        "run._PARENT_SECONDS = run._ORPHAN_SECONDS = 0.05\n"
        "with run._orphan_watch(1, stop := threading.Event()):\n"
        "    stop.wait()\n"
        "    print('told', flush=True)\n"
        "    time.sleep(600)\n"
    )
    done = subprocess.run(python(program), capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, b"told\n")


# -- what is missing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "reason"),
    [
        ({"mode": "memory"}, "no bucket"),
        ({"mode": "local_only", "wal": {"dir": "/nowhere"}}, "no bucket"),
        ({"wal": {"dir": "/nowhere"}, "metadata": {"backend": "memory"}}, "in memory"),
    ],
)
def test_storage_that_spark_cannot_use(storage, reason):
    assert reason in find_obstacle(load_config({"storage": storage}, {})).message


def test_pyspark_or_java_that_is_missing_or_old(monkeypatch, tmp_path):
    config = load_config(CONFIG, {})
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "Java not found" in find_obstacle(config).message
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch(mode=0o755)
    for version, expected in (("1.8.0_202", 8), ("11.0.2", 11), ("17.0.15", None), ("21", None)):
        (tmp_path / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
        found = find_obstacle(config)
        assert (found and found.message.startswith(f"Java {expected} is too old")) == (
            expected and True
        ), version
    (tmp_path / "release").unlink()
    assert find_obstacle(config) is None
    monkeypatch.setattr(child_process.importlib.util, "find_spec", lambda name: None)
    assert find_obstacle(config).message == "pyspark is not installed"
    assert "ister[spark]" in find_obstacle(config).hint
