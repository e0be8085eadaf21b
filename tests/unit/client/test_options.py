"""Addresses, encryption and tokens, as they are given to a client."""

import traceback

import pytest

from ister.cli.main import main
from ister.client.flight import parse_brokers
from ister.client.options import TlsOptions, parse_addresses, parse_token, parse_url, reachable
from ister.errors import ConfigError, InvalidRequestError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:6650", ("127.0.0.1:6650", None)),
        ("http://broker:1", ("broker:1", False)),
        ("https://broker.example:65535/", ("broker.example:65535", True)),
        ("grpc+tls://b:2", ("b:2", True)),
        ("[::1]:6650", ("[::1]:6650", None)),
    ],
)
def test_an_address(text, expected):
    assert parse_url(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "broker", "broker:", "broker:0", "broker:65536", "ftp://b:1", "b:1/x", "a b:1", "u@b:1"],
)
def test_what_is_no_address(text):
    with pytest.raises(InvalidRequestError):
        parse_url(text)


_SECRET = "s3cret"


@pytest.mark.parametrize(
    "text",
    [
        f"grpc://user:{_SECRET}@host:6651",
        f"http://{_SECRET}@host:6650",
        f"user:{_SECRET}@host",
        f"user:{_SECRET},{_SECRET}@host:6651",
        f"http://user:{_SECRET}",
        f"host:x?token={_SECRET}@",
        f"ftp://host:6650?token={_SECRET}",
    ],
)
def test_what_is_no_address_is_shown_without_credentials(text, capsys):
    for parse in (parse_url, parse_brokers, lambda text: parse_addresses([text], None)):
        with pytest.raises(InvalidRequestError) as error:
            parse(text)
        assert _SECRET not in "".join(traceback.format_exception(error.value))
    for parse in (lambda: parse_addresses(text, None), lambda: parse_addresses({text}, None)):
        with pytest.raises(InvalidRequestError) as error:
            parse()
        assert _SECRET not in str(error.value)
    assert main(["topics", "list", "--broker", text]) != 0
    assert _SECRET not in "".join(capsys.readouterr())


def test_several_addresses_and_what_they_say_about_encryption():
    assert parse_addresses("a:1, b:2", None) == (["a:1", "b:2"], None)
    assert parse_addresses(["a:1"], True) == (["a:1"], TlsOptions())
    assert parse_addresses("https://a:1", None) == (["a:1"], TlsOptions())
    assert parse_addresses("http://a:1", False) == (["a:1"], None)
    own = TlsOptions(server_name="x")
    assert parse_addresses("https://a:1", own)[1] is own
    with pytest.raises(InvalidRequestError):
        parse_addresses("http://a:1", True)
    with pytest.raises(InvalidRequestError):
        parse_addresses("http://a:1,https://b:1", None)
    with pytest.raises(InvalidRequestError):
        parse_addresses([], None)


def test_a_broker_that_speaks_of_itself_as_of_this_machine_is_reached_where_it_was():
    assert reachable("grpc://127.0.0.1:6651", "10.0.0.7:6650") == "10.0.0.7:6651"
    assert reachable("grpc://flight.example:1", "10.0.0.7:6650") == "flight.example:1"


def test_certificates(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_bytes(b"PEM")
    assert TlsOptions(ca=str(file)).texts() == (b"PEM", None, None)
    assert TlsOptions(cert=b"c", key=b"k").texts() == (None, b"c", b"k")
    with pytest.raises(ConfigError):
        TlsOptions(cert=b"c")
    with pytest.raises(ConfigError):
        TlsOptions(ca=str(tmp_path / "none")).texts()
    assert "secret" not in repr(TlsOptions(cert=b"c", key=b"secret"))


@pytest.mark.parametrize("token", ["", "two words", "new\nline", "secret-grün", b"secret", None])
def test_what_is_no_token_is_not_repeated(token):
    with pytest.raises(ConfigError) as caught:
        parse_token(token)
    assert "secret" not in str(caught.value)
