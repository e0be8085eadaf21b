"""The commands that talk to a broker, with a real one and real pipes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")

from ister.broker.security.minting import make_api_key
from ister.client import Client
from tests.servers.broker import BrokerProcess
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.security import auth_settings

PATIENCE = 120.0
COMMAND = [sys.executable, "-m", "ister.cli.main"]


def start(*arguments, broker, **options):
    """A command in a process of its own."""
    command = [*COMMAND, *arguments, "--broker", broker.address]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, text=True, **options
    )


def lines_of(number):
    return "".join(f"line {one}\n" for one in range(number)).encode()


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


# -- produce --------------------------------------------------------------------------------


def test_lines_become_messages_with_offsets_in_order(run, topic, broker):
    code, out, err = run("produce", topic, "--json", stdin=lines_of(3000))
    assert (code, out) == (0, "".join(f'{{"offset": {n}}}\n' for n in range(3000)))
    assert (
        err == f"ister: {topic} created (broker {broker.address})\n3,000 messages, offsets 0–2999\n"
    )
    code, out, err = run("produce", topic, stdin=b"no newline")
    assert (code, out, err) == (0, "", "1 message, offset 3000\n")
    code, out, err = run("consume", topic, "--no-follow")
    assert (code, out) == (0, lines_of(3000).decode() + "no newline\n")


def test_every_way_to_give_messages(run, topic, tmp_path):
    path = tmp_path / "input"
    path.write_bytes(b"a\0b\0")
    runs = [
        (("--message", "one\ntwo", "--attribute", "a=1", "--attribute", "b==", "--key", "k"), b""),
        (("--file", str(path), "--null"), b""),
        (("--whole",), b"x\ny\n"),
        (("--delimiter", ";;"), b"p;;q"),
        (("--key-field", "id"), b'{"id": "i"}\n'),
        (("--json-lines",), b'{"payload_base64": "/w==", "routing_key": "r"}\n'),
        (("--name", "shop", "--rate", "1000"), b"z\n"),
    ]
    for arguments, data in runs:
        assert run("produce", topic, *arguments, stdin=data)[0] == 0
    code, out, _ = run("consume", topic, "--no-follow", "--json")
    found = objects(out)
    assert code == 0
    assert [one["offset"] for one in found] == list(range(9))
    assert {one["topic"] for one in found} == {topic}
    assert [one["payload"] for one in found] == [
        "one\ntwo",
        *("a", "b", "x\ny\n", "p", "q", '{"id": "i"}', None, "z"),
    ]
    assert found[0]["attributes"] == {"a": "1", "b": "="}
    assert [found[at]["routing_key"] for at in (0, 6, 7, 8)] == ["k", "i", "r", None]
    assert found[7]["payload_base64"] == "/w=="
    assert found[8]["producer_name"] == "shop"
    assert all(abs(one["publish_time"] / 1000 - time.time()) < 3600 for one in found)


def test_a_line_that_is_none_ends_it_and_says_what_is_in(run, topic):
    data = b'{"payload": "x"}\nnonsense\n{"payload": "y"}\n'
    code, out, err = run("produce", topic, "--json-lines", "--json", stdin=data)
    assert (code, out) == (1, '{"offset": 0}\n')
    assert "message 2 of the input: 'nonsense' is not JSON" in err
    assert "acknowledged: 1 message, offset 0" in err


def test_a_message_that_is_refused_does_not_stop_the_others(run, topic):
    assert run("topics", "create", topic)[0] == 0
    assert run("topics", "policies", topic, "--set", "max_message_size=10")[0] == 0
    data = b"short\n" + b"x" * 100 + b"\nshort too\n"
    code, out, err = run("produce", topic, "--json", stdin=data)
    found = objects(out)
    assert code == 1
    assert [one["offset"] for one in found] == [0, None, 1]
    assert found[1]["code"] == "INVALID_ARGUMENT"
    assert "ister: message 2: " in err
    assert "acknowledged: 2 messages, offsets 0–1; 1 not" in err


def test_a_topic_is_made_as_it_is_said_or_not_at_all(run, topic, broker):
    code, _, err = run("produce", topic, "--no-create", "--message", "x")
    assert code == 1
    assert f"topic {topic} does not exist" in err
    arguments = ("--partitions", "2", "--ack", "written", "--json")
    code, out, err = run("produce", topic, *arguments, stdin=b"a\nb\nc\n")
    assert code == 0
    assert [(one["topic"][-1], one["offset"]) for one in objects(out)] == [
        ("0", 0),
        ("1", 0),
        ("0", 1),
    ]
    with Client(broker.address) as client:
        assert client.admin.describe_topic(f"{topic}-part-1").ack == "written"


def test_sigint_reports_what_is_acknowledged(broker, topic):
    process = start(
        "produce",
        *(topic, "--json"),
        broker=broker,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write("a\nb\n")
    process.stdin.flush()
    assert [process.stdout.readline() for _ in range(2)] == ['{"offset": 0}\n', '{"offset": 1}\n']
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    assert "interrupted before the end of the input" in err
    assert "acknowledged: 2 messages, offsets 0–1\n" in err
    assert "Traceback" not in err


def test_a_reader_of_offsets_that_goes_away_stops_it(broker, topic):
    process = start(
        "produce",
        *(topic, "--json"),
        broker=broker,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write("a\n")
    process.stdin.flush()
    assert process.stdout.readline() == '{"offset": 0}\n'
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        while process.poll() is None:
            process.stdin.write("b\n")
            process.stdin.flush()
            time.sleep(0.01)
    assert process.wait(PATIENCE) == 1
    err = process.stderr.read()
    process.stderr.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    assert "the reader of the offsets closed the pipe" in err
    assert "messages, offsets 0–" in err


def test_offsets_that_cannot_be_written_are_no_success(broker, topic, tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number}\n" for number in range(300)))
    with open("/dev/full", "w") as full:
        process = start(
            *("produce", topic, "--json", "--file", str(lines)),
            broker=broker,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    err = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1
    assert "cannot write the offsets: No space left on device" in err
    assert " messages, offsets 0–" in err
    assert "Traceback" not in err


# -- consume --------------------------------------------------------------------------------


def test_head_takes_its_lines_and_leaves_the_rest(broker, run, topic):
    assert run("produce", topic, stdin=lines_of(2000))[0] == 0
    for turn in range(2):
        arguments = ("--subscription", "s", *(("--from", "earliest") if turn == 0 else ()))
        reading = start("consume", topic, *arguments, broker=broker, stdout=subprocess.PIPE)
        head = subprocess.run(
            ["head", "-5"], stdin=reading.stdout, capture_output=True, timeout=PATIENCE, check=True
        )
        reading.stdout.close()
        assert reading.wait(PATIENCE) == 0
        assert head.stdout == b"".join(b"line %d\n" % n for n in range(5 * turn, 5 * turn + 5))
    code, out, _ = run("subscriptions", "describe", topic, "s", "--json")
    assert (code, json.loads(out)["cursor"]) == (0, 10)
    # Of what is left, nothing is missing.
    code, out, _ = run("consume", topic, "--subscription", "s", "--no-follow")
    assert (code, out.splitlines()[0], len(out.splitlines())) == (0, "line 10", 1990)


def test_sigint_ends_following_and_everything_shown_is_acknowledged(broker, run, topic):
    assert run("produce", topic, stdin=lines_of(3))[0] == 0
    arguments = ("--subscription", "s", "--from", "earliest")
    process = start("consume", topic, *arguments, broker=broker, stdout=subprocess.PIPE)
    assert [process.stdout.readline() for _ in range(3)] == ["line 0\n", "line 1\n", "line 2\n"]
    assert run("produce", topic, "--message", "later")[0] == 0
    assert process.stdout.readline() == "later\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    process.stdout.close()
    _, out, _ = run("subscriptions", "describe", topic, "s", "--json")
    assert (json.loads(out)["cursor"], json.loads(out)["lag"]) == (4, 0)


def test_limits_and_where_to_begin(run, topic):
    assert run("produce", topic, stdin=lines_of(10))[0] == 0
    last = "".join(f"line {n}\n" for n in range(7, 10))
    assert run("consume", topic, "--from", "7", "--no-follow")[1] == last
    assert run("consume", topic, "--from", "2h", "--limit", "1")[1] == "line 0\n"
    assert run("consume", topic, "--from", "latest", "--timeout", "0.2")[:2] == (0, "")
    assert run("consume", topic, "--from", "latest", "--no-follow")[:2] == (0, "")
    for name, where, first in (("a", "8", "8"), ("b", "1h", "0"), ("c", "earliest", "0")):
        code, out, err = run(
            *("consume", topic, "--subscription", name, "--from", where, "--limit", "1")
        )
        assert (code, out, err) == (0, f"line {first}\n", "")
    code, out, err = run(
        *("consume", topic, "--subscription", "a", "--from", "earliest", "--no-follow")
    )
    assert (code, out) == (0, "line 9\n")
    assert "continuing at its position" in err
    # A subscription that begins at a time knows what there is for it.
    for name, where, lines in (("d", "1h", 10), ("e", "2100-01-01T00:00:00Z", 0)):
        code, out, err = run(
            *("consume", topic, "--subscription", name, "--from", where, "--no-follow")
        )
        assert (code, out.count("\n"), err) == (0, lines, "")
    code, _, err = run("consume", topic, "--from", "11")
    assert code == 1
    assert "readable offsets: 0 up to, not including, 10" in err


def test_without_acknowledging_messages_come_again(run, topic):
    assert run("produce", topic, stdin=lines_of(2))[0] == 0
    for _ in range(2):
        arguments = ("--subscription", "s", "--from", "earliest", "--no-ack", "--limit", "2")
        assert run("consume", topic, *arguments)[:2] == (0, "line 0\nline 1\n")
    assert run("consume", topic, "--no-ack")[0] == 1


def test_all_partitions_are_consumed(run, topic):
    assert run("topics", "create", topic, "--partitions", "3")[0] == 0
    assert run("produce", topic, stdin=lines_of(30))[0] == 0
    expected = sorted(lines_of(30).decode().splitlines())
    for arguments in ((), ("--subscription", "s", "--from", "earliest")):
        code, out, _ = run("consume", topic, "--no-follow", *arguments)
        assert (code, sorted(out.splitlines())) == (0, expected)
    code, out, _ = run("subscriptions", "describe", topic, "s", "--json")
    assert (code, json.loads(out)["lag"]) == (0, 0)
    code, _, err = run("consume", topic, "--from", "3")
    assert code == 1
    assert "partitioned" in err


@pytest.mark.nightly
def test_a_broker_that_is_killed_and_comes_back(tmp_path, topic):
    """Both commands go on where they were, and nothing is missing or comes twice."""
    with BrokerProcess(tmp_path / "broker") as broker:
        producing = start(
            *("produce", topic, "--json", "--rate", "400"),
            broker=broker,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        number = 2000
        producing.stdin.write(lines_of(number).decode())
        producing.stdin.close()
        for _ in range(200):
            assert producing.stdout.readline()
        consuming = start(
            *("consume", topic, "--limit", str(number), "--json"),
            broker=broker,
            stdout=subprocess.PIPE,
        )
        first = [consuming.stdout.readline() for _ in range(50)]
        broker.kill()
        broker.start()
        offsets = [one["offset"] for one in objects(producing.stdout.read())]
        assert producing.wait(PATIENCE) == 0
        assert offsets == list(range(200, number))
        found = objects("".join(first) + consuming.stdout.read())
        assert consuming.wait(PATIENCE) == 0
        producing.stdout.close()
        consuming.stdout.close()
        assert [one["payload"] for one in found] == lines_of(number).decode().splitlines()
        assert [one["offset"] for one in found] == list(range(number))


# -- topics and subscriptions ---------------------------------------------------------------


def test_topics_are_made_listed_described_handed_over_and_deleted(run, topic, broker):
    code, out, _ = run("topics", "create", topic, "--ack", "written", "--json")
    made = {"ok": True, "topic": topic, "created": True, "partitions": []}
    assert (code, json.loads(out)) == (0, {**made, "broker": broker.address})
    code, out, _ = run("topics", "create", topic)
    assert (code, "already exists; unchanged" in out) == (0, True)
    assert run("produce", topic, stdin=lines_of(100))[0] == 0
    arguments = ("--subscription", "s", "--from", "earliest", "--limit", "25")
    assert run("consume", topic, *arguments)[0] == 0
    code, out, _ = run("topics", "describe", topic, "--json")
    view = json.loads(out)
    assert (code, view["topic"], view["ack"]) == (0, topic, "written")
    (subscription,) = view["subscriptions"]
    assert [subscription[name] for name in ("name", "type", "cursor", "lag")] == [
        *("s", "exclusive"),
        *(25, 75),
    ]
    assert run("topics", "describe", topic)[1].startswith(f"{topic}  open, ack written")
    code, out, _ = run("topics", "list")
    (row,) = [line.split() for line in out.splitlines() if line.split()[0] == topic]
    assert (row[1], row[2], row[-2:]) == ("written", "100", ["1", "75"])
    for arguments in ((), ("--short",)):
        code, out, _ = run("topics", "list", "--json", "--namespace", "default", *arguments)
        (found,) = [one for one in json.loads(out)["topics"] if one["topic"] == topic]
        assert found["watermarks"] == view["watermarks"]
        assert ("objects" in found) == (not arguments)
    code, out, _ = run("topics", "policies", topic, "--set", "max_publish_rate=7", "--json")
    assert json.loads(out)["policies"]["max_publish_rate"] == 7
    code, out, _ = run("topics", "policies", topic)
    assert "max_publish_rate" in out
    assert "7" in out
    assert run("topics", "policies", topic, "--reset")[0] == 0
    code, _, err = run("topics", "policies", topic, "--set", "nonsense=1")
    assert (code, "unknown policy" in err) == (1, True)
    code, out, _ = run("topics", "release-producer", topic, "shop", "--json")
    assert (code, json.loads(out)["principal"]) == (0, None)
    assert "unchanged" in run("topics", "release-producer", topic, "shop")[1]
    assert json.loads(run("topics", "unload", topic, "--json")[1])["ok"]
    assert run("consume", topic, "--subscription", "s", "--limit", "1")[1] == "line 25\n"
    code, _, err = run("topics", "delete", topic)
    assert (code, "--yes" in err) == (1, True)
    code, out, _ = run("topics", "delete", topic, "--yes", "--json")
    deleted = {"ok": True, "topic": topic, "deleted": [topic], "broker": broker.address}
    assert json.loads(out) == deleted
    code, out, err = run("topics", "describe", topic, "--json")
    assert (code, json.loads(out)["errors"][0]["code"]) == (1, "NOT_FOUND")


def test_partitions_are_added_by_grow_alone(run, topic):
    """Goal: keys move to other partitions only if somebody says so."""
    names = [f"{topic}-part-{number}" for number in range(4)]
    assert run("topics", "create", topic, "--partitions", "2", "--ack", "written")[0] == 0
    code, out, err = run("topics", "create", topic, "--partitions", "3")
    assert (code, out) == (1, "")
    assert "`ister topics grow` adds partitions" in err
    code, out, _ = run("topics", "create", topic, "--partitions", "2", "--json")
    made = json.loads(out)
    assert (code, made["created"], made["partitions"]) == (0, False, names[:2])
    code, _, err = run("topics", "grow", topic, "--partitions", "4")
    assert (code, "--yes" in err) == (1, True)
    code, out, _ = run("topics", "grow", topic, "--partitions", "4", "--yes")
    assert (code, "keys go to another partition" in out) == (0, True)
    assert json.loads(run("topics", "describe", topic, "--json")[1])["partitions"] == names
    code, out, _ = run("topics", "grow", topic, "--partitions", "4", "--json")
    assert (code, json.loads(out)["before"]) == (0, 4)
    assert run("topics", "grow", topic, "--partitions", "3", "--yes")[0] == 1


def test_every_change_names_its_broker(run, topic, broker, monkeypatch):
    """Goal: a command that acted on another broker than was meant is seen at once."""
    monkeypatch.setenv("ISTER_BROKER", broker.address)
    space = topic.rpartition("/")[2]
    for command in (
        ("topics", "create", topic),
        ("topics", "create", topic),
        ("topics", "create", f"{topic}-parts", "--partitions", "1"),
        ("topics", "grow", f"{topic}-parts", "--partitions", "2", "--yes"),
        ("topics", "policies", topic, "--set", "max_publish_rate=7"),
        ("topics", "release-producer", topic, "shop"),
        ("topics", "unload", topic),
        ("consume", topic, "--subscription", "s", "--timeout", "0"),
        ("subscriptions", "seek", topic, "s", "--to", "earliest"),
        ("subscriptions", "policy", topic, "s", "--poison", "drop"),
        ("subscriptions", "restrict", topic, "s", "--to", "service:billing"),
        ("subscriptions", "restrict", topic, "s", "--lift"),
        ("subscriptions", "remove", topic, "s", "--yes"),
        ("topics", "delete", topic, "--yes"),
        ("namespaces", "create", space),
        ("namespaces", "delete", space),
    ):
        code, out, err = run(*command, to=None)
        assert code == 0, err
        assert broker.address in out or command[0] == "consume", command


def test_subscriptions_are_listed_moved_changed_and_removed(run, topic):
    assert run("produce", topic, stdin=lines_of(10))[0] == 0
    assert "no subscriptions" in run("subscriptions", "list", topic)[1]
    arguments = ("--subscription", "billing", "--kind", "shared", "--from", "0", "--limit", "4")
    assert run("consume", topic, *arguments)[0] == 0
    code, out, _ = run("subscriptions", "list", topic, "--json")
    (one,) = json.loads(out)["subscriptions"]
    assert (one["name"], one["type"], one["cursor"], one["lag"]) == ("billing", "shared", 4, 6)
    assert "billing" in run("subscriptions", "list", topic)[1]
    for to, cursor in (("2", 2), ("1h", 0), ("latest", 10), ("earliest", 0)):
        code, out, _ = run("subscriptions", "seek", topic, "billing", "--to", to, "--json")
        assert (code, json.loads(out)["cursor"]) == (0, cursor)
    assert "from 0" in run("subscriptions", "seek", topic, "billing", "--to", "3")[1]
    changes = ("--poison", "drop", "--max-redelivery-count", "2", "--max-unacked-messages", "7")
    code, out, _ = run("subscriptions", "policy", topic, "billing", *changes, "--json")
    policy = json.loads(out)
    found = [policy[name] for name in ("poison", "max_redelivery_count", "max_unacked_messages")]
    assert (code, found) == (0, ["drop", 2, 7])
    assert "drop" in run("subscriptions", "describe", topic, "billing")[1]
    code, _, err = run("subscriptions", "describe", topic, "biling")
    assert (code, "existing subscriptions: billing" in err) == (1, True)
    assert run("subscriptions", "remove", topic, "billing")[0] == 1
    assert run("subscriptions", "remove", topic, "billing", "--yes")[0] == 0
    assert run("subscriptions", "describe", topic, "billing")[0] == 1


def test_brokers_are_listed(run, broker):
    code, out, _ = run("brokers", "list", "--json")
    (one,) = json.loads(out)["brokers"]
    assert (code, one["broker_url"], one["is_this"]) == (0, f"http://{broker.address}", True)
    assert one["node"] in run("brokers", "list")[1]


# -- what goes wrong ------------------------------------------------------------------------


NOWHERE = "127.0.0.1:1"


def test_no_broker_there(run, topic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = (("produce", topic, "--message", "x"), ("consume", topic), ("topics", "list"))
    for command in commands:
        code, out, err = run(*command, "--retry-for", "0.3", to=NOWHERE)
        assert (code, out) == (1, "")
        assert err.startswith(
            "ister: no broker answers at 127.0.0.1:1; start one with `ister up` or"
        )
        assert err.count("\n") == 1
    code, out, _ = run("topics", "list", "--json", "--retry-for", "0.3", to=NOWHERE)
    assert json.loads(out)["errors"][0]["code"] == "UNAVAILABLE"


def test_similar_topics_are_named(run, topic):
    assert run("topics", "create", topic)[0] == 0
    for command in (("consume",), ("topics", "describe"), ("subscriptions", "list")):
        code, _, err = run(*command, f"{topic}x")
        assert code == 1
        assert f"topic {topic}x does not exist; did you mean" in err
        assert topic in err.partition("did you mean")[2]


@pytest.mark.nightly
def test_who_calls_and_whom_to_trust(run, topic, tmp_path, monkeypatch):
    authority = Authority("servers")
    cert_file, key_file = authority.issue("broker", names=LOCAL_NAMES).write(tmp_path, "broker")
    ca_file = authority.write(tmp_path, "servers")
    key, line = make_api_key("loader")
    auth = auth_settings(tmp_path, super_admins=["loader"])
    (tmp_path / "api-keys").write_text(f"{line}\n")
    tls = {"cert_file": cert_file, "key_file": key_file}
    settings = {"broker": {"tls": tls, "auth": auth}}
    with BrokerProcess(tmp_path / "broker", settings=settings) as broker:
        trusted = ("--ca-file", str(ca_file))
        code, _, err = run("topics", "list", *trusted, to=broker.address)
        assert code == 1
        assert "--token, or ISTER_TOKEN in the environment, authenticates you" in err
        code, _, err = run("topics", "list", "--retry-for", "0.5", to=broker.address)
        assert code == 1
        assert (
            f"{broker.address} uses TLS, and this client does not; pass --tls, or --ca-file" in err
        )
        code, _, err = run("topics", "list", "--token", "ist_wrong", *trusted, to=broker.address)
        assert (code, "ist_wrong" in err) == (1, False)
        monkeypatch.setenv("ISTER_TOKEN", key)
        assert run("produce", topic, *trusted, stdin=b"x\n", to=broker.address)[0] == 0
        assert run("consume", topic, "--limit", "1", *trusted, to=broker.address)[:2] == (0, "x\n")
        arguments = ("--subscription", "s", "--from", "earliest", "--limit", "1")
        assert run("consume", topic, *arguments, *trusted, to=broker.address)[:2] == (0, "x\n")
        monkeypatch.setenv("ISTER_BROKER", broker.address)
        grant = ("auth", "grant", "ada", "consumer", "--topic", topic)
        code, out, _ = run(*grant, *trusted, to=None)
        assert (code, f"(broker {broker.address})" in out) == (0, True)


def test_a_log_in_memory_is_consumed_with_a_subscription_alone(tmp_path, run, topic):
    bare = {"mode": "memory", "wal": None, "uploader": None}
    with BrokerProcess(tmp_path / "m", settings={"storage": bare}) as broker:
        assert run("produce", topic, stdin=lines_of(3), to=broker.address)[0] == 0
        code, out, err = run("consume", topic, "--no-follow", to=broker.address)
        # Not 0 and no line, as if there were nothing.
        assert (code, out) == (1, "")
        assert "--subscription" in err
        arguments = ("--no-follow", "--subscription", "s", "--from", "earliest")
        code, out, _ = run("consume", topic, *arguments, to=broker.address)
        assert (code, out) == (0, "line 0\nline 1\nline 2\n")
        code, _, err = run("topics", "unload", topic, to=broker.address)
        assert code == 1
        assert "would be gone" in err
        assert run("topics", "describe", topic, "--json", to=broker.address)[0] == 0


# -- what somebody new runs into ------------------------------------------------------------


def test_a_namespace_that_is_not_there_is_told_at_once(run):
    for command in (
        ("produce", "/nowhere-yet/t", "--message", "x"),
        ("produce", "/nowhere-yet/t", "--create", "--message", "x"),
        ("topics", "create", "/nowhere-yet/t"),
    ):
        began = time.monotonic()
        code, out, err = run(*command)
        assert (code, out) == (1, "")
        assert "namespace 'nowhere-yet' does not exist" in err
        assert "create it: ister namespaces create nowhere-yet" in err
        assert "created" not in err
        assert "no broker answers" not in err
        # The retries of `produce` go on for a minute.
        assert time.monotonic() - began < 55


def test_namespaces_are_made_listed_and_deleted(run, broker):
    code, out, _ = run("namespaces", "create", "shop")
    assert (code, out) == (0, f"created shop (broker {broker.address})\n")
    code, _, err = run("produce", "/shop/orders", "--message", "x")
    assert code == 0
    assert "/shop/orders created" in err
    code, out, _ = run("namespaces", "list", "--json")
    assert {"default", "shop"} <= set(json.loads(out)["namespaces"])
    assert "shop" in run("namespaces", "list")[1]
    code, out, err = run("namespaces", "create", "shop", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)
    assert "namespace 'shop' already exists" in err
    code, _, err = run("namespaces", "delete", "shop")
    assert code == 1
    assert "1 topics" in err
    assert run("topics", "delete", "/shop/orders", "--yes")[0] == 0
    code, out, _ = run("namespaces", "delete", "shop", "--json")
    deleted = {"ok": True, "namespace": "shop", "broker": broker.address}
    assert (code, json.loads(out)) == (0, deleted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_that_waits_for_a_broker(number, tmp_path):
    """Somebody listens there and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen(
            [
                *(*COMMAND, "produce", "/default/t", "--message", "x", "--retry-for", "600"),
                *("--broker", f"127.0.0.1:{server.getsockname()[1]}"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            connection, _ = server.accept()
            with connection:
                process.send_signal(number)
                _, err = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.communicate()
    assert (process.returncode, err) == (1, "ister: interrupted\n")


def test_keys_that_are_missing_are_counted(run, topic):
    lines = b'{"id": 1}\n{"id": 2, "c": "x"}\n{}\n'
    code, _, err = run("produce", topic, "--key-field", "c", stdin=lines)
    assert code == 0
    assert err.count("2 messages without c to take a key from") == 1
    code, _, err = run("produce", topic, "--key-field", "c", "--key", "k", stdin=lines)
    assert (code, err) == (0, "3 messages, offsets 3–5\n")
