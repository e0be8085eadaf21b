"""What Python programs reach for: fixtures, JSON, graceful ends, tables. One broker for all.

The examples of `examples/` that talk to a broker are run here, too, in this process.
"""

import ast
import asyncio
import json
import logging
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")

import ister
import ister.client
from ister import testing
from ister.client import (
    Admin,
    AsyncAdmin,
    AsyncClient,
    AsyncReader,
    Client,
    JsonSerializer,
    Reader,
    TlsOptions,
)
from ister.client.flight import FlightClient
from ister.errors import (
    ClosedError,
    ConfigError,
    InvalidRequestError,
    IsterError,
    NoAnswerError,
    NotFoundError,
)
from ister.testing import run_broker
from tests.servers.ports import free_port
from tests.support.broker import run
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.example_runs import EXAMPLES, rows_of_table
from tests.support.waiting import eventually

PATIENCE = 180.0


@dataclass
class Order:
    number: int
    shop: str


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """The broker's threads come and go with its work; `broker` sees to it that all end."""
    return


@pytest.fixture(scope="module")
def broker():
    before = set(threading.enumerate())
    with run_broker() as broker:
        yield broker
    left = {one.name for one in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("ister-")} - {"ister-kernels"}


@pytest.fixture
def client(broker):
    with broker.client(timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def topic(broker):
    return broker.topic_name()


def fill(client, topic, count=3):
    with client.producer(topic, create=True) as producer:
        for number in range(count):
            producer.send_json({"number": number})


# -- payloads -------------------------------------------------------------------------------


def test_json_is_sent_and_received(client, topic):
    with client.producer(topic, create=True) as producer:
        assert producer.send_json({"a": [1]}, routing_key="k", attributes={"x": "y"}).result() == 0
        producer.send(b"not JSON")
        with pytest.raises(InvalidRequestError):
            producer.send_json(object())
        with pytest.raises(InvalidRequestError) as caught:
            producer.send("text")
        assert "send_json" in caught.value.hint
    with client.consumer(topic, "s") as consumer:
        good, bad = consumer.messages(limit=2)
        assert (good.json(), good.text(), good.value) == ({"a": [1]}, '{"a":[1]}', b'{"a":[1]}')
        assert (good.routing_key, good.attributes) == ("k", {"x": "y"})
        assert bad.text() == "not JSON"
        with pytest.raises(InvalidRequestError) as caught:
            bad.json()
        assert (caught.value.topic, caught.value.offset) == (topic, 1)


def test_options_of_a_message_are_known_or_refused(client, topic, broker):
    """Goal: a misspelt key is no message without a key, whichever method sends it."""
    with client.producer(topic, create=True) as producer:
        methods = (producer.send, producer.publish, producer.send_json, producer.publish_json)
        for method in methods:
            with pytest.raises(TypeError, match="kye"):
                method(b"x" if "json" not in method.__name__ else "x", kye="k")
            with pytest.raises(InvalidRequestError, match="routing_key"):
                method(b"x" if "json" not in method.__name__ else "x", key="a", routing_key="b")
        assert producer.publish(b"0", key="k") == 0
        assert producer.publish_json(1, key="k", routing_key="k") == 1

    async def scenario():
        async with AsyncClient(broker.address) as client, client.producer(topic) as producer:
            with pytest.raises(TypeError, match="kye"):
                await producer.publish_json(1, kye="k")
            return await producer.publish(b"2", key="k"), await producer.publish_json(3, key="k")

    assert asyncio.run(scenario()) == (2, 3)
    with client.consumer(topic, "s", start="earliest") as consumer:
        assert [message.routing_key for message in consumer.messages(limit=4)] == ["k"] * 4


def test_serializers(client, topic):
    class Own:
        def serialize(self, value):
            return b"%d" % value

        def deserialize(self, payload):
            return int(payload)

    for serializer, value in (
        ("json", {"a": 1}),
        ("text", "Donau"),
        ("bytes", b"x"),
        (JsonSerializer(Order), Order(1, "Ulm")),
        (Own(), 7),
    ):
        with client.producer(topic, create=True, serializer=serializer) as producer:
            offset = producer.publish(value)
        subscription = f"s-{offset}"
        with client.consumer(topic, subscription, start=offset, serializer=serializer) as consumer:
            assert consumer.receive(PATIENCE).value == value
    with client.producer(topic, serializer="text") as producer:
        with pytest.raises(InvalidRequestError):
            producer.send(b"x")
        assert producer.send_json("x").result() == 5, "whatever the serializer"
    for make in (client.producer, lambda *args, **named: client.consumer(*args, "s", **named)):
        with pytest.raises(InvalidRequestError):
            make(topic, serializer="yaml")


# -- asyncio --------------------------------------------------------------------------------


async def test_an_ack_can_be_awaited(broker, client, topic):
    fill(client, topic)

    async with AsyncClient(broker.address, timeout=PATIENCE) as client:
        consumer = await client.consumer(topic, "s")
        first, second, third = [one async for one in consumer.messages(limit=3)]
        await consumer.ack(first)
        await consumer.ack(first)
        assert (await client.admin.describe_subscription(topic, "s")).cursor == 1
        ack = consumer.ack(second)
        await asyncio.gather(ack, consumer.ack(third))
        assert (await client.admin.describe_subscription(topic, "s")).cursor == 3
        await consumer.close()
        await ack, "confirmed before"
        with pytest.raises(ClosedError):
            consumer.ack(third)


async def test_a_nack_does_not_hold_up_the_end(broker, client, topic):
    fill(client, topic, 1)

    async with AsyncClient(broker.address, timeout=PATIENCE) as client:
        consumer = await client.consumer(topic, "s")
        message = await consumer.receive(PATIENCE)
        await consumer.nack(message, delay=0)
        message = await consumer.receive(PATIENCE)
        assert message.attempt == 2
        consumer.nack(message)
        await consumer.close()


def test_async_for_ends_when_the_consumer_is_stopped(broker, client, topic):
    fill(client, topic)

    async def scenario():
        found = []
        async with (
            AsyncClient(broker.address, timeout=PATIENCE) as client,
            client.consumer(topic, "s") as consumer,
        ):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, consumer.stop)
            try:
                async for message in consumer:
                    found.append(message.offset)
                    if message.offset == 1:
                        signal.raise_signal(signal.SIGUSR1)
                        await asyncio.sleep(0.01)
                    consumer.ack(message)
            finally:
                loop.remove_signal_handler(signal.SIGUSR1)
            with pytest.raises(ClosedError):
                await consumer.receive()
            waiting = await client.consumer(topic, "t", start="latest")
            loop.call_later(0.01, waiting.stop)
            assert [one async for one in waiting] == []
        return found

    assert run(scenario()) == [0, 1]
    assert client.admin.describe_subscription(topic, "s").cursor == 2


