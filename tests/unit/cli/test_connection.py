"""Where a broker is, what a place in a topic is, and what is said when something fails."""

import argparse
from datetime import UTC, datetime, timedelta

import pytest

from ister.cli.connection import (
    BROKER_DEFAULT,
    add_broker_arguments,
    broker_address,
    connected,
    explained,
    names_broker,
    parse_count,
    parse_fixed_start,
    parse_seconds,
    parse_start,
)
from ister.errors import (
    ConfigError,
    IsterError,
    NoAnswerError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedOperationError,
)


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_broker_arguments(parser)
    return parser.parse_args(arguments)


def explain(error, *arguments):
    with pytest.raises(IsterError) as caught, explained(options(*arguments)):
        raise error
    return caught.value


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("ISTER_BROKER", "ISTER_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_the_broker_is_named_or_in_the_environment_or_here(monkeypatch):
    assert broker_address(options()) == BROKER_DEFAULT == "127.0.0.1:6650"
    assert not names_broker(options())
    monkeypatch.setenv("ISTER_BROKER", "b:1")
    assert broker_address(options()) == "b:1"
    assert names_broker(options())
    assert broker_address(options("--broker", "c:2")) == "c:2"


def test_start_is_a_position_or_an_age():
    assert parse_start("12345") == parse_fixed_start("12345") == 12345
    with pytest.raises(argparse.ArgumentTypeError, match="a different time in every run"):
        parse_fixed_start("7d")
    assert datetime.now(UTC) - parse_start("2h") >= timedelta(hours=2)
    with pytest.raises(argparse.ArgumentTypeError):
        parse_start("yesterday")


def test_numbers():
    assert (parse_count("3"), parse_seconds("0"), parse_seconds("1.5")) == (3, 0.0, 1.5)
    for text in ("0", "-1", "x", "1.5", "²"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_count(text)
    for text in ("-1", "x", "inf", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_seconds(text)


def test_errors_say_what_to_do_in_a_shell():
    assert "--token" in explain(UnauthenticatedError("no")).hint
    assert "--token" in explain(PermissionDeniedError("no")).hint
    assert "older" in explain(UnsupportedOperationError("no")).hint
    assert explain(PermissionDeniedError("no", hint="its own")).hint == "its own"
    refused = NoAnswerError("b:1", "x: Connection refused")
    found = explain(refused, "--broker", "b:1")
    assert found.message == "no broker answers at b:1"
    assert "`ister serve`" in found.hint
    assert "--ca-file" not in found.hint
    found = explain(NoAnswerError("b:1", "Tls handshake"), "--tls")
    assert found.message.endswith(": Tls handshake")
    assert "a CA other than that of --ca-file" in found.hint
    other = UnavailableError("no broker has the topic at the moment")
    assert explain(other) is other


def test_a_token_is_in_no_text(monkeypatch):
    monkeypatch.setenv("ISTER_TOKEN", "canary with spaces")
    with pytest.raises(ConfigError) as caught, connected(options()):
        pass
    assert "canary" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    path = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError), connected(options("--ca-file", path)):
        pass
    with pytest.raises(ConfigError), connected(options("--cert-file", path)):
        pass


class _Names:
    """A client that knows some topics."""

    def __init__(self, *names):
        self.names = names

    @property
    def admin(self):
        return self

    def namespaces(self):
        return sorted({name.split("/")[1] for name in self.names})

    def partitions(self, topic):
        return [topic] if topic in self.names else []

    def topics(self, namespace):
        return [name for name in self.names if name.startswith(f"/{namespace}/")]


def test_near_misses():
    for names, hint in [
        ((), "create it with `ister topics create`"),
        (("/default/billing",), "existing topics: /default/billing"),
        (("/default/orders", "/shop/order", "/shop/x"), "did you mean"),
    ]:
        from ister.cli import connection  # noqa: PLC0415 - a part of it is tried by itself

        with pytest.raises(NotFoundError) as caught, connection._near_misses(_Names(*names)):
            raise NotFoundError("topic /default/ordres does not exist", topic="/default/ordres")
        assert hint in caught.value.hint, names
        assert "/shop/x" not in caught.value.hint, names
        assert str(caught.value).count("/default/ordres") == 1, names


def test_how_long_to_wait_is_for_the_first_answer_too_if_the_user_says_so():
    parser = argparse.ArgumentParser()
    add_broker_arguments(parser, retry_for=60.0)
    default, said = parser.parse_args([]), parser.parse_args(["--retry-for", "30"])
    assert (default.retry_for, default.answer_within) == (60.0, 4.0)
    assert (said.retry_for, said.answer_within) == (30.0, 30.0)
    assert "60; 4 for the first response" in " ".join(parser.format_help().split())


def test_the_port_of_http_is_named():
    found = explain(NoAnswerError("h:9040", "x"), "--broker", "h:9040")
    assert "HTTP port; gRPC is on 6650" in found.hint
