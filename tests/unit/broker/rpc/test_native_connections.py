"""Connections that this process accepted, ended when they are too many, silent or idle."""

import os
import resource
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress

import grpc
import pytest

from ister.broker.rpc.native_connections import ConnectionLimits
from tests.support.clock import ManualClock

OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
LONG = 3600.0
GOAWAY = bytes([0, 0, 8, 7, 0, 0, 0, 0, 0]) + struct.pack(">II", 2**31 - 1, 0)


class Port:
    """A listening port of this process, and pairs of accepted and connecting sockets."""

    def __init__(self, stack, host="127.0.0.1"):
        self._stack = stack
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = stack.enter_context(socket.create_server((host, 0), family=family))
        self.number = self.listener.getsockname()[1]

    def connect(self, first=b""):
        client = self._stack.enter_context(
            socket.create_connection(self.listener.getsockname()[:2], timeout=60)
        )
        accepted = self._stack.enter_context(self.listener.accept()[0])
        if first:
            client.sendall(first)
        return client, accepted

    def limits(self, **settings):
        return ConnectionLimits(
            self.number,
            **{"count_max": 100, "silent_seconds": LONG, "idle_seconds": LONG, **settings},
        )


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def port(stack):
    return Port(stack)


def is_ended(accepted):
    """Whether a connection was ended from this side, without a word of the other one."""
    accepted.setblocking(False)
    with suppress(BlockingIOError):
        while data := accepted.recv(4096):
            assert data
        return True
    return False


def scan_until(limits, condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        limits.scan()
        time.sleep(0.01)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_newest_beyond_the_limit_are_ended(stack, host):
    port = Port(stack, host)
    limits = port.limits(count_max=2)
    old = [port.connect()[1] for _ in range(2)]
    limits.scan()
    new = [port.connect()[1] for _ in range(3)]
    limits.scan()
    assert [is_ended(one) for one in old] == [False, False]
    assert [is_ended(one) for one in new] == [True] * 3
    assert limits.count == 2


def test_nothing_but_connections_of_the_port_is_touched(stack, port):
    other = Port(stack)
    pairs = [other.connect() for _ in range(3)]
    ours = [port.connect() for _ in range(2)]
    bystanders = [
        *socket.socketpair(),
        stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
    ]
    limits = port.limits(count_max=0, silent_seconds=0.0)
    limits.scan()
    assert [is_ended(accepted) for _, accepted in ours] == [True, True]
    for client, accepted in pairs:
        client.sendall(b"x")
        accepted.settimeout(10)
        assert accepted.recv(1) == b"x"
    bystanders[0].send(b"x")
    assert bystanders[1].recv(1) == b"x"
    for one in bystanders:
        one.close()
    # The port itself goes on.
    assert not is_ended(port.connect()[1])


def test_a_descriptor_that_became_another_connection_is_a_new_one(port):
    clock = ManualClock()
    limits = port.limits(silent_seconds=10.0, clock=clock)
    client, accepted = port.connect()
    limits.scan()
    number = accepted.fileno()
    clock.advance(11.0)  # the first one would be due
    accepted.close()
    client.close()
    _, second = port.connect()
    if second.fileno() != number:
        os.dup2(second.fileno(), number)
        second.close()
        second = socket.socket(fileno=number)
    limits.scan()
    assert not is_ended(second)
    clock.advance(11.0)
    limits.scan()
    assert is_ended(second)
    second.close()


def test_silent_ones_are_ended_and_those_that_spoke_stay(port):
    limits = port.limits(silent_seconds=0.05)
    _, silent = port.connect()
    _, halting = port.connect(OPENING[:-1])
    _, spoke = port.connect(OPENING)
    scan_until(limits, lambda: is_ended(silent) and is_ended(halting))
    assert not is_ended(spoke)
    assert limits.count == 1


def test_an_idle_one_is_told_to_go_and_ended_if_it_stays(port):
    limits = port.limits(silent_seconds=0.05, idle_seconds=0.3, leave_seconds=0.2)
    client, accepted = port.connect(OPENING)
    found = b""

    def is_told():
        nonlocal found
        client.setblocking(False)
        with suppress(BlockingIOError):
            found += client.recv(100)
        return bool(found)

    scan_until(limits, is_told)
    assert found == GOAWAY
    assert not is_ended(accepted)
    scan_until(limits, lambda: is_ended(accepted))


def test_one_that_goes_on_talking_is_not_idle(port):
    limits = port.limits(silent_seconds=0.05, idle_seconds=0.4)
    client, accepted = port.connect(OPENING)
    _, idle = port.connect(OPENING)
    client.setblocking(False)

    def idle_was_told():
        client.send(b"x")
        limits.scan()
        return limits._connections[idle.fileno()].is_leaving

    scan_until(limits, idle_was_told)
    with pytest.raises(BlockingIOError):
        client.recv(100)
    assert not is_ended(accepted)


def test_the_thread_finds_a_flood_before_its_next_scan(port, monkeypatch):
    """The lowest free descriptor tells that many files were opened."""
    monkeypatch.setattr("ister.broker.rpc.native_connections._SCAN_SECONDS", LONG)
    limits = port.limits(count_max=5)
    before = len(os.listdir("/proc/self/fd"))
    limits.start()
    try:
        deadline = time.monotonic() + 60
        while limits._scan_from == 0:  # the first scan, which is due at once
            assert time.monotonic() < deadline
            time.sleep(0.01)
        accepted = [port.connect()[1] for _ in range(30)]
        while sum(map(is_ended, accepted)) < 25:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        limits.close()
    assert sum(map(is_ended, accepted)) == 25
    for one in accepted:
        one.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 30, "descriptors are left behind"


def test_no_descriptor_is_left_and_connections_are_ended_all_the_same(port):
    limits = port.limits(count_max=1)
    pairs = [port.connect() for _ in range(4)]
    assert limits._may_be_too_many()  # takes its spares
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        assert limits._may_be_too_many()
        limits.scan()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
        limits._release_spares()
    assert [is_ended(accepted) for _, accepted in pairs] == [False, True, True, True]


def test_a_grpc_client_that_was_idle_comes_again_with_its_next_call(stack):
    """It leaves when it is told to, and connects again; no call of it fails."""
    native = pytest.importorskip("pygrpc_native")
    front = native.NativeGrpcFront("127.0.0.1:0", [("/echo.Echo/Say", False)])
    stack.callback(front.close)
    front.start()

    def answer():
        while (events := front.recv_batch(16)) is not None:
            for _, call, _, payload, _ in events:
                front.respond(call, payload)

    answering = threading.Thread(target=answer)
    answering.start()
    stack.callback(answering.join)
    stack.callback(front.close)
    limits = ConnectionLimits(
        front.bound_port, count_max=10, silent_seconds=0.05, idle_seconds=0.2, leave_seconds=LONG
    )
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{front.bound_port}"))
    say = channel.unary_unary("/echo.Echo/Say")
    for number in range(3):
        assert say(b"%d" % number, timeout=60) == b"%d" % number
        limits.scan()
        assert limits.count == 1
        scan_until(limits, lambda: limits.count == 0)
