"""Every benchmark runs, obeys its JSON contract and leaves nothing behind. No times are judged."""

import json
import shutil
import subprocess
import sys

import pytest

from benchmarks import broker_engines, chain, history, jobs, spark, upload
from benchmarks.__main__ import main
from ister.base.limits import MIB
from tests.support.cases import each
from tests.support.scale import nightly

FIELDS = {"name", "value", "unit", "limit", "ratio", "target", "met"}
# What makes a quick run shorter still: a module, and what is another one in it.
SMALLER = {
    **dict.fromkeys(("append", "replay", "tail", "recover", "topics", "readers", "catalog"), ()),
    **dict.fromkeys(("cycle", "startup", "express", "up"), ()),
    "chain": (chain, {"_HISTORY_BYTES": 200 * MIB, "_LIVE_MESSAGES": 2000, "_ROUNDS": 1}),
    "history": (history, {"_HISTORY_BYTES": 200 * MIB, "_ROUNDS": 1}),
    "upload": (upload, {"_BACKLOG_BYTES": 40 * MIB, "_TOPICS": 60, "_ROUNDS": 1}),
    # Compiling from nothing takes longer than all the rest.
    "spark": (spark, {"_ROUNDS": 1, "_start_child": lambda side, *, cache: 0.25}),
    "jobs": (jobs, {"_ROUNDS": 1, "_TABLE_BYTES": 200 * MIB, "_SCRUBBED_BYTES": 100 * MIB}),
    "broker": (broker_engines, {"ENGINES": ("grpcio",)}),
}
# Processor time has steps of 10 ms, and memory that is there already need not grow.
MAY_BE_ZERO = ("growth", "broker CPU", "CPU")


@pytest.mark.parametrize("name", ["append", *map(nightly, list(SMALLER)[1:])])
def test_quick_run_prints_its_results_as_json(name, tmp_path, capsys, monkeypatch):
    if SMALLER[name]:
        module, values = SMALLER[name]
        for attribute, value in values.items():
            monkeypatch.setattr(module, attribute, value)
    assert main([name, "--quick", "--json", "--dir", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bench"] == name
    assert printed["results"]
    for result in printed["results"]:
        assert result.keys() >= FIELDS
        assert isinstance(result["unit"], str)
        assert (result["target"] is None) == (result["met"] is None)
        if not any(words in result["name"] for words in MAY_BE_ZERO):
            assert result["value"] > 0
        if result["ratio"] is not None:
            assert result["ratio"] == pytest.approx(result["value"] / result["limit"], rel=0.01)
    names = [result["name"] for result in printed["results"]]
    assert len(set(names)) == len(names)
    assert any(result["target"] is not None for result in printed["results"])
    assert list(tmp_path.iterdir()) == []


def test_directory_that_does_not_exist_is_an_error(tmp_path, capsys):
    assert main(["append", "--quick", "--dir", str(tmp_path / "none")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "none" in shown.err


def test_too_little_room_is_said_before_anything_is_written(tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    assert main(["recover", "--dir", str(tmp_path)]) == 1
    assert "--dir" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@each("name", ["spark", "jobs"])
def test_without_java_nothing_is_written(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    assert main([name, "--quick", "--dir", str(tmp_path)]) == 1
    assert "Java" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_server_ends_when_the_benchmark_is_killed():
    """Goal: no S3 server and no Spark outlives a benchmark, whose end nobody may see."""
    script = (
        "import subprocess, sys\n"
        "from benchmarks.history import _ending_with_parent\n"
        "subprocess.Popen(['sleep', '600'], preexec_fn=_ending_with_parent())\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        # The pipe is the child's as well: it ends with the last one that has it.
        assert parent.stdout.read() == b""
