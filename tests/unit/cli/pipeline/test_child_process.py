"""A pipeline beside a broker: started, started again, and ended with it."""

import asyncio
import os
import sys

import pytest

from ister.cli.pipeline import child_process
from ister.cli.pipeline.child_process import PipelineBeside, check_requirements, make_command
from ister.config import load_config
from ister.errors import ConfigError

CONFIG = {"storage": {"wal": {"dir": "/nowhere/wal"}}}


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 60))


def python(text):
    return [sys.executable, "-c", text]


def test_pipeline_that_dies_is_started_again():
    async def scenario():
        pipeline = PipelineBeside(python("raise SystemExit(3)"), pause_seconds=0.01)
        pipeline.start()
        await until(lambda: pipeline.starts >= 3)
        await pipeline.stop()
        starts = pipeline.starts
        await asyncio.sleep(0.1)
        assert pipeline.starts == starts
        await pipeline.stop()

    run(scenario)


def test_pipeline_ends_with_the_broker():
    async def scenario():
        pipeline = PipelineBeside(python("import time; time.sleep(600)"))
        pipeline.start()
        await until(lambda: pipeline.pid is not None)
        pid = pipeline.pid
        os.kill(pid, 0)
        await pipeline.stop()
        assert pipeline.pid is None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(scenario)


def test_pipeline_that_does_not_listen_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(child_process, "_END_SECONDS", 0.2)
    text = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "open({!r}, 'w').close(); time.sleep(600)"
    )

    async def scenario(path):
        pipeline = PipelineBeside(python(text.format(path)))
        pipeline.start()
        await until(lambda: os.path.exists(path))
        await pipeline.stop()
        assert pipeline.pid is None

    run(lambda: scenario(str(tmp_path / "ready")))


def test_program_that_is_not_there_does_not_harm_the_broker():
    async def scenario():
        pipeline = PipelineBeside(["/nowhere/python"], pause_seconds=0.01)
        pipeline.start()
        await asyncio.sleep(0.2)
        await pipeline.stop()
        assert pipeline.starts == 0

    run(scenario)


def test_command_names_the_place_and_the_broker():
    for flight, is_encrypted, expected in [
        ("127.0.0.1:6651", False, "grpc://127.0.0.1:6651"),
        ("0.0.0.0:6651", False, "grpc://127.0.0.1:6651"),
        ("[::]:6651", True, "grpc+tls://127.0.0.1:6651"),
        ("[::1]:6651", False, "grpc://[::1]:6651"),
    ]:
        command = make_command(["--data", "/d"], flight, is_encrypted=is_encrypted)
        assert command[:7] == [
            sys.executable,
            "-m",
            "ister.cli.main",
            "pipeline",
            "run",
            "--data",
            "/d",
        ], flight
        assert command[command.index("--broker") + 1] == expected, flight
        assert command[command.index("--master") + 1] == "local[*]", flight
        assert "--ends-with-parent" in command, flight


def test_what_is_missing_is_said_before_the_broker_starts(monkeypatch):
    config = load_config(CONFIG, {})
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ConfigError, match="Java 17"):
        check_requirements(config)
    monkeypatch.setattr(child_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pyspark") as failure:
        check_requirements(config)
    assert "ister[spark]" in failure.value.hint
    with pytest.raises(ConfigError, match="bucket"):
        check_requirements(load_config({"storage": {"mode": "memory"}}, {}))
