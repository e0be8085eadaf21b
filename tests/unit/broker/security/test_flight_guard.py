"""The guard in front of a real Flight server: mTLS, tokens, rights, streams that end."""

import contextlib
from datetime import timedelta

import pyarrow as pa
import pytest
from pyarrow import flight

from certificates import LOCAL_NAMES, Authority
from ister.broker.security.flight_guard import FlightAccess
from ister.broker.security.rights import Permission
from ister.broker.security.tls import ServerTls
from ister.client.contract import decode_error, encode_error
from ister.clock import SystemClock
from ister.config import ClientAuth, TlsConfig
from ister.errors import PermissionDeniedError, UnauthenticatedError
from security_rig import GuardRig

ORDERS = "/default/orders"
SERVERS, CLIENTS = Authority("servers"), Authority("clients")


class Server(flight.FlightServerBase):
    """Says who calls, and reads a topic that never ends."""

    def __init__(self, access, *, middleware=None, tls=None):
        self.access = access
        self.between = lambda: None
        scheme = "grpc" if tls is None else "grpc+tls"
        super().__init__(
            f"{scheme}://localhost:0",
            middleware=access.middleware if middleware is None else middleware,
            **({} if tls is None else tls.flight_options()),
        )

    def do_action(self, context, action):
        try:
            caller = self.access.caller(context)
            return [caller.name.encode(), str(caller._caller.peer).encode()]
        except Exception as error:
            raise flight.FlightServerError(encode_error(error)) from error

    def do_get(self, context, ticket):
        schema = pa.schema([("n", pa.int64())])

        def batches():
            try:
                caller = self.access.caller(context)
                for n in range(1000):
                    caller.check(Permission.CONSUME, topic=ticket.ticket.decode())
                    yield pa.record_batch([pa.array([n])], schema=schema)
                    self.between()
            except Exception as error:
                raise flight.FlightServerError(encode_error(error)) from error

        return flight.GeneratorStream(schema, batches())


@contextlib.contextmanager
def serving(rig, **more):
    server = Server(FlightAccess(rig.guard), **more)
    try:
        yield server
    finally:
        server.shutdown()
        server.wait()


def client(server, **more):
    scheme = "grpc+tls" if more else "grpc"
    return flight.connect(f"{scheme}://localhost:{server.port}", **more)


def options(headers):
    return flight.FlightCallOptions(
        headers=[(name.encode(), value.encode()) for name, value in headers.items()], timeout=30
    )


def ask(connection, headers=None):
    """Who the server takes us for."""
    results = connection.do_action(flight.Action("who", b""), options(headers or {}))
    return next(iter(results)).body.to_pybytes().decode()


@contextlib.contextmanager
def refused(kind):
    with pytest.raises(flight.FlightError) as caught:
        yield
    error = decode_error(str(caught.value))
    assert isinstance(error, kind), caught.value


@pytest.fixture
def rig(tmp_path):
    with GuardRig(tmp_path) as rig:
        yield rig


@pytest.fixture
def tls(tmp_path):
    directory = tmp_path / "tls"
    directory.mkdir()
    cert_file, key_file = SERVERS.issue("broker", names=LOCAL_NAMES).write(directory, "broker")
    return ServerTls(
        TlsConfig(
            cert_file=cert_file,
            key_file=key_file,
            ca_file=CLIENTS.write(directory),
            client_auth=ClientAuth.REQUIRED,
        ),
        clock=SystemClock(),
    )


def test_credentials_are_needed(rig):
    key = rig.api_key("loader")
    with serving(rig) as server, client(server) as connection:
        assert ask(connection, rig.bearer("alice")) == "user:alice"
        assert ask(connection, {"x-api-key": key}) == "service:loader"
        for headers in (
            {},
            {"authorization": "Bearer nonsense"},
            {"authorization": f"Basic {key}"},
            {"x-danube-internal-broker": "broker-1"},
            {"x-api-key": "ist_wrong"},
            {"authorization": "Bearer a.b.c"},
        ):
            with refused(UnauthenticatedError):
                ask(connection, headers)
    assert {line["outcome"] for line in rig.audited()} == {"unauthenticated"}


