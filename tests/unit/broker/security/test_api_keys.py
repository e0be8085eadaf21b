"""The file of API keys: its lines, and that it counts as it is now."""

import logging

import pytest

from ister.broker.security.api_keys import ApiKeyFile, format_line, parse_line
from ister.broker.security.minting import make_api_key
from ister.broker.security.principal import PrincipalKind
from ister.errors import ConfigError, InvalidRequestError
from tests.support.cases import each
from tests.support.clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


def test_line_survives_the_way_there_and_back():
    _, line = make_api_key("loader", kind=PrincipalKind.USER, expires_at=1_800_000_000.0)
    key = parse_line(line)
    assert (key.name, key.kind, key.expires_at) == ("loader", "user", 1_800_000_000.0)
    assert format_line(key) == line


@each("line", ["", "   ", "# loader sha256:00"])
def test_comment_is_no_key(line):
    assert parse_line(line) is None


@each(
    "line",
    [
        "loader",
        "loader sha256:12",
        "loader md5:" + "0" * 64,
        "loader sha256:" + "0" * 64 + " kind=broker_internal",
        "loader sha256:" + "0" * 64 + " expires=soon",
        "loader sha256:" + "0" * 64 + " admin=true",
        "x" * 300 + " sha256:" + "0" * 64,
    ],
)
def test_bad_line_is_refused_without_its_text(line):
    with pytest.raises(InvalidRequestError) as caught:
        parse_line(line)
    assert "0000" not in str(caught.value)


def test_key_is_found_by_its_digest_alone(tmp_path, clock):
    path = tmp_path / "keys"
    key, line = make_api_key("loader")
    path.write_text(f"# keys\n\n{line}  # the nightly one\n")
    keys = ApiKeyFile(str(path), clock=clock)
    principal = keys.find(key)
    assert (principal.name, principal.kind, principal.via) == ("loader", "service", "api-key")
    assert key not in path.read_text()
    assert key not in repr(principal)
    assert principal.credential not in repr(principal)
    for wrong in (key[:-1], key + "x", key.upper(), "", "ist_", "ist_" + "x" * 100_000, "\udc80"):
        assert keys.find(wrong) is None


def test_change_of_the_file_counts_within_a_second(tmp_path, clock):
    """A key that is added works; one that is taken out is refused, also where it was known."""
    path = tmp_path / "keys"
    (first, first_line), (second, second_line) = make_api_key("first"), make_api_key("second")
    path.write_text(first_line)
    keys = ApiKeyFile(str(path), clock=clock)
    principal = keys.find(first)
    assert keys.is_current(principal)
    path.write_text(second_line + "\n")
    assert keys.find(first), "the file is not looked at with every call"
    clock.advance(1.0)
    assert keys.find(first) is None
    assert keys.find(second).name == "second"
    assert not keys.is_current(principal)


def test_key_under_another_name_is_another_principal(tmp_path, clock):
    path = tmp_path / "keys"
    key, line = make_api_key("before")
    path.write_text(line)
    keys = ApiKeyFile(str(path), clock=clock)
    principal = keys.find(key)
    path.write_text(line.replace("before", "after"))
    clock.advance(1.0)
    assert not keys.is_current(principal)


def test_file_that_is_gone_holds_no_keys(tmp_path, clock, caplog):
    path = tmp_path / "keys"
    key, line = make_api_key("loader")
    path.write_text(line)
    keys = ApiKeyFile(str(path), clock=clock)
    path.unlink()
    clock.advance(1.0)
    assert keys.find(key) is None
    path.write_text(line)
    clock.advance(1.0)
    assert keys.find(key), "and it comes back with the file"
    assert sum("cannot read the file" in record.getMessage() for record in caplog.records) == 1


def test_bad_line_harms_no_other(tmp_path, clock, caplog):
    """A revocation must count even if somebody mistyped another line."""
    path = tmp_path / "keys"
    (first, first_line), (second, second_line) = make_api_key("first"), make_api_key("second")
    path.write_text(f"{first_line}\n{second_line}\n")
    keys = ApiKeyFile(str(path), clock=clock)
    path.write_text(f"mistyped {second}\n{second_line}\n")
    clock.advance(1.0)
    with caplog.at_level(logging.ERROR):
        assert keys.find(first) is None
    assert keys.find(second)
    assert [record.line for record in caplog.records] == [1]
    assert second not in str([vars(record) for record in caplog.records])


def test_bad_file_stops_the_start(tmp_path, clock):
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeyFile(str(tmp_path / "none"), clock=clock)
    path = tmp_path / "keys"
    path.write_text("# fine\nloader\n")
    with pytest.raises(ConfigError, match="bad line 2"):
        ApiKeyFile(str(path), clock=clock)