# -- blocking -------------------------------------------------------------------------------


def test_for_ends_when_a_signal_handler_stops_the_consumer(client, topic):
    fill(client, topic)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with client.consumer(topic, "s") as consumer:
            signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
            found = []
            for message in consumer:
                found.append(message.offset)
                if message.offset == 1:
                    # In the midst of a call, as a signal may come.
                    with consumer._core.lock():
                        signal.raise_signal(signal.SIGUSR1)
                consumer.ack(message)
        consumer.stop()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [0, 1]
    assert client.admin.describe_subscription(topic, "s").cursor == 2


@pytest.mark.parametrize("end", ["stop", "close"])
def test_for_ends_when_another_thread_ends_the_consumer(client, topic, end):
    fill(client, topic, 1)
    with client.consumer(topic, "s") as consumer:
        found = []
        began = threading.Event()

        def work():
            for message in consumer:
                found.append(message.offset)
                consumer.ack(message)
                began.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(PATIENCE)
        getattr(consumer, end)()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert found == [0]


# -- tables ---------------------------------------------------------------------------------


def test_a_topic_is_read_with_its_tail(broker, client, topic):
    fill(client, topic, 2)
    with client.producer(topic) as producer:
        producer.send(b"\xff", attributes={"a": "b"})
    reader = client.read_arrow(topic, columns=["offset", "text"])
    assert reader.read_all().to_pydict() == {
        "offset": [0, 1, 2],
        "text": ['{"number":0}', '{"number":1}', None],
    }
    assert client.admin.describe_topic(topic).tiered == 0, "nothing of it is in the bucket"
    assert client.read_arrow(topic, 1, end=2).read_all()["offset"].to_pylist() == [1]
    past = datetime.now(UTC) - timedelta(hours=1)
    assert client.read_arrow(topic, past, end=past).read_all().num_rows == 0
    assert client.read_arrow(topic, past).read_all().num_rows == 3
    with pytest.raises(NotFoundError):
        client.read_arrow("/default/none")

    async def scenario():
        async with AsyncClient(broker.address, timeout=PATIENCE) as client:
            count = 0
            async for batch in client.read_arrow(topic, columns=["payload"]):
                count += batch.num_rows
            async for _ in client.read_arrow(topic):
                break
            return count

    assert run(scenario()) == 3


