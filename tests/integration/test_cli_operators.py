"""What operators do with dead letters and schemas, by the command line and at a real broker."""

import json
from itertools import count

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("grpc")

from ister.cli.main import main
from ister.cli.schema import detect_type
from ister.client import Client
from ister.subscription.policy import FailurePolicy, PoisonPolicy
from tests.support.certificates import Authority
from tests.support.waiting import eventually

PATIENCE = 120.0
_numbers = count()


@pytest.fixture
def dead(broker):
    """A dead-letter topic with four letters of two subscriptions, and its source."""
    number = next(_numbers)
    source, target = f"/default/orders-{number}", f"/default/dead-{number}"
    policy = FailurePolicy(
        max_redelivery_count=0, poison=PoisonPolicy.DEAD_LETTER, dead_letter_topic=target
    )
    with Client(broker.address, timeout=PATIENCE) as client:
        client.admin.create_topic(source)
        for name in ("billing", "mail"):
            client.admin.set_failure_policy(source, name, policy)
        with client.producer(source) as producer:
            for payload in (b"a", b"b"):
                producer.send(payload, attributes={"shop": "eu"}, routing_key="k")
        for name in ("billing", "mail"):
            with client.consumer(source, name, start="earliest") as consumer:
                for _ in range(2):
                    message = consumer.receive(timeout=PATIENCE)
                    consumer.nack(message, reason=f"{name} failed on {message.payload.decode()}")
                eventually(
                    lambda name=name: client.admin.describe_subscription(source, name).cursor == 2
                )
    return source, target


def payloads(run, topic):
    code, out, _ = run("consume", topic, "--no-follow", "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def test_dead_letters_are_listed_shown_requeued_and_dropped(run, dead):
    source, target = dead
    code, out, _ = run("dlq", "list")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith(target)]
    assert [row[:4] for row in rows] == [
        [target, source, "billing", "2"],
        [target, source, "mail", "2"],
    ]
    assert "billing failed on a (1), billing failed on b (1)" in out
    _, out, _ = run("dlq", "list", "--json")
    [listed] = [one for one in json.loads(out)["topics"] if one["topic"] == target]
    assert listed["pending"] == 4
    assert {one["subscription"] for one in listed["subscriptions"]} == {"billing", "mail"}

    code, out, _ = run("dlq", "show", target, "--subscription", "billing", "--limit", "1")
    assert code == 0
    assert f"from       {source} offset 0, subscription billing" in out
    assert "reason     billing failed on a (attempt 1)" in out
    assert "attribute  shop=eu" in out
    assert "x-original" not in out
    assert out.count("payload") == 1
    template = "{offset} {key} {payload} {attributes.shop} {reason} {source}@{source_offset}"
    shown = ("dlq", "show", target, "--subscription", "mail")
    code, out, _ = run(*shown, "--format", template + " {subscription} {attempts}")
    assert code == 0
    assert out.splitlines()[0].endswith(f"k a eu mail failed on a {source}@0 mail 1")
    assert run(*shown, "--reason", "none", "--format", template)[1] == ""
    for some, found in (
        (("--contains", "b"), "b\n"),
        (("--key", "k"), "a\nb\n"),
        (("--key", "x"), ""),
    ):
        assert run(*shown, *some, "--format", "{payload}")[1] == found, some

    # Nothing happens without a confirmation, or in a dry run.
    code, out, err = run("dlq", "requeue", target)
    assert (code, out) == (1, "")
    assert "not confirmed; pass --yes" in err
    code, out, _ = run("dlq", "requeue", target, "--reason", "MAIL", "--dry-run")
    assert code == 0
    assert "2 dead letters would be requeued to the topics they failed in" in out
    assert len(payloads(run, source)) == 2

    code, out, _ = run("dlq", "requeue", target, "--reason", "MAIL", "--limit", "1", "--yes")
    assert code == 0
    assert out.startswith(f"1 dead letter of {target} requeued (broker ")
    again = payloads(run, source)[2:]
    assert [(one["payload"], one["attributes"], one["routing_key"]) for one in again] == [
        ("a", {"shop": "eu"}, "k")
    ]
    code, out, _ = run("dlq", "drop", target, "--subscription", "mail", "--yes", "--json")
    assert (code, json.loads(out)["done"]) == (0, 1)
    code, out, _ = run("dlq", "requeue", target, "--yes", "--json")
    assert (code, json.loads(out)["done"]) == (0, 2)
    assert [one["payload"] for one in payloads(run, source)] == ["a", "b", "a", "a", "b"]

    code, out, _ = run("dlq", "requeue", target, "--yes")
    assert (code, out) == (0, "no pending dead letters match\n")
    code, out, _ = run("dlq", "list", "--topic", target)
    assert (code, out) == (0, "no pending dead letters\n")
    code, out, _ = run("dlq", "show", target)
    assert (code, out) == (0, "no pending dead letters match\n")


