"""`ister bench chain` runs, obeys its contract and notices a broken chain. No times are judged."""

import json

import pytest

from benchmarks import chain
from ister.cli.main import main
from ister.errors import InvariantError
from ister.limits import MIB


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(chain, "_HISTORY_BYTES", 200 * MIB)
    monkeypatch.setattr(chain, "_LIVE_MESSAGES", 2000)
    monkeypatch.setattr(chain, "_ROUNDS", 1)


def test_quick_run_prints_its_results_as_json(tmp_path, capsys):
    assert main(["bench", "chain", "--quick", "--json", "--dir", str(tmp_path)]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert len({result["name"] for result in results}) == 5
    for result in results:
        assert result["value"] > 0
        assert result["limit"] > 0
        assert result["ratio"] == pytest.approx(result["value"] / result["limit"], rel=0.01)
        assert (result["target"] is None) == (result["met"] is None)
    (once,) = [result for result in results if result["target"] is not None]
    assert once["met"] is True
    assert once["value"] >= 10_240
    assert list(tmp_path.iterdir()) == []


def test_message_that_is_another_one_is_noticed(tmp_path, monkeypatch):
    payloads = chain._payloads
    monkeypatch.setattr(chain, "_payloads", lambda first, count: payloads(first + 1, count))
    with (
        chain.Run.begin("chain", str(tmp_path), is_quick=True) as run,
        pytest.raises(InvariantError, match="the message at 0 is another one"),
    ):
        chain.run(run)


def test_gap_is_noticed():
    class Message:
        offset = 7
        size_bytes = 1

    with pytest.raises(InvariantError, match="7 came where 6 should"):
        chain._check([Message()], 7)


def test_fault_beside_the_reader_is_raised(tmp_path, monkeypatch):
    def fail(self):
        raise ZeroDivisionError

    monkeypatch.setattr(chain._Activity, "_trim", fail)
    monkeypatch.setattr(chain, "_follow_chain", lambda log, topic, live: None)
    with (
        chain.Run.begin("chain", str(tmp_path), is_quick=True) as run,
        pytest.raises(ZeroDivisionError),
    ):
        chain.run(run)
