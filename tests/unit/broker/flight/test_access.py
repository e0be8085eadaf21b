"""Who calls Flight: the broker's guard in front of its service, asked by pyarrow's own client."""

import contextlib
import threading

import pytest

pytest.importorskip("pyarrow")

import grpc
import pyarrow as pa
from pyarrow import flight

from ister.broker.flight.broker_source import FlightAccess
from ister.broker.flight.failures import explain
from ister.broker.flight.service import SERVICE
from ister.broker.security import grpc_guard
from ister.broker.security.grpc_guard import GrpcGuard
from ister.config import load_config
from ister.errors import PermissionDeniedError, UnauthenticatedError
from ister.topic.log import Log
from ister.wire.contract import Action, RangeTicket
from ister.wire.errors import decode_error
from tests.servers.flight import FlightServer, LogSource
from tests.support.certificates import Authority

ORDERS = "/default/orders"
SERVERS, CLIENTS = Authority("servers"), Authority("clients")


class Seen(FlightAccess):
    """Remembers who called; something happens when a call is looked at for the third time."""

    def __init__(self, guard):
        super().__init__(guard)
        self.names = []
        self.happens = None

    def caller(self):
        caller = super().caller()
        self.names.append(caller.name)
        check, looks = caller.check, []

        def checked(*args, **more):
            looks.append(args)
            if len(looks) == 3 and self.happens is not None:
                self.happens()
            check(*args, **more)

        caller.check = checked
        return caller


@contextlib.contextmanager
def serving(rig, *, is_guarded=True):
    guard = GrpcGuard(rig.guard, texts={SERVICE: lambda error: explain(error)[1]})
    storage = {"mode": "local_only", "wal": {"dir": str(rig.directory / "wal")}}
    with Log(load_config({"storage": storage}, {})) as log:
        log.topic(ORDERS, create=True)
        access, source = Seen(rig.guard), LogSource(log)
        with FlightServer(
            source, access=access, interceptors=[guard] if is_guarded else []
        ) as server:
            server.access, server.log, server.source = access, log, source
            yield server


def client(server):
    return flight.connect(f"grpc://localhost:{server.port}")


def options(headers):
    return flight.FlightCallOptions(
        headers=[(name.encode(), value.encode()) for name, value in headers.items()], timeout=60
    )


def ask(server, connection, headers=None):
    """Who the server takes us for."""
    list(connection.do_action(flight.Action(Action.TOPICS, b""), options(headers or {})))
    return server.access.names[-1]


@contextlib.contextmanager
def refused(kind, flight_kind=flight.FlightError):
    with pytest.raises(flight_kind) as caught:
        yield
    error = decode_error(str(caught.value))
    assert isinstance(error, kind), caught.value


@pytest.fixture(autouse=True)
def quick_refusals(monkeypatch):
    monkeypatch.setattr("ister.broker.security.guard.REFUSAL_SECONDS", 0.01)


def test_every_method_needs_credentials(rig):
    """Goal: what is not supported says so, to those who may know."""
    with serving(rig) as server, client(server) as connection:
        descriptor = flight.FlightDescriptor.for_command(b"x")
        calls = {
            "GetFlightInfo": lambda headers: connection.get_flight_info(descriptor, headers),
            "GetSchema": lambda headers: connection.get_schema(descriptor, headers),
            "ListFlights": lambda headers: list(connection.list_flights(b"", headers)),
            "DoExchange": lambda headers: connection.do_exchange(descriptor, headers)[1].read_all(),
        }
        for name, call in calls.items():
            with refused(UnauthenticatedError, (flight.FlightUnauthenticatedError, OSError)):
                call(options({}))
            with pytest.raises(pa.ArrowNotImplementedError, match=f"{name} is not supported"):
                call(options(rig.bearer("alice")))
        with refused(UnauthenticatedError):
            list(connection.list_actions(options({})))
        assert len(list(connection.list_actions(options(rig.bearer("alice"))))) == len(Action)
        with pytest.raises(flight.FlightUnauthenticatedError):
            connection.authenticate_basic_token("alice", "secret")


def test_server_without_the_guard_knows_nobody(rig):
    with (
        serving(rig, is_guarded=False) as server,
        client(server) as connection,
        refused(UnauthenticatedError),
    ):
        ask(server, connection, rig.bearer("root"))


@pytest.mark.parametrize("how", ["nothing", "token", "right", "key"])
def test_read_ends_when_its_caller_is_no_longer_welcome(rig, how):
    name, kind = ("loader", "service") if how == "key" else ("alice", "user")
    binding = rig.allow(name, "consumer", topic=ORDERS, kind=kind)
    headers = rig.bearer("alice", lifetime_seconds=100)
    if how == "key":
        headers = {"x-api-key": rig.api_key("loader")}

    def change():
        if how == "token":
            rig.clock.advance(100)
        elif how == "right":
            rig.revoke(binding)
            rig.clock.advance(1)
        elif how == "key":
            rig.withdraw_keys()

    with serving(rig) as server, client(server) as connection:
        topic = server.log.topic(ORDERS)
        for number in range(24):
            topic.append(bytes([number]) * 1_000_000)
        topic.flush()
        ticket = RangeTicket(topic=ORDERS, start=0, end=24, columns=("payload",), incarnation="")
        server.access.happens = change
        reader = connection.do_get(flight.Ticket(ticket.to_json()), options(headers))
        if how == "nothing":
            assert reader.read_all().num_rows == 24
            return
        with refused(PermissionDeniedError if how == "right" else UnauthenticatedError):
            reader.read_all()


def test_paths_of_the_server_are_for_administrators_alone(rig):
    rig.allow("alice", "consumer", topic=ORDERS)
    rig.allow("ada", "admin")
    with serving(rig) as server, client(server) as connection:

        def settings(name):
            action = flight.Action(Action.STORAGE, b"")
            [answer] = connection.do_action(action, options(rig.bearer(name)))
            return answer.body.to_pybytes().decode()

        with refused(PermissionDeniedError):
            settings("nobody")
        assert str(rig.directory) in settings("ada")
        assert str(rig.directory) not in settings("alice")
        # Without the path of a bucket, nobody could do anything with the settings.
        bucket = {"wal": {"dir": "/srv/wal"}, "cloud": {"backend": "fs", "root": "/srv/bucket"}}
        server.source.config = load_config({"storage": bucket}, {})
        assert "/srv/bucket" in settings("ada")
        with refused(PermissionDeniedError):
            settings("alice")


def test_nothing_of_a_request_is_read_before_its_caller_is_known(rig, monkeypatch):
    """Goal: a body of any size costs nothing. Method: the guard would wait for one that never ends.

    The call sends no message at all, and is refused all the same.
    """
    read = []

    async def read_one(context):
        read.append(context)
        return await context.read()

    monkeypatch.setattr(grpc_guard, "_read_one", read_one)
    with serving(rig) as server, grpc.insecure_channel(f"localhost:{server.port}") as channel:
        call = channel.stream_stream(f"/{SERVICE}/DoAction")
        silent = threading.Event()

        def nothing():
            silent.wait(20)
            yield from ()

        with pytest.raises(grpc.RpcError) as caught:
            list(call(nothing(), timeout=60))
        silent.set()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert read == []
        answers = call(
            iter([b"\n\x06topics"]), timeout=60, metadata=tuple(rig.bearer("alice").items())
        )
        assert len(list(answers)) == len(read) == 1
