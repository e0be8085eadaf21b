"""`ister bench upload` runs, obeys its contract and leaves nothing behind. No times are judged."""

import json

import pytest

from benchmarks import upload
from benchmarks.measurement import PeakMemory
from ister.cli.main import main
from ister.errors import UnavailableError
from ister.limits import MIB


@pytest.mark.nightly
def test_quick_run_prints_its_results_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(upload, "_BACKLOG_BYTES", 40 * MIB)
    monkeypatch.setattr(upload, "_TOPICS", 60)
    monkeypatch.setattr(upload, "_ROUNDS", 1)
    assert main(["bench", "upload", "--quick", "--json", "--dir", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    results = {result["name"]: result for result in printed["results"]}
    assert len(results) == 4
    for result in results.values():
        assert result["value"] > 0
        assert result["limit"] > 0
        assert result["ratio"] == pytest.approx(result["value"] / result["limit"], rel=0.01)
        assert (result["target"] is None) == (result["met"] is None)
    assert results["upload of 2 MiB to a directory, 1 KiB messages"]["target"] == 0.7
    assert results["growth of resident memory, upload of 2 MiB"]["target"] == 96
    assert results["growth of resident memory, 3 topics of 1 MiB at once"]["target"] == 800
    assert list(tmp_path.iterdir()) == []


def test_copy_cuts_objects_as_ister_does(tmp_path, monkeypatch):
    settings = upload.UploaderConfig(stream_chunk_size=MIB, max_object_bytes=3 * MIB)
    monkeypatch.setattr(upload, "UploaderConfig", lambda: settings)
    (tmp_path / "files").mkdir()
    (tmp_path / "target").mkdir()
    whole = bytes(range(256)) * 30_000
    for number, part in enumerate((whole[: 5 * MIB], whole[5 * MIB :])):
        (tmp_path / "files" / f"wal.{number}.log").write_bytes(part)
    figures = upload._copy(str(tmp_path / "files"), str(tmp_path / "target"))
    copies = sorted((tmp_path / "target").iterdir())
    assert figures.size_bytes == len(whole)
    assert b"".join(path.read_bytes() for path in copies) == whole
    assert [path.stat().st_size for path in copies[:-1]] == [3 * MIB, 3 * MIB]


def test_process_that_fails_is_an_error(tmp_path, capfd):
    with pytest.raises(UnavailableError, match="upload"):
        upload._start_child("upload", str(tmp_path / "none"), str(tmp_path))
    assert "does not exist" in capfd.readouterr().err


def test_peak_counts_what_has_gone_again():
    memory = PeakMemory()
    held = bytes(64 * MIB)
    held = held[:-1]  # a copy, while the first one is still there
    del held
    assert memory.growth_mib > 60
    assert PeakMemory().growth_mib < 60
