"""An export into a real REST catalog of Iceberg: one commit a round, lost answers, dead servers."""

import threading

import pytest
from pyiceberg.catalog import load_catalog

from ister.base import failpoints
from ister.spark.jobs import export
from tests.integration.spark_topics import SparkPlace
from tests.servers.fault_proxy import Action, FaultProxy
from tests.servers.iceberg_rest import IcebergRestServer, fetch_jars
from tests.support.exports import tasks_here

pytestmark = pytest.mark.nightly

TOPICS = ["/default/a", "/default/b", "/default/c"]
TABLE = "shop.events"
_COMMIT = {"method": "POST", "path": r".*/tables/events$"}


@pytest.fixture(scope="module")
def jars(tmp_path_factory):
    """The server's jars."""
    directory = tmp_path_factory.mktemp("jars")
    if (reason := fetch_jars(directory)) is not None:
        pytest.skip(reason)
    return directory


@pytest.fixture
def server(jars, tmp_path):
    with IcebergRestServer(jars, tmp_path / "warehouse") as server:
        yield server


@pytest.fixture
def place(tmp_path):
    place = SparkPlace(tmp_path / "data")
    for name in TOPICS:
        place.fill(name, 60, uploaded=40, step_ms=6_000_000)
    return place


def _export(spark, place, url, **options):
    catalog = {"type": "rest", "uri": url}
    return export(spark, place.config, to=TABLE, format="iceberg", catalog=catalog, **options)


def _rows(server):
    """What the table has, read by pyiceberg; and how many snapshots it has."""
    catalog = load_catalog("reader", type="rest", uri=server.url)
    try:
        table = catalog.load_table(TABLE)
        found = table.scan(selected_fields=("topic", "offset")).to_arrow()
    finally:
        catalog.close()
    rows = sorted(zip(found["topic"].to_pylist(), found["offset"].to_pylist(), strict=True))
    return rows, len(table.snapshots())


def _expected(count):
    return [(topic, offset) for topic in TOPICS for offset in range(count)]


def test_rounds_on_spark_are_one_commit_each(spark, place, server):
    for include_tail, count, commits in ((False, 40, 1), (True, 60, 2), (True, 60, 2)):
        report = _export(spark, place, server.url, include_tail=include_tail)
        assert report.ok, report.errors
        assert _rows(server) == (_expected(count), commits)


def test_a_lost_answer_is_found_out(place, server):
    """The catalog has committed, and the connection breaks before its answer."""
    with tasks_here() as spark, FaultProxy(server.port) as proxy:
        assert _export(spark, place, proxy.endpoint, end=10).ok
        rule = proxy.add(Action.LOST_REPLY, **_COMMIT)
        report = _export(spark, place, proxy.endpoint)
        assert rule.hits == 1
        assert report.ok, report.errors
        assert _rows(server) == (_expected(40), 2)


@pytest.mark.parametrize("action", [Action.INTERNAL_ERROR, Action.SLOW_DOWN, Action.RESET])
def test_a_commit_that_may_have_happened_is_not_repeated_blindly(place, server, action):
    with tasks_here() as spark, FaultProxy(server.port) as proxy:
        assert _export(spark, place, proxy.endpoint, end=10).ok
        proxy.add(action, count=None, **_COMMIT)
        report = _export(spark, place, proxy.endpoint)
        assert [error["topic"] for error in report.errors] == TOPICS
        assert _rows(server) == (_expected(10), 1)
        proxy.clear()
        assert _export(spark, place, proxy.endpoint).ok
        assert _rows(server)[0] == _expected(40)


def test_a_server_that_dies_during_the_commit_and_comes_back(place, server):
    with tasks_here() as spark:
        assert _export(spark, place, server.url, end=10).ok
        failpoints.arm("export.before_table_commit", server.kill)
        report = _export(spark, place, server.url)
        failpoints.disarm()
        assert {error["code"] for error in report.errors} == {"UNAVAILABLE"}
        server.start()
        assert _rows(server) == (_expected(10), 1)
        assert _export(spark, place, server.url).ok
        assert _rows(server)[0] == _expected(40)


def test_exports_of_different_topics_at_once_lose_nothing(place, server):
    """Their commits meet at the catalog: whoever comes second looks again."""
    reports = []

    def run(topic):
        reports.append(_export(spark, place, server.url, topics=topic, include_tail=True))

    with tasks_here() as spark:
        assert _export(spark, place, server.url, end=10).ok
        threads = [threading.Thread(target=run, args=(topic,)) for topic in TOPICS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [report.errors for report in reports] == [[], [], []]
    assert _rows(server) == (_expected(60), 4)