def test_expired_token_is_refused(rig):
    headers = rig.bearer("alice", lifetime_seconds=5)
    with serving(rig) as server, client(server) as connection:
        assert ask(connection, headers)
        rig.clock.advance(5)
        with refused(UnauthenticatedError):
            ask(connection, headers)


def test_server_without_the_middleware_knows_nobody(rig):
    with (
        serving(rig, middleware={}) as server,
        client(server) as connection,
        refused(UnauthenticatedError),
    ):
        ask(connection, rig.bearer("root"))


def test_auth_off_needs_nothing(tmp_path):
    with (
        GuardRig(tmp_path, mode="none") as rig,
        serving(rig) as server,
        client(server) as connection,
    ):
        assert ask(connection) == ""


@pytest.mark.parametrize("how", ["nothing", "token", "right", "key"])
def test_stream_ends_when_its_caller_is_no_longer_welcome(rig, how):
    binding = rig.allow("alice", "consumer", topic=ORDERS)
    rig.allow("loader", "consumer", topic=ORDERS, kind="service")
    headers = rig.bearer("alice", lifetime_seconds=100)
    if how == "key":
        headers = {"x-api-key": rig.api_key("loader")}
    with serving(rig) as server, client(server) as connection:
        reader = connection.do_get(flight.Ticket(ORDERS), options(headers))
        assert reader.read_chunk().data.num_rows == 1

        def change():
            server.between = lambda: None
            if how == "token":
                rig.clock.advance(100)
            elif how == "right":
                rig.revoke(binding)
                rig.clock.advance(1)
            elif how == "key":
                rig.withdraw_keys()

        server.between = change
        if how == "nothing":
            assert reader.read_all().num_rows > 900
            return
        with refused(PermissionDeniedError if how == "right" else UnauthenticatedError):
            reader.read_all()


def test_right_is_needed(rig):
    rig.allow("alice", "producer", topic=ORDERS)
    with serving(rig) as server, client(server) as connection, refused(PermissionDeniedError):
        connection.do_get(flight.Ticket(ORDERS), options(rig.bearer("alice"))).read_all()
    (line,) = rig.audited()
    assert (line["action"], line["resource"]) == ("flight/do_get", ORDERS)
    assert line["peer"]


def test_matrix_of_client_certificates(rig, tls):
    day = timedelta(days=1)
    clients = {
        "good": CLIENTS.issue("loader"),
        "none": None,
        "other authority": Authority("clients").issue("loader"),
        "expired": CLIENTS.issue("loader", start=-2 * day, end=-day),
    }
    with serving(rig, tls=tls) as server:
        for name, issued in clients.items():
            shown = {}
            if issued is not None:
                shown = {"cert_chain": issued.certificate, "private_key": issued.key}
            with client(server, tls_root_certs=SERVERS.certificate, **shown) as connection:
                if name == "good":
                    assert ask(connection, rig.bearer("alice")) == "user:alice"
                    with refused(UnauthenticatedError):
                        ask(connection)
                else:
                    with pytest.raises(flight.FlightUnavailableError):
                        ask(connection, rig.bearer("alice"))
        with client(server) as connection, pytest.raises(flight.FlightUnavailableError):
            ask(connection, rig.bearer("alice"))


@pytest.mark.parametrize(
    ("names", "principal"),
    [
        ((), "service:loader"),
        (("spiffe://example/loader", "loader.example"), "service:spiffe://example/loader"),
    ],
)
def test_certificate_says_who_it_is(tmp_path, tls, names, principal):
    issued = CLIENTS.issue("loader", names=names)
    with (
        GuardRig(tmp_path, mtls_principal=True) as rig,
        serving(rig, tls=tls) as server,
        client(
            server,
            tls_root_certs=SERVERS.certificate,
            cert_chain=issued.certificate,
            private_key=issued.key,
        ) as connection,
    ):
        assert ask(connection) == principal
        assert ask(connection, rig.bearer("alice")) == "user:alice"
        with refused(UnauthenticatedError):
            ask(connection, {"authorization": "Bearer nonsense"})
