"""Spans of a broker and of a pipeline, as a collector gets them."""

import json
import os
import socket
import subprocess
import sys
import time

import grpc
import pytest

import ister
from ister.client import Client
from ister.wire import danube, stub
from tests.servers.broker import BrokerProcess
from tests.servers.collector import Collector

TOPIC = "/default/orders"
PRODUCER = "danube.ProducerService"
# Of a caller that has spans of its own, as W3C's Trace Context writes it.
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


def create_producer(address, metadata=()):
    with grpc.insecure_channel(address) as channel:
        request = danube.ProducerRequest(
            request_id=1, producer_name="p", topic_name=TOPIC, producer_access_mode=0
        )
        return stub(channel, PRODUCER).CreateProducer(request, metadata=metadata, timeout=60)


def attributes_of(span):
    values = {item.key: item.value for item in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def test_calls_are_spans_below_those_of_the_caller(tmp_path, collector):
    environment = {**SOON, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with BrokerProcess(tmp_path, environment=environment) as broker:
        create_producer(broker.address, CALLER)
        call = collector.wait_for(f"{PRODUCER}/CreateProducer")
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    assert attributes_of(call) == {
        "rpc.system": "grpc",
        "rpc.service": PRODUCER,
        "rpc.method": "CreateProducer",
    }
    (opened,) = collector.named("open topic")
    assert attributes_of(opened) == {"ister.topic": TOPIC}
    assert {service for service, _ in collector.spans} == {"ister-broker"}


@pytest.mark.nightly
def test_uploads_and_batches_are_spans(tmp_path, collector):
    environment = {**SOON, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces"}
    settings = {"storage": {"uploader": {"engine": "embedded", "interval_seconds": 1}}}
    with (
        BrokerProcess(tmp_path, settings=settings, environment=environment) as broker,
        Client(broker.address) as client,
        client.producer(TOPIC, create=True) as producer,
        grpc.insecure_channel(broker.address) as channel,
    ):
        stub(channel, "danube.HealthCheck").HealthCheck(danube.HealthCheckRequest(), timeout=60)
        producer.publish(b"x")
        batch = collector.wait_for("append batch")
        upload = collector.wait_for("upload")
    assert attributes_of(batch) == {"ister.topic": TOPIC, "ister.rows": 1}
    assert attributes_of(upload) == {"ister.topic": TOPIC, "ister.offset": 0}
    assert not collector.named("danube.HealthCheck/HealthCheck")


def test_a_call_that_is_refused_is_a_span_with_its_error(tmp_path, collector):
    environment = {**SOON, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with BrokerProcess(tmp_path, environment=environment) as broker:
        with grpc.insecure_channel(broker.address) as channel, pytest.raises(grpc.RpcError):
            stub(channel, PRODUCER).SendMessage(danube.StreamMessage(), timeout=60)
        call = collector.wait_for(f"{PRODUCER}/SendMessage")
    assert call.status.code == call.status.STATUS_CODE_ERROR
    assert call.status.message == "INVALID_ARGUMENT: the message has no msg_id"
    code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert attributes_of(call)["rpc.grpc.status_code"] == code
    assert not call.events


def test_what_is_left_is_sent_when_the_broker_ends(tmp_path, collector):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "mine"}
    environment["OTEL_BSP_SCHEDULE_DELAY"] = "600000"
    with BrokerProcess(tmp_path, environment=environment) as broker:
        create_producer(broker.address)
        assert not collector.spans
        broker.stop()
    assert collector.named(f"{PRODUCER}/CreateProducer")
    assert {service for service, _ in collector.spans} == {"mine"}


@pytest.mark.nightly
def test_a_collector_that_is_not_there_harms_nobody(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        # Connections are taken, and nothing is ever said.
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        environment = {**SOON, "OTEL_EXPORTER_OTLP_ENDPOINT": url}
        with BrokerProcess(tmp_path, environment=environment) as broker:
            assert create_producer(broker.address).producer_id
            began = time.monotonic()
            broker.stop()
            assert time.monotonic() - began < 10


@pytest.mark.nightly
def test_jobs_are_spans(tmp_path, collector):
    with ister.open(tmp_path / "data") as log:
        log.topic(TOPIC, create=True).append(b"x")
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ister.cli.main", "pipeline", "scrub", "--json"),
            *("--data", str(tmp_path / "data"), "--master", "local[1]"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    assert collector.named("pipeline scrub")
    assert {service for service, _ in collector.spans} == {"ister-pipeline"}
