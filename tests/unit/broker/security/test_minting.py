"""New keys and tokens."""

import pytest

from ister.broker.security.api_keys import digest_of_key, parse_line
from ister.broker.security.minting import make_api_key, make_token
from ister.errors import InvalidRequestError
from tests.support.cases import each

SETTINGS = {"algorithm": "HS256", "key": "k" * 32, "issuer": "i", "audience": "a"}


def test_line_has_the_digest_and_not_the_key():
    key, line = make_api_key("loader")
    assert key.startswith("ist_")
    assert len(key) > 40
    assert key not in line
    assert parse_line(line).digest == digest_of_key(key)
    assert make_api_key("loader")[0] != key


@each("name", ["", "a b", "a#b", "#", "a\nb", "\t", "x" * 257])
def test_name_has_to_fit_into_a_line(name):
    with pytest.raises(InvalidRequestError):
        make_api_key(name)


@each(
    "more",
    [
        {"algorithm": "none"},
        {"algorithm": "RS256"},
        {"lifetime_seconds": 0},
        {"lifetime_seconds": -5},
        {"lifetime_seconds": 10**9},
        {"lifetime_seconds": float("nan")},
    ],
)
def test_bad_arguments_are_refused_without_the_key(more):
    with pytest.raises(InvalidRequestError) as caught:
        make_token("alice", **{**SETTINGS, "lifetime_seconds": 60, **more})
    assert SETTINGS["key"] not in str(caught.value)
