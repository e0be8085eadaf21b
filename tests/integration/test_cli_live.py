"""`ister top`, `lag`, `seek --dry-run`, filters and templates, with a real broker."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from itertools import count

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")

from ister.client import Client
from tests.servers.ports import free_port
from tests.support.waiting import PATIENCE_SECONDS

PATIENCE = 120.0
_numbers = count()


@pytest.fixture(scope="module")
def client(broker):
    with Client(broker.address) as one:
        yield one


@pytest.fixture
def topic(client):
    name = f"/default/live-{next(_numbers)}"
    client.admin.create_topic(name)
    return name


def publish(client, topic, number=10):
    with client.producer(topic) as producer:
        for one in range(number):
            producer.send(
                json.dumps({"id": one, "user": {"id": one % 3}}).encode(),
                routing_key=f"key-{one % 2}",
                attributes={"kind": "even" if one % 2 == 0 else "odd"},
            )


# -- messages -------------------------------------------------------------------------------


def test_messages_are_filtered_and_formatted_without_a_subscription(run, client, topic):
    publish(client, topic)
    arguments = ("consume", topic, "--no-follow", "--format", r"{offset}\t{key}\t{payload.user.id}")
    assert run(*arguments, "--where", "user.id == 1") == (
        0,
        "1\tkey-1\t1\n4\tkey-0\t1\n7\tkey-1\t1\n",
        "",
    )
    assert run(*arguments, "--key", "*-1", "--limit", "2")[1] == "1\tkey-1\t1\n3\tkey-1\t0\n"
    even = ("--attribute", "kind=even", "--where", "id > 4")
    assert run(*arguments, *even)[1] == "6\tkey-0\t0\n8\tkey-0\t2\n"
    code, out, _ = run("consume", topic, "--no-follow", "--json", "--contains", '"id": 9')
    assert (code, json.loads(out)["offset"]) == (0, 9)


def test_a_subscription_skips_what_does_not_match(run, client, topic):
    publish(client, topic)
    arguments = ("consume", topic, "--subscription", "s", "--format", "{offset}")
    only = ("--key", "key-1", "--from", "earliest", "--limit", "2")
    assert run(*arguments, *only)[:2] == (0, "1\n3\n")
    # Nothing behind the last one that was printed is acknowledged.
    assert run("subscriptions", "describe", topic, "s", "--json")[1].count('"cursor": 4')
    assert run(*arguments, "--limit", "1")[:2] == (0, "4\n")


def test_a_new_subscription_starts_at_the_earliest_message(run, client, topic):
    publish(client, topic, 3)
    arguments = ("consume", topic, "--no-follow", "--subscription")
    assert run(*arguments, "all")[1].count("\n") == 3
    assert run(*arguments, "late", "--from", "latest") == (0, "", "")
    with client.consumer(topic, "api") as consumer:
        assert consumer.receive(PATIENCE_SECONDS).offset == 0


# -- subscriptions --------------------------------------------------------------------------


def test_seek_says_what_it_would_do(run, client, topic):
    publish(client, topic)
    first = ("--subscription", "s", "--from", "earliest", "--limit", "4")
    assert run("consume", topic, *first)[0] == 0
    seek = ("subscriptions", "seek", topic, "s", "--dry-run", "--to")
    for where, target, what in (
        ("earliest", 0, "4 messages would be read again"),
        ("latest", 10, "6 messages would be skipped"),
        ("4", 4, "would stay where it is"),
        ("7", 7, "3 messages would be skipped"),
        ("1h", 0, "4 messages would be read again"),
        ("2100-01-01", 10, "6 messages would be skipped"),
    ):
        expected = f"s would move to offset {target} from 4: {what}\n"
        assert run(*seek, where) == (0, expected, ""), where
    code, out, _ = run(*seek, "latest", "--json")
    (move,) = json.loads(out)["moves"]
    assert (code, move["before"], move["cursor"], move["skipped"]) == (0, 4, 10, 6)
    assert "out of range" in run(*seek, "11")[2]
    assert client.admin.describe_subscription(topic, "s").cursor == 4, "nothing has moved"
    assert run("subscriptions", "seek", topic, "s", "--to", "7")[0] == 0
    assert client.admin.describe_subscription(topic, "s").cursor == 7


def test_seek_of_partitions_is_planned_one_by_one(run, client):
    topic = f"/default/live-{next(_numbers)}"
    client.admin.create_topic(topic, partitions=2)
    publish(client, topic)
    first = ("--subscription", "s", "--from", "earliest", "--no-follow")
    assert run("consume", topic, *first)[0] == 0
    code, out, _ = run("subscriptions", "seek", topic, "s", "--to", "earliest", "--dry-run")
    assert code == 0
    assert [line.split(" ")[2] for line in out.splitlines()] == [
        f"{topic}-part-0",
        f"{topic}-part-1",
    ]
    again = json.loads(
        run("subscriptions", "seek", topic, "s", "--to", "earliest", "--dry-run", "--json")[1]
    )
    assert sum(move["read_again"] for move in again["moves"]) == 10
    code, _, err = run("subscriptions", "seek", topic, "s", "--to", "3", "--dry-run")
    assert code == 1
    assert "partition" in err


def test_lag_of_all_topics_in_one_table(run, client, topic):
    other = f"/default/live-{next(_numbers)}"
    client.admin.create_topic(other)
    publish(client, topic)
    publish(client, other, 5)
    for name, one, start in (("behind", topic, "0"), ("half", topic, "5"), ("more", other, "0")):
        arguments = ("--subscription", name, "--from", start, "--limit", "1")
        assert run("consume", one, *arguments)[0] == 0
    code, out, _ = run("subscriptions", "list", "--json")
    assert code == 0
    ours = [one for one in json.loads(out)["subscriptions"] if one["topic"] in (topic, other)]
    assert [(one["topic"], one["name"], one["lag"]) for one in ours] == [
        (topic, "behind", 9),
        (topic, "half", 4),
        (other, "more", 4),
    ]
    assert ours[0]["cursor"] == 1
    lines = run("subscriptions", "list", topic, "--min-lag", "5")[1].splitlines()
    assert lines[0].split()[:3] == ["SUBSCRIPTION", "KIND", "CURSOR"]
    assert [line.split()[0] for line in lines[1:]] == ["behind"]
    assert "no consumer is connected" in lines[1]
    assert run("subscriptions", "list", topic, "--min-lag", "50")[:2] == (
        0,
        "no subscription has a lag of 50 messages or more\n",
    )
    code, _, err = run("subscriptions", "list", "/default/missing")
    assert (code, "does not exist" in err) == (1, True)


# -- top ------------------------------------------------------------------------------------


def test_top_once(run, client, topic):
    publish(client, topic)
    arguments = ("--subscription", "s", "--from", "earliest", "--limit", "1")
    assert run("consume", topic, *arguments)[0] == 0
    code, out, err = run("top", "--once", "--json", "--sort", "lag")
    assert (code, err) == (0, "")
    content = json.loads(out)
    (ours,) = [one for one in content["topics"] if one["topic"] == topic]
    assert (ours["lag"], ours["subscriptions"], ours["blocked"]) == (9, 1, 1)
    assert set(ours["rates"]) == {"messages_in", "bytes_in", "messages_out", "bytes_out"}
    lags = [one["lag"] for one in content["topics"]]
    assert lags == sorted(lags, reverse=True)
    code, out, _ = run("top", "--once")
    assert code == 0
    assert topic in out
    assert run("top", "--once", "--namespace", "none")[1].endswith(
        "no topics yet; create one with `ister produce /default/NAME`\n"
    )


def test_top_without_a_broker_says_so(run):
    nowhere = f"127.0.0.1:{free_port()}"
    code, out, err = run("top", "--once", "--retry-for", "0.2", to=nowhere)
    assert (code, out) == (1, "")
    assert f"no broker answers at {nowhere}" in err
    code, out, err = run("top", "--json", "--retry-for", "0.2", to=nowhere)
    assert code == 1
    assert "no broker answers" in json.loads(out)["errors"][0]["message"]


class Screen:
    """A terminal of its own, with a program on it."""

    def __init__(self, *command, lines=20, columns=60):
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environ = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
        for name in ("COLUMNS", "LINES"):
            environ.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, env=environ, start_new_session=True
        )
        os.close(side)
        self._seen = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._main)

    def press(self, keys):
        self._seen = b""
        os.write(self._main, keys)

    def until(self, text):
        """Reads until the text was shown."""
        deadline = time.monotonic() + PATIENCE
        while text.encode() not in self._seen:
            assert time.monotonic() < deadline, self._seen
            if select.select([self._main], [], [], 1.0)[0]:
                try:
                    self._seen += os.read(self._main, 65536)
                except OSError:  # the program has ended
                    assert text.encode() in self._seen, self._seen
        return self._seen.decode()

    def ended(self):
        """The exit code; what the program still shows is read meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([self._main], [], [], 0.1)[0]:
                try:
                    os.read(self._main, 65536)
                except OSError:
                    return self.process.wait(PATIENCE)
        return self.process.returncode


def test_top_is_live_sorts_by_keys_and_quits(broker, client, topic):
    publish(client, topic, 1)
    command = (sys.executable, "-m", "ister.cli.main", "top", "--interval", "0.2")
    with Screen(*command, "--broker", broker.address) as screen:
        screen.until("IN/S*")
        screen.press(b"s")
        screen.until("OUT/S*")
        new = f"{topic}-new"
        client.admin.create_topic(new)
        screen.press(b"r")
        screen.until(new[-6:])
        screen.press(b"q")
        assert screen.ended() == 0
    with Screen(*command, "--broker", broker.address) as screen:
        screen.until("q quit")
        screen.process.send_signal(signal.SIGINT)
        assert screen.ended() == 0
