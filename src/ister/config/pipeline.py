"""`pipeline`: what `ister pipeline run` does, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ister.config.settings import setting


class ObjectFormat(StrEnum):
    """Formats of merged objects."""

    DNB1 = "dnb1"
    """Frames, as in uploads; Danube's tools read them."""
    PARQUET = "parquet"
    """Tables that DuckDB, pandas, Polars and Spark read directly."""


class Keep(StrEnum):
    """Which messages a merged object keeps."""

    ALL = "all"
    LATEST_PER_KEY = "latest-per-key"
    """The newest message per routing key, and all messages without a key."""


class TableFormat(StrEnum):
    """Formats of exported tables."""

    PARQUET = "parquet"
    ICEBERG = "iceberg"
    DELTA = "delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactConfig:
    """`pipeline.compact`: when and how small objects are merged."""

    every_minutes: int | None = setting(
        60, low=1, says="How often small objects are merged; null turns it off."
    )
    topics: tuple[str, ...] = setting(("*",), says="Topics: names and patterns.")
    format: ObjectFormat = setting(
        ObjectFormat.DNB1,
        says="Format of merged objects: `dnb1`, frames as in uploads, or `parquet`, tables.",
    )
    keep: Keep = setting(
        Keep.ALL,
        says="Messages to keep: `all`, or `latest-per-key`, which needs `format: parquet`.",
    )
    target_mb: int = setting(
        128,
        low=1,
        high=2048,
        says="Approximate size of merged objects; objects above half of it are not merged.",
    )
    min_objects: int = setting(
        4, low=2, high=100, says="Minimum number of adjacent objects to merge."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """`pipeline.export`: topics as tables. Nothing is exported unless `to` is set."""

    every_minutes: int = setting(15, low=1, says="How often topics are exported, if `to` is set.")
    topics: tuple[str, ...] = setting(("*",), says="Topics: names and patterns.")
    format: TableFormat = setting(TableFormat.PARQUET, says="Table format.")
    to: str | None = setting(
        None,
        is_path=True,
        says="A directory or URL (Parquet, Delta) or a table's name (Iceberg); `{namespace}` and "
        "`{topic}` are replaced for each topic.",
    )
    schema: str | None = setting(
        None,
        is_path=True,
        says="File with a JSON Schema whose properties become columns, or `registry` for each "
        "topic's registered schema; without one, the envelope's.",
    )
    catalog: Mapping[str, str] = setting(
        {},
        is_secret=True,
        says="Properties of the Iceberg catalog (`type`, `uri`, `warehouse`, …); values are "
        "redacted.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubConfig:
    """`pipeline.scrub`: when stored messages are checked."""

    every_minutes: int | None = setting(
        1440, low=1, says="How often all messages are checked; null turns it off."
    )
    topics: tuple[str, ...] = setting(("*",), says="Topics: names and patterns.")
    repair: bool = setting(False, says="Whether to repair damage.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcConfig:
    """`pipeline.gc`: when expired and orphaned objects are removed from the bucket."""

    every_minutes: int | None = setting(
        60,
        low=1,
        says="How often to remove expired and orphaned objects of topics that no process has open, "
        "and express objects that no topic needs; null turns it off.",
    )
    topics: tuple[str, ...] = setting(
        ("*",),
        says="Topics: names and patterns; express objects and unfinished uploads are removed only "
        "with `*`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """`pipeline`: what `ister pipeline run` does, and how often."""

    master: str = setting("local[*]", says="Spark master URL.")
    conf: Mapping[str, str] = setting(
        {}, is_secret=True, says="Spark settings (values are redacted)."
    )
    broker: str | None = setting(
        None,
        says="Flight addresses of brokers, separated by commas; by default those in the metadata "
        "store.",
    )
    compact: CompactConfig = field(default_factory=CompactConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    gc: GcConfig = field(default_factory=GcConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)
