"""The scripts of `examples/` run as their README says, and print the right figures.

Those that take a minute and more are in `tests/fault/test_examples_at_length.py`, and those that
talk to a broker in `tests/integration/test_python_surface.py`.
"""

import json
import re
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

import pytest

import ister
from tests.support.example_runs import EXAMPLES, rows_of_table, run_example

pytestmark = pytest.mark.timeout(700)


def orders_in(directory: Path, topic: str = "/default/orders") -> list[tuple[ister.Message, dict]]:
    """Each message that is an order, and the order."""
    with ister.open(directory) as log:
        return [
            (message, json.loads(message.payload, parse_float=Decimal))
            for message in log.topic(topic).read()
            if message.payload.startswith(b"{")
        ]


def amounts_by_shop(orders: list[tuple[ister.Message, dict]]) -> dict[str, list[Decimal]]:
    amounts = defaultdict(list)
    for _, order in orders:
        amounts[order["shop"]].append(order["amount"])
    assert len({sum(of_shop) for of_shop in amounts.values()}) == 3, "shops that differ"
    return amounts


def test_readme_names_every_example_and_no_other():
    text = (EXAMPLES / "README.md").read_text()
    scripts = {
        path.relative_to(EXAMPLES).as_posix()
        for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/run.py"), *EXAMPLES.glob("*.ipynb"))
    }
    named = re.findall(r"(?:python|jupyter lab) examples/([\w/]+\.(?:py|ipynb))", text)
    assert set(named) == scripts
    for path in EXAMPLES.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), target


def test_each_script_says_how_it_is_run():
    for path in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/run.py")):
        name = path.relative_to(EXAMPLES)
        assert f"    python examples/{name} [DIRECTORY]" in path.read_text()


def test_arrow_without_spark(tmp_path):
    data = tmp_path / "data"
    printed = run_example("arrow_without_spark.py", data, home=tmp_path / "home")

    orders = orders_in(data)
    assert len(orders) == 3000
    duckdb = rows_of_table(printed, "DuckDB, all messages:")
    currencies = {"eu-1": "EUR", "eu-2": "EUR", "us-1": "USD"}
    assert [row for row in duckdb if row[0] in currencies] == [
        [shop, currencies[shop], str(len(amounts)), str(sum(amounts))]
        for shop, amounts in sorted(amounts_by_shop(orders).items())
    ]

    polars = rows_of_table(printed, "Polars, offsets 1000 up to 2500:")
    assert [row for row in polars if row[0] in currencies] == [
        [shop, str(len(amounts)), str(float(sum(amounts)))]
        for shop, amounts in sorted(amounts_by_shop(orders[1000:2500]).items())
    ]

    pandas = re.search(r"pandas, from noon on, in a bucket with offsets up to (\d+):", printed)
    assert pandas is not None
    tiered = int(pandas.group(1))
    assert tiered in (2000, 3000), "more only if the log's own upload came in between"
    days = defaultdict(list)
    for message, order in orders[:tiered]:
        if message.offset >= 720:  # one a minute: noon
            days[f"{message.publish_time:%Y-%m-%d}"].append(order["amount"])
    assert re.findall(r"^(2026-\S+) +(\d+) +([\d.]+)$", printed, re.M) == [
        (day, str(len(amounts)), str(float(sum(amounts)))) for day, amounts in sorted(days.items())
    ]
    assert len(days) >= 2


def test_scripts_make_a_directory_of_their_own_and_remove_it(tmp_path):
    printed = run_example("arrow_without_spark.py", None, home=tmp_path)
    assert "DuckDB, all messages:" in printed
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["errors", "tmp"]


