"""Spark with a broker that wants a token: drivers, tasks and sinks take it from the environment."""

import pytest
from pyspark.errors import PySparkException

from tests.servers.broker import BrokerProcess
from tests.support.security import auth_settings, sign
from tests.support.spark_session import get_spark, stop_spark

ORDERS, COPIES = "/default/orders", "/default/copies"


@pytest.fixture
def broker(tmp_path):
    """A broker that refuses callers without a token; its topic has a tail and no object."""
    settings = {"broker": {"auth": auth_settings(tmp_path)}}
    with BrokerProcess(tmp_path / "broker", settings=settings) as process:
        yield process


@pytest.fixture
def restarted(monkeypatch):
    """Sets the token of the JVM's next life: its workers inherit the environment."""

    def restart(token):
        stop_spark()
        if token is None:
            monkeypatch.delenv("ISTER_TOKEN", raising=False)
        else:
            monkeypatch.setenv("ISTER_TOKEN", token)
        return get_spark()

    yield restart
    stop_spark()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_reads_streams_and_sinks_authenticate_with_the_token_of_the_environment(
    broker, restarted, tmp_path
):
    """Goal: with the token all of it works, without one nothing does, and no plan shows it."""
    secret = sign("root")
    spark = restarted(secret)
    options = {"broker": broker.flight, "topic": ORDERS}
    rows = spark.range(20).selectExpr("CAST(id AS STRING) AS payload")
    rows.write.format("ister").mode("append").options(**options).save()
    frame = spark.read.format("ister").options(**options).load()
    assert [row.offset for row in frame.select("offset").collect()] == list(range(20))
    assert secret not in frame._jdf.queryExecution().toString()
    live = spark.readStream.format("ister").options(**options)
    query = (
        live.option("startingOffsets", "earliest")
        .load()
        .select("payload")
        .writeStream.format("ister")
        .options(broker=broker.flight, topic=COPIES, checkpointLocation=str(tmp_path / "c"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    copies = spark.read.format("ister").options(broker=broker.flight, topic=COPIES).load()
    assert copies.count() == 20

    for token in (None, sign("nobody"), f"{secret}x"):
        spark = restarted(token)
        with pytest.raises(PySparkException) as refused:
            spark.read.format("ister").options(**options).load().count()
        assert any(
            text in str(refused.value) for text in ("UnauthenticatedError", "PermissionDeniedError")
        ), str(refused.value)[:2000]
        assert secret not in str(refused.value)