def test_letters_that_cannot_be_requeued_are_told_and_stay(run, dead, broker):
    source, target = dead
    with Client(broker.address, timeout=PATIENCE) as client:
        for name in ("billing", "mail"):
            client.admin.unsubscribe(source, name)
        client.admin.delete_topic(source)
    code, out, err = run("dlq", "requeue", target, "--offset", "0-1", "--yes")
    assert code == 1
    assert out.startswith("0 dead letters")
    assert f"{target} offset 0 stays pending: topic {source} does not exist" in err
    code, out, _ = run("dlq", "requeue", target, "--offset", "0", "--to", "/default/none", "--yes")
    assert code == 1
    code, out, _ = run("dlq", "list", "--topic", target, "--json")
    assert json.loads(out)["topics"][0]["pending"] == 4
    code, _, err = run("dlq", "show", "/default/dead-")
    assert code == 1
    assert "does not exist" in err


def test_offsets_are_a_number_or_a_range(capsys):
    for text in ("x", "5-3", "1-", "-1", "1-2-3"):
        with pytest.raises(SystemExit):
            main(["dlq", "drop", "/default/t", f"--offset={text}"])
        assert "use an offset such as 12, or a range such as 12-40" in capsys.readouterr().err


# -- schemas --------------------------------------------------------------------------------


def avro(*fields):
    return json.dumps(
        {
            "type": "record",
            "name": "Order",
            "fields": [{"name": name, "type": "long"} for name in fields],
        }
    )


def test_schemas_are_registered_checked_and_shown(run, tmp_path):
    subject = f"orders-{next(_numbers)}"
    first, second = tmp_path / "order.avsc", tmp_path / "order-2.avsc"
    first.write_text(avro("id"))
    second.write_text(avro("id", "price"))
    code, out, _ = run("schema", "register", subject, str(first), "--description", "the first")
    assert code == 0
    assert out.startswith(f"registered: {subject} version 1, avro, id ")
    _, out, _ = run("schema", "register", subject, str(first), "--json")
    again = json.loads(out)
    assert (again["version"], again["is_new"], again["type"]) == (1, False, "avro")

    # A field without a default: readers of the new version cannot read old messages.
    code, out, _ = run("schema", "check", subject, str(second))
    assert code == 1
    assert out.startswith(f"{second} is not compatible with {subject}:\n  ")
    code, out, _ = run("schema", "check", subject, str(second), "--mode", "forward", "--json")
    assert (code, json.loads(out)["is_compatible"]) == (0, True)
    code, _, err = run("schema", "register", subject, str(second))
    assert code == 1
    assert "price" in err

    assert run("schema", "compat", subject)[1] == "backward\n"
    code, out, _ = run("schema", "compat", subject, "forward")
    assert (code, out.startswith(f"compatibility of {subject}: forward")) == (0, True)
    assert run("schema", "register", subject, str(second), "--tag", "money")[0] == 0

    _, out, _ = run("schema", "list")
    [row] = [line.split() for line in out.splitlines() if line.startswith(f"{subject} ")]
    assert row[1:4] == ["avro", "2", "forward"]
    _, out, _ = run("schema", "list", "--json")
    assert subject in [one["subject"] for one in json.loads(out)["subjects"]]
    _, out, _ = run("schema", "show", subject)
    assert out.startswith(f"{subject}, version 2\n")
    assert "the first" in out
    assert '"price"' in out
    _, out, _ = run("schema", "show", subject, "--version", "1", "--json")
    shown = json.loads(out)
    assert shown["definition"] == first.read_text()
    assert [one["version"] for one in shown["versions"]] == [1, 2]
    _, out, _ = run("schema", "show", subject, "--version", "1", "--definition")
    assert out == first.read_text()
    for arguments, said in [
        (("show", "none-such"), "none-such"),
        (("show", subject, "--version", "9"), "version 9"),
        (("register", subject, str(tmp_path / "none")), "cannot read the file"),
    ]:
        code, _, err = run("schema", *arguments)
        assert code == 1, arguments
        assert said in err, arguments


def test_the_type_of_a_definition_is_found():
    record = avro("id").encode()
    assert detect_type("a.avsc", b"") == "avro"
    assert detect_type("a.proto", b"") == "protobuf"
    for name, data, kind in [
        ("a.json", record, "avro"),
        ("-", record, "avro"),
        ("a.json", b'{"type": "object", "properties": {}}', "json_schema"),
        ("a.json", b'{"$schema": "https://json-schema.org/draft/2020-12/schema"}', "json_schema"),
        ("a.json", b'{"type": "array", "items": "string"}', "avro"),
        ("a.json", b'{"type": "array", "items": {"type": "string"}}', "json_schema"),
        ("a.txt", b'syntax = "proto3"; message A {}', "protobuf"),
        ("a.json", b"{}", None),
        ("a.json", b"[]", None),
        ("a.json", b"\xff", None),
    ]:
        assert detect_type(name, data) == kind, (name, data)


def test_a_file_of_unknown_type_needs_the_option(tmp_path, capsys):
    path = tmp_path / "s.json"
    path.write_text("{}")
    assert main(["schema", "register", "s", str(path)]) == 1
    assert "--type" in capsys.readouterr().err


# -- TLS ------------------------------------------------------------------------------------


def test_tls_at_a_port_without_it_is_told_in_shell_words(run, tmp_path, broker):
    ca = Authority().write(tmp_path)
    code, _, err = run("topics", "list", "--ca-file", ca)
    assert code == 1
    text = f"ister: {broker.address} does not use TLS, and this client does; leave out --tls"
    assert text in err  # gRPC, used before in this process, says something as well
