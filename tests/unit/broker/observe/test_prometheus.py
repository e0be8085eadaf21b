"""`/metrics`: what a broker says is what happened, and Prometheus reads it."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ister.base.metrics import BY_NAME, LEFT_OUT, METRICS, Histogram
from ister.base.model import TopicState
from ister.broker.observe.prometheus import OTHER, Family, PrometheusMetrics, format_families
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind
from ister.topic.schema_kinds import ValidationPolicy
from ister.wire import danube
from tests.support.broker import a_broker, a_record, eventually, take
from tests.support.dispatch import ack

NAME = "/default/t"


def read(text):
    """Values by name and labels, and families by name."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    return values, families


def exposition(broker, **more):
    return PrometheusMetrics(
        broker.config,
        broker.topics.log,
        broker.health,
        guard=broker.guard,
        schemas=broker.schemas,
        calls=broker._calls,
        clock=broker._clock,
        **more,
    )


async def send(services, payload=b"12345", name=NAME):
    created = await services.producers.CreateProducer(
        danube.ProducerRequest(
            producer_name="p", topic_name=name, dispatch_strategy=danube.DispatchStrategy.Reliable
        )
    )
    await services.producers.SendMessage(
        danube.StreamMessage(
            msg_id=danube.MsgID(producer_id=created.producer_id, topic_name=name),
            producer_name="p",
            payload=payload,
        )
    )


def label(name, **labels):
    return (name, *sorted(labels.items()))


# -- what is told -----------------------------------------------------------------------------