@pytest.mark.nightly
def test_cluster(tmp_path):
    data = tmp_path / "data"
    printed = run_example("cluster/run.py", data, home=tmp_path / "home")

    topics = {f"/default/orders-{number}" for number in range(6)}
    seen = []
    for title in (
        "Three brokers:",
        r"(broker-\d) is killed with SIGKILL:",
        "Each broker is restarted with SIGTERM:",
    ):
        found = re.search(rf"^{title}\n((?:    broker-\d: .*\n)+)", printed, re.M)
        assert found is not None, printed
        rows = dict(re.findall(r"^    (broker-\d): (.*)$", found.groups()[-1], re.M))
        owned = {name: set(names.split(", ")) for name, names in rows.items()}
        assert set().union(*owned.values()) == topics
        seen.append((found.groups()[0], owned))
    (_, before), (victim, after), _ = seen
    assert set(before) == {"broker-1", "broker-2", "broker-3"}
    assert set(after) == set(before) - {victim}
    pauses = dict(re.findall(r"^    (\S+): no answers for ([\d.]+) s", printed, re.M))
    assert set(pauses) == before[victim]
    # Its lease has to end before others may take them.
    assert all(float(pause) > 1 for pause in pauses.values())
    checked = re.search(r"^(\d+) acknowledged orders: each is there once, in order$", printed, re.M)
    assert checked is not None
    assert int(checked.group(1)) > 6 * 20


@pytest.mark.nightly
def test_spark_sql(tmp_path):
    home = tmp_path / "home"
    printed = run_example("spark_sql.py", Path("data"), home=home)

    data = home / "data"  # found by workers, too, from where the script was started
    orders = orders_in(data)
    assert len(orders) == 1000
    assert rows_of_table(printed, "What each shop has sold:") == [
        ["shop", "orders", "revenue", "largest"],
        *(
            [shop, str(len(amounts)), str(sum(amounts)), str(max(amounts))]
            for shop, amounts in sorted(amounts_by_shop(orders).items())
        ),
    ]
    assert rows_of_table(printed, "Messages that are not orders:") == [
        ["offset", "payload_error"],
        ["1000", "not JSON: invalid character (byte 1)"],
    ]
    assert rows_of_table(printed, "From offset 900 on:")[1:] == [["101", "900", "1000"]]
    assert rows_of_table(printed, "After one more message:")[1:] == [["1001", "1002"]]
    with ister.open(data) as log:
        assert log.topic("/default/orders").watermarks.tiered >= 600
    assert sorted(path.name for path in home.iterdir()) == ["data", "errors", "tmp"]


@pytest.mark.nightly
def test_spark_from_kafka(tmp_path):
    printed = run_example("spark_from_kafka.py", tmp_path / "all", home=tmp_path / "home")

    assert printed.splitlines() == [
        "30 clicks, 60 behind, at most 33",
        "30 clicks, 30 behind, at most 17",
        "30 clicks, 0 behind, at most 0",
        "by page: {'/': 30, '/cart': 31, '/help': 29}",
        "by browser: {'chrome': 45, 'firefox': 45}",
    ]


@pytest.mark.nightly
def test_spark_stream(tmp_path):
    printed = run_example("spark_stream.py", tmp_path / "all", home=tmp_path / "home")

    late = 45
    expected = []
    for first in range(0, 50, 10):  # the window from 50 on is not complete
        readings = [10 + n % 20 / 2 for n in range(first, first + 10) if n != late]
        average = f"{sum(readings) / len(readings):.2f} °C from {len(readings)} readings"
        expected.append(f"00:00:{first:02} to 00:00:{first + 10:02}  roof  {average}")
    assert printed.splitlines() == [*expected, "1 too late"]
    with ister.open(tmp_path / "all" / "data") as log:
        times = [message.publish_time for message in log.topic("/default/readings").read()]
    assert len(times) == 60
    assert times[late] < times[10], "it was late indeed"


@pytest.mark.nightly
def test_spark_enrich(tmp_path):
    printed = run_example("spark_enrich.py", tmp_path / "all", home=tmp_path / "home")

    said = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert said == [
        "Spark has written the micro-batches [0, 1, 2]",
        "100 messages of 100 orders, such as",
        "forgotten: that 2 was written",
        "Spark has written the micro-batches [2]",
        "100 messages of 100 orders, such as",
    ]
    assert "    {'order': 1, 'customer': 'bob', 'city': 'Ruse'}" in printed.splitlines()
    enriched = orders_in(tmp_path / "all" / "data", "/default/enriched")
    cities = {"ann": "Ulm", "bob": "Ruse", "eve": "Novi Sad"}
    customers = ["ann", "bob", "eve"]
    assert sorted(
        (order["order"], order["customer"], order["city"], message.routing_key)
        for message, order in enriched
    ) == [(n, customers[n % 3], cities[customers[n % 3]], customers[n % 3]) for n in range(100)]
