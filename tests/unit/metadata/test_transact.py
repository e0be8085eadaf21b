"""Repeated changes of a record: what ends them, and what a lost answer means."""

import pytest

from ister.errors import CommitUnknownError, ConflictError
from ister.metadata.base import Put
from ister.metadata.transact import ATTEMPTS, transact, unchanged
from tests.support.cases import each
from tests.support.memory_metadata import MemoryMetadata

LOST = CommitUnknownError("lost")
CONFLICT = ConflictError("it keeps changing")


@each(
    ("outcomes", "attempts", "expected"),
    [
        pytest.param([1], 5, 1, id="first"),
        pytest.param([None, LOST, None, 0], 5, 0, id="after-lost-and-overtaken"),
        pytest.param([None] * 5, 5, CONFLICT, id="always-overtaken"),
        pytest.param([LOST] * ATTEMPTS, 100, LOST, id="answers-always-lost"),
        pytest.param([LOST, None], 2, CONFLICT, id="lost-then-overtaken"),
    ],
)
def test_change_is_attempted_until_it_has_an_answer(outcomes, attempts, expected):
    left = iter(outcomes)

    def attempt():
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    if isinstance(expected, Exception):
        with pytest.raises(type(expected)) as raised:
            transact(attempt, CONFLICT, attempts=attempts)
        assert raised.value is expected
    else:
        assert transact(attempt, CONFLICT, attempts=attempts) == expected
    assert list(left) == []


def test_key_is_unchanged_until_it_is_put_again():
    store = MemoryMetadata()
    absent = unchanged("/k", store.get("/k"))
    assert store.transact([absent], [Put("/k", b"1")]) is not None
    found = unchanged("/k", store.get("/k"))
    assert store.transact([absent], [Put("/k", b"2")]) is None
    assert store.transact([found], [Put("/k", b"1")]) is not None
    assert store.transact([found], [Put("/k", b"3")]) is None
