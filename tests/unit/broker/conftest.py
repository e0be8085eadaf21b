"""Fixtures for tests of the broker."""

import pytest

from ister.broker import server


@pytest.fixture(autouse=True)
def _brokers_end_at_once(monkeypatch):
    """No other client has a call on its way to these brokers."""
    monkeypatch.setattr(server, "_LAST_SECONDS", 0.0)
