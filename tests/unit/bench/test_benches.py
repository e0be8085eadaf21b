"""Every benchmark runs, obeys its JSON contract and leaves nothing behind. No times are judged."""

import json
import shutil

import pytest

from ister.cli.main import main
from tests.support.scale import nightly

FIELDS = {"name", "value", "unit", "limit", "ratio", "target", "met"}
BENCHES = (
    "append",
    "replay",
    "tail",
    "recover",
    "topics",
    "readers",
    "catalog",
    "cycle",
    "startup",
)


@pytest.mark.parametrize("name", ["append", *map(nightly, BENCHES[1:])])
def test_quick_run_prints_its_results_as_json(name, tmp_path, capsys):
    assert main(["bench", name, "--quick", "--json", "--dir", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bench"] == name
    assert printed["results"]
    for result in printed["results"]:
        assert result.keys() >= FIELDS
        assert isinstance(result["name"], str)
        assert isinstance(result["unit"], str)
        assert result["value"] > 0
        assert result["limit"] > 0
        assert result["ratio"] == pytest.approx(result["value"] / result["limit"], rel=0.01)
        assert (result["target"] is None) == (result["met"] is None)
    names = [result["name"] for result in printed["results"]]
    assert len(set(names)) == len(names)
    assert any(result["target"] is not None for result in printed["results"])
    assert list(tmp_path.iterdir()) == []


def test_people_get_a_table(tmp_path, capsys):
    assert main(["bench", "tail", "--quick", "--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("NAME ")
    assert "limit: waking 1 thread, p50" in shown


def test_directory_that_does_not_exist_is_an_error(tmp_path, capsys):
    assert main(["bench", "append", "--quick", "--dir", str(tmp_path / "none")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "none" in shown.err


def test_too_little_room_is_said_before_anything_is_written(tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    assert main(["bench", "recover", "--dir", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "6.0 GiB" in shown.err
    assert "--dir" in shown.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_quick_run_of_up_measures_the_pipeline(tmp_path, capsys):
    assert main(["bench", "up", "--quick", "--json", "--dir", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    figures = {result["name"].partition(" of ")[0]: result["value"] for result in results}
    assert figures["until the pipeline runs"] > figures["until the broker serves"] > 0
    # A driver, a JVM and a daemon take more than this, however small they are.
    assert figures["memory"] > 200
    assert figures["CPU time"] > 0
    assert list(tmp_path.iterdir()) == []
