"""The client of benchmarks: frames, headers, windows; and its workloads on a real broker."""

import json
import socket
import struct
import sys
import threading
from contextlib import contextmanager

import pytest

pytest.importorskip("grpc")

from benchmarks import http2, http2_client
from benchmarks.broker_servers import ENGINES, broker, engine_settings, why_not
from benchmarks.http2 import Loop, Method, decode_headers, encode_headers, frame
from ister.errors import InvalidRequestError, InvariantError, UnavailableError
from ister.wire import danube, ister_api

DESCRIBE = Method("/ister.Admin/DescribeTopic")
DESCRIBE_SUBSCRIPTION = Method("/ister.Admin/DescribeSubscription")
SEND = Method("/danube.ProducerService/SendMessage")


# -- headers --------------------------------------------------------------------------------


def test_headers_are_decoded_as_they_were_encoded():
    headers = {"grpc-status": "0", "grpc-message": "a" * 126}
    assert decode_headers(encode_headers(headers.items())) == headers


def test_headers_of_servers_are_decoded():
    for block, headers in [
        # RFC 7541, C.2.1 and, with its Huffman code, C.4.1 to C.4.3 and C.6.1.
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", {"custom-key": "custom-header"}),
        (
            "8287858440" + "8825a849e95ba97d7f" + "8925a849e95bb8e8b4bf",
            {"custom-key": "custom-value"},
        ),
        ("00" + "88" + "9acac8b21234da8f" + "8107", {"grpc-status": "0"}),
        # A literal of 1337 characters, whose length is C.1.2's.
        ("0001" + "61" + "7fba09" + "62" * 1337, {"a": "b" * 1337}),
    ]:
        assert decode_headers(bytes.fromhex(block)) == headers, block


def test_text_in_huffman_code_is_decoded():
    # RFC 7541, C.6.1: the value of `date`.
    content = bytes.fromhex("d07abe941054d444a8200595040b8166e082a62d1bff")
    assert http2._unpacked(content) == "Mon, 21 Oct 2013 20:13:21 GMT"


def test_header_that_was_sent_before_is_refused():
    with pytest.raises(InvalidRequestError, match="62"):
        decode_headers(b"\xbe")


# -- frames and windows ---------------------------------------------------------------------


class Peer:
    """The other end of a connection: a socket, read by frames."""

    def __init__(self, listener, settings=b""):
        self._socket, _ = listener.accept()
        self._file = self._socket.makefile("rb")
        assert self._file.read(len(http2.PREFACE)) == http2.PREFACE
        self.send(frame(http2.SETTINGS, 0, 0, settings))

    def send(self, data):
        self._socket.sendall(data)

    def read(self):
        high, low, kind, flags, stream = struct.unpack(">BHBBI", self._file.read(9))
        return kind, flags, stream, self._file.read(high << 16 | low)

    def read_data(self, count):
        """The streams of the next so many frames of data."""
        streams = []
        while len(streams) < count:
            kind, _, stream, _ = self.read()
            if kind == http2.DATA:
                streams.append(stream)
        return streams

    def answer(self, stream, *messages, status=b"0"):
        block = b"\0\x0bgrpc-status" + bytes([len(status)]) + status
        body = b"".join(struct.pack(">BI", 0, len(one)) + one for one in messages)
        self.send(
            frame(http2.HEADERS, http2.END_HEADERS, stream, b"\x88")
            + frame(http2.DATA, 0, stream, body)
            + frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, block)
        )

    def close(self):
        self._file.close()
        self._socket.close()


