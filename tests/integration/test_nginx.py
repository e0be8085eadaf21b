"""TLS by a proxy before a plaintext broker: `deploy/nginx/ister.conf`, where nginx is installed."""

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from ister import wire
from ister.client import Client, TlsOptions
from ister.wire import danube, ister_api
from tests.servers.broker import BrokerProcess
from tests.servers.ports import free_port
from tests.support.broker import run
from tests.support.certificates import LOCAL_NAMES, Authority

CONF = Path(__file__).parents[2] / "deploy" / "nginx" / "ister.conf"
NGINX = shutil.which("nginx")
MIB = 1024 * 1024

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx")


class Proxied:
    """A broker, and nginx before it."""

    def __init__(self, broker, port, ca_file):
        self.broker, self.address, self.ca_file = broker, f"localhost:{port}", ca_file

    def channel(self, **options):
        credentials = grpc.ssl_channel_credentials(Path(self.ca_file).read_bytes())
        return grpc.aio.secure_channel(self.address, credentials, options=list(options.items()))


@pytest.fixture(scope="module")
def proxied(tmp_path_factory, engine):
    directory = tmp_path_factory.mktemp("nginx")
    authority = Authority()
    certificate, key = authority.issue("broker", names=LOCAL_NAMES).write(directory, "broker")
    ca_file = authority.write(directory)
    port, flight = free_port(), free_port()
    settings = {
        "broker": {
            "advertised": {
                "broker_url": f"https://localhost:{port}",
                "flight_url": f"grpc+tls://localhost:{flight}",
            }
        }
    }
    with BrokerProcess(directory, settings=settings, engine=engine) as broker:
        changes = {
            "/etc/ister/broker.pem": certificate,
            "/etc/ister/broker.key": key,
            "127.0.0.1:16650": broker.address,
            "127.0.0.1:16651": broker.flight,
            "listen 6650": f"listen 127.0.0.1:{port}",
            "listen 6651": f"listen 127.0.0.1:{flight}",
            "http {\n": "http {\n"
            + "".join(
                f"    {kind}_temp_path {directory / kind};\n"
                for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
            ),
        }
        text = CONF.read_text()
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        conf = directory / "nginx.conf"
        conf.write_text(f"daemon off;\npid {directory / 'nginx.pid'};\nuser root;\n{text}")
        command = [NGINX, "-p", str(directory), "-c", str(conf), "-e", "stderr"]
        subprocess.run([*command, "-t"], check=True, capture_output=True, timeout=30)
        with subprocess.Popen(command) as nginx:
            try:
                yield Proxied(broker, port, ca_file)
            finally:
                nginx.terminate()
                nginx.wait()


def test_a_client_publishes_and_consumes_through_the_proxy(proxied):
    with Client(proxied.address, tls=TlsOptions(ca=proxied.ca_file)) as client:
        with client.producer("/default/proxied", name="shop", create=True) as producer:
            for number in range(20):
                producer.send(b"%d" % number)
        with client.consumer("/default/proxied", subscription="sub", start="earliest") as consumer:
            found = []
            for message in consumer:
                found.append(message.payload)
                consumer.ack(message)
                if len(found) == 20:
                    break
    assert found == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize(
    ("size", "compression", "expected"),
    [
        (12 * MIB, grpc.Compression.NoCompression, "RESOURCE_EXHAUSTED"),
        (MIB, grpc.Compression.Gzip, "UNIMPLEMENTED"),
    ],
)
def test_what_the_engine_would_take_in_is_refused_before(proxied, size, compression, expected):
    async def send():
        async with proxied.channel() as channel:
            await wire.stub(channel, "ister.Admin").Info(ister_api.InfoRequest(), timeout=60)
            method = channel.unary_unary("/danube.ProducerService/SendMessage")
            message = danube.StreamMessage(payload=bytes(size)).SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(message, compression=compression, timeout=60)
            return caught.value

    error = run(send())
    assert error.code().name == expected
    assert error.details()