def test_tables_of_pandas_polars_and_duckdb(client, topic, broker):
    duckdb = pytest.importorskip("duckdb")
    polars = pytest.importorskip("polars")
    pytest.importorskip("pandas")
    fill(client, topic)
    with client.producer(topic) as producer:
        producer.publish(b"x", attributes={"a": "b"})
    table = client.table(topic)
    frame = table.to_pandas()
    assert list(frame["attributes"]) == [{}, {}, {}, {"a": "b"}]
    assert frame["publish_time"].dt.tz is not None
    assert table.to_polars()["offset"].to_list() == [0, 1, 2, 3]
    assert polars.DataFrame(table).height == 4
    texts = client.table(topic, end=3, columns=["text"])
    query = "SELECT sum(CAST(text::JSON->>'number' AS INTEGER)) FROM {}"
    assert texts.to_duckdb().query("t", query.format("t")).fetchall() == [(3,)]
    with duckdb.connect() as connection:
        relation = texts.to_duckdb(connection)
        assert relation.query("t", query.format("t")).fetchall() == [(3,)]
    assert texts.to_arrow().num_rows == len(texts.read_arrow().read_all()) == 3
    with client.producer(topic) as producer:
        producer.publish(b"y")
    assert table.to_arrow().num_rows == 5, "each use reads it anew"

    async def scenario():
        async with AsyncClient(broker.address, timeout=PATIENCE) as other:
            table = other.table(topic, end=3, columns=["text"])
            counts = [batch.num_rows async for batch in table.read_arrow()]
            frames = await table.to_arrow(), await table.to_pandas(), await table.to_polars()
            relation = await table.to_duckdb()
            return sum(counts), *map(len, frames), relation.count("*").fetchall()[0][0]

    assert run(scenario()) == (3, 3, 3, 3, 3)


def test_both_clients_have_the_same_methods():
    for kinds, only in (
        ((Client, AsyncClient), set()),
        ((Admin, AsyncAdmin), {"dead_letters"}),  # an iterator of what show_dead_letters returns
        ((Reader, AsyncReader), set()),
    ):
        blocking, awaited = ({*dir(kind)} - {"joined", "left"} for kind in kinds)
        assert {name for name in blocking ^ awaited if not name.startswith("_")} == only, kinds
    assert {"table", "read_arrow", "producer", "reader", "topics"} <= {*dir(AsyncClient)}


def test_calls_without_a_broker_say_what_was_tried(monkeypatch):
    monkeypatch.setattr("ister.client.core.network.DEFAULT_TIMEOUT_SECONDS", 0.3)
    address = f"127.0.0.1:{free_port()}"
    with Client(address) as client:
        for call in (client.topics, lambda: client.producer("/default/t")):
            with pytest.raises(NoAnswerError) as caught:
                call()
            assert caught.value.address == address
            assert "refused" in caught.value.reason
            assert "timeout=" in caught.value.hint


def test_client_certificates_are_shown_to_flight_too(tmp_path):
    servers, clients = Authority("servers"), Authority("clients")
    cert_file, key_file = servers.issue("broker", names=LOCAL_NAMES).write(tmp_path, "broker")
    own_cert, own_key = clients.issue("reader").write(tmp_path, "reader")
    trusted = clients.write(tmp_path, "clients")
    tls = {"cert_file": cert_file, "key_file": key_file, "ca_file": trusted}
    tls["client_auth"] = "required"
    ca = servers.write(tmp_path, "servers")
    with run_broker({"broker": {"tls": tls}}) as broker:
        shown = TlsOptions(ca=ca, cert=own_cert, key=own_key)
        with Client(broker.address, tls=shown, timeout=PATIENCE) as client:
            fill(client, "/default/t")
            assert client.read_arrow("/default/t").read_all().num_rows == 3
        with (
            FlightClient(
                f"grpc+tls://{broker.flight}", tls_ca=Path(ca).read_bytes(), timeout_seconds=5
            ) as unknown,
            pytest.raises(IsterError),
        ):
            unknown.topics()


