"""Names, places and catalogs of tables."""

import pytest

from ister.base.clock import SystemClock
from ister.config import TableFormat, load_config
from ister.errors import InvalidRequestError
from ister.spark.tables.delta import DeltaTable
from ister.spark.tables.iceberg import IcebergTable
from ister.spark.tables.opening import TablePlace, dead_letters_name, open_table, table_name
from ister.spark.tables.parquet_directory import ParquetDirectory
from ister.spark.tables.targets import local_path, storage_of
from tests.support.cases import each

_S3 = {
    "cloud": {
        "backend": "s3",
        "root": "s3://log/x",
        "options": {"access_key": "A", "secret_key": "S"},
    }
}


def _place(tmp_path, format: str, *, storage=None, **fields) -> TablePlace:
    config = load_config(
        {"storage": {"wal": {"dir": str(tmp_path / "wal")}, **(storage or {})}}, {}
    )
    return TablePlace(config=config, format=TableFormat(format), **fields)


def test_names():
    assert (
        table_name("x/{namespace}/{topic}", "/shop/or-ders", TableFormat.DELTA) == "x/shop/or-ders"
    )
    assert table_name("{namespace}.{topic}", "/shop/or-ders", TableFormat.ICEBERG) == "shop.or_ders"
    assert table_name("all", "/shop/orders", TableFormat.PARQUET) == "all"
    for wrong in ("{other}", "{", "{topic", "{0}", "{topic:{x}}", "{topic:>9}", "{topic!r}", "{}"):
        with pytest.raises(InvalidRequestError):
            table_name(wrong, "/shop/orders", TableFormat.PARQUET)
    assert dead_letters_name("a/b/", None) == "a/b_dead_letters"
    assert dead_letters_name("a/b", "c") == "c"


def test_directories_and_addresses(tmp_path):
    assert local_path("file:///a%20b/c") == "/a b/c"
    assert local_path("s3://b/c") is None
    assert storage_of(str(tmp_path), {"a": "b"}, None).options == {}
    with pytest.raises(InvalidRequestError) as caught:
        storage_of("hdfs://user:secret@x/y", None, None)
    assert "secret" not in str(caught.value)


@each("format", ["parquet", "delta", "iceberg"])
def test_an_address_with_credentials_is_refused_and_not_repeated(tmp_path, format):
    with pytest.raises(InvalidRequestError) as caught:
        table_name("s3://AKIA:hunter2@bucket/{y}", "/shop/orders", TableFormat(format))
    assert "hunter2" not in str(caught.value)
    place = _place(tmp_path, format)
    with pytest.raises(InvalidRequestError) as caught:
        open_table("s3://AKIA:hunter2@bucket/x", place, clock=SystemClock())
    assert "hunter2" not in str(caught.value)
    assert open_table(
        "s3://bucket/a@b", _place(tmp_path, "delta"), clock=SystemClock()
    ).location.endswith("a@b")


def test_a_bucket_of_the_same_kind_has_the_logs_own_options(tmp_path):
    cloud = _place(tmp_path, "delta", storage=_S3).config.storage.cloud
    assert storage_of("s3://lake/t", None, cloud).options == {"access_key": "A", "secret_key": "S"}
    assert storage_of("s3://lake/t", {"region": "r"}, cloud).options == {"region": "r"}
    assert storage_of("gs://lake/t", None, cloud).options == {}
    assert "S" not in repr(storage_of("s3://lake/t", None, cloud)).removeprefix("Storage")


def test_formats(tmp_path):
    for name, kind in (("parquet", ParquetDirectory), ("delta", DeltaTable)):
        table = open_table(str(tmp_path / "t"), _place(tmp_path, name), clock=SystemClock())
        assert isinstance(table, kind)
        assert table.location == str(tmp_path / "t")


@each(
    ("name", "catalog", "expected"),
    [
        ("lake/orders", None, ("default.orders", "{cwd}/lake")),
        ("/abs/lake/shop.orders", None, ("shop.orders", "/abs/lake")),
        ("shop.orders", None, ("shop.orders", "{tmp}/warehouse")),
        ("orders", {"warehouse": "/w"}, ("default.orders", "/w")),
    ],
)
def test_the_catalog_by_default_is_in_the_warehouse(tmp_path, monkeypatch, name, catalog, expected):
    monkeypatch.chdir(tmp_path)
    table = open_table(name, _place(tmp_path, "iceberg", catalog=catalog), clock=SystemClock())
    assert isinstance(table, IcebergTable)
    warehouse = expected[1].format(cwd=tmp_path, tmp=tmp_path)
    assert table._name == expected[0]
    assert table._properties["warehouse"] == f"file://{warehouse}"
    assert table._properties["uri"] == f"sqlite:///{warehouse}/catalog.db"
    assert list(tmp_path.iterdir()) == []


def test_a_catalog_that_is_given(tmp_path):
    catalog = {"type": "rest", "uri": "http://c:1", "warehouse": "s3://lake/w", "name": "prod"}
    place = _place(tmp_path, "iceberg", catalog=catalog, storage=_S3)
    table = open_table("shop.orders", place, clock=SystemClock())
    assert table._catalog_name == "prod"
    assert table._properties["s3.access-key-id"] == "A"
    assert "secret" not in table.location
    assert table.location == "s3://lake/w#shop.orders"


@each("name", ["", " ", "a..b", "x/.y"])
def test_names_that_are_none(tmp_path, name):
    with pytest.raises(InvalidRequestError):
        open_table(name, _place(tmp_path, "iceberg"), clock=SystemClock())


def test_a_warehouse_in_a_bucket_needs_a_catalog(tmp_path):
    with pytest.raises(InvalidRequestError, match="catalog"):
        open_table("s3://lake/orders", _place(tmp_path, "iceberg"), clock=SystemClock())
