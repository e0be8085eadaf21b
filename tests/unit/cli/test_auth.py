"""`ister auth`: keys and tokens that a broker takes, rights given and taken back."""

import json
import os

import jwt
import pytest

from ister.cli.main import main
from ister.client import Client
from ister.errors import PermissionDeniedError, UnauthenticatedError
from tests.servers.broker import BrokerProcess

ISSUER, AUDIENCE, SECRET = "https://id.example", "ister", "s" * 40
TOPIC = "/default/orders"


def output(capsys, *arguments):
    code = main(["auth", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return path


def make_token(capsys, secret_file, name):
    signed = ("--key-file", str(secret_file), "--issuer", ISSUER, "--audience", AUDIENCE)
    code, out, _ = output(capsys, "token", name, *signed, "--json")
    assert code == 0
    return json.loads(out)["token"]


def test_token_says_who_and_until_when(capsys, secret_file):
    token = make_token(capsys, secret_file, "ada")
    claims = jwt.decode(token, SECRET, algorithms=["HS256"], issuer=ISSUER, audience=AUDIENCE)
    assert claims["sub"] == "ada"
    assert 3590 < claims["exp"] - claims["iat"] <= 3600


def test_token_without_an_audience(capsys, secret_file):
    code, out, _ = output(
        capsys, "token", "ada", "--key-file", str(secret_file), "--issuer", ISSUER
    )
    assert code == 0
    claims = jwt.decode(out.strip(), SECRET, algorithms=["HS256"], issuer=ISSUER)
    assert "aud" not in claims


def test_key_goes_into_the_file_as_a_digest(capsys, tmp_path):
    path = tmp_path / "keys"
    before = os.umask(0o022)
    try:
        code, out, _ = output(capsys, "key", "loader", "--file", str(path), "--json")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    made = json.loads(out)
    assert code == 0
    assert path.read_text() == made["line"] + "\n"
    assert made["key"] not in path.read_text()


def test_what_is_wrong_is_said(capsys):
    for arguments, said in [
        (["key", "two words"], "one word"),
        (["token", "a", "--key-file", "nowhere", "--issuer", "i", "--audience", "a"], "key file"),
        (["grant", "ada", "producer", "--broker", "127.0.0.1:1"], "`ister serve`"),
        (["grant", "ada", "producer", "--ca-file", "no.pem"], "no.pem cannot be read"),
        (["grant", "ada", "producer", "--tls-ca", "no.pem"], "no.pem cannot be read"),
    ]:
        code, out, err = output(capsys, *arguments)
        assert (code, out) == (1, ""), arguments
        assert said in err, arguments


def shown_to(capsys, admin, key):
    """What `auth list` and `auth show` tell of the one right that was granted."""
    code, out, _ = output(capsys, "list", "--token", admin)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["service:loader", "producer", "topic", TOPIC] in rows
    assert ["producer", "lookup,", "produce"] in rows
    _, out, _ = output(capsys, "list", "--token", admin, "--json")
    listed = json.loads(out)
    [binding] = listed["bindings"]
    assert (binding["principal"], binding["roles"]) == ("service:loader", ["producer"])
    assert {role["name"] for role in listed["roles"]} == {"admin", "consumer", "producer"}
    code, out, _ = output(capsys, "show", "service:loader", "--token", admin)
    assert code == 0
    assert out.splitlines()[-1].split() == ["topic", TOPIC, "producer", "lookup,", "produce"]
    for topic, permissions in [(TOPIC, ["lookup", "produce"]), ("/default/other", [])]:
        arguments = ("service:loader", "--topic", topic, "--json")
        _, out, _ = output(capsys, "show", *arguments, "--token", admin)
        assert json.loads(out)["permissions"] == permissions
    code, _, err = output(capsys, "show", "loader", "--token", admin)
    assert code == 1
    assert "user:loader has no roles; principals with roles: service:loader" in err
    code, _, err = output(capsys, "list", "--token", key)
    assert code == 1
    assert "manage_cluster" in err


def test_rights_are_given_and_taken_back_on_a_running_broker(
    capsys, tmp_path, secret_file, monkeypatch
):
    """Goal: on the broker of the environment, and on no other one."""
    keys = tmp_path / "keys"
    _, out, _ = output(capsys, "key", "loader", "--file", str(keys), "--json")
    key = json.loads(out)["key"]
    admin = make_token(capsys, secret_file, "ada")
    signed = {"algorithm": "HS256", "secret": SECRET, "issuer": ISSUER, "audience": AUDIENCE}
    auth = {"jwt": signed, "api_keys_file": str(keys), "super_admins": ["user:ada"]}
    settings = {"broker": {"auth": {"mode": "token", **auth}}}
    with BrokerProcess(tmp_path / "data", settings=settings) as broker:
        address = broker.address
        monkeypatch.setenv("ISTER_BROKER", address)

        def may(token):
            with Client(address, token=token, timeout=60) as client:
                try:
                    client.admin.describe_topic(TOPIC)
                except (PermissionDeniedError, UnauthenticatedError) as error:
                    return error.code
            return "OK"

        def change(action, *more, token=admin):
            named = ("service:loader", "producer", "--topic", TOPIC, "--token", token)
            return output(capsys, action, *named, *more)

        with Client(address, token=admin) as client:
            client.admin.create_topic(TOPIC)
        assert may("nonsense") == "UNAUTHENTICATED"
        assert may(key) == "PERMISSION_DENIED"
        assert change("grant", token=key)[0] == 1, "a loader gave itself rights"
        code, out, _ = change("grant", "--json")
        assert code == 0
        assert (json.loads(out)["resource"], json.loads(out)["broker"]) == (TOPIC, address)
        assert may(key) == "OK"
        shown_to(capsys, admin, key)
        assert change("revoke")[0] == 0
        assert may(key) == "PERMISSION_DENIED"