# -- examples -------------------------------------------------------------------------------


def run_main(script, broker, capsys):
    """What an example prints that is given a broker."""
    found = runpy.run_path(str(EXAMPLES / script), run_name="example")
    found["main"](["--broker", broker.address])
    return capsys.readouterr().out


def test_a_service_publishes(broker, client, capsys):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    assert run_main("fastapi_publisher.py", broker, capsys).splitlines() == [
        "Ulm orders for 12.5: 201",
        "Linz orders for 3: 201",
        "Ruse orders for -1: 422",
        'in the topic: {"shop":"Ulm","amount":12.5}',
        'in the topic: {"shop":"Linz","amount":3.0}',
    ]
    keys = client.read_arrow("/default/web-orders", columns=["routing_key"]).read_all()
    assert keys["routing_key"].to_pylist() == ["Ulm", "Linz"]


def test_workers_end_gracefully(broker, client, capsys, request):
    # asyncio gives SIGINT back to Python, whoever had it before; Spark's session takes it, too.
    others = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, others))
    before = [signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)]
    printed = run_main("asyncio_worker.py", broker, capsys)
    done = dict(re.findall(r"^(\S+): (\d+) orders$", printed, re.M))
    assert done.pop("failed") == "6"
    assert sum(map(int, done.values())) == 60
    described = client.admin.describe_subscription("/default/worker-orders", "billing")
    assert (described.cursor, described.lag, described.kind) == (60, 0, "shared")
    assert before == [signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)]


def test_sql_over_a_topic(broker, capsys):
    pytest.importorskip("duckdb")
    printed = run_main("duckdb_tail.py", broker, capsys)
    for title, count in (("What each shop has sold:", 900), ("A hundred orders later:", 1000)):
        expected = [
            [shop, str(len(amounts)), f"{sum(amounts):.2f}"]
            for at, shop in enumerate(("Linz", "Ruse", "Ulm"))
            if (amounts := [n % 39 + 0.25 for n in range(at, count, 3)])
        ]
        assert rows_of_table(printed, title)[-3:] == expected
    assert "In the last five minutes: 1000" in printed


