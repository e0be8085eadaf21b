"""How the demo is shown, and what it refuses before it starts anything."""

import pytest

from demo.terminal import open_stage, print_summary, summarise
from ister.cli.main import main


@pytest.fixture(name="figures")
def _figures():
    latency = {"p50": 3.26, "p99": 9.5}
    return {
        "ok": True,
        "messages": 120_000,
        "topics": [{}, {}, {}],
        "traffic": {
            "in_per_second": 31_000.0,
            "out_per_second": 12_000.0,
            "pace": 3000.0,
            "latency": {"steady": latency},
            "kill": {"away_seconds": 2.5, "pending": 77},
        },
        "chain": {
            "messages": 120_000,
            "seconds": 2.0,
            "tiers": {"bucket": 1, "files": 2, "cache": 3},
            "words": "1 from the bucket, 2 from local files",
            "lost": 0,
            "duplicates": 42,
        },
        "left_out": [],
        "failures": [],
        "seconds": 61.0,
    }


def test_the_summary_has_the_figures(figures, capsys):
    figures["compact"] = {"topics": [{"bytes": 8192, "new_bytes": 1024, "objects": 9, "merged": 1}]}
    figures["left_out"] = [{"title": "SQL", "why": "Java"}]
    print_summary(figures, report="/somewhere/report.html")
    shown = capsys.readouterr().out
    for words in ("0 of 120,000", "p50 3.3 ms", "60,000 msg/s", "9 objects became 1", "1 : 8.0"):
        assert words in shown
    assert "SQL: Java" in shown
    assert "/somewhere/report.html" in shown
    assert "SQL" not in dict(summarise(figures))


def test_a_failed_proof_stands_out(figures, capsys):
    figures |= {"ok": False, "failures": ["3 lost"]}
    print_summary(figures, report="x")
    assert "FAILED" in capsys.readouterr().out


def test_without_a_terminal_there_are_whole_lines(capsys):
    with open_stage(stderr=False) as stage:
        stage.begin("Start", "a broker")
        stage.bar("in", "published", 10)
        stage.update("in", 5)
        stage.say("something happened")
        stage.end("done with it")
        stage.leave_out("SQL", "no Java")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == " 1  Start: a broker"
    assert lines[1] == "    ! something happened"
    assert lines[2].startswith("    = done with it (")
    assert lines[3] == " 2  SQL: left out (no Java)"


def test_a_directory_with_something_in_it_is_refused(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").touch()
    report = tmp_path / "report.html"
    assert main(["demo", "--data", str(tmp_path / "data"), "--report", str(report)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert not report.exists()


def test_a_report_that_cannot_be_is_refused_first(tmp_path, capsys):
    assert main(["demo", "--report", str(tmp_path / "none" / "report.html")]) == 1
    assert "no such directory" in capsys.readouterr().err
