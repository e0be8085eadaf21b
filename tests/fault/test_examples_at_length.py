"""The scripts of `examples/` at length: a pipeline that runs twice, a stream without an end."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

import ister
from tests.support.example_runs import complaints, run_example, started_example

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


def test_pipeline_reads_only_what_is_new_when_it_runs_again(tmp_path):
    """Goal: a declarative pipeline with topics at both ends works, and goes on in its next run.

    Method: the example, twice in one directory. Each run publishes a hundred orders. All orders
    are in the table and all large ones in the topic, once; and Spark's own checkpoints say that
    the second run began where the first had ended.
    """
    directory = tmp_path / "all"
    for run in (1, 2):
        printed = run_example("pipeline/run.py", directory, home=tmp_path / f"home-{run}")
        count = 100 * run
        orders = [(("eu-1", "eu-2", "us-1")[n % 3], n % 39 + 0.25) for n in range(count)]
        tables = re.findall(r"^    (\S+)  (\d+) orders  ([\d.]+)$", printed, re.M)
        assert tables == [
            (shop, str(len(amounts)), f"{sum(amounts):.2f}")
            for shop in ("eu-1", "eu-2", "us-1")
            if (amounts := [amount for at, amount in orders if at == shop])
        ]
        large = [n for n, (_, amount) in enumerate(orders) if amount >= 30]
        assert f"{len(large)} messages of {len(large)} orders" in printed
        assert offsets_in(directory / "data") == large
        assert sorted(path.name for path in (tmp_path / f"home-{run}").iterdir()) == [
            "errors",
            "tmp",
        ]
    batches = (directory / "checkpoints").rglob("orders/0/offsets/[01]")
    ranges = [read_range(path) for path in sorted(batches)]
    assert ranges == [(0, 100), (100, 200)]


def offsets_in(data: Path) -> list[int]:
    """Where the messages of the pipeline's topic came from, in their order."""
    with ister.open(data) as log:
        messages = list(log.topic("/default/large").read())
    return [json.loads(message.payload)["offset"] for message in messages]


def read_range(path: Path) -> tuple[int, int]:
    """The offsets of a micro-batch, by Spark's record of it."""
    topic = json.loads(path.read_text().splitlines()[-1])["topics"]["/default/orders"]
    return topic["from"], topic["offset"]


def test_stream_goes_on_with_its_checkpoint_and_then_live(tmp_path):
    """Goal: the streaming example goes on where it was, follows live readings, and ends on Ctrl-C.

    Method: a run over what is there; then one with --follow in the same directory, until it has
    printed windows that only live readings complete.
    """
    directory, home = tmp_path / "all", tmp_path / "home"
    first = run_example("spark_stream.py", directory, home=tmp_path / "first")
    assert first.splitlines()[-2].startswith("00:00:40 to 00:00:50"), "the last complete window"

    windows = []
    with started_example("spark_stream.py", str(directory), "--follow", home=home) as process:
        assert process.stdout is not None
        for line in process.stdout:
            windows += re.findall(r"^(\S+) to \S+  roof  \S+ °C from (\d+) readings$", line)
            if len(windows) >= 8:
                break
        # As a terminal does it: Spark's own processes get it, too.
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 0, complaints(home)
    assert rest.splitlines()[-1] == "0 too late"
    # The first run's sixty readings and sixty more; what is behind 00:02:00 was live.
    assert windows[:8] == [(f"00:{at // 60:02}:{at % 60:02}", "10") for at in range(50, 130, 10)]