def test_a_micro_batch_is_in_a_delta_table_once(tmp_path):
    """The example's commits; `test_jobs_export` runs all of it at night."""
    pytest.importorskip("pyspark")
    deltalake = pytest.importorskip("deltalake")
    script = runpy.run_path(str(EXAMPLES / "spark_to_delta.py"), run_name="example")
    script["publish"](str(tmp_path / "data"), 4)
    with ister.open(tmp_path / "data") as log:
        topic = log.topic(script["TOPIC"])
        assert topic.watermarks.tiered >= 3
        rows = SimpleNamespace(toArrow=topic.table(columns=["offset", "text"]).to_arrow)
        table = str(tmp_path / "table")
        assert [script["commit"](table, rows, batch) for batch in (0, 0, 1, 0, 1)] == [
            *(True, False, True),
            *(False, False),
        ]
    found = deltalake.DeltaTable(table)
    assert found.version() == 1
    assert sorted(found.to_pyarrow_table()["offset"].to_pylist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_notebook(broker, client, monkeypatch):
    """Goal: each cell runs, and what a notebook shows of a cell is there."""
    pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    pytest.importorskip("pandas")
    monkeypatch.setenv("ISTER_BROKER", broker.address)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    names, shown = {}, []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "the file is kept without outputs"
        *body, last = ast.parse("".join(cell["source"])).body
        if not isinstance(last, ast.Expr):
            body.append(last)
        exec(compile(ast.Module(body, []), cell["id"], "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else value)
    topic, table, frame, revenue, count, _ = shown
    assert ">300<" in topic
    assert "{&quot;order&quot;:0,&quot;shop&quot;:&quot;Linz&quot;" in table
    assert re.findall(r"<td>(\d+)</td>", frame) == ["100"] * 3
    for at in range(3):
        assert f"{sum(n % 39 + 0.25 for n in range(at, 300, 3)):.2f}" in revenue
    assert count == 100
    with pytest.raises(ClosedError):
        names["client"].topics()


# -- ister.testing --------------------------------------------------------------------------

CONFTEST = 'pytest_plugins = ["ister.testing"]\n'
INNER = """
import ast
import asyncio
import json
import logging
import re
import runpy
from pathlib import Path

from ister.client import AsyncClient

seen = []

def names(client):
    return [one["topic"] for one in client.admin.list_topics()]

def test_a_topic_of_its_own(ister_client, ister_topic, ister_broker):
    assert names(ister_client) == [ister_topic]
    with ister_client.producer(ister_topic) as producer:
        assert producer.send_json({"a": 1}).result() == 0
    seen.append((ister_broker, ister_topic))
    Path("place").write_text(ister_broker.directory)

def test_asyncio(ister_broker, ister_topic, ister_client):
    (broker, topic), = seen
    assert broker is ister_broker
    assert topic != ister_topic
    assert names(ister_client) == [ister_topic], "the other one is deleted"

    async def scenario():
        async with AsyncClient(ister_broker.address) as client:
            async with client.producer(ister_topic) as producer:
                await producer.send_json(1)
            async with client.consumer(ister_topic, "s") as consumer:
                async for message in consumer:
                    await consumer.ack(message)
                    consumer.stop()
            return message.json()

    assert asyncio.run(scenario()) == 1

def test_a_topic_that_the_test_deletes(ister_client, ister_topic):
    ister_client.admin.delete_topic(ister_topic)
"""


OUTER = """
import threading

import pytest

code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist"])
ours = [one for one in threading.enumerate() if one.name.startswith("ister-")]
for one in ours:
    one.join(0 if one.name == "ister-kernels" else 60)
left = {one.name for one in ours if one.is_alive()}
assert (code, left - {"ister-kernels"}) == (0, set())
"""


def test_fixtures_give_a_broker_and_topics(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_inner_surface.py").write_text(INNER)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-c", OUTER],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    place = Path((tmp_path / "place").read_text())
    assert not place.exists()


def test_a_missing_extra_is_named():
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from ister.testing import run_broker\n"
        "try:\n    run_broker().__enter__()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.startswith("ConfigError ister.testing needs aiohttp")
    assert "pip install 'ister[broker]'" in done.stdout


def test_settings_and_a_directory_that_stays(tmp_path, monkeypatch):
    settings = {"storage": {"uploader": {"engine": "embedded", "interval_seconds": 1}}}
    with monkeypatch.context() as developer:
        developer.setenv("ISTER_STORAGE__MODE", "memory")
        running = run_broker(settings, directory=tmp_path / "data")
        broker = running.__enter__()
    try:
        with broker.client(timeout=PATIENCE) as client:
            fill(client, "/default/orders")
            eventually(lambda: client.admin.describe_topic("/default/orders").tiered == 3)
        with ister.open_bucket(broker.directory) as history:
            assert history.topic("/default/orders").read_arrow().read_all().num_rows == 3
        host, _, port = broker.address.rpartition(":")
        socket.create_connection((host, int(port)), PATIENCE).close()
    finally:
        running.__exit__(None, None, None)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), PATIENCE)
    with ister.open(tmp_path / "data") as log:
        assert [one.offset for one in log.topic("/default/orders").read()] == [0, 1, 2]


@pytest.mark.parametrize("settings", [{"broker": {"nothing": 1}}, {"broker": 7}, {"storage": []}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ConfigError), run_broker(settings):
        pass


def test_a_broker_that_cannot_start_says_why(tmp_path):
    with (
        run_broker(directory=tmp_path),
        pytest.raises(ister.DirectoryLockedError),
        run_broker(directory=tmp_path),
    ):
        pass


def test_reports_of_pollers_are_dropped_and_no_others():
    keeps = testing._PollerNoise().filter
    text = "Exception in callback PollerCompletionQueue._handle_events(...)"

    def record(text, error):
        info = None if error is None else (type(error), error, None)
        return logging.LogRecord("asyncio", 40, "", 1, text, (), info)

    assert not keeps(record(text, BlockingIOError()))
    assert keeps(record(text, None))
    assert keeps(record(text, ValueError()))
    assert keeps(record("Exception in callback of a program", BlockingIOError()))
