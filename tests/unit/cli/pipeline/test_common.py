"""What every job's command prints when it fails, without Spark."""

import argparse
import json
from contextlib import contextmanager

import pytest

from ister.cli.pipeline.common import add_job_arguments, run_job
from ister.errors import InvariantError, UnavailableError
from ister.spark.jobs import session


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a job that ends with an error."""

    @contextmanager
    def no_session(master, conf, **more):
        yield None

    monkeypatch.setattr(session, "open_session", no_session)

    def call(error, *arguments):
        def work(spark, place, bar):
            raise error

        parser = argparse.ArgumentParser()
        add_job_arguments(parser)
        options = parser.parse_args(["--data", str(tmp_path), *arguments])
        return run_job(options, "compact", work, columns=[])

    return call


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Spark could not run a wave"), InvariantError("Spark could not run a wave")],
    ids=["of Spark", "of our own"],
)
def test_failure_that_nobody_expects_is_one_object_and_exit_code_1(run, capsys, error):
    assert run(error, "--json") == 1
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    found = json.loads(line)
    assert (found["ok"], found["job"], found["topics"]) == (False, "compact", [])
    assert found["errors"][0]["code"] == "INTERNAL"
    assert "could not run a wave" in found["errors"][0]["message"]
    assert "Traceback" in printed.err


def test_failure_that_is_expected_is_shown_by_the_command(run, capsys):
    with pytest.raises(UnavailableError):
        run(UnavailableError("silent"), "--json")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["errors"][0]["code"] == "UNAVAILABLE"
    assert printed.err == ""


def test_reader_of_the_output_that_has_gone_is_told_nothing(run, capsys):
    with pytest.raises(BrokenPipeError):
        run(BrokenPipeError(), "--json")
    assert capsys.readouterr().out == ""