@contextmanager
def connected(settings=b""):
    """A connection of a loop, and its peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Loop() as loop:
        peers = []
        thread = threading.Thread(target=lambda: peers.append(Peer(listener, settings)))
        thread.start()
        connection = loop.connect("{}:{}".format(*listener.getsockname()))
        thread.join()
        try:
            yield loop, connection, peers[0]
        finally:
            peers[0].close()


def until(loop, condition):
    while not condition():
        loop.turn()


def test_calls_wait_for_the_window_of_the_server():
    """Goal: no byte too many. Method: a peer that renews its window once."""
    with connected() as (loop, connection, peer):
        message = bytes(1019)  # 1024 bytes with its prefix
        answers = []
        for _ in range(70):
            connection.call(SEND, message, answers.append)
        loop.flush(connection)
        assert peer.read_data(63) == list(range(1, 127, 2))
        assert connection.calls == 70
        peer.answer(1)
        until(loop, lambda: answers == [b""])
        # An answer gives no room. A ping is the last that is read before there is some.
        peer.send(frame(http2.PING, 0, 0, b"12345678"))
        loop.turn()
        while (read := peer.read())[0] != http2.PING:
            assert read[0] != http2.DATA
        assert read == (http2.PING, http2.ACK, 0, b"12345678")
        peer.send(frame(http2.WINDOW, 0, 0, struct.pack(">I", 7 * 1024)))
        loop.turn()
        assert peer.read_data(7) == list(range(127, 141, 2))


def test_calls_wait_for_the_number_that_the_server_allows():
    with connected(struct.pack(">HI", 3, 2)) as (loop, connection, peer):
        answers = []
        for _ in range(3):
            connection.call(SEND, b"x", answers.append)
        loop.flush(connection)
        assert peer.read_data(2) == [1, 3]
        peer.answer(1)
        until(loop, lambda: answers)
        assert peer.read_data(1) == [5]


def test_refused_call_is_made_again_when_another_has_ended():
    with connected() as (loop, connection, peer):
        answers = []
        for message in (b"one", b"two"):
            connection.call(SEND, message, answers.append)
        loop.flush(connection)
        assert peer.read_data(2) == [1, 3]
        peer.send(frame(http2.RESET, 0, 1, struct.pack(">I", 7)))
        peer.answer(3, b"second")
        until(loop, lambda: answers)
        assert peer.read_data(1) == [5]
        peer.answer(5, b"first")
        until(loop, lambda: len(answers) == 2)
        assert answers == [b"second", b"first"]


def test_call_that_fails_is_an_error():
    for sent, error in [
        (frame(http2.RESET, 0, 1, struct.pack(">I", 2)), "reset a call: 2"),
        (frame(http2.GOAWAY, 0, 0, bytes(8) + b"too many"), "too many"),
        (frame(http2.HEADERS, 5, 1, b"\0\x0bgrpc-status\x0213"), "SendMessage: status 13"),
        (frame(http2.HEADERS, 5, 1, b"\x88"), "SendMessage: status none"),
        (frame(http2.DATA, http2.END_STREAM, 1, bytes(5)), "trailers have to follow"),
    ]:
        with connected() as (loop, connection, peer):
            connection.call(SEND, b"x", [].append)
            peer.send(sent)
            with pytest.raises(UnavailableError, match=error):
                loop.turn()


def test_failure_after_many_that_went_well_is_an_error():
    """Trailers are compared with those before, and are decoded when they differ."""
    with connected() as (loop, connection, peer):
        answers = []
        for _ in range(3):
            connection.call(SEND, b"x", answers.append)
        peer.answer(1)
        peer.answer(3)
        until(loop, lambda: len(answers) == 2)
        peer.answer(5, status=b"8")
        with pytest.raises(UnavailableError, match="status 8"):
            loop.turn()


def test_connection_that_ends_is_an_error():
    with connected() as (loop, _, peer):
        peer.close()
        with pytest.raises(UnavailableError, match="the connection ended"):
            loop.turn()


def test_request_that_does_not_fit_is_refused():
    with connected() as (_, connection, _), pytest.raises(InvalidRequestError, match="16380"):
        connection.call(SEND, bytes(16_380), [].append)


def test_messages_of_a_stream_come_whole_however_they_are_cut():
    with connected() as (loop, connection, peer):
        messages = []
        connection.call(SEND, b"", [].append, messages.append)
        body = b"".join(struct.pack(">BI", 0, n) + b"x" * n for n in (3, 0, 5))
        for at in range(len(body)):
            peer.send(frame(http2.DATA, 0, 1, body[at : at + 1]))
        until(loop, lambda: len(messages) == 3)
        assert messages == [b"xxx", b"", b"xxxxx"]


# -- workloads ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ENGINES)
def served(tmp_path_factory, request):
    if (reason := why_not(request.param)) is not None:
        pytest.skip(reason)
    directory = str(tmp_path_factory.mktemp("broker"))
    with broker(directory, **engine_settings(request.param)) as ready:
        yield ready


def ask(served, method, request, answer):
    with Loop() as loop:
        connection = loop.connect(served["grpc"])
        return answer.FromString(loop.ask(connection, method, request.SerializeToString()))


def messages_in(served, topic):
    request = ister_api.TopicName(topic=topic)
    return ask(served, DESCRIBE, request, ister_api.TopicDescription).next


@pytest.mark.nightly
def test_every_send_that_counts_is_in_the_topic(served):
    found = http2_client.send(
        served["grpc"], producers=8, count=200, warm_up=2, pid=served["pid"], topic="/default/sent"
    )
    assert found.count == len(found.times_ms) == 200
    assert messages_in(served, "/default/sent") == 200 + 16
    assert found.cpu_us is not None
    assert found.cpu_us > 0
    assert found.rate == pytest.approx(200 / found.seconds)


@pytest.mark.nightly
def test_sends_go_on_for_so_long(served):
    found = http2_client.send(
        served["grpc"], producers=2, seconds=0.2, warm_up=0, topic="/default/timed"
    )
    assert found.seconds >= 0.2
    assert found.count == messages_in(served, "/default/timed") > 0


@pytest.mark.nightly
def test_everything_consumed_is_acknowledged(served):
    found = http2_client.consume(served["grpc"], count=300, topic="/default/consumed")
    assert found.count == 300
    request = ister_api.SubscriptionName(topic="/default/consumed", subscription="bench")
    described = ask(served, DESCRIBE_SUBSCRIPTION, request, ister_api.SubscriptionDescription)
    assert (described.cursor, described.lag) == (300, 0)


@pytest.mark.nightly
def test_flow_delivers_each_message_once(served):
    found = http2_client.flow(served["grpc"], rate=200, seconds=0.5, topic="/default/flow")
    assert found.count == len(found.times_ms) == 100
    assert messages_in(served, "/default/flow") == 100
    assert min(found.times_ms) > 0
    assert found.seconds >= 0.49


@pytest.mark.nightly
def test_module_prints_its_figures(served, capsys, monkeypatch):
    arguments = ["--address", served["grpc"], "--pid", str(served["pid"]), "--mode", "flow"]
    monkeypatch.setattr(sys, "argv", ["", *arguments, "--rate", "100", "--seconds", "0.2"])
    http2_client.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["messages"] == 20
    assert {"msg_per_s", "p50_ms", "p99_ms", "server_cpu_us", "client_cpu_us"} <= printed.keys()


@contextmanager
def scripted(*connections):
    """A server that answers the calls of each connection as its list says."""

    def serve():
        for answers in connections:
            peer = Peer(listener)
            peers.append(peer)
            for messages in answers:
                (stream,) = peer.read_data(1)
                peer.answer(stream, *(message.SerializeToString() for message in messages))

    peers = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "{}:{}".format(*listener.getsockname())
        finally:
            thread.join()
            for peer in peers:
                peer.close()


def test_answer_of_another_request_is_an_error():
    answers = [[danube.ProducerResponse(producer_id=1)], [danube.MessageResponse(request_id=8)]]
    with scripted(answers) as address, pytest.raises(InvariantError, match="answer"):
        http2_client.send(address, producers=1, count=1, warm_up=0)


def test_message_that_comes_twice_is_an_error():
    message = danube.StreamMessage(msg_id=danube.MsgID(topic_offset=3), payload=b"x")
    stream = [[danube.ConsumerResponse(consumer_id=1)], [message, message]]
    with (
        scripted([[danube.ProducerResponse(producer_id=1)]], stream) as address,
        pytest.raises(InvariantError, match="twice"),
    ):
        http2_client.consume(address, count=2, fill=False)


def test_stream_that_ends_is_an_error():
    stream = [[danube.ConsumerResponse(consumer_id=1)], [danube.StreamMessage()]]
    with (
        scripted([[danube.ProducerResponse(producer_id=1)]], stream) as address,
        pytest.raises(InvariantError, match="ended"),
    ):
        http2_client.consume(address, count=2, fill=False)
