"""SQL over a topic through its broker, with DuckDB: from the oldest message to the last second.

The broker has the history in the bucket and the newest messages in its files; `client.read_arrow`
reads both. DuckDB takes the batches while they arrive, so the topic need not fit into memory.

    python examples/duckdb_tail.py [DIRECTORY]

starts a broker and publishes orders. With `--broker HOST:PORT` it uses a broker of yours.

Needs `pip install 'ister[broker,client]' duckdb`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import duckdb

from ister.client import Client
from ister.testing import run_broker

TOPIC = "/default/sql-orders"
SHOPS = ("Linz", "Ruse", "Ulm")


def publish(client: Client, start: int, end: int) -> None:
    """Publishes orders of a range of numbers."""
    with client.producer(TOPIC, create=True) as producer:
        for number in range(start, end):
            shop = SHOPS[number % 3]
            producer.send_json({"order": number, "amount": number % 39 + 0.25}, routing_key=shop)


def by_shop(client: Client) -> duckdb.DuckDBPyRelation:
    """What each shop has sold. `text` is the payload as a string, or null if it is not UTF-8."""
    messages = duckdb.from_arrow(client.read_arrow(TOPIC, columns=["routing_key", "text"]))
    return messages.query(
        "messages",
        """
        SELECT routing_key AS shop, count(*) AS orders,
               sum(CAST(text::JSON->>'amount' AS DECIMAL(10, 2))) AS revenue
        FROM messages GROUP BY shop ORDER BY shop
        """,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="SQL over a topic through its broker.")
    parser.add_argument("directory", nargs="?", help="for the data; a temporary one by default")
    parser.add_argument("--broker", metavar="HOST:PORT", help="a broker that runs already")
    options = parser.parse_args(arguments)
    with (
        run_broker(directory=options.directory)
        if options.broker is None
        else nullcontext() as broker,
        Client(options.broker or broker.address, timeout=30) as client,
    ):
        publish(client, 0, 900)
        print("What each shop has sold:")
        print(by_shop(client))
        publish(client, 900, 1000)
        print("A hundred orders later:")
        print(by_shop(client))
        # A table is read anew at each use, here from a point in time on.
        recent = client.table(TOPIC, datetime.now(UTC) - timedelta(minutes=5), columns=["offset"])
        [(count,)] = recent.to_duckdb().aggregate("count(*)").fetchall()
        print(f"In the last five minutes: {count}")


if __name__ == "__main__":
    main()