async def test_what_was_published_and_delivered_is_told_by_topic_and_subscription(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        await send(services)
        topic = await broker.topics.get(NAME)
        consumer = await topic.subscribe("s", SubscriptionKind.SHARED, "c", (), "earliest")
        subscription = topic.subscription("s")
        outbox = subscription.attach(consumer.id, ())
        await send(services, b"x" * 95)
        for offset, _ in await take(outbox, 2):
            message = await subscription.next_message(outbox, offset)
            assert subscription.readable(message) is not None
        ack(subscription, 0)
        with pytest.raises(Exception, match="no msg_id"):
            await services.producers.SendMessage(danube.StreamMessage())
        values, families = read(await exposition(broker).text())
        of_topic, of_both = {"topic": NAME}, {"topic": NAME, "subscription": "s"}
        assert values[label("danube_topic_messages_in_total", **of_topic)] == 2
        assert values[label("danube_topic_bytes_in_total", **of_topic)] == 100
        assert values[label("danube_topic_message_size_bytes_count", **of_topic)] == 2
        assert values[label("danube_topic_message_size_bytes_sum", **of_topic)] == 100
        assert values[label("danube_topic_message_size_bytes_bucket", le="64", **of_topic)] == 1
        assert values[label("danube_wal_append_total", **of_topic)] == 2
        assert values[label("danube_topic_active_producers", **of_topic)] == 1
        assert values[label("danube_topic_active_consumers", **of_topic)] == 1
        assert values[label("danube_topic_active_subscriptions", **of_topic)] == 1
        sent = {"result": "ok", "error_code": "", **of_topic}
        assert values[label("danube_producer_send_total", **sent)] == 2
        assert values[label("danube_producer_send_latency_ms_count", **of_topic)] == 2
        assert values[label("danube_consumer_messages_out_total", **of_both)] == 2
        assert values[label("danube_consumer_bytes_out_total", **of_both)] == 100
        assert values[label("danube_subscription_lag_messages", **of_both)] == 1
        assert values[label("danube_subscription_active_consumers", **of_both)] == 1
        assert values[label("ister_subscription_in_flight_messages", **of_both)] == 1
        assert values[label("danube_subscription_terminal_blocked", **of_both)] == 0
        assert values[label("ister_topic_state", state="open", **of_topic)] == 1
        assert values[label("ister_topics", state="open")] == 1
        assert values[label("ister_topics", state="failed")] == 0
        assert values[label("ister_upload_lag_messages", **of_topic)] == 2
        call = {"service": "danube.ProducerService", "method": "SendMessage"}
        assert values[label("danube_broker_rpc_total", result="OK", **call)] == 2
        refused = label("danube_broker_rpc_total", result="INVALID_ARGUMENT", **call)
        assert values[refused] == 1
        assert values[label("ister_rpc_latency_seconds_count", **call)] == 2
        assert values[label("ister_broker_messages_in_total")] == 2
        assert values[label("ister_broker_ready")] == 1
        assert values[label("ister_lease_valid")] == 1
        assert values[label("process_resident_memory_bytes")] > 1 << 20
        assert families["danube_topic_messages_in"].type == "counter"
        assert families["danube_topic_message_size_bytes"].type == "histogram"
        assert values[label("ister_health_state", check="topics")] == 0


async def test_failures_of_a_subscription_are_told(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        await send(services)
        topic = await broker.topics.get(NAME)
        consumer = await topic.subscribe("s", SubscriptionKind.SHARED, "c", (), "earliest")
        subscription = topic.reliable_subscription("s")
        policy = FailurePolicy(
            max_redelivery_count=1, base_redelivery_delay_ms=0, poison=PoisonPolicy.BLOCK
        )
        await subscription.set_policy(policy)
        outbox = subscription.attach(consumer.id, ())
        for _ in range(2):
            await take(outbox, 1)
            assert await subscription.next_message(outbox, 0) is not None
            outbox.written(1)
            subscription.nack(0, delay_ms=0, reason="no")
        values, _ = read(await exposition(broker).text())
        of = {"topic": NAME, "subscription": "s"}
        assert values[label("danube_subscription_nack_total", **of)] == 2
        assert values[label("danube_subscription_redelivery_total", **of)] == 1
        assert values[label("danube_subscription_retry_exhausted_total", **of)] == 1
        assert values[label("danube_subscription_terminal_blocked", **of)] == 1
        assert values[label("ister_health_state", check="subscriptions")] == 1


async def test_every_declared_metric_is_told_where_it_applies(tmp_path):
    elsewhere = {
        # With etcd, with TLS, after a job, between two brokers, with a schema, after a fault.
        *("danube_etcd_put_latency_seconds", "danube_etcd_descriptor_write_total"),
        "ister_certificate_expiry_timestamp_seconds",
        *("ister_job_last_start_timestamp_seconds", "ister_job_last_duration_seconds"),
        *("ister_job_last_ok", "danube_client_redirects_total"),
        *("danube_schema_validation_total", "danube_schema_validation_failures_total"),
        "ister_thread_failures_total",
    }

    async with a_broker(tmp_path) as (broker, services, _):
        await send(services)
        await (await broker.topics.get(NAME)).subscribe("s", SubscriptionKind.SHARED, "c", ())
        await eventually(lambda: broker.health.probe.answered_at is not None)
        text = await exposition(broker).text()
        told = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
        assert told == {one.exposed for one in METRICS} - elsewhere
        assert not {name for name, _ in LEFT_OUT} & told


async def test_jobs_are_told_from_their_last_reports(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        broker.health.probe.reports = {
            "compact": {"ok": False, "started_at": 1_700_000_000, "seconds": 2.5},
            "scrub": {"ok": True, "started_at": 1_700_000_100, "seconds": None},
        }
        values, _ = read(await exposition(broker).text())
        assert values[label("ister_job_last_ok", pipeline_job="compact")] == 0
        assert values[label("ister_job_last_ok", pipeline_job="scrub")] == 1
        begun = label("ister_job_last_start_timestamp_seconds", pipeline_job="compact")
        assert values[begun] == 1_700_000_000
        assert values[label("ister_job_last_duration_seconds", pipeline_job="compact")] == 2.5
        assert label("ister_job_last_duration_seconds", pipeline_job="scrub") not in values


# -- how many series --------------------------------------------------------------------------


async def test_topics_beyond_the_limit_are_summed_and_no_counter_goes_down(tmp_path):
    names = [f"/default/t{number}" for number in range(5)]

    async with a_broker(tmp_path) as (broker, _, _):
        figures = exposition(broker, topics_max=2)
        topics = [await broker.topics.get_or_create(name, is_reliable=True) for name in names]
        for number, topic in enumerate(topics):
            for _ in range(number + 1):
                await topic.publish(a_record(b"12", topic=topic.name))

        async def counted():
            values, _ = read(await figures.text())
            return {
                dict(key[1:])["topic"]: value
                for key, value in values.items()
                if key[0] == "danube_topic_messages_in_total"
            }, values

        first, values = await counted()
        assert first == {names[4]: 5, names[3]: 4, OTHER: 6}
        assert values[label("ister_topics_summed")] == 3
        assert values[label("ister_upload_lag_messages", topic=OTHER)] == 6
        assert values[label("ister_topics", state="open")] == 5
        assert label("danube_topic_message_size_bytes_count", topic=OTHER) not in values
        # Another topic becomes the busiest: its series begins, the sum stays as it is.
        for _ in range(100):
            await topics[0].publish(a_record(b"12", topic=names[0]))
        second, _ = await counted()
        assert second == {names[4]: 5, names[3]: 4, OTHER: 106}
        figures._chosen_at = -float("inf")
        await topics[0].publish(a_record(b"12", topic=names[0]))
        third, _ = await counted()
        assert third == {names[0]: 102, names[4]: 5, OTHER: 106}
        await topics[3].publish(a_record(b"12", topic=names[3]))
        fourth, _ = await counted()
        assert fourth == {names[0]: 102, names[4]: 5, OTHER: 107}


async def test_topic_that_is_not_well_has_its_own_series(tmp_path, monkeypatch):
    async with a_broker(tmp_path) as (broker, _, _):
        for name in ("/default/a", "/default/b", "/default/c"):
            topic = await broker.topics.get_or_create(name, is_reliable=True)
            await topic.publish(a_record(topic=name))
        sick = (await broker.topics.get("/default/c")).topic.wal
        monkeypatch.setattr(sick.gate, "state", TopicState.STALLED)
        values, _ = read(await exposition(broker, topics_max=1).text())
        assert values[label("ister_topic_state", topic="/default/c", state="stalled")] == 1
        assert values[label("ister_topics", state="stalled")] == 1
        monkeypatch.undo()


async def test_subscriptions_beyond_the_limit_are_summed(tmp_path):
    async with a_broker(tmp_path) as (broker, services, _):
        await send(services)
        topic = await broker.topics.get(NAME)
        for number in range(4):
            name = f"s{number}"
            await topic.subscribe(name, SubscriptionKind.SHARED, "c", (), "earliest")
        values, _ = read(await exposition(broker, subscriptions_max=1).text())
        lags = {
            dict(key[1:])["subscription"]: value
            for key, value in values.items()
            if key[0] == "danube_subscription_lag_messages"
        }
        assert lags == {"s0": 1, OTHER: 3}


# -- the text ---------------------------------------------------------------------------------


def test_labels_are_escaped():
    odd = 'a"b\\c\nd{},= \u00e9'
    family = Family("danube_topic_messages_in_total", {(odd,): 3})
    text = format_families([family])
    assert len(text.splitlines()) == 3
    values, _ = read(text)
    assert values == {label("danube_topic_messages_in_total", topic=odd): 3}


def test_histogram_has_buckets_that_add_up():
    histogram = Histogram((0.5, 1.0, 2.0))
    for value in (0.1, 0.5, 1.5, 9.0):
        histogram.observe(value)
    text = format_families([Family("ister_rpc_latency_seconds", {("s", "m"): histogram})])
    values, families = read(text)
    of = {"service": "s", "method": "m"}
    buckets = {
        le: values[label("ister_rpc_latency_seconds_bucket", le=le, **of)]
        for le in ("0.5", "1", "2", "+Inf")
    }
    assert buckets == {"0.5": 2, "1": 2, "2": 3, "+Inf": 4}
    assert values[label("ister_rpc_latency_seconds_count", **of)] == 4
    assert values[label("ister_rpc_latency_seconds_sum", **of)] == pytest.approx(11.1)
    assert families["ister_rpc_latency_seconds"].type == "histogram"


def test_every_line_is_one_that_prometheus_reads():
    def value(metric):
        made = Histogram((1.0,)) if metric.kind == "histogram" else 0.25
        if isinstance(made, Histogram):
            made.observe(0.5)
        return made

    families = [Family(m.name, {tuple("x" for _ in m.labels): value(m)}) for m in METRICS]
    text = format_families(families)
    assert text.endswith("\n")
    sample = re.compile(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [0-9.e+-]+')
    helped, typed = set(), set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.add(line.split()[2])
        elif line.startswith("# TYPE "):
            typed.add(line.split()[2])
        else:
            assert sample.fullmatch(line), line
    assert helped == typed == {one.exposed for one in METRICS}
    assert len(list(text_string_to_metric_families(text))) == len({one.exposed for one in METRICS})


def test_names_follow_the_conventions():
    for metric in METRICS:
        name = metric.exposed
        assert name.endswith("_total") == (metric.kind == "counter"), name
        if name.startswith("danube_"):
            continue
        assert not re.search(r"_(ms|us|millis|micros|kb|mb)(_|$)", name), name
        assert (metric.exposed_unit == "s") == ("_seconds" in name), name
        assert (metric.exposed_unit == "bytes") == ("_bytes" in name), name
        if metric.exposed_unit in ("s", "bytes"):
            assert re.search(r"_(seconds|bytes)(_total)?$", name), name
    in_milliseconds = {one.name for one in METRICS if one.exposed.endswith("_ms")}
    assert in_milliseconds == {
        "danube_producer_send_latency_ms",
        "danube_wal_flush_latency_ms",
        "danube_cloud_upload_latency_ms",
    }
    assert BY_NAME["danube_topic_messages_in_total"].labels == ("topic",)


def test_metric_is_told_in_base_units():
    slow = Histogram((1.0, 500.0))
    slow.observe(250.0, 4)
    text = format_families(
        [Family("wal.writer_sync_latency_ms", {(): slow}), Family("broker.schema_misfits", {(): 7})]
    )
    values, _ = read(text)
    assert values[label("ister_wal_writer_sync_latency_seconds_sum")] == 1.0
    assert values[label("ister_wal_writer_sync_latency_seconds_bucket", le="0.5")] == 4
    assert values[label("ister_wal_writer_sync_latency_seconds_bucket", le="0.001")] == 0
    assert values[label("ister_broker_schema_mismatches_total")] == 7
    helped = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    new = "ister_wal_writer_sync_latency_seconds"
    assert helped[new] == "one fdatasync of the active file (s)"
    assert "# TYPE ister_broker_schema_mismatches_total counter" in text


# -- where it is counted ----------------------------------------------------------------------


async def test_messages_held_against_a_schema_are_counted_by_reason(tmp_path):
    async with a_broker(tmp_path) as (broker, _, _):
        await broker.topics.get_or_create(NAME, is_reliable=True)
        schemas = broker.schemas

        def work():
            schema = schemas.register("s", "json_schema", b'{"type": "object"}')
            schemas.configure_topic(NAME, "s", ValidationPolicy.WARN, checks_payload=True)
            for schema_id, payload in (
                (schema.schema_id, b"{}"),
                (schema.schema_id, b"[]"),
                (None, b"{}"),
                (999, b"{}"),
            ):
                schemas.check_message(
                    NAME, schema_id=schema_id, schema_version=None, payload=payload
                )

        await asyncio.to_thread(work)
        values, _ = read(await exposition(broker).text())
        assert values[label("danube_schema_validation_total", topic=NAME)] == 4
        for reason in ("payload", "missing_schema_id", "unknown_schema_id"):
            failed = label("danube_schema_validation_failures_total", topic=NAME, reason=reason)
            assert values[failed] == 1, reason
