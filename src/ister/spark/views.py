"""Topics as views in Spark SQL, each query of which sees the newest messages.

    CREATE TABLE ister.messages USING ister                            one table, without options
    CREATE VIEW ister.default_orders AS SELECT * FROM ister.messages WITH (topic = …)

Owns: the statements that create and drop these views, and their names. Does not own: what a query
reads (`batch`).

Spark plans a read once for each table that it resolves, and keeps the plan with the DataFrame: a
temporary view of a DataFrame stays at its first scan (Spark 4.1 and later). A view that is
defined in SQL is resolved for every query, with its table, and options in `WITH` reach the reader.
A catalog of its own (`ister.default.orders`) would need classes in Java.

What a crash leaves: some of the views; another call creates the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ister.base.partitions import base_of_partition
from ister.base.retry import retry_unavailable
from ister.errors import ConflictError, InvalidRequestError
from ister.spark.location import find_place
from ister.spark.options import ReadOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TABLE: Final = "messages"  # no view has this name: theirs have a namespace and `_` in it
_TOPIC: Final = "ister.topic"
_LOG: Final = "ister.log"
_DATABASE: Final = re.compile(r"[A-Za-z0-9_]+")
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_]")
# Options that change the columns. All views share one table, which has those of messages.
_COLUMN_OPTIONS: Final = frozenset(
    {"columns", "includeheaders", "payloadformat", "payloadschema", "payloaderrors"}
)


def register_views(
    spark: SparkSession,
    config: str | None = None,
    *,
    broker: str | None = None,
    pattern: str = ".*",
    database: str = "ister",
    options: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Creates a view for each topic, and drops the views of deleted topics.

    A query on such a view reads everything that is there when the query starts. Call this again to
    add topics that were created since. A partitioned topic is one view.

    Args:
        spark: The session, classic or Spark Connect.
        config: A data directory or an ister.yml, as in the option of that name.
        broker: Flight addresses of brokers, as in the option of that name.
        pattern: A regular expression for whole names of topics.
        database: The database of the views, which is created if it does not exist.
        options: More options of a read, such as `startingTimestamp` or `includeTail`.

    Returns:
        The topics by the names of their views, with the database; `/default/orders` has the view
        `default_orders`.

    Raises:
        ConflictError: Two topics would have the same view, or there is a view of that name that
            is of another log, or not of a topic.
        InvalidRequestError: An argument is invalid.
        UnavailableError: The metadata store does not respond.
    """
    if _DATABASE.fullmatch(database) is None:
        raise InvalidRequestError(
            f"invalid database name {database!r}",
            hint="use ASCII letters, digits and '_', without a catalog",
        )
    given = dict(options or {})
    if config is not None:
        given["config"] = os.path.abspath(config) if os.path.exists(config) else config
    if broker is not None:
        given["broker"] = broker
    for name in given:
        if name.lower() in _COLUMN_OPTIONS:
            raise InvalidRequestError(
                f"the option {name} changes the columns, and all views share one table",
                hint="create a table with these columns and a view of it, as in docs/SPARK.md",
            )
    parsed = ReadOptions.parse({**given, "topicPattern": pattern}, is_streaming=False)
    place = find_place(parsed.config, parsed.brokers)
    existing = retry_unavailable(place.history().topics)
    topics = sorted({base_of_partition(name) or name for name in existing})
    wanted = _name_views([topic for topic in topics if parsed.matches(topic)], database)

    spark.sql(f"CREATE DATABASE IF NOT EXISTS `{database}`")
    table = f"`{database}`.`{_TABLE}`"
    spark.sql(f"CREATE TABLE IF NOT EXISTS {table} USING ister")
    log = parsed.config or ",".join(parsed.brokers)
    present = _read_views(spark, database)
    _check_replaced(present, wanted, log=log)
    for view, topic in wanted.items():
        spark.sql(
            " ".join(
                [
                    f"CREATE OR REPLACE VIEW {_quote_name(view)}",
                    f"COMMENT {_quote(f'topic {topic}')}",
                    f"TBLPROPERTIES ({_pairs({_TOPIC: topic, _LOG: log})})",
                    f"AS SELECT * FROM {table} WITH ({_pairs({**given, 'topic': topic})})",  # noqa: S608 - quoted
                ]
            )
        )
    for view, properties in present.items():
        if properties.get(_LOG) == log and properties.get(_TOPIC) not in topics:
            spark.sql(f"DROP VIEW IF EXISTS {_quote_name(view)}")
    return wanted


def _name_views(topics: list[str], database: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for topic in topics:
        view = f"{database}.{_NOT_IN_NAMES.sub('_', topic.strip('/'))}"
        # Spark's names do not differ by case.
        other = next((known for known in found if known.lower() == view.lower()), None)
        if other is not None:
            raise ConflictError(
                f"{found[other]} and {topic} would both have the view {view}",
                hint="narrow the pattern, or use two databases",
            )
        found[view] = topic
    return found


def _read_views(spark: SparkSession, database: str) -> dict[str, dict[str, str]]:
    """Returns the properties of the views that a database has, by name in lower case."""
    found: dict[str, dict[str, str]] = {}
    for row in spark.sql(f"SHOW VIEWS IN `{database}`").collect():
        if row["isTemporary"]:
            continue
        view = f"{database}.{row['viewName']}".lower()
        quoted = f"`{database}`.`{row['viewName']}`"
        found[view] = {
            entry["key"]: entry["value"]
            for entry in spark.sql(f"SHOW TBLPROPERTIES {quoted}").collect()
        }
    return found


def _check_replaced(
    present: Mapping[str, Mapping[str, str]], wanted: Mapping[str, str], *, log: str
) -> None:
    """Refuses to replace a view of something else: its queries would read other rows."""
    for view, topic in wanted.items():
        properties = present.get(view.lower())
        if properties is None or properties.get(_LOG) == log:
            continue
        other = properties.get(_LOG)
        raise ConflictError(
            f"the view {view} exists, and is "
            + (f"of the log {other}, not {log}" if other is not None else "not one of a topic"),
            topic=topic,
            hint="use another database, or drop that view",
        )


def _quote_name(view: str) -> str:
    """Returns the name of a view and its database for SQL; either may look like a number."""
    return f"`{view.replace('.', '`.`')}`"


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{_quote(name)} = {_quote(text)}" for name, text in values.items())
